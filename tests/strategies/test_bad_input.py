"""What cannot work is refused before training starts: what came, what is allowed, what to do."""

import copy
import logging
import math
import pickle
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from lightning_parstrat import PipelineStrategy, TunedDDPStrategy, ZeRO1Strategy, ZeRO2Strategy, ZeRO3Strategy
from tests.pool import RankPool
from tests.strategies import zoo
from tests.strategies.cases import adafactor
from tests.strategies.for_shards import captured
from tests.strategies.odd_optimizers import ClosureTwice
from tests.strategies.parity import PoolEnvironment, make_trainer, train, zero1, zero3

NO_CHOICES = ("", "Exact", None, True, 0, ["exact"])
NUMBERS = "a positive number of MiB"
# A strategy, its argument, what it refuses, and what is allowed. What several strategies take is asked of one.
WRONG: list[tuple[type[Any], str, tuple[Any, ...], str]] = [
    (ZeRO1Strategy, "bucket_cap_mb", (0, -0.5, math.nan, math.inf, True, "8", "huge", None, [8]), f"{NUMBERS}, such"),
    (ZeRO1Strategy, "partition", ("rows", "Element", None, 1, ["element"]), "one of ('auto', 'element', 'parameter')."),
    (ZeRO1Strategy, "comm_dtype", ("fp16", "bfloat16", True, torch.float16), "'bf16', torch.bfloat16, or None"),
    (ZeRO1Strategy, "gather_dtype", ("fp16", "", True), "'bf16', torch.bfloat16, or None"),
    (ZeRO1Strategy, "max_inflight_buckets", (0, -1, 1.5, True, "2", math.inf), "a whole number >= 1, 'auto' or None."),
    (ZeRO1Strategy, "expose_gradients", ("yes",), "'auto', True or False."),
    (ZeRO1Strategy, "master_weights", (32,), "'auto', True or False."),
    (ZeRO1Strategy, "shard_group", ("rack", 0, True, 2.0), "'all', 'node', or a whole number of ranks >= 1"),
    (ZeRO3Strategy, "shard_group", (-1, "nodes"), "'all', 'node', or a whole number of ranks >= 1"),
    (ZeRO1Strategy, "partial_window", NO_CHOICES, "one of ('exact', 'lightning')."),
    (ZeRO1Strategy, "clip_scope", NO_CHOICES, "one of ('optimizer', 'global')."),
    (ZeRO1Strategy, "nonfinite_grads", NO_CHOICES, "one of ('propagate', 'skip', 'raise')."),
    (ZeRO1Strategy, "norm_type", (0, -1, -math.inf, math.nan, True, "2", None, [2.0], 2j), "a positive number, such"),
    (ZeRO1Strategy, "stall_warning_seconds", (0, -1.0, math.nan, math.inf, True, "15"), "a positive number of seconds"),
    (ZeRO1Strategy, "rank_shares", ("fast", [3, 0], [-1], [], [True], 3, None), "'equal', 'auto', or a list with a"),
    (ZeRO1Strategy, "max_share", (0.5, math.nan, True, "2", None), "a number >= 1, such as 2.0."),
    (ZeRO1Strategy, "keep_global_batch", ("yes", None, 1), "True or False."),
    *((cls, "exact_evaluation", ("yes",), "True or False.") for cls in (ZeRO1Strategy, TunedDDPStrategy)),
    (TunedDDPStrategy, "bucket_cap_mb", ("small", 0, True, math.inf, [1.0, -1.0], []), f"'auto', {NUMBERS}"),
    (TunedDDPStrategy, "tune_steps", (1, 2.0), "a whole number >= 2."),
    (TunedDDPStrategy, "tune_tolerance", (-0.1, 1, math.nan), "a number >= 0 and < 1."),
    (TunedDDPStrategy, "plan_cache", (3,), "a folder's path, or None."),
    (TunedDDPStrategy, "comm_hook", ("int8",), "one of ('bf16', 'fp16'), or None."),
    (ZeRO3Strategy, "auto_wrap_policy", ("Block",), "a list or set of classes or their names, or None."),
    (
        ZeRO1Strategy,
        "activation_checkpointing_policy",
        ("Block", [3]),
        "a list or set of classes or their names, or None.",
    ),
    (ZeRO3Strategy, "tensor_parallel_size", (0, 2.0, True, "2", None), "a whole number of ranks >= 1"),
    (ZeRO3Strategy, "min_num_params", (-1,), "a whole number >= 0."),
    (ZeRO3Strategy, "param_dtype", ("fp16",), "'auto', 'bf16', or None"),
]


@pytest.mark.parametrize(("strategy", "name", "values", "allowed"), WRONG, ids=[f"{row[1]}" for row in WRONG])
def test_wrong_arguments_name_the_value_and_what_is_allowed(
    strategy: type[Any], name: str, values: tuple[Any, ...], allowed: str
) -> None:
    for value in values:
        with pytest.raises(ValueError) as caught:
            strategy(**{name: value})
        assert str(caught.value).startswith(f"Invalid {name}: {value!r}. Must be {allowed}"), caught.value


def test_an_argument_that_there_is_not_is_named_with_the_closest_one() -> None:
    for ours, name, close in (
        (ZeRO1Strategy, "bucket_cap", "'bucket_cap_mb'"),
        (ZeRO2Strategy, "shard_groups", "'shard_group'"),
        (PipelineStrategy, "micro_batches", "'microbatches'"),
        (TunedDDPStrategy, "find_unused_parameter", "'find_unused_parameters'"),
    ):
        with pytest.raises(TypeError, match=f"{ours.__name__} has no argument '{name}'. Did you mean {close}"):
            ours(**{name: 4})
    with pytest.raises(TypeError, match="ZeRO2Strategy always shards gradients"):
        ZeRO2Strategy(shard_gradients=False)
    # No wrapper takes DDP's arguments there.
    with pytest.raises(TypeError, match=r"ZeRO1Strategy has no argument 'ddp_comm_hook'\. docs"):
        ZeRO1Strategy(ddp_comm_hook=print)
    with pytest.raises(TypeError, match=r"'sharding_strategy'\. docs/arguments\.md lists"):
        ZeRO3Strategy(sharding_strategy="FULL_SHARD")


@pytest.mark.parametrize("ours", [PipelineStrategy, TunedDDPStrategy, ZeRO1Strategy, ZeRO2Strategy, ZeRO3Strategy])
def test_a_strategy_is_copied_with_its_parts(ours: type[Any]) -> None:
    # As a launcher does that spawns processes.
    for copied in (copy.deepcopy(ours()), pickle.loads(pickle.dumps(ours()))):
        assert all(part._strategy is copied for part in copied._parts)


def test_arguments_that_exclude_each_other_are_refused() -> None:
    hook = default_hooks.allreduce_hook
    for strategy, arguments, message in (
        (ZeRO1Strategy, {"gather_dtype": "bf16", "master_weights": False}, "master_weights=False forgoes"),
        (TunedDDPStrategy, {"bucket_cap_mb": 8, "bucket_cap_mb_list": [1.0]}, "Give one of them"),
        (ZeRO3Strategy, {"rank_shares": [5, 1, 1, 1]}, "set a larger max_share"),
        (ZeRO3Strategy, {"tensor_parallel_size": 2, "state_dict_type": "sharded"}, "Set state_dict_type='full'"),
        (TunedDDPStrategy, {"comm_hook": "bf16", "ddp_comm_hook": hook}, "Give one of them"),
    ):
        with pytest.raises(ValueError, match=message):
            strategy(**arguments)
    with pytest.raises(TypeError, match="ddp_comm_hook"):
        ZeRO1Strategy(ddp_comm_hook=hook)


def test_arguments_that_a_wrapper_needs_are_said_to_be_needless(caplog: pytest.LogCaptureFixture) -> None:
    for name in ("find_unused_parameters", "static_graph", "gradient_as_bucket_view"):
        # A command line gives every argument, and None is as good as nothing.
        for value in (True, False, None):
            caplog.clear()
            with caplog.at_level(logging.INFO):
                strategy = ZeRO1Strategy(**{name: value})
            assert (f"{name}={value} is not needed" in caplog.text) is (value is not None)
            assert strategy._ddp_kwargs == ({} if value is None else {name: value})


def on_several_devices(parameters: Any) -> Any:
    return zoo.adamw([*parameters, nn.Parameter(torch.zeros(3, device="meta"))])


def of_other_parameters(parameters: Any) -> Any:
    """The same module everywhere; what its optimizer is given is not."""
    return zoo.adamw(list(parameters)[dist.get_rank() :])


class RankDependent(zoo.MLP):
    def build(self) -> None:
        super().build()
        if dist.get_rank() == 1:
            self.extra = nn.Linear(2, 2)


class Lazy(zoo.MLP):
    def build(self) -> None:
        self.net = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1))


class GetsCutParameter(zoo.StepsByHand, zoo.MLP):
    """A parameter of an optimizer that steps elements joins one that looks at matrices."""

    def configure_optimizers(self) -> Any:
        return [zoo.adamw(self.net[0].parameters()), adafactor(self.net[2].parameters())]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.trainer.optimizers[1].param_groups[0]["params"].append(self.net[0].weight)


BY_PARAMETER, BY_ELEMENT = {"partition": "parameter"}, {"partition": "element"}
# The module, its optimizer, arguments of the strategy, and what the error has.
REFUSED: list[tuple[Any, Any, dict[str, Any], list[str]]] = [
    (zoo.MLP, on_several_devices, {}, ["ValueError", "cpu", "meta"]),
    (GetsCutParameter, None, {}, ["ValueError", "shape (33, 12) was added to Adafactor, which steps whole parameters"]),
    (captured, zoo.adamw, {}, ["ValueError", "on_train_start"]),
    # A promise that is not kept, found out in the first step.
    (
        *(zoo.MLP, ClosureTwice, BY_PARAMETER),
        ["ClosureEvaluatedAgainError", "ClosureTwice", "closure more than once", "'auto'"],
    ),
    # It takes means over rows and columns.
    (zoo.MLP, adafactor, BY_ELEMENT, ["ValueError", "partition='element'", "Adafactor", "'parameter'"]),
    (Lazy, zoo.adamw, {}, ["ValueError", "'net.0.weight' has no shape yet"]),
    (zoo.MLP, zoo.adamw, {"master_weights": True}, ["ValueError", "master_weights=True", "bf16-true"]),
    (zoo.MLP, zoo.adamw, {"activation_checkpointing_policy": {nn.LSTM}}, ["No module within MLP is of such a class"]),
]


def error_of(module: Any, optimizer: Any, arguments: dict[str, Any], strategy: Any = zero1) -> str:
    with pytest.raises(Exception) as raised:
        train(lambda: module(optimizer), strategy(**arguments))
    return f"{raised.type.__name__}: {raised.value}"


def test_what_cannot_be_sharded_is_refused_on_every_rank(pool: RankPool) -> None:
    for *row, words in REFUSED:
        for message in pool.run(2, error_of, *row):
            assert all(word in message for word in words), message


def test_modules_that_differ_between_ranks_are_refused(own_pool: RankPool) -> None:
    kinds = ((RankDependent, zoo.adamw), (zoo.MLP, of_other_parameters))
    for (module, optimizer), strategy in product(kinds, (zero1, zero3)):
        for message in own_pool.run(2, error_of, module, optimizer, {}, strategy):
            assert "ValueError" in message and "same parameters in the same order" in message, message


class TooManyRanks(PoolEnvironment):
    def world_size(self) -> int:
        return 3


def wrong_world_sizes() -> list[str]:
    messages = []
    for strategy in (zero1, TunedDDPStrategy):
        try:
            make_trainer(strategy(cluster_environment=TooManyRanks()), plugins=[]).fit(zoo.MLP(), zoo.loader(8, 4))
            messages.append("no error")
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


def test_world_sizes_that_disagree_are_refused(own_pool: RankPool) -> None:
    for messages in own_pool.run(2, wrong_world_sizes):
        for message in messages:
            for words in ("MisconfigurationException", "2 ranks", "asks for 3", "num_nodes"):
                assert words in message, message
