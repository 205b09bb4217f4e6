"""Checkpoints go from any strategy to any other, on any number of ranks: training goes on as if it had not stopped."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from lightning_parstrat.cli.main import main
from lightning_parstrat.strategies.checkpoint.checkpoints import CHECKPOINT_KEY
from tests.comparing import assert_same, distance, tensors_in
from tests.pool import RankPool
from tests.slow import slow_unless
from tests.strategies import zoo
from tests.strategies.checkpoint.trainings import (
    GLOBAL_BATCH,
    MODULES,
    STEPS,
    STRATEGIES,
    load,
    make,
    without_own,
    write,
)
from tests.strategies.parity import Recorder, make_trainer


class Route(NamedTuple):
    """Who saves what in which form, and who goes on from it; ``consolidated`` is sharded first."""

    module: str
    source: str
    form: str
    target: str
    ranks: tuple[int, int]

    @property
    def exists(self) -> bool:
        stock = {"ddp", "single"}
        if self.source in stock and (self.form != "full" or self.target in stock):
            return False
        if self.target in stock and self.form not in ("full", "consolidated"):
            return False
        # DDP does not average what was frozen when it began.
        if self.module == "unfrozen" and "ddp" in (self.source, self.target):
            return False
        sides = zip((self.source, self.target), self.ranks, strict=True)
        return all((ranks == 1) if name == "single" else (ranks == 4 or "grouped" not in name) for name, ranks in sides)

    def __str__(self) -> str:
        return f"{self.module}-{self.source}-{self.ranks[0]}-{self.form}-{self.target}-{self.ranks[1]}"


def cover(rows: Sequence[tuple[Any, ...]], together: int, begun: Iterable[tuple[Any, ...]] = ()) -> Iterator[Any]:
    """Few rows in which all values that occur together in some row, so many at a time, occur together.

    Args:
        rows: All that are possible.
        together: How many values at a time.
        begun: Rows that are there already.
    """

    def combined(row: tuple[Any, ...]) -> set[Any]:
        return set(combinations(enumerate(row), together))

    left = set().union(*map(combined, rows)) - set().union(*map(combined, begun))
    for enough in range(10, 0, -1):
        for row in rows:
            if len(found := combined(row) & left) >= enough:
                left -= found
                yield row


RANKS = ((2, 2), (2, 3), (3, 2), (4, 1), (4, 3), (1, 4), (2, 4), (4, 4))
TRAINED_AS_ONE_DEVICE = [name for name in MODULES if name != "normalised"]
"""Batches of several ranks are not normalised as one."""
# Shuffled, so that rows that are taken one after the other differ in much.
POSSIBLE = [
    route
    for route in map(
        Route._make,
        product(TRAINED_AS_ONE_DEVICE, STRATEGIES, ("full", "sharded", "async", "consolidated"), STRATEGIES, RANKS),
    )
    if route.exists
]
random.Random(0).shuffle(POSSIBLE)
QUICK = [
    Route("convolutional", "ddp", "full", "zero1", (2, 3)),
    Route("scheduled", "zero1", "sharded", "zero2", (3, 2)),
    Route("gan", "zero2", "async", "zero3", (3, 2)),
    Route("tied", "zero3", "sharded", "zero3 whole", (2, 3)),
    Route("frozen", "tuned", "sharded", "grouped", (4, 4)),
    Route("unfrozen", "single", "full", "zero3", (1, 4)),
    Route("adafactor", "grouped", "consolidated", "single", (4, 1)),
    Route("unused", "zero3 whole", "async", "tuned", (4, 1)),
    Route("convolutional", "zero3", "consolidated", "ddp", (1, 4)),
    Route("tied", "zero3", "full", "zero1", (3, 2)),
    Route("scheduled", "zero3 grouped", "sharded", "zero3", (4, 1)),
    Route("tied", "zero3", "async", "zero3 grouped", (2, 4)),
    Route("scheduled", "zero1", "full", "zero1", (2, 2)),
]
ROUTES = [*QUICK, *cover(POSSIBLE, 2, begun=QUICK)]


class Outcome(NamedTuple):
    """Of each step of the second epoch: all parameters, and the mean of the ranks' losses; and the last step."""

    parameters: list[Any]
    losses: torch.Tensor
    step: int


def go_on(module: str, strategy: str, path: str | None, saved: str) -> Outcome:
    """Trains until two epochs are done, from a checkpoint or without a stop, and saves what came of it."""
    torch.manual_seed(0 if path is None else 1)
    recorder, ranks = Recorder(), dist.get_world_size()
    trainer = make_trainer(make(strategy), max_epochs=2, callbacks=[recorder])
    data = zoo.loader(STEPS * GLOBAL_BATCH, GLOBAL_BATCH // ranks, rank=dist.get_rank(), world_size=ranks)
    trainer.fit(MODULES[module](), data, ckpt_path=path, weights_only=False)
    trainer.save_checkpoint(saved)
    losses = torch.stack(recorder.losses[-STEPS:])
    dist.all_reduce(losses)
    return Outcome(recorder.parameters[-STEPS:], losses / ranks, trainer.global_step)


@pytest.fixture(scope="module")
def uninterrupted(
    pool: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Outcome, dict[str, Any]]]:
    """By module: what a single device comes to without a stop."""
    folder = tmp_path_factory.mktemp("uninterrupted")

    @cache
    def trained(module: str) -> tuple[Outcome, dict[str, Any]]:
        saved = folder / f"{module}.ckpt"
        return pool.run(1, go_on, module, "single", None, str(saved))[0], load(saved)

    return trained


@pytest.mark.parametrize("route", slow_unless(lambda route: route in QUICK, ROUTES), ids=str)
def test_training_goes_on_as_if_it_had_not_stopped(
    pool: RankPool, tmp_path: Path, uninterrupted: Callable[[str], tuple[Outcome, dict[str, Any]]], route: Route
) -> None:
    path, end = tmp_path / "a.ckpt", tmp_path / "end.ckpt"
    written = "sharded" if route.form == "consolidated" else route.form
    pool.run(route.ranks[0], write, route.module, route.source, written, str(path))
    if route.form == "consolidated":
        folder, path = path, tmp_path / "b.ckpt"
        assert main(["consolidate", str(folder), str(path)]) == 0
    expected, state = uninterrupted(route.module)
    for found in pool.run(route.ranks[1], go_on, route.module, route.target, str(path), str(end)):
        assert_same(found, expected, rtol=1e-4, atol=1e-5)
    saved = load(end)
    assert_same(saved["lr_schedulers"], state["lr_schedulers"], rtol=1e-6)
    for ours, theirs in zip(saved["optimizer_states"], state["optimizer_states"], strict=True):
        assert ours["state"].keys() == theirs["state"].keys()
        in_order = [[of["state"][index] for index in sorted(of["state"])] for of in (ours, theirs)]
        for one, other in zip(*map(tensors_in, in_order), strict=True):
            assert distance(one, other) <= 1e-3 * float(other.abs().max())


FILES = [
    (module, strategy, (2, 3, 4, 1)[(number + turn) % 4])
    for number, module in enumerate(MODULES)
    for turn, strategy in enumerate(("zero1", "zero3", "tuned"))
    if (number + turn) % 3 != 1
]
QUICK_FILES = [("convolutional", "zero1"), ("scheduled", "zero3"), ("tied", "tuned")]


@pytest.mark.parametrize(
    ("module", "strategy", "ranks"), slow_unless(lambda module, name, ranks: (module, name) in QUICK_FILES, FILES)
)
def test_a_file_is_what_ddp_writes_and_a_folder_holds_the_same(
    pool: RankPool, tmp_path: Path, module: str, strategy: str, ranks: int
) -> None:
    paths = {form: tmp_path / f"{form}.ckpt" for form in ("full", "sharded", "async", "made", "ddp")}
    for form in ("full", "sharded", "async"):
        pool.run(ranks, write, module, strategy, form, str(paths[form]))
    full = load(paths["full"])
    for form in ("sharded", "async"):
        files = {path.name for path in paths[form].iterdir()}
        assert files == {".metadata", "checkpoint.pt", *(f"__{rank}_0.distcp" for rank in range(ranks))}
        assert_same(without_own(load(paths[form])), without_own(full), as_stored=True)
    assert main(["consolidate", str(paths["sharded"]), str(paths["made"])]) == 0
    made = load(paths["made"])
    assert_same(without_own(made), without_own(full), as_stored=True)
    assert len(full[CHECKPOINT_KEY]["resume"]["ranks"]) == ranks
    assert_same(made[CHECKPOINT_KEY]["resume"], full[CHECKPOINT_KEY]["resume"], as_stored=True)
    # Tied weights are written once.
    assert paths["made"].stat().st_size < 1.05 * paths["full"].stat().st_size
    assert main(["consolidate", str(paths["sharded"]), str(paths["made"])]) == 2
    if module not in ("unfrozen", "normalised"):
        pool.run(ranks, write, module, "ddp", "full", str(paths["ddp"]))
        check_like(full, load(paths["ddp"]))
        # A view of a bucket would bring the whole bucket along, and each bucket once for each of its parameters.
        torch.save(full, paths["made"])
        assert paths["made"].stat().st_size < 1.1 * paths["ddp"].stat().st_size


def check_like(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Takes this package's entries out of a checkpoint, which must then be the same as another."""
    own = actual.pop(CHECKPOINT_KEY)
    assert actual.keys() == expected.keys()
    assert_same(actual["state_dict"], expected["state_dict"], rtol=1e-5, atol=1e-6, as_stored=True)
    for ours, theirs in zip(actual["optimizer_states"], expected["optimizer_states"], strict=True):
        assert ours["param_groups"] == theirs["param_groups"] and list(ours["state"]) == list(theirs["state"])
        assert_same(ours["state"], theirs["state"], rtol=1e-4, atol=1e-6)
    planned = [name for bucket in own.get("bucket_plan", ()) for name in bucket]
    # Neither buffers nor second names of tied parameters are in a bucket.
    assert len(set(planned)) == len(planned) and set(planned) <= actual["state_dict"].keys()
