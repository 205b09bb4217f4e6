"""``zero3_custom`` trains as ``ddp`` does, or as a single process on the whole batch, step by step."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_parstrat.distributed.comm.collectives import Collectives
from tests.pool import RankError, RankPool
from tests.slow import slow_unless
from tests.strategies import odd, zoo
from tests.strategies.cases import CASES, FP32
from tests.strategies.oracles import make, oracle
from tests.strategies.parity import ddp, largest_difference, largest_loss_difference, train, zero3

# Of the table of cases, what is refused before training, or ends with an error.
REFUSED = {
    "reused under checkpoints": "use_reentrant=False",
    # Weights are read after the backward, when only shards are there.
    "repeated backward": "mixed torch.Tensor and DTensor",
    "gradients hidden, repeated backward": "mixed torch.Tensor and DTensor",
}
# What no DTensor can do: trade `data` with a whole tensor. And ranks that run a backward more wait for the others.
LEFT_OUT = {"traded data", "inner backward", "inner backward, exposed"}
# Ranks that call different modules gather from ranks that do not: what is not gathered by itself may be called so.
WITHOUT_UNITS = {name for name in CASES if "unused by some ranks" in name}
QUICK = (
    "mlp",
    "tied",
    "unused",
    "unused by some ranks",
    "bare parameters",
    "batch norm",
    "gan",
    "clip by norm, unused",
    "accumulate, short window",
    "fp16 autocast, a scaler",
    "outside every optimizer",
    "users' hooks",
    "toggling",
)


def compare(name: str, arguments: dict[str, Any]) -> tuple[float, float]:
    expected = oracle(name)
    actual = train(make(name), zero3(**arguments), **CASES[name].trainer)
    return largest_difference(actual, expected), largest_loss_difference(actual, expected)


def arguments_for(name: str) -> dict[str, Any]:
    return {"min_num_params": 100_000} if name in WITHOUT_UNITS else {}


@pytest.mark.parametrize(
    ("name", "world_size"),
    slow_unless(
        lambda name, size: name in QUICK and size == 2,
        [
            (name, size)
            for name, case in CASES.items()
            for size in case.world_sizes
            if name not in REFUSED and name not in LEFT_OUT
        ],
    ),
)
def test_trains_as_the_oracle_does(pool: RankPool, name: str, world_size: int) -> None:
    case = CASES[name]
    for parameters, losses in pool.run(world_size, compare, name, arguments_for(name)):
        assert parameters <= case.tolerance
        assert losses <= 10 * case.tolerance


def compare_under_older_torch(name: str) -> tuple[float, float]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.delattr(FSDPModule, "set_reduce_scatter_unused_params", raising=False)
        return compare(name, arguments_for(name))


@pytest.mark.parametrize("name", ["unused by some ranks", "accumulate, unused"])
def test_torch_before_2_13_reduces_what_only_some_ranks_have_used(pool: RankPool, name: str) -> None:
    for parameters, losses in pool.run(2, compare_under_older_torch, name):
        assert parameters <= FP32
        assert losses <= 10 * FP32


@pytest.mark.parametrize(
    ("name", "arguments"),
    slow_unless(
        lambda name, arguments: (name, *arguments) in (("gan", "min_num_params"), ("tied", "shard_gradients")),
        [
            (name, arguments)
            for name in ("tied", "gan", "scheduled", "accumulate, short window", "accumulate, unused", "batch norm")
            for arguments in (
                {"min_num_params": 100_000},
                {"shard_gradients": False},
                {"reshard_after_forward": False},
            )
        ],
    ),
)
def test_how_it_is_sharded_changes_no_result(pool: RankPool, name: str, arguments: dict[str, Any]) -> None:
    case = CASES[name]
    for parameters, losses in pool.run(2, compare, name, arguments):
        assert parameters <= case.tolerance
        assert losses <= 10 * case.tolerance


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_says_so(pool: RankPool, name: str) -> None:
    with pytest.raises(RankError, match=REFUSED[name]):
        pool.run(2, compare, name, {})


def narrow(arguments: dict[str, Any], precision: str) -> tuple[set[torch.dtype], set[torch.dtype], float]:
    """The dtypes that parameters and gradients travel in, and how far they get from those of ``ddp``."""
    gathered, reduced = set(), set()
    # Its name since torch 2.13, and before.
    gather = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    all_gather, reduce_scatter = getattr(dist, gather), Collectives.reduce_scatter

    def note_gather(output: torch.Tensor, sent: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        gathered.add(sent.dtype)
        return all_gather(output, sent, *args, **kwargs)

    def note_reduction(self: Collectives, sent: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        reduced.add(sent.dtype)
        return reduce_scatter(self, sent, *args, **kwargs)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(dist, gather, note_gather)
        monkeypatch.setattr(Collectives, "reduce_scatter", note_reduction)
        actual = train(zoo.MLP, zero3(**arguments), precision=precision)
    return gathered, reduced, largest_difference(actual, train(zoo.MLP, ddp(), precision=precision))


WIDE, NARROW = {torch.float32}, {torch.bfloat16}


@pytest.mark.parametrize(
    ("arguments", "precision", "gathered", "reduced", "least", "most"),
    [
        ({}, "32-true", WIDE, WIDE, 0, FP32),
        # Autocast rounds the weights of linear layers all the same.
        ({"gather_dtype": "bf16"}, "bf16-mixed", NARROW, WIDE, 0, FP32),
        ({"gather_dtype": "bf16", "reduce_dtype": "bf16"}, "bf16-mixed", NARROW, NARROW, 1e-6, 0.01),
    ],
)
def test_what_travels_in_16_bits_is_stepped_in_32(
    pool: RankPool,
    arguments: dict[str, Any],
    precision: str,
    gathered: set[torch.dtype],
    reduced: set[torch.dtype],
    least: float,
    most: float,
) -> None:
    for *travelled, difference in pool.run(2, narrow, arguments, precision):
        assert travelled == [gathered, reduced]
        assert least <= difference <= most


def scaled(model: type, init_scale: float) -> tuple[float, float]:
    """How far a training with a loss scale gets from that of ``ddp``; and how far their last scales are apart."""

    def train_by(chosen: Any) -> tuple[Any, float]:
        scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
        return train(model, chosen, precision=MixedPrecision("16-mixed", "cpu", scaler)), scaler.get_scale()

    expected, expected_scale = train_by(ddp())
    actual, scale = train_by(zero3())
    return largest_difference(actual, expected), abs(scale - expected_scale)


# Convolutions' weights may stay whole, beside others that are sharded: torch unscales no mixture.
@pytest.mark.parametrize("init_scale", [128.0, 2.0**24])
@pytest.mark.parametrize("model", [zoo.Convolutional, zoo.MLP])
def test_whole_and_sharded_gradients_are_unscaled_together(pool: RankPool, model: type, init_scale: float) -> None:
    for parameters, scale in pool.run(2, scaled, model, init_scale):
        assert parameters <= 1e-3 and scale == 0


class OverflowsInOneShard(zoo.MLP):
    def on_after_backward(self) -> None:
        if self.trainer.global_step == 1 and dist.get_rank() == 1:
            parameter = next(iter(self.parameters()))
            assert isinstance(parameter.grad, DTensor)
            parameter.grad.to_local().fill_(torch.inf)


def parameters_and_scale_after_overflow() -> tuple[list[torch.Tensor], float]:
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    run = train(OverflowsInOneShard, zero3(), precision=MixedPrecision("16-mixed", "cpu", scaler))
    return run.parameters[-1], scaler.get_scale()


def test_what_overflows_on_one_rank_lowers_the_scale_of_all(pool: RankPool) -> None:
    (first, first_scale), (second, second_scale) = pool.run(2, parameters_and_scale_after_overflow)
    # As long as the overflow comes back: the step is left out every time.
    assert first_scale == second_scale < 128.0
    assert first and all(map(torch.equal, first, second))


def train_with_early_optimizer() -> str:
    class Early(odd.MLP):
        def build(self) -> None:
            super().build()
            self.early = torch.optim.SGD(self.parameters(), lr=0.1)

        def configure_optimizers(self) -> Any:
            return self.early

    with pytest.raises(ValueError, match="Make it in `configure_optimizers`") as raised:
        train(Early, zero3())
    return str(raised.value)


def test_an_optimizer_of_parameters_before_they_were_sharded_is_refused(pool: RankPool) -> None:
    assert all("SGD" in message for message in pool.run(2, train_with_early_optimizer))
