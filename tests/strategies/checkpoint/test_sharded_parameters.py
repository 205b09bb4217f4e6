"""Checkpoints that all ranks write of sharded parameters: the training goes on from them as if it had not stopped."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from lightning_parstrat.cli.main import main
from lightning_parstrat.distributed.checkpoint import reading
from lightning_parstrat.distributed.checkpoint.index import IndexUnpickler
from tests.comparing import assert_same
from tests.pool import RankPool
from tests.slow import slow_unless
from tests.strategies import odd, zoo
from tests.strategies.cases import adafactor, muon
from tests.strategies.checkpoint.test_checkpoints import GLOBAL_BATCH, MODULES, STRATEGIES, grouped, load
from tests.strategies.checkpoint.test_sharded_checkpoints import SAVING, elements_of, tuned, without_own
from tests.strategies.checkpoint.test_sharded_checkpoints import whole as filled
from tests.strategies.parity import make_trainer, train, whole, zero3

KINDS: dict[str, Any] = {
    **STRATEGIES,
    "zero1 sharded": SAVING["sharded"],
    "groups sharded": SAVING["sharded groups"],
    "tuned sharded": SAVING["tuned"],
    "tuned": tuned,
    "grouped": grouped,
    "zero3 sharded": lambda: zero3(checkpoint_format="sharded"),
    "zero3 async": lambda: zero3(checkpoint_format="sharded", async_save=True),
    "zero3 at once": lambda: zero3(checkpoint_format="sharded", min_num_params=10**6),
}


class StaysFrozen(zoo.Frozen):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        pass


TRAINED = {
    "scheduled": MODULES["scheduled"],
    "gan": MODULES["gan"],
    "tied": MODULES["tied"],
    "convolutional": MODULES["convolutional"],
    "adafactor": MODULES["adafactor"],
    "frozen": lambda: StaysFrozen(),
    "unfrozen": lambda: zoo.Frozen(),
    "unused": lambda: zoo.Unused(),
    "normalised": lambda: zoo.BatchNormalised(),
}
STEPS = 4


def batches_of(epochs: int) -> dict[str, Any]:
    """The same samples in each step on any number of ranks."""
    batch = GLOBAL_BATCH // dist.get_world_size()
    return {"samples_per_rank": STEPS * batch, "batch_size": batch, "max_epochs": epochs}


def write(module: str, kind: str, path: str) -> None:
    callback = ModelCheckpoint(dirpath=Path(path).parent, filename=Path(path).stem, save_top_k=-1)
    train(TRAINED[module], KINDS[kind](), callbacks=[callback], enable_checkpointing=True, **batches_of(1))


def uninterrupted(module: str) -> list[Tensor]:
    run = train(TRAINED[module], None, **batches_of(2))
    assert run.trainer.global_step == 2 * STEPS * len(run.trainer.optimizers)
    return [parameter.detach() for parameter in run.module.parameters()]


def resume(module: str, kind: str, path: str) -> list[Tensor]:
    torch.manual_seed(1)
    fresh, ranks = TRAINED[module](), dist.get_world_size()
    trainer = make_trainer(KINDS[kind](), max_epochs=2)
    data = zoo.loader(STEPS * GLOBAL_BATCH, GLOBAL_BATCH // ranks, rank=dist.get_rank(), world_size=ranks)
    trainer.fit(fresh, data, ckpt_path=path, weights_only=False)
    assert trainer.global_step == 2 * STEPS * len(trainer.optimizers)
    return [whole(parameter.detach()) for parameter in fresh.parameters()]


CONSOLIDATED = "consolidated"
# Who saves with how many ranks, what becomes of the checkpoint, and who goes on with how many.
ROUTES = {
    "as many": ("zero3 sharded", 2, "zero3", 2),
    "more": ("zero3 sharded", 2, "zero3 sharded", 3),
    "fewer": ("zero3 async", 3, "zero3", 2),
    "in other units": ("zero3 at once", 3, "zero3", 3),
    "to one": ("zero3 sharded", 3, "zero3", 1),
    "from one": ("zero3 sharded", 1, "zero3", 2),
    "to zero1, more": ("zero3 sharded", 2, "zero1", 3),
    "to zero1, fewer": ("zero3 async", 3, "zero1 sharded", 2),
    "to groups": ("zero3 sharded", 3, "grouped", 4),
    "to ddp_tuned, more": ("zero3 sharded", 2, "tuned", 3),
    "to ddp_tuned, fewer": ("zero3 sharded", 3, "tuned", 2),
    "from zero1, more": ("zero1 sharded", 2, "zero3", 3),
    "from zero1, fewer": ("zero1 sharded", 3, "zero3 sharded", 2),
    "from groups": ("groups sharded", 4, "zero3", 2),
    "from ddp_tuned, more": ("tuned sharded", 2, "zero3", 3),
    "from ddp_tuned, fewer": ("tuned sharded", 3, "zero3", 2),
    "from ddp": ("ddp", 2, "zero3 sharded", 3),
    "from one device": ("single", 1, "zero3 sharded", 2),
    "from a full one": ("zero3", 3, "zero3 sharded", 2),
    "consolidated, to ddp": ("zero3 sharded", 3, CONSOLIDATED, "ddp", 2),
    "consolidated, to one device": ("zero3 sharded", 2, CONSOLIDATED, "single", 1),
    "consolidated, to zero3": ("zero3 async", 2, CONSOLIDATED, "zero3", 3),
}
# DDP does not average what was frozen when it began; and batches of several ranks are not normalised as one.
NOT_AS_ONE_DEVICE = {
    *(("unfrozen", route) for route, (source, *_, target, _) in ROUTES.items() if "ddp" in (source, target)),
    *(("normalised", route) for route in ROUTES),
}
QUICK_ROUTES = [
    ("scheduled", "more"),
    ("gan", "fewer"),
    ("tied", "as many"),
    ("unused", "to zero1, more"),
    ("gan", "to ddp_tuned, fewer"),
    ("tied", "from zero1, fewer"),
    ("convolutional", "from ddp_tuned, more"),
    ("unfrozen", "from one device"),
    ("convolutional", "to zero1, fewer"),
    ("frozen", "consolidated, to ddp"),
    ("adafactor", "more"),
]
EVERY_ROUTE = ("gan", "tied")
"""Modules that go all of them; the others each go some, and together all."""


def routes_of_modules() -> Iterator[tuple[str, str]]:
    for number, module in enumerate(TRAINED):
        for place, route in enumerate(ROUTES):
            goes = module in EVERY_ROUTE or place % 4 == number % 4 or (module, route) in QUICK_ROUTES
            if goes and (module, route) not in NOT_AS_ONE_DEVICE:
                yield module, route


@pytest.mark.parametrize(
    ("module", "route"), slow_unless(lambda *case: case in QUICK_ROUTES, list(routes_of_modules()))
)
def test_training_goes_on_as_if_it_had_not_stopped(pool: RankPool, tmp_path: Path, module: str, route: str) -> None:
    source, source_ranks, *between, target, target_ranks = ROUTES[route]
    path = tmp_path / "a.ckpt"
    pool.run(int(source_ranks), write, module, source, str(path))
    if between:
        folder, path = path, tmp_path / "b.ckpt"
        assert main(["consolidate", str(folder), str(path)]) == 0
    (expected,) = pool.run(1, uninterrupted, module)
    for parameters in pool.run(int(target_ranks), resume, module, target, str(path)):
        for actual, reference in zip(parameters, expected, strict=True):
            torch.testing.assert_close(actual, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("module", "kind", "ranks"),
    slow_unless(
        lambda *case: case in [("tied", "zero3 sharded", 3), ("gan", "zero3 async", 2)],
        [
            (module, kind, ranks)
            for module in TRAINED
            for kind in ("zero3 sharded", "zero3 async")
            for ranks in (1, 2, 3, 4)
        ],
    ),
)
def test_it_holds_what_a_full_one_does_to_the_bit(
    pool: RankPool, tmp_path: Path, module: str, kind: str, ranks: int
) -> None:
    for each in ("zero3", kind):
        pool.run(ranks, write, module, each, str(tmp_path / f"{each}.ckpt"))
    folder, made, full = tmp_path / f"{kind}.ckpt", tmp_path / "made.ckpt", tmp_path / "zero3.ckpt"
    assert_same(without_own(filled(folder)), without_own(load(full)), as_stored=True)
    assert main(["consolidate", str(folder), str(made)]) == 0
    assert_same(without_own(load(made)), without_own(load(full)), as_stored=True)
    # Tied weights are written once.
    assert made.stat().st_size < 1.05 * full.stat().st_size


def test_inspect_shows_whole_tensors(pool: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pool.run(3, write, "tied", "zero3 sharded", str(tmp_path / "a.ckpt"))
    assert main(["inspect", str(tmp_path / "a.ckpt")]) == 0
    said = capsys.readouterr().out
    assert "embedding.weight" in said and "3 ranks" in said


def test_each_rank_writes_its_own_rows(pool: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    pool.run(3, write, "gan", "zero3 sharded", str(path))
    with open(path / ".metadata", "rb") as file:
        index = IndexUnpickler(file).load()
    pieces = [{p.name: (p.start, p.numel) for p in index.of_rank(rank)} for rank in range(3)]
    # 12 rows of 10 columns over three ranks, and one row, of which the last two have nothing.
    for name in ("state_dict/generator.2.weight", "optimizer_states/0/state/2/exp_avg"):
        assert [of_rank.get(name) for of_rank in pieces] == [(0, 40), (40, 40), (80, 40)]
    assert [of_rank.get("state_dict/discriminator.2.weight") for of_rank in pieces] == [(0, 10), None, None]


class OnMeta(zoo.Zoo):
    """Weights are loaded when they are sharded already."""

    def build(self) -> None:
        pass

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            with torch.device("meta"):
                self.net = nn.Sequential(nn.Linear(zoo.FEATURES, 40), nn.Tanh(), nn.Linear(40, 24))

    def compute_loss(self, batch: Tensor) -> Tensor:
        return self.net(batch).pow(2).mean()


def save_from_meta(path: str) -> None:
    train(OnMeta, zero3(checkpoint_format="sharded")).trainer.save_checkpoint(path)


def read_from_disk(path: str) -> tuple[int, list[Tensor]]:
    """Bytes of elements that this rank reads when a training goes on, and the weights it goes on from."""
    nbytes = [0]
    read_part = reading._read_part

    def count(file: Any, part: Any) -> None:
        nbytes[0] += part.target.nbytes
        read_part(file, part)

    with mock.patch.object(reading, "_read_part", count):
        module = OnMeta()
        trainer = make_trainer(zero3(), max_epochs=1, min_epochs=0)
        trainer.fit(module, zoo.loader(16, 4), ckpt_path=path, weights_only=True)
    return nbytes[0], [whole(parameter.detach()) for parameter in module.parameters()]


def test_a_module_made_on_the_meta_device_reads_its_own_rows(pool: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    pool.run(3, save_from_meta, str(path))
    elements = elements_of(path)
    total = sum(tensor.nbytes for tensor in elements.values())
    for nbytes, weights in (found := pool.run(2, read_from_disk, str(path))):
        assert 0.4 * total < nbytes < 0.6 * total
        stored = [elements[f"state_dict/net.{name}"] for name in ("0.weight", "0.bias", "2.weight", "2.bias")]
        for one, other in zip(weights, stored, strict=True):
            torch.testing.assert_close(one.reshape(-1), other, rtol=0, atol=0)
    assert sum(nbytes for nbytes, _ in found) == total


STEPPED_WHOLE = {
    "adafactor": lambda: zoo.Convolutional(adafactor),
    "muon": lambda: odd.Matrices(muon),
}


def go_on(kind: str, optimizer: str, folder: str) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters after two epochs, without a stop, and with one after the first."""
    make = STEPPED_WHOLE[optimizer]
    through = train(make, KINDS[kind](), max_epochs=2)
    train(make, KINDS[kind]()).trainer.save_checkpoint(f"{folder}/a.ckpt")
    module = make()
    trainer = make_trainer(KINDS[kind](), max_epochs=2)
    ranks = dist.get_world_size()
    data = zoo.loader(40 * ranks, 4, rank=dist.get_rank(), world_size=ranks)
    trainer.fit(module, data, ckpt_path=f"{folder}/a.ckpt", weights_only=False)
    assert trainer.global_step == through.trainer.global_step
    return through.parameters[-1], [whole(parameter.detach()) for parameter in module.parameters()]


@pytest.mark.parametrize(
    ("optimizer", "kind"),
    slow_unless(
        lambda *case: case in [("muon", "zero3"), ("adafactor", "zero3 sharded")],
        [(optimizer, kind) for optimizer in STEPPED_WHOLE for kind in ("zero3", "zero3 sharded")],
    ),
)
def test_what_steps_whole_parameters_goes_on_to_the_bit(
    pool: RankPool, tmp_path: Path, optimizer: str, kind: str
) -> None:
    for expected, actual in pool.run(2, go_on, kind, optimizer, str(tmp_path)):
        assert_same(actual, expected)


class CountsLoads(zoo.MLP):
    loads = 0

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loads += 1


def count_loads(path: str, kind: str) -> list[int]:
    """How often a checkpoint is loaded: into a module as it was made, in a second training of it, in an evaluation."""
    train(zoo.MLP, KINDS[kind]()).trainer.save_checkpoint(path)
    module, counted = CountsLoads(), []
    for _ in range(2):
        make_trainer(KINDS[kind](), max_epochs=2).fit(module, zoo.loader(40, 4), ckpt_path=path)
        counted.append(module.loads)
    make_trainer(KINDS[kind]()).validate(module, zoo.loader(8, 4), ckpt_path=path, verbose=False)
    return [*counted, module.loads]


@pytest.mark.parametrize("kind", ["zero3", "zero3 sharded"])
def test_it_is_loaded_once(pool: RankPool, tmp_path: Path, kind: str) -> None:
    assert pool.run(2, count_loads, str(tmp_path / "a.ckpt"), kind) == [[1, 2, 3]] * 2


class CopiesWeights(zoo.MLP):
    """Its hook copies shards, which would be written as if they were all there is."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {name: value.clone() for name, value in checkpoint["state_dict"].items()}


class KeepsWhole(zoo.MLP):
    """Its hook keeps a whole weight of its own, and a second name of one."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        weight = checkpoint["state_dict"]["net.0.weight"]
        assert isinstance(weight, DTensor)
        checkpoint["mine"] = weight.full_tensor()
        checkpoint["again"] = weight


def saved(make: type[zoo.MLP], path: str) -> str:
    trainer = make_trainer(zero3(checkpoint_format="sharded"), max_steps=1)
    trainer.fit(make(), zoo.loader(8, 2))
    try:
        trainer.save_checkpoint(path)
    except Exception as error:
        return str(error)
    return "no error"


def test_hooks_see_shards_and_are_told_when_they_copy_them(pool: RankPool, tmp_path: Path) -> None:
    assert all(
        "has copied or changed" in error for error in pool.run(2, saved, CopiesWeights, str(tmp_path / "a.ckpt"))
    )
    assert not list(tmp_path.iterdir())
    assert pool.run(2, saved, KeepsWhole, str(tmp_path / "a.ckpt")) == ["no error"] * 2
    found = filled(tmp_path / "a.ckpt")
    assert_same([found["mine"], found["again"]], [found["state_dict"]["net.0.weight"]] * 2)


class CutByColumns(zoo.MLP):
    def configure_model(self) -> None:
        if not isinstance(self.net[2].weight, DTensor):
            fully_shard(self.net[0], shard_placement_fn=lambda parameter: Shard(parameter.dim() - 1))


def test_what_a_user_has_cut_otherwise_is_refused_before_training(pool: RankPool, tmp_path: Path) -> None:
    for error in pool.run(3, trained, str(tmp_path)):
        assert "'net.0.weight' was cut otherwise" in error


def trained(folder: str) -> str:
    trainer = make_trainer(zero3(checkpoint_format="sharded"), default_root_dir=folder)
    try:
        trainer.fit(CutByColumns(), zoo.loader(12, 2))
    except ValueError as error:
        return str(error)
    return "no error"
