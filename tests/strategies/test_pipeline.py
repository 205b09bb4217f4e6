"""A module in stages: trainings equal those of one process, and what cannot be cut is refused on all ranks."""

import ctypes
import re
import tempfile
import warnings
import weakref
from collections import deque
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    EMAWeightAveraging,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, Metric, SumMetric

from lightning_parstrat import PipelineStrategy, ZeRO1Strategy
from lightning_parstrat.core import footprint
from lightning_parstrat.core.grid import Grid
from lightning_parstrat.distributed.pipeline.holders import largest_stage
from lightning_parstrat.distributed.pipeline.schedule import _kept
from lightning_parstrat.distributed.pipeline.sharded_blocks import ShardedBlocks
from lightning_parstrat.distributed.torch_compat import has_memory
from lightning_parstrat.strategies.lightning_compat import follow_device, minor
from tests.comparing import assert_same, distance
from tests.pool import RankPool
from tests.slow import slow_unless
from tests.strategies import zoo
from tests.strategies.cases import CLIP, WINDOW, fused, plain_sgd
from tests.strategies.odd_optimizers import ClosureTwice, GloballyScaled, PlainSGD
from tests.strategies.parity import make_trainer, zero1
from tests.strategies.pipelines import (
    BATCH,
    MICRO,
    SAMPLES,
    WIDTH,
    WORDS,
    Block,
    Compiled,
    Depth,
    DropsAndMasks,
    DropsBetween,
    DropsByPython,
    DropsOut,
    GetsOptimizers,
    GivesOn,
    GrowsBuffers,
    Halves,
    HeadFirst,
    Hooked,
    Joins,
    KeepsStatistics,
    LeavesOut,
    Lengths,
    Measured,
    Model,
    Normed,
    NormsParts,
    NormsWeights,
    Planned,
    Recomputes,
    ReturnsViews,
    SharesLayer,
    Stops,
    TiedAtTimes,
    Unfreezes,
    UnfreezesOnly,
    Weighted,
    Wrapped,
    WritesInValidation,
    fit,
    loader,
    pipeline,
)

pytestmark = pytest.mark.skipif(minor(torch.__version__) < (2, 13), reason="torch's schedules before 2.13 are refused")


TWO: dict[str, Any] = {"data_parallel_size": 2, "microbatches": 2}
SHARED: dict[str, Any] = {"tensor_parallel_size": 2}
SHARDED: dict[str, Any] = {**TWO, "shard": "parameters"}
nadam = partial(torch.optim.NAdam, lr=0.01)


class Case(NamedTuple):
    """A training in stages, and how far it may be from its oracle: one process."""

    module: type[zoo.Zoo] = Model
    optimizer: Any = plain_sgd
    tolerance: float = 2e-6
    trainer: dict[str, Any] = {}  # noqa: RUF012
    strategy: dict[str, Any] = {}  # noqa: RUF012
    ranks: tuple[int, ...] = (2,)
    alone_in_stages: bool = False
    """Whether the oracle is a pipeline of one rank: random numbers are drawn for each block and micro-batch."""
    oracle: type[zoo.Zoo] | None = None
    """The module that the oracle trains, if it is another."""


class CountsLater(Planned):
    """It makes a metric when a validation begins."""

    def on_validation_start(self) -> None:
        self.found = getattr(self, "found", SumMetric())

    def validation_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.found.update(len(batch))
        self.log("found", self.found, on_epoch=True)
        return super().validation_step(batch, batch_idx)


CASES = {
    "1f1b": Case(ranks=(1, 2, 3, 4)),
    "clipped": Case(trainer=CLIP, ranks=(2, 4)),
    "head first": Case(HeadFirst),
    "stops": Case(Stops),
    "leaves out": Case(LeavesOut),
    "accumulated": Case(trainer={**CLIP, **WINDOW}),
    "lengths": Case(Lengths, ranks=(2, 3)),
    "adamw": Case(optimizer=zoo.adamw, tolerance=2e-5, trainer=CLIP),
    "fused": Case(optimizer=fused, tolerance=2e-5, trainer=CLIP),
    "dropout": Case(DropsOut, ranks=(2, 4), alone_in_stages=True),
    "drops and masks": Case(DropsAndMasks, ranks=(2, 3), alone_in_stages=True),
    "gives on": Case(GivesOn, ranks=(2, 4)),
    "dropout by Python": Case(DropsByPython, ranks=(2,), alone_in_stages=True),
    "recomputed": Case(Recomputes, ranks=(3,), alone_in_stages=True, oracle=DropsBetween),
    "recomputed twice": Case(
        Recomputes, strategy={"schedule": "zero_bubble"}, alone_in_stages=True, oracle=DropsBetween
    ),
    "wrapped": Case(Wrapped, ranks=(2,), alone_in_stages=True),
    "a shared layer": Case(SharesLayer, trainer=CLIP, ranks=(2, 4)),
    "statistics": Case(
        Normed, strategy={"schedule": "interleaved"}, trainer={"num_sanity_val_steps": 0}, alone_in_stages=True
    ),
    "statistics outside of blocks": Case(KeepsStatistics, ranks=(2, 3), alone_in_stages=True),
    "buffers that grow": Case(GrowsBuffers, strategy=SHARDED, ranks=(4,)),
    "unfrozen, in place": Case(Unfreezes, trainer=CLIP),
    "weights that forwards compute": Case(NormsWeights),
    "double": Case(trainer={"precision": "64-true", **CLIP}, tolerance=1e-12),
    "double, sharded": Case(trainer={"precision": "64-true"}, tolerance=1e-12, strategy=SHARDED, ranks=(4,)),
    "a late metric": Case(
        CountsLater, strategy=SHARED, ranks=(4,), tolerance=5e-6, trainer={"num_sanity_val_steps": 0}
    ),
    "compiled": Case(Compiled),
    "hooked": Case(Hooked, trainer=CLIP, ranks=(2, 4)),
    "gradients halved": Case(Halves, strategy=TWO, ranks=(4,)),
    "tied at times": Case(TiedAtTimes, strategy=TWO, trainer=WINDOW, ranks=(4,)),
    "uneven": Case(strategy={"stages": [3, 1]}, trainer=CLIP),
    "by class": Case(strategy={"auto_wrap_policy": ["Block"], "microbatches": 2}),
    "pipelines": Case(optimizer=zoo.adamw, tolerance=2e-5, trainer={**CLIP, **WINDOW}, strategy=TWO, ranks=(2, 4)),
    # Neither clipping nor Adam hides a wrong scale.
    "sgd in pipelines": Case(tolerance=5e-6, strategy={**TWO, "schedule": "interleaved"}, ranks=(4,)),
    "3d": Case(Planned, zoo.adamw, 2e-5, {**CLIP, **WINDOW}, {**SHARDED, **SHARED}, (4, 8)),
    "3d, sgd": Case(Planned, tolerance=5e-6, trainer=WINDOW, strategy={**SHARDED, **SHARED}, ranks=(8,)),
    "norms between shared layers": Case(NormsParts, tolerance=5e-6, strategy=SHARED, ranks=(4,)),
    "shared": Case(Planned, zoo.adamw, 2e-5, CLIP, {**SHARED, "schedule": "interleaved"}, (4,)),
    "sharded": Case(UnfreezesOnly, zoo.adamw, 2e-5, CLIP, {**SHARDED, "schedule": "gpipe"}, (4,)),
    "new optimizers": Case(GetsOptimizers, zoo.adamw, 2e-5, strategy=TWO, ranks=(4,)),
    "new optimizers, sharded": Case(GetsOptimizers, zoo.adamw, 2e-5, strategy=SHARDED, ranks=(4,)),
    "written in a validation": Case(WritesInValidation),
    "written in a validation, sharded": Case(WritesInValidation, strategy=SHARDED, ranks=(4,)),
    "views, split": Case(ReturnsViews, strategy={"schedule": "zbv"}),
    "joins": Case(Joins),
    "joins in pipelines": Case(Joins, tolerance=5e-6, strategy=TWO, ranks=(4,)),
    "joins in pipelines, sharded": Case(Joins, zoo.adamw, 2e-5, strategy=SHARDED, ranks=(4,)),
    "unfrozen in pipelines": Case(Unfreezes, trainer=CLIP, strategy={**TWO, "stages": [1, 3]}, ranks=(4,)),
    **{
        schedule: Case(Lengths, trainer=CLIP, strategy={"schedule": schedule}, ranks=(2,))
        for schedule in ("gpipe", "interleaved", "looped_bfs", "zero_bubble", "zbv", "dualpipev")
    },
}
QUICK = {
    ("1f1b", 2),
    ("sgd in pipelines", 4),
    ("accumulated", 2),
    ("lengths", 3),
    ("recomputed", 3),
    ("adamw", 2),
    ("interleaved", 2),
    ("zero_bubble", 2),
    ("statistics outside of blocks", 3),
}
TRAININGS = [(name, ranks) for name, case in CASES.items() for ranks in case.ranks]


def train(name: str, oracle: bool) -> tuple[list[dict[str, Tensor]], list[Tensor], dict[str, Tensor]]:
    """The weights after the training on rank 0, each step's loss, and what was logged."""
    case = CASES[name]
    strategy = None if oracle and not case.alone_in_stages else case.strategy
    module = (oracle and case.oracle) or case.module
    run, _ = fit(module, case.optimizer, strategy, **case.trainer)
    module = run.module
    # Rank 0 has the whole module, whatever its state dict leaves out.
    kept = {**dict(module.named_parameters()), **dict(module.named_buffers()), **module.state_dict()}
    weights = {name: one.detach() for name, one in kept.items()} if dist.get_rank() == 0 else {}
    return [weights], run.losses, dict(run.trainer.callback_metrics)


@pytest.mark.parametrize(("name", "ranks"), slow_unless(lambda *one: one in QUICK, TRAININGS))
def test_trains_as_one_process_does(pool: RankPool, name: str, ranks: int) -> None:
    ((expected, losses, logged),) = pool.run(1, train, name, True)
    found = pool.run(ranks, train, name, False)
    assert distance(found[0][0], expected) <= CASES[name].tolerance
    pipelines, shared = (CASES[name].strategy.get(f"{kind}_parallel_size", 1) for kind in ("data", "tensor"))
    # The first stage of each comes first.
    firsts = [one[1] for one in found[: pipelines * shared : shared]]
    means = [torch.stack(each).mean(0) for each in zip(*firsts, strict=True)]
    assert distance(means, losses) <= 1e-5
    for number, (_, own_losses, own_logged) in enumerate(found):
        assert distance(own_losses, firsts[number // shared % pipelines]) == 0
        assert own_logged.keys() == logged.keys()
        assert distance(own_logged, logged) <= min(1e-5, 1000 * CASES[name].tolerance)


class Counts(Model):
    """Counts what it sees, before the first block: by an attribute, a metric and a buffer."""

    def build(self) -> None:
        super().build()
        self.batches, self.seen = 0, SumMetric()
        self.register_buffer("samples", torch.zeros(()))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.batches += 1
        self.samples = self.samples + len(batch)
        self.seen.update(len(batch))
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


def counted(schedule: str) -> tuple[int, float, float]:
    run, _ = fit(Counts, plain_sgd, {"schedule": schedule}, epochs=1, num_sanity_val_steps=0)
    return run.module.batches, float(run.module.samples), float(run.trainer.callback_metrics["seen"])


@pytest.mark.parametrize("schedule", slow_unless(lambda one: one == "interleaved", ["1f1b", "interleaved", "zbv"]))
def test_code_before_the_blocks_counts_once_on_a_rank(pool: RankPool, schedule: str) -> None:
    # Not once for each of the rank's stages.
    expected = (-(-SAMPLES // BATCH) * MICRO, SAMPLES, SAMPLES)
    assert pool.run(2, counted, schedule) == [expected, expected]


def rounded(stages: bool) -> Any:
    """A training in bf16-mixed: in stages, or as one process that accumulates the same micro-batches."""
    torch.manual_seed(0)
    module = Model(plain_sgd)
    strategy = pipeline() if stages else None
    trainer = make_trainer(strategy, precision="bf16-mixed", accumulate_grad_batches=1 if stages else MICRO)
    trainer.fit(module, zoo.loader(24, BATCH if stages else BATCH // MICRO))
    return module.state_dict() if dist.get_rank() == 0 else None


class NeverNothing(Weighted):
    least = 1


def weighed(pipelines: int, shard: str = "state") -> Any:
    """A training whose losses have weights: in stages, or as one process that accumulates micro-batches of two."""
    torch.manual_seed(0)
    module = (Weighted if pipelines else NeverNothing)(plain_sgd)
    own: Any = {
        "partial_window": "exact",
        "microbatches": 4 // max(1, pipelines),
        "data_parallel_size": pipelines,
        "shard": shard,
    }
    strategy = pipeline(**own) if pipelines else ZeRO1Strategy()
    trainer = make_trainer(strategy, accumulate_grad_batches=2 if pipelines else 8, max_epochs=2)
    trainer.fit(module, loader(trainer) if pipelines else zoo.loader(SAMPLES, 2))
    return module.state_dict() if dist.get_rank() == 0 else None


def one_pipeline_then_two() -> list[Any]:
    """A pipeline of four ranks, two of which hold the tied matrix, and two pipelines by the same processes."""
    runs = [fit(Model, plain_sgd, own) for own in ({}, {"stages": [2, 2], "microbatches": 2, "data_parallel_size": 2})]
    return [run.module.state_dict() for run, _ in runs] if dist.get_rank() == 0 else []


def groups_made() -> int:
    """How many groups this rank makes in a training. Two of three ranks hold the tied matrix."""
    with patch.object(dist, "new_group", wraps=dist.new_group) as made:
        fit(Model, plain_sgd, {})
    return sum(call.kwargs["backend"] is None for call in made.mock_calls)


def test_all_ranks_make_equally_many_groups(own_pool: RankPool) -> None:
    # NCCL makes groups on all ranks together: another number would hang.
    numbers = own_pool.run(3, groups_made)
    assert min(numbers) == max(numbers) > 0


def test_a_tied_matrix_leaves_other_groups_of_ranks_as_they_are(pool: RankPool) -> None:
    one, two = pool.run(4, one_pipeline_then_two)[0]
    assert distance(one, two) <= 2e-6


@pytest.mark.slow
@pytest.mark.parametrize(("pipelines", "shard"), [(1, "state"), (2, "state"), (2, "parameters")])
def test_loss_weights_count_over_micro_batches(pool: RankPool, pipelines: int, shard: str) -> None:
    (expected,) = pool.run(1, weighed, 0)
    assert distance(pool.run(2 * pipelines, weighed, pipelines, shard)[0], expected) <= 2e-6


@pytest.mark.slow
def test_bf16_mixed_is_that_of_one_process(pool: RankPool) -> None:
    (expected,) = pool.run(1, rounded, False)
    assert distance(pool.run(2, rounded, True)[0], expected) <= 5e-4


def held() -> tuple[int, set[str]]:
    _, recorder = fit(Model, zoo.adamw, {})
    return recorder.held, recorder.names


def test_a_rank_holds_its_stages_alone(pool: RankPool) -> None:
    (first, names), (last, others) = pool.run(2, held)
    # Each of the two is told apart in the first step by what has used it.
    assert names & others == {"embedding.weight"} and "position" in names and "norm.weight" in others
    assert {name.split(".")[1] for name in names if "blocks" in name} == {"0", "1"}
    sizes = {name: one.nbytes for name, one in Model().named_parameters()}
    every = sum(one.numel() for one in Model().parameters())
    training = footprint.Training(parameters=every, devices=2, stages={2: largest_stage(Model(), 2)})
    planned = footprint.pipeline(training, Grid(ranks=2, pipeline=2))
    # The plan counts gradients, too. The tied matrix is on both ranks.
    assert max(first, last) <= 3 / 4 * planned.held + 3 * sizes["embedding.weight"]
    for found, own in ((first, names), (last, others)):
        assert found == 3 * sum(sizes[name] for name in own)


def whole_blocks_at_once() -> int:
    """The most blocks of its stage that a rank holds whole while they are divided. Rank 0 alone has values at first."""
    found, divide = list[int](), ShardedBlocks.divide

    def noting(sharded: ShardedBlocks, name: str) -> None:
        left = [one for other, one in sharded.originals.items() if other not in sharded.copies]
        found.append(sum(any(map(has_memory, block.parameters())) for block in left))
        divide(sharded, name)

    torch.manual_seed(0)
    with torch.device("meta" if dist.get_rank() else "cpu"):
        module = Planned(plain_sgd)
    trainer = make_trainer(pipeline(**SHARDED))
    with patch.object(ShardedBlocks, "divide", noting):
        trainer.fit(module, loader(trainer))
    return max(found)


def test_a_rank_holds_one_whole_block_at_once(pool: RankPool) -> None:
    assert pool.run(4, whole_blocks_at_once)[1:] == [1] * 3


def state_after_a_fit() -> set[torch.dtype]:
    run, _ = fit(Model, nadam, {}, precision="bf16-true")
    return {entries["mu_product"].dtype for entries in run.trainer.optimizers[0].state.values()}


def test_state_keeps_its_dtype_after_a_training(pool: RankPool) -> None:
    assert pool.run(2, state_after_a_fit)[0] == {torch.float32}


def held_in_grid(strategy: dict[str, Any]) -> int:
    return fit(Planned, zoo.adamw, strategy)[1].held


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "ranks"), [({}, 2), (TWO, 4), ({**SHARDED, **SHARED}, 8)])
def test_the_ranks_of_a_stage_hold_what_the_plan_says(pool: RankPool, strategy: dict[str, Any], ranks: int) -> None:
    module, tensor = Planned(), strategy.get("tensor_parallel_size", 1)
    blocks = [one for block in module.blocks for one in block.parameters()]
    cut = sum(one.numel() for block in module.blocks for one in (block.up.weight, block.up.bias, block.down.weight))
    every = sum(one.numel() for one in blocks)
    training = footprint.Training(parameters=every, devices=ranks, cut=cut)
    planned = footprint.pipeline(training, Grid(ranks=ranks, pipeline=2, tensor=tensor))
    # The plan counts gradients of one shard, too. What is in no block is whole, with its state.
    data = ranks // 2 // tensor
    of_plan = planned.held - 4 * (every - cut + cut / tensor) / 2 / data
    outer = sum(one.numel() for one in module.parameters()) - every
    assert 0.97 * of_plan <= max(pool.run(ranks, held_in_grid, strategy)) <= 1.03 * of_plan + 12 * outer


# Evaluation.


def evaluate(stages: bool) -> Any:
    torch.manual_seed(0)
    module, trainer = Measured(), make_trainer(pipeline() if stages else None)
    data = zoo.loader(SAMPLES, BATCH)
    # Two loaders of one metric.
    validated = trainer.validate(module, [data, zoo.loader(SAMPLES - 10, BATCH)], verbose=False)
    callbacks = {name: float(one) for name, one in trainer.callback_metrics.items()}
    return validated, module.sums, callbacks, trainer.predict(module, data)


def test_evaluates_as_one_process_does(pool: RankPool) -> None:
    ((validated, sums, callbacks, predicted),) = pool.run(1, evaluate, False)
    for own_validated, own_sums, own_callbacks, own_predicted in pool.run(2, evaluate, True):
        assert own_sums == pytest.approx(sums, rel=1e-5)
        assert own_callbacks.keys() >= {name for name in callbacks if "running_step" not in name}
        for own, one in zip(own_validated, validated, strict=True):
            assert own == pytest.approx({**one, "mean": own["mean"]}, rel=1e-5)
            # Micro-batches of the last batch differ in size.
            assert own["mean"] == pytest.approx(one["mean"], rel=1e-2)
        assert distance([one["logits"] for one in own_predicted], [one["logits"] for one in predicted]) <= 1e-5
        assert [one["first"] for one in own_predicted] == [one["first"] for one in predicted]


def flow(strategy: dict[str, Any] | None, **more: Any) -> Any:
    """A program's calls, one after the other, with one Trainer and a checkpoint of the best weights."""
    torch.manual_seed(0)
    saving = ModelCheckpoint(monitor="val_loss", save_top_k=1)
    with tempfile.TemporaryDirectory() as folder:
        where: Any = {"enable_checkpointing": True, "default_root_dir": folder, "num_sanity_val_steps": 0}
        made = None if strategy is None else pipeline(**strategy)
        trainer = make_trainer(made, max_epochs=2, callbacks=[saving], **where, **more)
        module, data = Planned(plain_sgd), loader(trainer, torch.float64 if more else torch.float32)
        trainer.validate(module, data, verbose=False)
        trainer.fit(module, data, data)
        (tested,) = trainer.test(module, data, verbose=False)
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module, data, data)
        (validated,) = trainer.validate(module, data, verbose=False)
        kept = float(re.search(r"step=(\d+)", saving.best_model_path)[1])  # type: ignore[index]
        return {**tested, **validated, "best": float(saving.best_model_score), "kept": kept}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("strategy", "ranks"), slow_unless(lambda strategy, _: not strategy, [({}, 2), (TWO, 4), (SHARDED, 4), (SHARED, 4)])
)
@pytest.mark.parametrize("precision", ["32-true", pytest.param("64-true", marks=pytest.mark.slow)])
def test_a_program_fits_tests_and_validates(
    pool: RankPool, strategy: dict[str, Any], ranks: int, precision: str
) -> None:
    more = {} if precision == "32-true" else {"precision": precision}
    (expected,) = pool.run(1, partial(flow, None, **more))
    for found in pool.run(ranks, partial(flow, strategy, **more)):
        assert found == pytest.approx(expected, rel=1e-5)


# Checkpoints.

ROUTES: dict[str, tuple[Any, int]] = {
    "2 stages": (pipeline, 2),
    "3 stages": (pipeline, 3),
    "interleaved": (lambda: pipeline(schedule="interleaved"), 2),
    "pipelines": (lambda: pipeline(**TWO), 4),
    "3d": (lambda: pipeline(**SHARDED, **SHARED), 8),
    "1 x 4 x 2": (lambda: pipeline(**{**SHARDED, **SHARED, "data_parallel_size": 4, "stages": [4]}), 8),
    "2 x 4 x 1": (lambda: pipeline(**{**SHARDED, "data_parallel_size": 4}), 8),
    "zero1": (zero1, 1),
    "single": (lambda: None, 1),
}
SAVED_AND_RESUMED = [
    ("2 stages", "3 stages"),
    ("2 stages", "single"),
    ("single", "2 stages"),
    ("interleaved", "zero1"),
    ("2 stages", "2 stages"),
    ("pipelines", "3 stages"),
    ("2 stages", "pipelines"),
    ("pipelines", "zero1"),
    ("3d", "1 x 4 x 2"),
    ("3d", "2 x 4 x 1"),
    ("3d", "single"),
    ("single", "3d"),
    ("pipelines", "3d"),
]


def resume(name: str, epochs: int, resumed: str | None, saved: str | None) -> Any:
    torch.manual_seed(0 if resumed is None else 1)
    trainer = make_trainer(ROUTES[name][0](), max_epochs=epochs, gradient_clip_val=0.05)
    module = Planned(zoo.adamw)
    trainer.fit(module, loader(trainer, samples=4 * BATCH), ckpt_path=resumed, weights_only=False)
    if saved is not None:
        trainer.save_checkpoint(saved)
    return module.state_dict() if dist.get_rank() == 0 else None


@pytest.mark.parametrize(
    ("source", "target"), slow_unless(lambda *one: one == ("2 stages", "3 stages"), SAVED_AND_RESUMED)
)
def test_a_checkpoint_resumes_under_any_number_of_stages(
    pool: RankPool, tmp_path: Path, source: str, target: str
) -> None:
    saved = str(tmp_path / "one.ckpt")
    expected = pool.run(1, resume, "single", 2, None, None)[0]
    pool.run(ROUTES[source][1], resume, source, 1, None, saved)
    assert distance(pool.run(ROUTES[target][1], resume, target, 2, saved, None)[0], expected) <= 2e-5


def interrupted(folder: str, resumed: str | None, trainer: Mapping[str, Any], strategy: Mapping[str, Any]) -> Any:
    """A training with dropout and shuffled data, which saves in the middle of an epoch."""
    torch.manual_seed(0 if resumed is None else 1)
    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_top_k=-1)
    more = {"max_epochs": 2, "callbacks": [saving], "enable_checkpointing": True, **trainer}
    module = DropsOut(zoo.adamw)
    data = DataLoader(zoo.Samples(SAMPLES), BATCH, shuffle=True)
    make_trainer(pipeline(**strategy), **more).fit(module, data, ckpt_path=resumed, weights_only=False)
    return module.state_dict() if dist.get_rank() == 0 else None


@pytest.mark.parametrize(
    ("ranks", "trainer", "strategy"), [(2, {}, {}), (4, {"precision": "bf16-true"}, {"data_parallel_size": 2})]
)
def test_a_training_resumes_bit_for_bit_within_an_epoch(
    pool: RankPool, tmp_path: Path, ranks: int, trainer: dict[str, Any], strategy: dict[str, Any]
) -> None:
    expected = pool.run(ranks, interrupted, str(tmp_path / "whole"), None, trainer, strategy)[0]
    saved = str(tmp_path / "whole" / "step=3.ckpt")
    found = pool.run(ranks, interrupted, str(tmp_path / "rest"), saved, trainer, strategy)[0]
    assert_same(found, expected)


def test_an_error_of_memory_that_is_kept_holds_no_tensors() -> None:
    held = []

    def fails() -> None:
        activations = torch.ones(3)
        held.append(weakref.ref(activations))
        raise torch.OutOfMemoryError("full")

    with pytest.raises(torch.OutOfMemoryError) as raised:
        fails()
    assert held[0]() is not None
    assert _kept(raised.value) is raised.value and held[0]() is None


class AsksEarly(Model):
    def setup(self, stage: str) -> None:
        self.number = self.trainer.estimated_stepping_batches


def count_early() -> tuple[int, int]:
    run, _ = fit(AsksEarly, plain_sgd, {})
    return run.module.number, run.trainer.global_step


def test_the_number_of_steps_is_known_before_the_module_is_cut(pool: RankPool) -> None:
    for estimated, steps in pool.run(2, count_early):
        assert estimated == steps > 0


# What cannot be cut.


class Skips(Model):
    """The last block gets what the first one has computed."""

    def logits(self, tokens: Tensor) -> Tensor:
        outputs = [self.embed(tokens)]
        for block in self.blocks:
            outputs.append(block(outputs[-1]))
        return self.head(self.norm(outputs[-1] + outputs[1]))


class AddsBetween(Model):
    """What a block gets is added to its output outside of it."""

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


class PassesOn(Block):
    """It returns what it was given beside its input."""

    def forward(self, x: Tensor, given: Any) -> Any:
        return super().forward(x), given


class Passes(Model):
    """Passes on what is no tensor, and is another one in each step."""

    block = PassesOn
    kind: Any = np.float32

    def logits(self, tokens: Tensor) -> Tensor:
        x, given = self.embed(tokens), self.kind(self.global_step)
        for block in self.blocks:
            x, given = block(x, given)
        return self.head(self.norm(x))


class PassesNone(Passes):
    kind = staticmethod(lambda step: None if step % 2 else ())


class PassesTensor(Passes):
    kind = staticmethod(lambda step: SimpleNamespace(mask=torch.ones(1)))


class PassesObject(Passes):
    kind = staticmethod(lambda step: SimpleNamespace(step=step))


class CountsIn(Block):
    def forward(self, x: Tensor, depth: Any) -> Tensor:
        depth.number += 1
        return super().forward(x) * depth.number


class CountsInOne(Model):
    """Blocks count in an object of the caller."""

    block = CountsIn

    def logits(self, tokens: Tensor) -> Tensor:
        x, depth = self.embed(tokens), Depth()
        for block in self.blocks:
            x = block(x, depth)
        return self.head(self.norm(x))


class Teaches(Model):
    """A step moves the averages of its blocks' parameters."""

    def build(self) -> None:
        super().build()
        self.teacher = nn.Linear(WIDTH, 2 * WIDTH).requires_grad_(False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        with torch.no_grad():
            for block in self.blocks:
                self.teacher.weight.data.mul_(0.9).add_(block.up.weight, alpha=0.1)
        return super().training_step(batch, batch_idx)


class Shrinks(Model):
    """A step shrinks a frozen layer before the first block."""

    def build(self) -> None:
        super().build()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def embed(self, tokens: Tensor) -> Tensor:
        self.frozen.weight.mul_(0.9)
        return self.frozen(super().embed(tokens))


class Decides(Model):
    """Code decides by what the embedding returns."""

    def embed(self, tokens: Tensor) -> Tensor:
        embedded = super().embed(tokens)
        return embedded if embedded.sum() > -1e9 else embedded * 2


class Leaves(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.penalty = x.square().mean()
        return super().forward(x)


class Appends(Block):
    def forward(self, x: Tensor, found: Any) -> Tensor:
        found.append(x.square().mean())
        return super().forward(x)


class Collects(Model):
    """Blocks put tensors for the loss into a list of the caller."""

    block = Appends

    def logits(self, tokens: Tensor) -> Tensor:
        x, found = self.embed(tokens), list[Tensor]()
        for block in self.blocks:
            x = block(x, found)
        return self.head(self.norm(x)) * torch.stack(found).sum()


class CollectsApart(Collects):
    """Each block has its own."""

    def logits(self, tokens: Tensor) -> Tensor:
        x, found = self.embed(tokens), [deque[Tensor]() for _ in self.blocks]
        for block, own in zip(self.blocks, found, strict=True):
            x = block(x, own)
        return self.head(self.norm(x)) * torch.stack([one for own in found for one in own]).sum()


class AddsTo(Block):
    def forward(self, x: Tensor, sums: Any) -> Tensor:
        sums.total = sums.total + x.square().mean()
        return super().forward(x)


class AddsUp(Model):
    """Blocks add to an object of the caller."""

    block = AddsTo

    def logits(self, tokens: Tensor) -> Tensor:
        x, sums = self.embed(tokens), SimpleNamespace(total=torch.ones(()))
        for block in self.blocks:
            x = block(x, sums)
        return self.head(self.norm(x)) * sums.total


class AddsInto(Block):
    def forward(self, x: Tensor, total: Tensor) -> Tensor:
        total += x.square().mean()
        return super().forward(x)


class AddsUpInPlace(Model):
    """Blocks add to elements of a tensor."""

    block = AddsInto

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        sums = 0 * x.flatten()[: len(self.blocks)]
        for number, block in enumerate(self.blocks):
            x = block(x, sums[number])
        return self.head(self.norm(x)) * sums.sum()


class LogsFromDictionary(Model):
    """A metric is in a dictionary, where other ranks do not find it."""

    def build(self) -> None:
        super().build()
        self.metrics = {"mean": MeanMetric()}

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.metrics["mean"].update(loss)
        self.log("mean", self.metrics["mean"], on_step=False, on_epoch=True, metric_attribute="metrics")
        return loss


class Adds(Block):
    def forward(self, x: Tensor) -> Tensor:
        x += super().forward(x.clone())
        return x


class TakesNoReturn(Model):
    """Blocks change their input, and what they return is not used."""

    block = Adds

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            block(x)
        return self.head(self.norm(x))


class HookedWithin(Model):
    """Hooks collect what modules within blocks return."""

    def build(self) -> None:
        super().build()
        self.found: list[Tensor] = []
        for block in self.blocks:
            block.up.register_forward_hook(lambda module, args, output: self.found.append(output.mean()))

    def compute_loss(self, batch: Tensor) -> Tensor:
        self.found.clear()
        return super().compute_loss(batch) + torch.stack(self.found).sum()


class Penalised(Model):
    """Blocks leave tensors for the loss."""

    block = Leaves

    def compute_loss(self, batch: Tensor) -> Tensor:
        return super().compute_loss(batch) + sum(getattr(block, "penalty", 0.0) for block in self.blocks)


class Twice(Model):
    """A block is called again."""

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        return self.head(self.norm(x))


class FreezesFirst(Model):
    def on_fit_start(self) -> None:
        for one in (self.embedding, *self.blocks[:2]):
            one.requires_grad_(False)
        self.position.requires_grad_(False)


class Reentrant(Model):
    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(self.norm(x))


class Remembers(Model):
    """Has parameters in a list of its own."""

    def build(self) -> None:
        super().build()
        self.own = list(self.parameters())

    def compute_loss(self, batch: Tensor) -> Tensor:
        return super().compute_loss(batch) + sum(one.square().sum() for one in self.own)


class FailsBackward(Model):
    def compute_loss(self, batch: Tensor) -> Tensor:
        loss = super().compute_loss(batch)
        if loss.requires_grad:
            loss.register_hook(fail)
        return loss


def fail(_: Tensor) -> None:
    raise ArithmeticError("in backward")


class ByHand(Model):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.automatic_optimization = False


class NormsBetween(Block):
    """A norm that the plan leaves whole, between layers that are cut."""

    def __init__(self, dropout: float) -> None:
        super().__init__(dropout)
        self.inner = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.inner * self.up(self.norm(x)))


class ScaledBetween(Planned):
    block = NormsBetween


class Watched(Planned):
    def on_fit_start(self) -> None:
        for one in self.blocks.parameters():
            one.register_hook(lambda gradient: gradient / 2)


class Finetunes(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        pass

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        pass


class NoTensor(Model):
    def on_before_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Any:
        return {"samples": batch, "table": torch.zeros(3, 2)}


class Choosy(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else x


class ListsSamples(Model):
    def on_before_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Any:
        return list(batch)


class AveragesAll(Model):
    """Averages of parameters, which begin before the first step."""

    def on_train_start(self) -> None:
        self.averages = [one.detach().clone() for one in self.parameters()]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for average, one in zip(self.averages, self.parameters(), strict=True):
            average.lerp_(one.detach(), 0.1)


class Lengthens(Model):
    """The second epoch has longer sequences. The rank of the last stage gets shorter ones than its targets are."""

    def compute_loss(self, batch: Tensor) -> Tensor:
        return super().compute_loss(batch[:, : 4 + 2 * self.current_epoch])


class Renames(Model):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {f"model.{name}": one for name, one in super().state_dict(*args, **kwargs).items()}


class HooksBackward(Model):
    """Backward hooks halve the gradients that leave blocks."""

    def on_fit_start(self) -> None:
        for block in self.blocks:
            block.register_full_backward_hook(lambda _, given, __: tuple(one / 2 for one in given))


class FreezesAtTheEnd(Model):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.blocks[0].requires_grad_(self.global_step < 1)
        return loss


class SetsRateAtTheEnd(Model):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = 0.05 / (1 + self.global_step)
        return loss


class UsesInManyPlaces(Model):
    """A matrix is used before the blocks, after them and in the loss, and so is a number."""

    def build(self) -> None:
        super().build()
        self.factor = nn.Parameter(torch.ones(1))

    def compute_loss(self, batch: Tensor) -> Tensor:
        return self.factor * super().compute_loss(batch) + self.embedding.weight.square().mean()


class ReturnsNone(Model):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return None


class DecidesInBlock(Model):
    block = Choosy


class Copies(torch.autograd.Function):
    """Reads addresses, as a kernel does that torch does not know."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        copied = torch.empty_like(x)
        ctypes.memmove(copied.data_ptr(), x.data_ptr(), x.nbytes)
        return copied

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class WithKernel(Block):
    def forward(self, x: Tensor) -> Tensor:
        return Copies.apply(super().forward(x).contiguous())


class RunsKernel(Model):
    block = WithKernel


class WithoutValues(Model):
    def build(self) -> None:
        super().build()
        self.to("meta")


class Refused(NamedTuple):
    """A training, and the text of its error on all ranks."""

    module: type[zoo.Zoo]
    text: str
    strategy: dict[str, Any] = {}  # noqa: RUF012
    trainer: dict[str, Any] = {}  # noqa: RUF012
    optimizer: Any = plain_sgd
    ranks: int = 2


class GetsHead(Model):
    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 1:
            self.head = nn.Linear(WIDTH, WORDS)
            self.trainer.optimizers[0].add_param_group({"params": self.head.parameters()})


class OneByOne(Metric):
    """torchmetrics gathers each item of its list."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("items", [], dist_reduce_fx=None)

    def update(self, item: Tensor) -> None:
        self.items.append(item)

    def compute(self) -> Tensor:
        return torch.stack(self.items).max()


class LogsOneByOne(Model):
    def build(self) -> None:
        super().build()
        self.worst = OneByOne()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.worst.update(self.compute_loss(batch))
        self.log("worst", self.worst)


class PenalisesInputs(Model):
    def logits(self, tokens: Tensor) -> Tensor:
        x = hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        found = self.head(self.norm(hidden))
        if not self.training:
            return found
        (slope,) = torch.autograd.grad(found.sum(), x, create_graph=True)
        return found + slope.square().mean()


class NormedTwice(Normed):
    """One norm before the blocks and after them."""

    def build(self) -> None:
        super().build()
        self.last = self.statistics


REFUSED = {
    "skip": Refused(Skips, r"self\.log\('val_loss', \.\.\.\)` takes what another stage computes.*through the blocks"),
    "skip, sharded": Refused(AddsBetween, "'blocks.2' depends on what another stage computes", SHARDED, ranks=4),
    "a number of NumPy": Refused(Passes, r"has returned the numbers \[np.float32\(1.0\)\], and \[np.float32\(0.0\)\]"),
    "None at times": Refused(PassesNone, r"has returned the numbers \[None\], and \[\] for"),
    "an object's number": Refused(PassesObject, r"has returned the numbers \[1\], and \[0\] for"),
    "an object's tensor": Refused(PassesTensor, r"returns an object with a tensor in 'SimpleNamespace\.mask'"),
    "counts in an object": Refused(CountsInOne, r"'blocks\.1' is given what an earlier block was given, too"),
    "a teacher in a step": Refused(Teaches, "`add_` would change a tensor by parameters of other stages"),
    "a frozen layer in a step": Refused(Shrinks, r"A step changes frozen\.weight, which has no gradient"),
    "decision": Refused(Decides, "reads or decides by values that another stage computes"),
    "decision in a block": Refused(DecidesInBlock, "In blocks, decide by shapes, not by values"),
    "kernel": Refused(RunsKernel, "cannot be found without values: .*data"),
    "left tensors": Refused(Penalised, r"A forward leaves a tensor with a gradient in 'blocks\.\d\.penalty'"),
    "appends": Refused(Collects, r"'blocks\.1' is given what an earlier block was given, too"),
    "appends, each to another": Refused(CollectsApart, r"'blocks\.0' leaves a tensor with a gradient in its arguments"),
    "adds to an object": Refused(AddsUp, r"'blocks\.0' leaves a tensor with a gradient in its arguments"),
    "adds in place": Refused(AddsUpInPlace, r"'blocks\.0' leaves a tensor with a gradient in its arguments"),
    "a metric in a dictionary": Refused(LogsFromDictionary, "A MeanMetric is logged that is no submodule"),
    "returns unused": Refused(TakesNoReturn, r"'blocks\.1' is given what an earlier block was given"),
    "backward hooks": Refused(HooksBackward, r"A backward hook is registered on 'blocks\.1'"),
    "freezes at the end": Refused(FreezesAtTheEnd, "A step has set `requires_grad` after the last block of a stage"),
    "a rate at the end": Refused(SetsRateAtTheEnd, "A step has set a number of an optimizer's group, such as"),
    "in many places, split": Refused(UsesInManyPlaces, "splits backwards, and torch fails", {"schedule": "zbv"}),
    "one norm before and after": Refused(NormedTwice, r"Stages on several ranks change statistics\.running_mean"),
    "a list of a metric": Refused(LogsOneByOne, "A step updates worst on the rank of the last stage alone"),
    "a gradient by the input": Refused(PenalisesInputs, "a gradient by a tensor with which another stage computes"),
    "a new head": Refused(GetsHead, r"has got head\.weight, head\.bias since it was divided into stages"),
    "a new head, sharded": Refused(GetsHead, r"has got head\.weight, head\.bias since", SHARDED, ranks=4),
    "called twice": Refused(Twice, "has called 'blocks.0', and 'the end' was to come"),
    "fails in backward": Refused(FailsBackward, "in backward"),
    "frozen, split": Refused(FreezesFirst, "torch loses gradients", {"schedule": "zero_bubble"}),
    "reentrant": Refused(Reentrant, "use_reentrant=False"),
    "held parameters": Refused(Remembers, "through an object from before the training"),
    "averages": Refused(Model, "WeightAveraging reads", trainer={"callbacks": [EMAWeightAveraging()]}),
    "averages, swa": Refused(
        Model, "StochasticWeightAveraging reads", trainer={"callbacks": [StochasticWeightAveraging(0.1)]}
    ),
    "finetuning": Refused(Model, "BaseFinetuning", trainer={"callbacks": [Finetunes()]}),
    "pruning": Refused(Model, "ModelPruning reads", trainer={"callbacks": [ModelPruning("l1_unstructured")]}),
    "averages by hand": Refused(AveragesAll, "`lerp_` would change a tensor.* copy parameters after it"),
    "longer": Refused(Lengthens, r"'blocks\.1' has returned.* must not depend on values, on the epoch"),
    "rate finder": Refused(Planned, "LearningRateFinder reads", SHARED, {"callbacks": [LearningRateFinder()]}),
    "renames": Refused(Renames, r"other names, such as model\.position, "),
    "manual": Refused(ByHand, "optimizes manually"),
    "no samples": Refused(NoTensor, re.escape("A tensor of shape (3, 2) in a batch of 8 samples")),
    "list of samples": Refused(ListsSamples, "tensors is 12, and the loader's batches have 8 samples"),
    "no loss": Refused(ReturnsNone, "has not called 'blocks.0'.* If `training_step` returns None"),
    "small batch": Refused(Model, "A batch of 8 samples cannot be cut into microbatches=9", {"microbatches": 9}),
    "few micro-batches": Refused(Model, "1f1b.*microbatches=1", {"microbatches": 1}),
    "stages": Refused(Model, r"stages=\[1, 1, 2\] are 3 for 2 ranks", {"stages": [1, 1, 2]}),
    "sum of stages": Refused(Model, r"stages=\[1, 1\] are 2 blocks, and the module has 4", {"stages": [1, 1]}),
    "one stage a rank": Refused(Model, "needs a multiple of 2", {"schedule": "interleaved", "stages": [2, 2]}),
    "forward hook": Refused(Hooked, "A forward hook is registered on 'blocks.0'", SHARED),
    "no plan": Refused(Model, "needs a plan of the layers that ranks share", SHARED),
    "whole between cut": Refused(ScaledBetween, "different gradients of blocks.0.inner", SHARED),
    "scalar": Refused(ScaledBetween, r"'blocks\.0\.inner' of a block cannot be divided", SHARDED),
    "hook": Refused(Watched, "A hook is registered on", SHARED),
    "odd pipelines": Refused(Model, "need a multiple of 3 ranks, and there are 2", {"data_parallel_size": 3}),
    "odd grid": Refused(Planned, "need a multiple of 4 ranks, and there are 2", {**TWO, **SHARED}),
    "split backward": Refused(Model, "splits backwards, and FSDP2", {**SHARED, "schedule": "zero_bubble"}),
    "no values": Refused(WithoutValues, "'position' has no values on rank 0"),
    "no blocks": Refused(zoo.Recurrent, "has 0 blocks"),
    "synchronized": Refused(Normed, "SyncBatchNorm waits for all ranks", trainer={"sync_batchnorm": True}),
    "16-mixed": Refused(Model, "no loss scale", trainer={"fp16": True}),
    "lbfgs": Refused(Model, "evaluates the loss again", optimizer=torch.optim.LBFGS),
    "combines": Refused(Model, "GloballyScaled cannot .* depends on others, and each rank", optimizer=GloballyScaled),
    "closure twice": Refused(Model, "evaluates the closure again", optimizer=ClosureTwice),
}


def refuse(name: str) -> str:
    row = REFUSED[name]
    try:
        fit(row.module, row.optimizer, row.strategy, **row.trainer)
    except (RuntimeError, MisconfigurationException, ValueError, ArithmeticError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("name", slow_unless(lambda name: name in ("skip", "left tensors", "stages"), REFUSED))
def test_what_cannot_be_cut_is_an_error_on_all_ranks(pool: RankPool, name: str) -> None:
    for message in pool.run(REFUSED[name].ranks, refuse, name):
        assert re.search(REFUSED[name].text, message), message


class CountsSteps(Model):
    """Buffers that change after the last block: one in place, one by another tensor."""

    def build(self) -> None:
        super().build()
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("average", torch.zeros(()))
        self.register_buffer("fixed", torch.ones(()))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.steps += 1
        self.average = 0.9 * self.average + 0.1 * loss.detach()
        return loss


class Notes(Block):
    """Notes the mean of what it returns."""

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        self.mean = output.detach().mean()
        return output


class LeavesNotes(Model):
    block = Notes


class CollectsLosses(Model):
    """Lists of what validation has found, for the end of the epoch; an attribute that all ranks set."""

    def build(self) -> None:
        super().build()
        self.found: dict[str, list[Tensor]] = {"losses": []}

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.length = len(batch)
        self.found["losses"].append(self.compute_loss(batch))


class CountsSamples(Model):
    def validation_step(self, batch: Tensor, batch_idx: int) -> Any:
        super().validation_step(batch, batch_idx)
        return {"samples": len(batch), "mean": float(batch.mean()), "is_first": batch_idx == 0}


class SumsFeatures(Model):
    def validation_step(self, batch: Tensor, batch_idx: int) -> Any:
        super().validation_step(batch, batch_idx)
        return {"sums": batch.sum(0), "rows": [*batch]}


class Untried(PlainSGD):
    """Takes no parameters as small as those of a trial."""

    def step(self, closure: Any = None) -> Any:
        assert all(max(one.shape) > 8 for group in self.param_groups for one in group["params"])
        return super().step(closure)


class StepsUntried(Model):
    def configure_optimizers(self) -> Any:
        return Untried(self.parameters())


WARNED: dict[type[Model], str] = {
    StepsUntried: r"pipeline_custom: Untried: trying it on a copy failed \(AssertionError.* the training is wrong",
    HookedWithin: r"Forward hooks are registered in blocks, on blocks\.0\.up, blocks\.1\.up, ",
    LeavesNotes: r"Blocks leave tensors on their modules, .*: blocks\.\d\.mean, blocks\.\d\.mean",
    CountsSteps: r"A step changes buffers: average, steps\. It does so for each micro-batch",
    CollectsLosses: r"`validation_step` changes self\.found on the rank of the last stage alone.* Return it",
    CountsSamples: "`validation_step` returns whole numbers",
    SumsFeatures: "`validation_step` returns whole numbers, or tensors whose first dimension is not the samples",
}


def warned(module: type[Model]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(module, plain_sgd, {})
    return [text for one in caught if re.match("|".join(WARNED.values()), text := str(one.message))]


def test_what_differs_from_a_whole_batch_is_named_once(pool: RankPool) -> None:
    for module in (Model, *WARNED):
        (lines, others) = pool.run(2, warned, module)
        # Each rank names what its own blocks leave.
        assert others == [] and len(lines) == (module in WARNED) + (module is LeavesNotes)
        assert re.match(WARNED.get(module, ""), "".join(lines))


ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"stages": [2, 0]}, "stages"),
    ({"stages": "two"}, "stages"),
    ({"microbatches": 0}, "microbatches"),
    ({"schedule": "2f2b"}, "1f1b"),
    ({"state_dict_type": "sharded"}, "state_dict_type='full'"),
    ({"rank_shares": [1, 2]}, "rank_shares='equal'"),
    ({"keep_global_batch": True}, "keep_global_batch=False"),
]


def test_arguments_are_checked() -> None:
    for arguments, text in ARGUMENTS:
        with pytest.raises(ValueError, match=re.escape(text)):
            PipelineStrategy(**arguments)


class Holds(Model):
    def build(self) -> None:
        super().build()
        self.total, self.inner = SumMetric(), zoo.MLP()


def test_metrics_and_inner_modules_follow_to_a_device() -> None:
    module = Holds()
    follow_device(module, torch.device("meta"))
    assert {one.device.type for one in (module, module.inner, module.total)} == {"meta"}
    assert module.total.sum_value.is_meta and not module.position.is_meta
