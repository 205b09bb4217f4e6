"""What cannot work is refused before training starts: what came, what is allowed, what to do."""

import logging
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import nn

from lightning_parstrat import TunedDDPStrategy, ZeRO1Strategy
from tests.pool import RankPool
from tests.strategies import zoo
from tests.strategies.cases import adafactor
from tests.strategies.odd_optimizers import ClosureTwice
from tests.strategies.parity import PoolEnvironment, make_trainer, train, zero1, zero3


def test_wrong_arguments_name_the_value_and_what_is_allowed() -> None:
    refused: list[tuple[dict[str, Any], list[str]]] = [
        *(({"bucket_cap_mb": value}, [repr(value), "positive"]) for value in (0, -3.5, float("nan"), "8", True)),
        # What ddp_tuned takes.
        ({"bucket_cap_mb": "huge"}, ["bucket_cap_mb: 'huge'", "positive number of MiB", "'auto'"]),
        ({"partition": "row"}, ["'row'", "auto", "element", "parameter"]),
        ({"expose_gradients": "yes"}, ["expose_gradients: 'yes'", "auto", "True", "False"]),
        ({"shard_group": "rack"}, ["shard_group: 'rack'", "'all'", "'node'", "number of ranks"]),
        ({"shard_group": 0}, ["shard_group: 0", ">= 1"]),
        ({"shard_group": True}, ["shard_group: True", "whole number"]),
        ({"shard_group": 2.0}, ["shard_group: 2.0", "whole number"]),
        ({"master_weights": 32}, ["master_weights: 32", "auto", "True", "False"]),
    ]
    for arguments, words in refused:
        with pytest.raises(ValueError) as caught:
            ZeRO1Strategy(**arguments)
        assert all(word in str(caught.value) for word in words), str(caught.value)
    with pytest.raises(TypeError, match="ddp_comm_hook"):
        ZeRO1Strategy(ddp_comm_hook=sum)


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


BY_PARAMETER, BY_ELEMENT = {"partition": "parameter"}, {"partition": "element"}
# The module, its optimizer, arguments of the strategy, and what the error has.
REFUSED: list[tuple[type[zoo.Zoo], Any, dict[str, Any], list[str]]] = [
    (zoo.MLP, on_several_devices, {}, ["ValueError", "cpu", "meta"]),
    # A promise that is not kept, found out in the first step.
    (
        *(zoo.MLP, ClosureTwice, BY_PARAMETER),
        ["ClosureEvaluatedAgainError", "ClosureTwice", "closure more than once", "'auto'"],
    ),
    # It takes means over rows and columns.
    (zoo.MLP, adafactor, BY_ELEMENT, ["ValueError", "partition='element'", "Adafactor", "'parameter'"]),
    (Lazy, zoo.adamw, {}, ["ValueError", "'net.0.weight'", "no shape yet", "configure_model"]),
    (zoo.MLP, zoo.adamw, {"master_weights": True}, ["ValueError", "master_weights=True", "bf16-true"]),
]


def error_of(module: type[zoo.Zoo], optimizer: Any, arguments: dict[str, Any], strategy: Any = zero1) -> str:
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


def test_a_wrong_strategy_name_gets_lightnings_own_error() -> None:
    with pytest.raises(ValueError, match="invalid strategy name"):
        Trainer(accelerator="cpu", strategy="zero1_costum", logger=False)
