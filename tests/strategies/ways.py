"""The ways in which the table of cases is trained, and which case is trained in which way on how many ranks."""

import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_parstrat import TunedDDPStrategy
from lightning_parstrat.core.tensor_trees import replace_leaves
from lightning_parstrat.distributed.engine.cuts import local
from lightning_parstrat.distributed.engine.stepping import is_sharded, sharding_of
from lightning_parstrat.distributed.fsdp.sharding import module_sharding
from lightning_parstrat.strategies.lightning_compat import unwrapped
from tests.comparing import assert_same
from tests.strategies import zoo
from tests.strategies.cases import CASES, EQUAL, KEPT_WHOLE, WAITS, Case
from tests.strategies.late import delayed, late, late_zero3
from tests.strategies.parity import (
    Looks,
    Reference,
    Run,
    by_flag,
    ddp,
    largest_difference,
    largest_loss_difference,
    reference,
    train,
    whole,
    zero1,
    zero3,
)


class Way(NamedTuple):
    """How a case is trained.

    Attributes:
        column: The case's, which says what is expected.
        strategy: Makes it on a rank, for the case and its number.
        world_sizes: Of which the cases have one each, in rotation.
        suits: Whether the way differs from others for that case.
        look: What is to be seen at the end of the training, before it is torn down.
        check: Asserts what must hold of that on all ranks, for the case's name.
        accumulates: Whether automatic optimization is over windows of three micro-batches, of which the last is short.
    """

    column: str
    strategy: Callable[[Case, int], Any]
    world_sizes: tuple[int, ...] = (1, 2, 3)
    suits: Callable[[Case], bool] = lambda case: True
    look: Callable[[Trainer], Any] = lambda trainer: None
    check: Callable[[str, list[Any]], None] = lambda name, seen: None
    accumulates: bool = False


class Found(NamedTuple):
    """How far a training is from the oracle's, and what else was seen of it."""

    parameters: float
    losses: float
    seen: Any


ARRIVE_IN_THE_STEP = {
    # Compiled code depends on the class of what it reads.
    "compiled as a whole",
    # Every rank steps everything.
    "closure twice",
    "globally scaled",
    "globally scaled, hidden gan",
    "a new head, many optimizers look",
    "has modes",
    "keeps its own list",
    "lbfgs",
    "lbfgs, accumulated",
    "lbfgs, clipped",
    "lbfgs, line search",
    "no torch optimizer",
    "replaced step",
    "replaced step, a scheduler",
    "two heads, many optimizers look",
    *KEPT_WHOLE,
    # Who holds the memory sees what it holds when the step ends.
    "views are held",
}
# Their users look at gradients between micro-batches.
ACCUMULATE_IN_FULL = {"users' hooks", "inner backward"}
# In which deliberate faults show, and windows whose end sends nothing of what they have accumulated.
ALSO = {
    ("two heads", "late"),
    ("unused", "by flag"),
    ("memory shared without being tied", "small buckets"),
    ("toggling, many buckets", "in shards"),
    ("a new head", "in shards"),
    ("a backward of an earlier forward", "late"),
}
# Steps that are left out need no parameters.
SKIPS = "fp16 autocast, a scale so large that steps are skipped"
POLICIES: tuple[dict[str, Any], ...] = (
    {},
    {"expose_gradients": True},
    {"max_inflight_buckets": 1},
    {"overlap_param_gather": False},
    {"bucket_cap_mb": 25},
    {"partition": "parameter"},
    {"max_inflight_buckets": None},
    {"bucket_cap_mb": 1e-6},
)
ZERO3_POLICIES: tuple[dict[str, Any], ...] = (
    {},
    {"reshard_after_forward": False},
    {"min_num_params": 100_000},
    {"shard_gradients": False},
)


def in_groups(case: Case, number: int) -> Any:
    """Groups of ranks hold a copy of the state each: 4 by 1 and 2, 6 by 2 and 3."""
    size = dist.get_world_size() // 2 - number // 2 % 2
    return zero1(**case.strategy, shard_group=size)


def whole_or_units(case: Case, number: int, make: Callable[..., Any] = zero3) -> Any:
    if case.of_zero3 is not None:
        return make(**case.of_zero3)
    if not case.units:
        return make(min_num_params=100_000)
    # An error may come where units are gathered by themselves alone.
    return make(**ZERO3_POLICIES[number % len(ZERO3_POLICIES)] if case.zero3 == EQUAL else {})


def zero3_in_groups(case: Case, number: int) -> Any:
    policy = ZERO3_POLICIES[number % len(ZERO3_POLICIES)] if case.of_zero3 is None else case.of_zero3
    # 4 by 1 and 2, 6 by 2 and 3.
    return zero3(**policy, shard_group=dist.get_world_size() // 2 - number // 2 % 2)


def check_arrival(name: str, seen: list[bool]) -> None:
    assert seen == [name not in ARRIVE_IN_THE_STEP] * len(seen)


def transfers(trainer: Trainer) -> tuple[int, int, int]:
    launched = trainer.strategy.launched
    return trainer.global_step, launched["reduce-scatter"], launched["all-gather"]


def check_that_no_shortcut_was_taken(name: str, seen: list[tuple[int, int, int]]) -> None:
    for steps, reduce_scatters, all_gathers in seen:
        assert steps > 0 and reduce_scatters > 0 and (all_gathers > 0 or name == SKIPS), seen


def accumulates_in_shards(trainer: Trainer) -> tuple[bool, bool]:
    """Whether micro-batches were reduced one by one; and whether they could be."""
    return trainer.strategy._engine.reducer.shards_accumulation, trainer.lightning_module.automatic_optimization


def check_accumulation(name: str, seen: list[tuple[bool, bool]]) -> None:
    hidden = "expose_gradients" not in CASES[name].strategy and name not in ACCUMULATE_IN_FULL
    for in_shards, automatic in seen:
        assert in_shards == (automatic and hidden)


def copies(trainer: Trainer) -> tuple[list[Tensor], int, list[Any]]:
    """The parameters and, with the number of this rank's shard, the state of that shard."""
    shard, state = 0, []
    for optimizer in map(unwrapped, trainer.optimizers):
        if is_sharded(optimizer):
            sharding = sharding_of(optimizer)
            shard = sharding.shard_groups.place(dist.get_rank()).shard
            state += [optimizer.state.get(slot.shard) for slot in sharding.slots.values() if slot.shard is not None]
    return [parameter.detach() for parameter in trainer.lightning_module.parameters()], shard, state


def copies_of_zero3(trainer: Trainer) -> tuple[list[Tensor], int, list[Any]]:
    """The whole parameters and, with the number of this rank's shard, the shards of parameters and state."""
    parameters = list(trainer.lightning_module.parameters())
    states = [optimizer.state.get(one) for optimizer in map(unwrapped, trainer.optimizers) for one in parameters]
    shard = module_sharding(trainer.lightning_module).place.shard
    own = [local(one.detach()) for one in parameters], replace_leaves(states, local)
    return [whole(one.detach()) for one in parameters], shard, list(own)


def check_copies(name: str, seen: list[tuple[list[Tensor], int, list[Any]]]) -> None:
    """Nothing would bring copies together again."""
    states: dict[int, list[Any]] = {}
    for parameters, shard, state in seen:
        assert_same(parameters, seen[0][0])
        assert_same(state, states.setdefault(shard, state))
    assert len(seen) > len(states)


WAYS: dict[str, Way] = {
    "small buckets": Way("zero1", lambda case, number: zero1(**case.strategy)),
    # As a user has it: gradients are exposed where something in the module asks for it, and one bucket holds all.
    "by flag": Way("zero1", lambda case, number: by_flag(), suits=lambda case: not case.strategy),
    "exposed": Way(
        "zero1",
        lambda case, number: zero1(**{**case.strategy, "expose_gradients": True}),
        suits=lambda case: "expose_gradients" not in case.strategy,
    ),
    "in shards": Way(
        "zero2",
        lambda case, number: zero1(**case.strategy, shard_gradients=True),
        (2, 3),
        look=accumulates_in_shards,
        check=check_accumulation,
        accumulates=True,
    ),
    "late": Way(
        "zero1",
        lambda case, number: late(**case.strategy),
        look=lambda trainer: trainer.strategy.under_way > 0,
        check=check_arrival,
    ),
    "groups": Way("zero1", in_groups, (4, 6), look=copies, check=check_copies),
    "zero3": Way("zero3", whole_or_units),
    # Some of each kind: all but errors, and what depends on how ranks call their modules.
    "zero3 in groups": Way(
        "zero3",
        zero3_in_groups,
        (4, 6),
        suits=lambda case: case.zero3 == EQUAL and case.units and bool(case.trainer or case.of_zero3),
        look=copies_of_zero3,
        check=check_copies,
    ),
    "ddp_tuned": Way("ddp_tuned", lambda case, number: TunedDDPStrategy(partial_window="lightning"), (2, 3)),
    "ddp_tuned that finds unused": Way(
        "ddp_tuned_find_unused_parameters_true",
        lambda case, number: TunedDDPStrategy(partial_window="lightning", find_unused_parameters=True),
        (2, 3),
        suits=lambda case: case.ddp_tuned == WAITS,
    ),
}
# What a GPU may do otherwise than a CPU, by the path of several ranks: what has not arrived is NaN.
WAYS_ON_A_DEVICE: dict[str, Way] = {
    "nothing arrives before it is waited for": Way(
        "zero1",
        lambda case, number: late(**{**case.strategy, **POLICIES[number % len(POLICIES)]}),
        (1,),
        look=transfers,
        check=check_that_no_shortcut_was_taken,
    ),
    "all arrives after a while": Way(
        "zero1",
        lambda case, number: delayed(**{**case.strategy, **POLICIES[(number + 3) % len(POLICIES)]}),
        (1, 2),
        look=transfers,
        check=check_that_no_shortcut_was_taken,
    ),
    "accumulated in shards": Way(
        "zero2",
        lambda case, number: late(**case.strategy, shard_gradients=True),
        (1, 2),
        suits=lambda case: "accumulate_grad_batches" in case.trainer,
    ),
    "late zero3": Way("zero3", lambda case, number: whole_or_units(case, number, late_zero3), (1, 2)),
    "ddp_tuned that finds unused on a device": Way(
        "ddp_tuned_find_unused_parameters_true",
        lambda case, number: TunedDDPStrategy(partial_window="lightning", find_unused_parameters=True),
        (2,),
        suits=lambda case: case.ddp_tuned == WAITS or "accumulate_grad_batches" in case.trainer,
    ),
}


def expected(case: Case, way: Way) -> str | None:
    return getattr(case, way.column, EQUAL)


def number_of(name: str) -> int:
    """A case's own, whatever stands before it: the rotation goes by it."""
    return zlib.crc32(name.encode()) % 840


def make(name: str) -> Callable[[], zoo.Zoo]:
    case = CASES[name]
    return lambda: case.module(case.optimizer)


def trainer_arguments(name: str, accumulates: bool) -> dict[str, Any]:
    if not accumulates or not make(name)().automatic_optimization:
        return CASES[name].trainer
    # Batches are many enough for a window that is cut short.
    return {"accumulate_grad_batches": 3, **CASES[name].trainer}


def oracle(name: str, accumulates: bool = False) -> Reference:
    """A single process on the whole batch, or DDP; trained once for all ways."""
    return reference((name, accumulates), lambda: train_as_oracle(name, make(name), accumulates))


def train_as_oracle(name: str, make_module: Callable[[], zoo.Zoo], accumulates: bool = False) -> Run:
    """Trains a module in the way of the case's oracle."""
    whole_batch = CASES[name].oracle == "whole batch"
    arguments = trainer_arguments(name, accumulates)
    return train(make_module, None if whole_batch else ddp(), whole_batch=whole_batch, **arguments)


def compare(name: str, way_name: str) -> Found:
    way = (WAYS | WAYS_ON_A_DEVICE)[way_name]
    expected = oracle(name, way.accumulates)
    actual, seen = train_in(name, way)
    return Found(largest_difference(actual, expected), largest_loss_difference(actual, expected), seen)


def train_in(name: str, way: Way) -> tuple[Run, Any]:
    looks = Looks(way.look)
    strategy = way.strategy(CASES[name], number_of(name))
    return train(make(name), strategy, callbacks=[looks], **trainer_arguments(name, way.accumulates)), looks.seen


def error_of(name: str, way_name: str) -> str:
    try:
        train_in(name, (WAYS | WAYS_ON_A_DEVICE)[way_name])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


class Planned(NamedTuple):
    name: str
    way: str
    world_size: int
    is_quick: bool


def plan(on_device: bool = False) -> Iterator[Planned]:
    """Every case in two of the ways of ``zero1_custom`` and in all others, on as many ranks as it allows, in rotation.

    One way of every fourth case is quick.

    Args:
        on_device: Whether a device is tried, in the ways of :data:`WAYS_ON_A_DEVICE`.
    """
    for name, case in CASES.items():
        number = number_of(name)
        for turn, (way_name, way) in enumerate((WAYS_ON_A_DEVICE if on_device else WAYS).items()):
            if expected(case, way) is None or not way.suits(case) or (on_device and case.needs):
                continue
            if not on_device and way.column in ("zero1", "zero2") and (number + turn) % 3:
                if (name, way_name) in ALSO:
                    yield Planned(name, way_name, 2, True)
                continue
            # A device's oracle is of as many ranks. An error may need several.
            any_size = on_device and expected(case, way) == EQUAL
            # What three ranks train, more ranks do, too.
            sizes = [size for size in way.world_sizes if any_size or min(size, 3) in case.world_sizes]
            if not sizes:
                continue
            size = sizes[(number // 3 + turn) % len(sizes)]
            yield Planned(name, way_name, size, (number - turn) % 10 == 0)
