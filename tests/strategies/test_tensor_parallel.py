"""Layers that ranks share: trainings equal those of one process, and plans that do not fit are refused."""

import ast
import copy
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.utils import weight_norm as old_weight_norm
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader

from lightning_parstrat.core.footprint import Training
from lightning_parstrat.core.footprint import zero3 as zero3_footprint
from lightning_parstrat.distributed.engine.cuts import local
from lightning_parstrat.distributed.fsdp.tensor_plan import TensorPlanError, find_plan
from tests.comparing import distance
from tests.pool import RankPool
from tests.slow import slow_unless
from tests.strategies import zoo
from tests.strategies.cases import CLIP, WINDOW, adafactor, foreach, fused, plain_sgd
from tests.strategies.parity import Looks, Run, largest_difference, make_trainer, whole, zero3
from tests.strategies.tensor_parallel import (
    PLAN,
    AveragesBetween,
    CalledByMethod,
    Compiled,
    Counts,
    CutAll,
    CutShort,
    DropsOut,
    DropsParts,
    InSequence,
    Llama,
    MixedHeads,
    NormedHeads,
    NormsHeads,
    OddSequence,
    Penalised,
    PenalisesParts,
    PenalisesPartsALittle,
    ReadsHeads,
    SecondReadsHeads,
    StatisticsOfHeads,
    Tied,
    Transformer,
    fit,
    with_class,
    zeroed,
)
from tests.strategies.test_report import STRATEGIES, listening


class Case(NamedTuple):
    """A training on ranks of which two share layers, and how far it may be from one process."""

    module: type[zoo.Zoo] = Transformer
    optimizer: Any = zoo.adamw
    trainer: dict[str, Any] = {}  # noqa: RUF012
    strategy: dict[str, Any] = {}  # noqa: RUF012
    tolerance: float = 2e-5
    sizes: tuple[int, ...] = (2, 4)


CHECKPOINTED = {"activation_checkpointing_policy": ["Block"]}
BY_NAME = {"auto_wrap_policy": ["Linear"]}
BY_VALUE = {"gradient_clip_val": 0.003, "gradient_clip_algorithm": "value"}
DOUBLE = {"precision": "64-true"}
CASES = {
    "sgd, clipped": Case(optimizer=plain_sgd, trainer=CLIP, tolerance=2e-6),
    "sgd, accumulated, dropout": Case(DropsOut, plain_sgd, WINDOW, tolerance=2e-6, sizes=(2,)),
    "adamw, clipped, accumulated": Case(trainer={**CLIP, **WINDOW}),
    "adamw, checkpointed": Case(DropsOut, strategy=CHECKPOINTED, sizes=(2,)),
    "fused, clipped": Case(optimizer=fused, trainer=CLIP),
    "foreach, clipped by value": Case(optimizer=foreach, trainer=BY_VALUE),
    "vocabularies are cut": Case(CutAll, trainer=CLIP),
    "groups of one": Case(trainer=CLIP, strategy={"shard_group": 1}, sizes=(4,)),
    "layers by themselves": Case(trainer=CLIP, strategy=BY_NAME),
    "gathered for a step": Case(trainer=CLIP, strategy={"min_num_params": 10**6}),
    "tied": Case(Tied, trainer=CLIP),
    "in sequence": Case(InSequence, trainer=CLIP),
    "double": Case(trainer={**DOUBLE, **CLIP}, tolerance=1e-9),
    "adafactor": Case(optimizer=adafactor, trainer=DOUBLE, tolerance=1e-9),
    "norms of heads": Case(NormsHeads, plain_sgd, tolerance=2e-6),
    "16-mixed": Case(optimizer=plain_sgd, trainer={"fp16": True, **CLIP}, tolerance=1e-3, sizes=(2,)),
    "compiled": Case(Compiled, plain_sgd, tolerance=2e-6, sizes=(2,)),
    "llama": Case(Llama, trainer=CLIP),
}
QUICK = {("sgd, clipped", 4), ("adamw, checkpointed", 2)}
TRAININGS = [(name, size) for name, case in CASES.items() for size in case.sizes]


def train_both(name: str) -> float:
    case = CASES[name]
    expected = fit(case.module, case.optimizer, None, {}, **case.trainer)
    return largest_difference(fit(case.module, case.optimizer, 2, case.strategy, **case.trainer), expected)


@pytest.mark.parametrize(("name", "ranks"), slow_unless(lambda *one: one in QUICK, TRAININGS))
def test_trains_as_one_process_does(pool: RankPool, name: str, ranks: int) -> None:
    for difference in pool.run(ranks, train_both, name):
        assert difference <= CASES[name].tolerance


def looking(look: Callable[[Any], Any], module: Any, optimizer: Any, strategy: dict[str, Any]) -> tuple[Any, Run]:
    """What a look at the Trainer shows when a training of an epoch ends."""
    looks = Looks(look)
    run = fit(module, optimizer, 2, strategy, max_epochs=1, callbacks=[looks])
    return looks.seen, run


def bytes_held(trainer: Any) -> int:
    parameters = list(trainer.lightning_module.parameters())
    states = [one for state in trainer.optimizers[0].state.values() for one in state.values() if one.dim()]
    return sum(local(one).nbytes for one in [*parameters, *(p.grad for p in parameters), *states])


def held(strategy: dict[str, Any]) -> int:
    return looking(bytes_held, Transformer, zoo.adamw, strategy)[0]


@pytest.mark.slow
def test_ranks_hold_what_is_planned(pool: RankPool) -> None:
    layers = find_plan(module := Transformer(), 2, set())
    parts = ([module], [one.layer for one in layers])
    every, cut = (sum(one.numel() for part in of for one in part.parameters()) for of in parts)
    for strategy, shards in (({}, 2), ({"shard_group": 1}, 1)):
        planned = zero3_footprint(Training(parameters=every, devices=4, tensor_ranks=2, cut=cut, shard_ranks=shards))
        assert 0.97 * planned.held <= max(pool.run(4, held, strategy)) <= 1.03 * planned.held


def masks_and_gradients(module: Any, strategy: dict[str, Any]) -> tuple[list[Any], list[Tensor]]:
    """What the blocks have dropped in the last step, outside of the layers that are cut and between them."""

    def look(trainer: Any) -> Any:
        return [getattr(block, "dropped", None) for block in trainer.lightning_module.blocks]

    masks, run = looking(look, module, plain_sgd, strategy)
    return masks, run.parameters[-1]


def test_between_cut_layers_each_rank_drops_other_features(pool: RankPool) -> None:
    trainings = ((DropsParts, {}), (DropsParts, CHECKPOINTED), (CutShort, {}))
    plain, *again = (pool.run(2, masks_and_gradients, *training) for training in trainings)
    (first, parameters), (second, _) = plain
    for (outside, inside), (same, other) in zip(first, second, strict=True):
        assert torch.equal(outside, same) and not torch.equal(inside, other) and inside.any() and other.any()
    # Two blocks do not drop the same.
    assert not torch.equal(first[0][1], first[1][1])
    # What is computed again in backward drops the same.
    for (_, recomputed), _ in again:
        assert distance(recomputed, parameters) <= 2e-6


def rounding(size: int | None) -> float:
    """How far a training in 16 bits is from one process in 32 bits."""
    expected = fit(Transformer, plain_sgd, None, {})
    return largest_difference(fit(Transformer, plain_sgd, size, {}, precision="bf16-mixed"), expected)


@pytest.mark.slow
def test_16_bits_round_as_in_one_process(pool: RankPool) -> None:
    alone, shared = (max(pool.run(2, rounding, size)) for size in (None, 2))
    assert 1e-6 < shared <= 1.5 * alone


# Errors.

HOW = "Transformer has none. Set it in the module: `self.tp_plan ="
PLANS: dict[str, tuple[Any, int, str]] = {
    "no plan": ({}, 2, HOW),
    "no such layer": ({"blocks.*.wide": "colwise"}, 2, "names 'blocks.*.wide', and it has no such layer. Its layers"),
    "a norm": ({"blocks.*.norm": "colwise"}, 2, "names 'blocks.*.norm', and it has no such layer. Its layers are emb"),
    "a style that is not known": ({"head": "packed_colwise"}, 2, "'packed_colwise'. Must be one of colwise, rowwise"),
    "features": ({"head": "colwise"}, 5, "does not divide the 24 rows of 'head', and each rank has an equal part"),
    "inputs": ({"head": "rowwise"}, 3, "does not divide the 16 columns of 'head'"),
    "words": ({"embedding": "embedding_rowwise"}, 5, "does not divide the 24 rows of 'embedding'"),
    "heads": (PLAN, 8, "does not divide the 4 num_heads of Attention"),
    "a head without a partner": ({**PLAN, "head": "colwise"}, 2, "cuts the output of 'head', and no module below"),
}


@pytest.mark.parametrize("name", PLANS)
def test_what_is_wrong_with_a_plan(name: str) -> None:
    plan, size, text = PLANS[name]
    with pytest.raises(ValueError, match=re.escape(text)):
        find_plan(with_class("Transformer", tp_plan=plan)(), size, set())


def test_the_outermost_plan_decides_and_styles_of_torch_are_taken() -> None:
    plan = {"blocks.1.up": ColwiseParallel(), "blocks.1.down": "rowwise"}
    module = with_class("Outer", tp_plan=plan)()
    module.blocks[0].tp_plan = {"up": "colwise", "down": "rowwise"}
    assert [one.name for one in find_plan(module, 2, set())] == list(plan)
    module.tp_plan = {}
    assert [one.name for one in find_plan(module, 2, set())] == ["blocks.0.up", "blocks.0.down"]
    with pytest.raises(TensorPlanError, match=r"cuts 'blocks\.0\.down', which shares a parameter with another"):
        find_plan(module, 2, {module.blocks[0].down.bias})
    weight_norm(module.blocks[0].up)
    with pytest.raises(TensorPlanError, match=r"cuts 'blocks\.0\.up', which .* is parametrized"):
        find_plan(module, 2, set())
    module = Transformer()
    old_weight_norm(module.blocks[1].down)
    with pytest.raises(TensorPlanError, match=r"cuts 'blocks\.1\.down', which .* is parametrized"):
        find_plan(module, 2, set())
    module.tp_plan = {"embedding": "embedding_rowwise"}
    with pytest.raises(TensorPlanError, match="A layer that is tied to another one does not count"):
        find_plan(module, 2, {module.embedding.weight})
    module.embedding.max_norm = 1.0
    with pytest.raises(TensorPlanError, match="'embedding' has max_norm"):
        find_plan(module, 2, set())
    # The plan that an error proposes can be carried out. The head is the last layer, and in no module with another one.
    untied = with_class("Untied", tp_plan={})()
    with pytest.raises(TensorPlanError) as raised:
        find_plan(untied, 2, set())
    untied.tp_plan = ast.literal_eval(re.search(r"{.*?}", str(raised.value))[0])  # type: ignore[index]
    assert len(find_plan(untied, 2, set())) == 4
    # A tied layer is not proposed.
    tied = Tied()
    tied.tp_plan = {}
    with pytest.raises(TensorPlanError, match=r"'blocks\.\*\.down': 'rowwise'}`.* are embedding, "):
        find_plan(tied, 2, set())


def train(module: type[zoo.Zoo] = Transformer, **strategy: Any) -> None:
    fit(module, plain_sgd, 2, strategy)


def train_with_cut_layers(flag: str) -> None:
    module = Transformer()
    parallelize_module(module.head, init_device_mesh("cpu", (2,)), ColwiseParallel())
    make_trainer(flag, max_epochs=1).fit(module, zoo.loader(8, 4))


def train_on(make: Callable[[int], DataLoader[Any]]) -> None:
    make_trainer(zero3(tensor_parallel_size=2), max_epochs=1).fit(Transformer(), make(dist.get_rank()))


def of_other_length(rank: int) -> DataLoader[Any]:
    return DataLoader(zoo.Samples(16 + 8 * rank), batch_size=8, sampler=range(16 + 8 * rank))


def divided_by_all(rank: int) -> DataLoader[Any]:
    return zoo.loader(32, 8, rank=rank, world_size=2)


OTHERWISE, APART = "'blocks.0' computes something else than with whole layers", "different gradients of blocks."
CUT_ALREADY = "'head.weight' is"
REFUSED: dict[str, tuple[Callable[[], None], str, int]] = {
    "reads all heads": (partial(train, with_class("A", attention=ReadsHeads)), OTHERWISE, 2),
    "layers by themselves": (partial(train, with_class("B", attention=ReadsHeads), **BY_NAME), OTHERWISE, 2),
    "reads all heads, begins with 0": (partial(train, with_class("C", attention=zeroed(ReadsHeads))), OTHERWISE, 2),
    "a layer between": (partial(train, with_class("F", attention=MixedHeads)), "It raises RuntimeError: mat1 and", 2),
    "statistics of all heads": (partial(train, with_class("G", attention=StatisticsOfHeads)), OTHERWISE, 2),
    "a norm between": (partial(train, with_class("D", attention=NormedHeads)), APART, 2),
    "a norm between, begins with 0": (partial(train, with_class("E", attention=zeroed(NormedHeads))), APART, 2),
    "an average between": (partial(train, AveragesBetween), "different gradients of embedding.weight", 2),
    "called by a method": (
        partial(train, with_class("H", attention=CalledByMethod)),
        "Call the module, not a method",
        2,
    ),
    "an odd sequence": (partial(train, OddSequence), "does not divide its size 7. Pad sequences", 2),
    "a part in the loss": (partial(train, PenalisesParts), "A loss takes a part of the features", 2),
    "a small part in the loss": (partial(train, PenalisesPartsALittle), "A loss takes a part of the features", 2),
    "the second block reads all heads": (partial(train, SecondReadsHeads), "'blocks.1' computes something else", 2),
    "a gradient in the loss": (partial(train, Penalised), "A loss contains gradients that go through 'blocks.", 2),
    "three ranks": (
        partial(train_on, lambda rank: zoo.loader(32, 8)),
        "tensor_parallel_size=2 does not divide the 3 ranks",
        3,
    ),
    "data divided by all": (partial(train_on, divided_by_all), "num_replicas=2, and 1 is right", 2),
    "data of other lengths": (partial(train_on, of_other_length), "have loaders of 2, 3 batches", 2),
    **{f"cut already, {flag}": (partial(train_with_cut_layers, flag), CUT_ALREADY, 2) for flag in STRATEGIES},
}


def error_of(name: str) -> str:
    with pytest.raises((ValueError, MisconfigurationException)) as error:
        REFUSED[name][0]()
    return str(error.value)


@pytest.mark.parametrize(
    "name", slow_unless(lambda name: name in ("reads all heads", "cut already, zero1_custom"), REFUSED)
)
def test_what_does_not_fit_is_refused(pool: RankPool, name: str) -> None:
    _, text, ranks = REFUSED[name]
    assert all(text in error for error in pool.run(ranks, error_of, name))


def lines_of(module: type[zoo.Zoo]) -> list[str]:
    with listening() as lines:
        train(module)
    return [line for line in lines if "divide the sequence" in line]


def test_a_warning_names_what_is_not_checked(pool: RankPool) -> None:
    (line,), _ = pool.run(2, lines_of, InSequence)
    assert "blocks.0.attention" in line and "it is not checked" in line
    assert pool.run(2, lines_of, Transformer) == [[], []]


# What ranks see and count.


NUMBERS = (torch.bool, torch.bfloat16, torch.complex64)
ODD: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "of all kinds": (
        lambda one: {
            "views": [one.expand(3), one.expand(2, 3)[:, 1], one.expand(2, 2).to_sparse()],
            "dtypes": [one.to(dtype) for dtype in NUMBERS],
            "others": (None, torch.empty(0), str(one)),
        },
        "",
    ),
    "packed": (lambda one: pack_sequence([one.expand(2), one]), ""),
    "not picklable": (lambda one: {"call": lambda: one}, "it cannot be pickled"),
}


def share(name: str) -> tuple[str, list[float], dict[str, int]]:
    """The batch that this rank gets, or the error; what it draws afterwards; and which data are its own."""
    torch.manual_seed(dist.get_rank())
    strategy = zero3(tensor_parallel_size=2)
    trainer = make_trainer(strategy, max_epochs=1, limit_train_batches=1)
    trainer.fit(Transformer(), DataLoader(zoo.Samples(32), batch_size=8))
    torch.manual_seed(dist.get_rank())
    try:
        shared = repr(strategy.batch_to_device(ODD[name][0](torch.tensor([dist.get_rank() + 3.0]))))
    except TypeError as error:
        shared = str(error)
    return shared, torch.rand(3).tolist(), trainer.distributed_sampler_kwargs


@pytest.mark.parametrize("name", ODD)
def test_batches_of_all_kinds_are_shared(pool: RankPool, name: str) -> None:
    (first, second, other, _), error = pool.run(4, share, name), ODD[name][1]
    assert first[0] == second[0] and (error or "3.") in first[0] and (error or "5.") in other[0]
    assert error or first[1] == second[1] != other[1]
    assert first[2] == {"num_replicas": 2, "rank": 0} and other[2] == {"num_replicas": 2, "rank": 1}


def counted(size: int | None) -> list[Tensor]:
    metrics = fit(Counts, plain_sgd, size, {}, max_epochs=1).trainer.callback_metrics
    return [metrics[name] for name in ("total", "sum", "mean")]


def losses_within(trainer: Any) -> list[Tensor]:
    """Of the module as a plain one, and of a copy of it."""
    with trainer.strategy.full_parameters() as module, torch.no_grad():
        return [one.compute_loss(zoo.Samples(4).data) for one in (module, copy.deepcopy(module))]


def look_within(size: int | None) -> list[Tensor]:
    looks = Looks(losses_within)
    run = fit(CutAll, zoo.adamw, size, {}, callbacks=[looks] if size else [])
    return looks.seen if size else [run.module.compute_loss(zoo.Samples(4).data).detach()] * 2


def average(size: int | None) -> list[Tensor]:
    averages = EMAWeightAveraging(decay=0.5)
    fit(CutAll, plain_sgd, size, {}, callbacks=[averages])
    return [whole(one.detach()) for one in averages._average_model.module.parameters()]


SEEN = {"metrics": counted, "full parameters": look_within, "averages": average}


@pytest.mark.parametrize("name", slow_unless(lambda name: name != "averages", SEEN))
def test_what_one_process_has(pool: RankPool, name: str) -> None:
    (expected,) = pool.run(1, SEEN[name], None)
    for found in pool.run(4, SEEN[name], 2):
        assert distance(found, expected) <= 1e-5


# Checkpoints.

# The ranks that share layers, and all ranks.
GRIDS = {"2 x 2": (2, 4), "1 x 2": (2, 2), "zero3": (1, 2), "single": (None, 1)}
SAVED_AND_RESUMED = [("2 x 2", "single"), ("single", "2 x 2"), ("zero3", "1 x 2"), ("2 x 2", "1 x 2")]


def go_on(size: int | None, epochs: int, resumed: str | None, saved: str | None) -> list[Tensor]:
    """Trains until so many epochs are done."""
    run = fit(CutAll, zoo.adamw, size, {}, ckpt_path=resumed, max_epochs=epochs, **CLIP)
    if saved is not None:
        run.trainer.save_checkpoint(saved)
    return run.parameters[-1]


@pytest.mark.parametrize(("source", "target"), slow_unless(lambda *one: one == ("2 x 2", "single"), SAVED_AND_RESUMED))
def test_checkpoints_go_from_any_grid_to_any_other(pool: RankPool, tmp_path: Path, source: str, target: str) -> None:
    saved, (size, ranks), (size_now, ranks_now) = str(tmp_path / "one.ckpt"), GRIDS[source], GRIDS[target]
    expected = pool.run(1, go_on, None, 2, None, None)[0]
    pool.run(ranks, go_on, size, 1, None, saved)
    for parameters in pool.run(ranks_now, go_on, size_now, 2, saved, None):
        assert distance(parameters, expected) <= 2e-5
