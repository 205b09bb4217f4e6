"""``ddp_tuned`` averages what is trained, whatever was frozen, unfrozen, added or removed since the training began."""

import copy
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

from lightning_parstrat import TunedDDPStrategy
from lightning_parstrat.distributed.ddp import trained_parameters
from lightning_parstrat.errors import DifferentParametersError
from tests.comparing import worst
from tests.pool import RankPool
from tests.slow import slow_unless
from tests.strategies import odd, zoo
from tests.strategies.cases import FP32
from tests.strategies.parity import Run, largest_difference, make_trainer, train
from tests.strategies.test_ddp import tiny_sizes
from tests.torch_versions import is_before

Plan = dict[int, tuple[int, bool]]
"""By the number of the batch since training began: which layer, and whether it is trained from then on."""


class Flips(zoo.MLP):
    """Freezes and unfreezes layers, at one of the places where users do."""

    frozen: tuple[int, ...] = ()
    plan: Plan = {}  # noqa: RUF012  (never changed)
    where = "on_train_batch_start"

    def build(self) -> None:
        super().build()
        self.batches = 0
        for layer in self.frozen:
            self.net[layer].requires_grad_(False)

    def flip(self, where: str) -> None:
        if where == self.where and self.batches in self.plan:
            layer, trained = self.plan[self.batches]
            self.net[layer].requires_grad_(trained)

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.flip("on_train_batch_start")

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.flip("training_step")
        loss = super().training_step(batch, batch_idx)
        self.flip("after the forward")
        return {"loss": loss, "predicted": self.net(batch).detach()}

    def on_after_backward(self) -> None:
        self.flip("on_after_backward")

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.batches += 1


def flips(plan: Plan, frozen: tuple[int, ...] = (), where: str = "on_train_batch_start") -> type[Flips]:
    # By name in this module it could not be found, but nothing pickles it.
    return type("Flips", (Flips,), {"plan": plan, "frozen": frozen, "where": where})


class GetsTeacher(zoo.MLP):
    """A copy of itself, whose parameters require gradients and get none."""

    def on_train_start(self) -> None:
        self.teacher = copy.deepcopy(self.net)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with torch.no_grad():
            target = self.teacher(batch)
        return super().training_step(batch, batch_idx) + 0.1 * (self.net(batch) - target).pow(2).mean()


class GetsSameHead(odd.GetsHead):
    def draw_seed(self) -> int:
        return 3


class LosesLayer(zoo.MLP):
    def build(self) -> None:
        super().build()
        self.extra = nn.Linear(zoo.FEATURES, 3)

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 4 and self.current_epoch == 0:
            del self.extra

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + self.extra(batch).pow(2).mean() if hasattr(self, "extra") else loss


class Ignored(Flips):
    """What DDP is told to ignore goes its own way on each rank, frozen or not."""

    _ddp_params_and_buffers_to_ignore = ("own.weight", "own.bias")
    frozen, plan = (0,), {3: (0, True)}

    def build(self) -> None:
        super().build()
        self.own = nn.Linear(zoo.FEATURES, 1).requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.net.parameters())

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if dist.get_rank() == 1 and batch_idx == 4:
            self.own.requires_grad_(True)
        return super().training_step(batch, batch_idx)["loss"] + 0 * self.own(batch).sum()


class FrozenForBackward(zoo.MLP):
    """A layer is frozen between forward and backward: what it has accumulated stays, and nothing is added."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.net[0].requires_grad_(batch_idx % 2 == 0)
        return loss

    def on_after_backward(self) -> None:
        self.net[0].requires_grad_(True)


class Checkpointed(Flips):
    """Activations are computed again in backward, which has to find what forward has seen."""

    plan = {3: (2, False), 9: (2, True)}  # noqa: RUF012  (never changed)

    def compute_loss(self, batch: Tensor) -> Tensor:
        return checkpoint(super().compute_loss, batch, use_reentrant=False)


class Rows(nn.Module):
    def forward(self, batch: Tensor) -> Tensor:
        return batch.abs().mul(4).long().clamp(max=11)


class Sparse(Flips):
    plan = {3: (1, False)}  # noqa: RUF012  (never changed)

    def build(self) -> None:
        super().build()
        self.net = nn.Sequential(Rows(), nn.Embedding(12, 8, sparse=True), nn.Flatten(), nn.Linear(96, 1))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Net(nn.Sequential):
    def forward(self, batch: Tensor) -> Tensor:
        return super().forward(batch)


class Compiled(Flips):
    frozen, plan = (0,), {3: (0, True), 8: (2, False)}

    def build(self) -> None:
        super().build()
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        # A class of its own: in place, torch's compiles nothing.
        self.net = Net(*self.net)
        self.net.compile(backend="aot_eager")

    def on_train_end(self) -> None:
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


UNUSED, STATIC = {"find_unused_parameters": True}, {"static_graph": True}
BY_TWO = {"accumulate_grad_batches": 2}


class Case(NamedTuple):
    """A training, and how often its reducer is made anew (None: whatever)."""

    module: Callable[[], LightningModule]
    made_anew: int | None
    flags: dict[str, Any] = {}  # noqa: RUF012
    trainer: dict[str, Any] = {}  # noqa: RUF012
    tolerance: float = FP32


UNFROZEN = flips({3: (0, True)}, (0,))
FROZEN = flips({3: (0, False)})
CASES = {
    "unfrozen before a batch": Case(UNFROZEN, 1),
    "unfrozen before a batch, unused are found": Case(UNFROZEN, 1, UNUSED),
    "unfrozen before a batch, static graph": Case(UNFROZEN, 1, STATIC),
    "unfrozen before a batch, sizes given": Case(UNFROZEN, 1, {"bucket_cap_mb": [0.001, 0.002]}),
    "unfrozen before a batch, norms clipped": Case(UNFROZEN, 1, trainer={"gradient_clip_val": 0.05}),
    "unfrozen in the first step": Case(flips({0: (0, True)}, (0,)), 1),
    "unfrozen in the last step": Case(flips({19: (0, True)}, (0,)), 0),
    "unfrozen in a step": Case(flips({3: (0, True)}, (0,), "training_step"), 1),
    "unfrozen after a forward": Case(flips({3: (0, True)}, (0,), "after the forward"), 1),
    "unfrozen layer by layer": Case(flips({3: (2, True), 10: (0, True)}, (0, 2)), 2),
    "unfrozen for one batch": Case(flips({3: (0, True), 4: (0, False)}, (0,)), 0),
    "frozen": Case(FROZEN, 1),
    "frozen, unused are found": Case(FROZEN, 0, UNUSED),
    "frozen, static graph": Case(FROZEN, 1, STATIC),
    "frozen after a forward": Case(flips({3: (0, False)}, where="after the forward"), 1),
    "frozen for backward": Case(FrozenForBackward, None),
    "frozen for backward, in a window": Case(FrozenForBackward, None, trainer=BY_TWO),
    "frozen, and unfrozen after a backward": Case(
        flips({3: (0, False), 6: (0, True)}, where="on_after_backward"), None
    ),
    "frozen, activations computed again": Case(Checkpointed, None),
    "frozen, gradients are sparse": Case(Sparse, None),
    "frozen and unfrozen": Case(flips({3: (0, False), 9: (0, True)}), 2),
    "frozen here, unfrozen there": Case(flips({3: (0, True), 4: (2, False)}, (0,)), 1),
    "unfrozen before a window": Case(flips({4: (0, True)}, (0,)), 1, trainer=BY_TWO),
    "unfrozen in a window": Case(flips({5: (0, True)}, (0,)), 1, trainer=BY_TWO),
    "unfrozen in a window, unused are found": Case(flips({5: (0, True)}, (0,)), 1, UNUSED, BY_TWO),
    "unfrozen in a window, and frozen again": Case(flips({4: (0, True), 5: (0, False)}, (0,)), 0, trainer=BY_TWO),
    "frozen in a window": Case(flips({5: (0, False)}), 1, trainer=BY_TWO),
    "by hand, one after the other": Case(odd.Toggling, None),
    "by hand, unused are found": Case(odd.Toggling, None, UNUSED),
    "a teacher": Case(GetsTeacher, 0),
    "a new head": Case(GetsSameHead, 2),
    "a new head, unused are found": Case(GetsSameHead, 2, UNUSED),
    "a lost layer": Case(LosesLayer, 1),
    "some are ignored": Case(Ignored, 1),
    # By small buckets torch splits no graph: its first one would be larger.
    "compiled": Case(Compiled, 2, {"bucket_cap_mb": 25}),
    "compressed": Case(UNFROZEN, 1, {"comm_hook": "bf16"}, tolerance=2e-2),
    "compressed by torch's hook": Case(
        UNFROZEN, None, {"ddp_comm_hook": default_hooks.fp16_compress_hook}, tolerance=2e-2
    ),
}
QUICK = {
    "unfrozen before a batch, unused are found",
    "unfrozen in a step",
    "unfrozen in a window",
    "frozen",
    "frozen for backward, in a window",
    "a new head",
    "compressed",
}


def is_compressed(name: str) -> bool:
    return any("comm_hook" in flag for flag in CASES[name].flags)


def apart(run: Run) -> float:
    """The largest difference of a parameter between this rank and rank 0, when training has ended."""
    found = []
    for parameter in run.parameters[-1]:
        of_rank_0 = parameter.clone()
        dist.broadcast(of_rank_0, 0)
        found.append((parameter - of_rank_0).abs().max())
    return worst(found)


def compare(name: str) -> tuple[float, float, int, float]:
    """How far from one process and between ranks, how often a reducer was made anew, and how far weights have moved."""
    case, made = CASES[name], []
    arguments = {"max_epochs": 2, **case.trainer}
    exchange = trained_parameters.exchange_reducer
    strategy = TunedDDPStrategy(partial_window="lightning", **{"bucket_cap_mb": 0.001, **case.flags})
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(trained_parameters, "exchange_reducer", lambda *each: (made.append(each), exchange(*each)))
        actual = train(case.module, strategy, **arguments)
    assert all(len(ddp._comm_hooks) == is_compressed(name) for ddp, *_ in made)
    assert not any(one._post_accumulate_grad_hooks for one in actual.module.parameters())
    expected = train(case.module, None, whole_batch=True, **arguments)
    moved = (expected.parameters[0][0] - expected.parameters[-1][0]).abs().max()
    return largest_difference(actual, expected), apart(actual), len(made), float(moved)


@pytest.mark.parametrize("name", slow_unless(lambda name: name in QUICK, CASES))
def test_what_is_trained_is_averaged(pool: RankPool, name: str) -> None:
    if name == "compiled" and is_before("2.13"):
        pytest.skip("compiled code does not notice that a parameter was unfrozen, also in one process")
    for difference, between_ranks, made_anew, moved in pool.run(2, compare, name):
        # What travels in 16 bits is rounded.
        least = 1e-6 if is_compressed(name) else 0
        assert least <= difference <= CASES[name].tolerance and between_ranks == 0
        assert CASES[name].made_anew in (made_anew, None) and moved > 1e-3


def train_a_new_head() -> list[tuple[float, bool]]:
    runs = [train(lambda: odd.GetsHead(), TunedDDPStrategy(**flags)) for flags in ({}, UNUSED)]
    return [(apart(run), bool(run.parameters[-1][-1].any())) for run in runs]


def test_a_new_head_is_that_of_rank_0(pool: RankPool) -> None:
    assert pool.run(2, train_a_new_head) == [[(0, True)] * 2] * 2


def train_approximated() -> float:
    state = powerSGD_hook.PowerSGDState(process_group=None, start_powerSGD_iter=2, min_compression_rate=0.5)
    run = train(
        lambda: UNFROZEN(), TunedDDPStrategy(ddp_comm_state=state, ddp_comm_hook=powerSGD_hook.powerSGD_hook), 80
    )
    assert state.error_dict, "nothing was approximated after the change"
    return apart(run)


def test_what_a_hook_keeps_of_buckets_goes_on_with_them(pool: RankPool) -> None:
    assert pool.run(2, train_approximated) == [0, 0]


def tune_and_unfreeze(batch: int) -> tuple[float, float, str]:
    module = flips({batch: (0, True)}, (0,))
    strategy = TunedDDPStrategy(tune_steps=4, tune_tolerance=0.0)
    with tiny_sizes():
        actual = train(lambda: module(), strategy, 240)
    assert strategy.tuning_report is not None
    expected = train(lambda: module(), None, 240, whole_batch=True)
    return largest_difference(actual, expected), apart(actual), strategy.tuning_report.verdict


@pytest.mark.slow
@pytest.mark.parametrize("batch", [0, 5, 9, 14, 30])
def test_buckets_are_tuned_anew(pool: RankPool, batch: int) -> None:
    for difference, between_ranks, verdict in pool.run(2, tune_and_unfreeze, batch):
        assert difference <= FP32 and between_ranks == 0 and verdict in ("tuned", "default is best")


class Disagrees(Flips):
    def flip(self, where: str) -> None:
        if dist.get_rank() == 1:
            super().flip(where)


def disagree(plan: Plan, frozen: tuple[int, ...], where: str, flags: dict[str, Any]) -> tuple[str, int, float]:
    module = type("Disagrees", (Disagrees,), {"plan": plan, "frozen": frozen, "where": where})()
    began = time.monotonic()
    with pytest.raises(DifferentParametersError) as caught:
        train(lambda: module, TunedDDPStrategy(**flags))
    return str(caught.value), module.batches, time.monotonic() - began


DISAGREE: list[tuple[Plan, tuple[int, ...], str, dict[str, Any], str, int]] = [
    ({3: (0, True)}, (0,), "on_train_batch_start", {}, "trained by rank 1 alone", 4),
    ({3: (0, True)}, (0,), "training_step", UNUSED, "trained by rank 1 alone", 4),
    ({3: (0, False)}, (), "on_train_batch_start", {}, "left out by rank 1 alone", 4),
    ({3: (0, False)}, (), "on_train_batch_start", STATIC, "left out by rank 1 alone", 4),
    ({9: (0, True)}, (0,), "on_train_batch_start", {}, "trained by rank 1 alone", 10),
]


def test_ranks_that_disagree_end_with_the_same_error(pool: RankPool) -> None:
    for *row, trained, step in DISAGREE:
        (first, *of_first), (second, *of_second) = pool.run(2, disagree, *row)
        assert first == second, row
        for name in ("net.0.weight", "net.0.bias"):
            assert f"'{name}' of shape" in first and first.count(f": {trained}") == 2, row
        for batches, seconds in (of_first, of_second):
            # The next step's backward finds out, or the end of the training.
            assert batches == step and seconds < 20, row


def advice() -> str:
    with pytest.raises(RuntimeError) as caught:
        train(lambda: zoo.Unused(), "ddp_tuned")
    return str(caught.value)


def test_unused_parameters_are_named_and_what_finds_them_under_this_strategy(pool: RankPool) -> None:
    for said in pool.run(2, advice):
        assert "'ddp_tuned_find_unused_parameters_true'" in said
        assert "TunedDDPStrategy(find_unused_parameters=True)" in said
        assert "these have no gradient: never.weight, never.bias." in said


class AdaptsInTest(zoo.MLP):
    """Runs a backward by hand, outside of training."""

    def build(self) -> None:
        super().build()
        self.automatic_optimization = False

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            self.manual_backward(self.compute_loss(batch.clone()))


def run_backward_in_test() -> bool:
    module = AdaptsInTest()
    trainer = make_trainer("ddp_tuned", inference_mode=False)
    trainer.test(module, zoo.loader(8, 4), verbose=False)
    return all(parameter.grad is not None for parameter in module.parameters())


def test_a_backward_outside_of_training_is_left_alone(pool: RankPool) -> None:
    assert all(pool.run(2, run_backward_in_test))


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class Parametrizes(zoo.MLP):
    """torch gives the parameter another memory, and so another node of the graph."""

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 2 and self.current_epoch == 0:
            register_parametrization(self.net[0], "weight", Doubled())


def parametrize(flags: dict[str, Any]) -> str:
    with pytest.raises(RuntimeError) as caught:
        train(lambda: Parametrizes(), TunedDDPStrategy(**flags))
    return str(caught.value)


def test_a_gradient_that_ddp_does_not_notice_is_an_error(pool: RankPool) -> None:
    for flags in ({}, UNUSED):
        for said in pool.run(2, parametrize, flags):
            assert "its memory was replaced in the training, as `register_parametrization` and" in said
