"""Parameters and losses equal those of a single process on the whole batch, or of DDP, step by step."""

import hashlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer

from lightning_parstrat import ZeRO1Strategy
from lightning_parstrat.core.tensor_trees import leaves
from lightning_parstrat.distributed.zero1 import replanning
from lightning_parstrat.distributed.zero1.optimizer_sharding import is_sharded, sharding_of
from lightning_parstrat.strategies.lightning_compat import unwrapped
from tests.pool import RankPool
from tests.slow import slow_unless
from tests.strategies.cases import CASES, FP32
from tests.strategies.oracles import make, oracle, train_as_oracle
from tests.strategies.parity import by_flag, largest_difference, largest_loss_difference, reference, train, zero1

# Where the default decides by itself whether gradients are exposed, and what one bucket holds.
BY_FLAG = (
    "tied",
    "unused by some ranks",
    "batch norm",
    "fused",
    "adafactor, which looks at whole matrices",
    "clip by norm, fewer parameters than ranks",
    "accumulate, unused",
    "double, unused by some ranks",
    "bf16 autocast",
    "fp16 autocast, a scale so large that steps are skipped",
    "memory shared without being tied",
    "layouts",
    "several dtypes",
    "reused under checkpoints",
    "inner backward",
    "frozen between backward and step",
    "a parameter moves over",
    "gradients hidden, by closure",
    "toggling",
    "traded data",
    "groups added",
    "users' hooks",
    "muon, hidden",
    "needs the loss",
    "closure twice",
    "lbfgs, line search",
)
# Beside the cases that ask for it.
EXPOSED = (
    "tied",
    "frozen",
    "bare parameters",
    "complex",
    "fused",
    "clip by value",
    "accumulate, short window",
    "double",
    "layouts",
    "several dtypes",
    "reused under checkpoints",
    "frozen between backward and step",
    "toggling",
    "swapped data",
    "groups added",
    "has modes",
    "lbfgs, clipped",
)


def compare(name: str, strategy: ZeRO1Strategy | str) -> tuple[float, float]:
    expected = oracle(name)
    actual = train(make(name), strategy, **CASES[name].trainer)
    return largest_difference(actual, expected), largest_loss_difference(actual, expected)


def compare_with_small_buckets(name: str) -> tuple[float, float]:
    return compare(name, zero1(**CASES[name].strategy))


def compare_by_flag(name: str) -> tuple[float, float]:
    """As a user has it: gradients are exposed where something in the module asks for it, and one bucket holds all."""
    return compare(name, by_flag())


def compare_exposed(name: str) -> tuple[float, float]:
    return compare(name, zero1(expose_gradients=True))


def compare_planned(name: str) -> tuple[float, float]:
    """Buckets are planned by what the wire takes, however small the module is."""
    replanning._SMALLEST_WORTH_TIMING, smallest = 0, replanning._SMALLEST_WORTH_TIMING
    try:
        return compare(name, zero1(bucket_cap_mb=8.0, **CASES[name].strategy))
    finally:
        replanning._SMALLEST_WORTH_TIMING = smallest


# A rank that is alone has nobody to send to: what its own code must do right are these.
ALONE = (
    "mlp",
    "unused",
    "bare parameters",
    "complex",
    "gan",
    "accumulate, short window",
    "fp16 autocast, a scaler",
    "exposed, a scaler",
    "whole parameters",
    "several dtypes",
    "a parameter in two optimizers",
    "swapped data",
    "groups added",
    "globally scaled",
    "lbfgs",
)


# Two ranks have these buckets below, with exposed gradients, and in test_late_parameters.py.
@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        (name, size)
        for name, case in CASES.items()
        for size in case.world_sizes
        if size == 3 or (size == 1 and name in ALONE) or 3 not in case.world_sizes
    ],
)
def test_trains_as_the_oracle_does(pool: RankPool, name: str, world_size: int) -> None:
    case = CASES[name]
    for parameters, losses in pool.run(world_size, compare_with_small_buckets, name):
        assert parameters <= case.tolerance
        assert losses <= 10 * case.tolerance


@pytest.mark.parametrize(
    ("name", "world_size"),
    # Of several world sizes the largest but one: one bucket differs from small ones where there are ranks.
    slow_unless(
        lambda name, _: name in BY_FLAG,
        [(name, case.world_sizes[-2:][0]) for name, case in CASES.items() if not case.strategy],
    ),
)
def test_trains_as_the_oracle_does_by_flag(pool: RankPool, name: str, world_size: int) -> None:
    case = CASES[name]
    for parameters, losses in pool.run(world_size, compare_by_flag, name):
        assert parameters <= case.tolerance
        assert losses <= 10 * case.tolerance


@pytest.mark.parametrize("name", EXPOSED)
def test_trains_as_the_oracle_does_with_exposed_gradients(pool: RankPool, name: str) -> None:
    case = CASES[name]
    for parameters, losses in pool.run(2, compare_exposed, name):
        assert parameters <= case.tolerance
        assert losses <= 10 * case.tolerance


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if 2 in case.world_sizes][::9])
def test_trains_as_the_oracle_does_by_plan(pool: RankPool, name: str) -> None:
    case = CASES[name]
    for parameters, losses in pool.run(2, compare_planned, name):
        assert parameters <= case.tolerance
        assert losses <= 10 * case.tolerance


class SaysWhereItAccumulates(Callback):
    """Whether micro-batches were reduced one by one, at the end of the training."""

    in_shards = False

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.in_shards = trainer.strategy._engine.reducer.shards_accumulation


def compare_accumulated(name: str, arguments: dict[str, Any]) -> tuple[float, float, bool]:
    """Sharded accumulation with accumulation in full gradients."""
    case, where = CASES[name], SaysWhereItAccumulates()
    chosen = {"partial_window": "exact", **case.strategy, **arguments}
    # Batches are many enough for a window that is cut short.
    accumulates = {"accumulate_grad_batches": 3} if make(name)().automatic_optimization else {}
    trainer = {**accumulates, **case.trainer}
    expected = reference((name, "accumulated"), lambda: train(make(name), zero1(**chosen), **trainer))
    actual = train(make(name), zero1(**chosen, shard_gradients=True), callbacks=[where], **trainer)
    return largest_difference(actual, expected), largest_loss_difference(actual, expected), where.in_shards


# Of one optimizer each; the others are in shards.
ACCUMULATE_IN_FULL = {
    "a parameter in two optimizers",
    "a parameter moves over",
    "backward without a word",
    "by closure",
    "exposed",
    "exposed gan",
    "exposed, a scaler",
    "exposed, accumulated",
    "exposed, unused by some ranks",
    "frozen between backward and step",
    "gan",
    "globally scaled, hidden gan",
    "gradient penalty",
    "gradients hidden, by closure",
    "gradients hidden, gradient penalty",
    "gradients hidden, repeated backward",
    "inner backward",
    "inner backward, exposed",
    "muon",
    "muon, hidden",
    "outside every optimizer",
    "repeated backward",
    "two heads",
    "two heads, many optimizers look",
    "two speeds",
    "users' hooks",
}
ACCUMULATED_QUICKLY = (
    "unused by some ranks",
    "inner backward",
    "outside every optimizer",
    "fp16 autocast, a scale so large that steps are skipped",
    "frozen later",
    "groups added",
    "lbfgs, accumulated",
    "16-true",
)


@pytest.mark.parametrize(
    ("name", "world_size"),
    slow_unless(
        lambda name, _: name in ACCUMULATED_QUICKLY,
        # Each at one world size.
        [
            (name, case.world_sizes[-2:][number % len(case.world_sizes[-2:])])
            for number, (name, case) in enumerate(CASES.items())
        ],
    ),
)
def test_accumulates_in_shards_as_in_full(pool: RankPool, name: str, world_size: int) -> None:
    # Of 16 bits, sums over micro-batches are made in fp32 here, and in 16 bits there.
    tolerance = CASES[name].tolerance
    for parameters, losses, in_shards in pool.run(world_size, compare_accumulated, name, {}):
        assert parameters <= tolerance
        assert losses <= 10 * tolerance
        assert in_shards == (name not in ACCUMULATE_IN_FULL)


@pytest.mark.parametrize(
    ("name", "world_size", "shard_group"),
    slow_unless(
        lambda *case: case == ("unused by some ranks", 4, 2),
        [(name, 4, 2) for name in ("unused by some ranks", "bare parameters", "whole parameters", "several dtypes")]
        + [("unused by some ranks", 6, 2), ("bf16 autocast", 6, 3)],
    ),
)
def test_accumulates_in_shards_of_groups(pool: RankPool, name: str, world_size: int, shard_group: int) -> None:
    for parameters, losses, in_shards in pool.run(world_size, compare_accumulated, name, {"shard_group": shard_group}):
        assert parameters <= CASES[name].tolerance
        assert losses <= 10 * CASES[name].tolerance
        assert in_shards


# Where groups of ranks hold a copy of the state each: the number of ranks, and how many are in a group.
GROUPINGS = ((4, 2), (6, 2))
GROUPED = {
    "convolutional": (4, 2),
    "bare parameters": (6, 2),
    "complex": (4, 2),
    "gan": (4, 2),
    "unused by some ranks": (6, 2),
    "clip by norm, fewer parameters than ranks": (4, 2),
    "accumulate, short window": (4, 2),
    "exposed, a scaler": (4, 2),
    "whole parameters": (6, 2),
    "muon, hidden": (4, 2),
    "lbfgs, clipped": (4, 2),
}


def compare_grouped(name: str, shard_group: int) -> tuple[float, float, str, tuple[int, str]]:
    """And digests of what this rank ends with: its parameters, and with the number of its shard the state of that."""
    expected, case = oracle(name), CASES[name]
    actual = train(make(name), zero1(**case.strategy, shard_group=shard_group), **case.trainer)
    parameters = [parameter.detach() for parameter in actual.module.parameters()]
    shard, state = 0, []
    for optimizer in map(unwrapped, actual.trainer.optimizers):
        if is_sharded(optimizer):
            sharding = sharding_of(optimizer)
            shard = sharding.shard_groups.place(dist.get_rank()).shard
            state += [optimizer.state.get(slot.shard) for slot in sharding.slots.values() if slot.shard is not None]
    return (
        largest_difference(actual, expected),
        largest_loss_difference(actual, expected),
        digest(parameters),
        (shard, digest(state)),
    )


def digest(tree: Any) -> str:
    """Of all tensors, to the last bit."""
    found = hashlib.sha256()
    for leaf in leaves(tree):
        found.update(leaf.tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


@pytest.mark.parametrize(
    ("name", "world_size", "shard_group"),
    slow_unless(
        lambda name, *grouping: GROUPED.get(name) == grouping,
        [
            (name, *grouping)
            for name, case in CASES.items()
            for grouping in (*GROUPINGS, (4, 1), (6, 3))
            if max(case.world_sizes) > 1 and (grouping in GROUPINGS or name in GROUPED)
        ],
    ),
)
def test_trains_as_the_oracle_does_in_shard_groups(
    pool: RankPool, name: str, world_size: int, shard_group: int
) -> None:
    case = CASES[name]
    found = pool.run(world_size, compare_grouped, name, shard_group)
    for parameters, losses, *_ in found:
        assert parameters <= case.tolerance
        assert losses <= 10 * case.tolerance
    # Nothing would bring copies together again.
    assert len({parameters for _, _, parameters, _ in found}) == 1
    states = {state for _, _, _, state in found}
    assert len(states) == len({shard for shard, _ in states})


# A case of each tolerance, and all whose tolerance is large.
SEEN = [
    name
    for name, case in CASES.items()
    if case.tolerance > FP32 or name in ("mlp", "clip by norm", "double", "lbfgs, line search")
]


def train_with_scaled_gradients(name: str, factor: float) -> float:
    """How far a training gets from the oracle whose gradients are so many times as large, after they were clipped."""
    expected, make_right = oracle(name), make(name)

    def make_wrong() -> Any:
        module = make_right()
        clip = module.configure_gradient_clipping

        def clip_and_scale(*args: Any, **kwargs: Any) -> None:
            clip(*args, **kwargs)
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.grad *= factor

        module.configure_gradient_clipping = clip_and_scale
        return module

    return largest_difference(train_as_oracle(name, make_wrong), expected)


@pytest.mark.parametrize("name", SEEN)
@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_every_tolerance_sees_gradients_that_are_doubled_or_halved(pool: RankPool, name: str, factor: float) -> None:
    assert min(pool.run(2, train_with_scaled_gradients, name, factor)) > 5 * CASES[name].tolerance
