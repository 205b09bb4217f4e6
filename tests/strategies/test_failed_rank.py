"""What a rank does when it fails or others do, in which order: with a GPU, whose NCCL is played, and without memory."""

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor
from torch.distributed.distributed_c10d import _world

from lightning_parstrat.distributed import torch_compat
from lightning_parstrat.distributed.comm import liveness
from lightning_parstrat.distributed.engine.engine import ShardedDataParallel
from tests.pool import RankPool
from tests.slow import slow_unless
from tests.strategies import zoo
from tests.strategies.checkpoint.trainings import tuned
from tests.strategies.odd import Blocks
from tests.strategies.parity import make_trainer, zero1, zero3
from tests.torch_versions import is_before

STRATEGIES: dict[str, Any] = {"ddp_tuned": tuned, "zero1_custom": zero1, "zero3_custom": zero3}


class Played:
    """A group that sends by NCCL, its backend, and the world of such a group beside the real ones."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def _get_backend(self, device: torch.device) -> "Played":
        return self

    def name(self) -> str:
        return "nccl"

    def abort(self) -> None:
        self.events.append("NCCL is aborted")

    @property
    def pg_map(self) -> list[Any]:
        return [*_world.pg_map, self]


class Notes(logging.Handler):
    def __init__(self, events: list[str]) -> None:
        super().__init__(logging.ERROR)
        self.events = events

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info and record.exc_info[0]
        self.events.append(f"logs a {error.__name__}" if error else f"logs: {record.getMessage()}")


class Reads(Callback):
    """A user's, which may wait for the device."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def on_exception(self, *_: Any) -> None:
        self.events.append("a callback reads")


class Ends(TorchCheckpointIO):
    """What a strategy's teardown calls last."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def teardown(self) -> None:
        self.events.append("has ended")


@contextmanager
def noted(events: list[str], plays: bool) -> Iterator[None]:
    logger, handler = logging.getLogger("lightning_parstrat"), Notes(events)
    logger.addHandler(handler)
    world = patch.object(torch_compat, "_world", Played(events) if plays else _world)
    try:
        with world, patch.object(liveness, "GRACE", timedelta(seconds=2)):
            yield
    finally:
        logger.removeHandler(handler)


class Fails(Blocks):
    """One rank fails, or all do; or a rank calls blocks in another order than the other."""

    who: tuple[int, ...] = ()
    differs = False

    def compute_loss(self, batch: Tensor) -> Tensor:
        if self.global_step == 2 and self.global_rank in self.who:
            raise ValueError("a fault of this rank's own")
        swaps = self.differs and self.global_step == 2 and self.global_rank == 1
        for number in (1, 0, 2) if swaps else (0, 1, 2):
            batch = self.blocks[number](batch)
        return self.head(batch).pow(2).mean()


def fail(name: str, module: Fails, folder: str, plays: bool = True, **arguments: Any) -> list[str]:
    events: list[str] = []
    callbacks: list[Callback] = [Reads(events), OnExceptionCheckpoint(folder, "saved")]
    if name != "ddp_tuned":
        # Before its second save, it asks all ranks.
        callbacks.append(ModelCheckpoint(folder, save_last=True, save_on_exception=True, every_n_train_steps=1000))
    strategy = STRATEGIES[name](checkpoint_io=Ends(events), **arguments)
    trainer = make_trainer(strategy, callbacks=callbacks, enable_checkpointing=True)
    data = zoo.loader(40, 4, rank=dist.get_rank(), world_size=2)
    fails_itself = dist.get_rank() in module.who
    with noted(events, plays), pytest.raises(ValueError if fails_itself else (ValueError, RuntimeError)):
        trainer.fit(module, data)
    return events


def fail_on_one_rank(name: str, folder: str) -> list[str]:
    module = Fails()
    module.who = (1,)
    # FSDP2 keeps a group, and its connections.
    events = fail(name, module, folder, timeout=timedelta(seconds=10))
    if dist.get_rank() == 1:
        # As at the end of a process: the other's connections end.
        del module
        gc.collect()
        dist.destroy_process_group()
    return events


@pytest.mark.parametrize("name", slow_unless(lambda name: name == "zero1_custom", STRATEGIES))
def test_the_rank_that_is_left_logs_the_error_and_ends_what_its_device_does(
    own_pool: RankPool, tmp_path: Path, name: str
) -> None:
    left, failed = own_pool.run(2, fail_on_one_rank, name, str(tmp_path))
    assert failed == ["logs a ValueError", "a callback reads", "has ended"]
    why = "ended, stuck elsewhere, or waiting for a rank that has ended."
    named = f"logs: {name}, rank 0: Rank 1 did not answer: {why}"
    assert left == ["logs a RuntimeError", named, "NCCL is aborted", "a callback reads", "has ended"]
    # By Gloo and the store this rank has found out that it is alone.
    assert (tmp_path / "saved.ckpt").exists() == (name == "ddp_tuned")


def call_different_modules(folder: str) -> tuple[list[str], float]:
    module = Fails()
    module.differs = True
    events = fail("zero3_custom", module, folder)
    total = torch.ones(())
    dist.all_reduce(total)
    return events, float(total)


def test_ranks_that_differ_end_what_their_devices_do(own_pool: RankPool, tmp_path: Path) -> None:
    for events, total in own_pool.run(2, call_different_modules, str(tmp_path)):
        assert events == ["logs a DifferentModulesError", "NCCL is aborted", "a callback reads", "has ended"]
        assert total == 2.0
    assert not list(tmp_path.iterdir()), "a save would have gathered by NCCL"


def fail_on_all_and_go_on(name: str, folder: str, plays: bool) -> tuple[list[str], int]:
    module = Fails()
    module.who = (0, 1)
    events = fail(name, module, folder, plays)
    module.who = ()
    trainer = make_trainer(STRATEGIES[name](), limit_train_batches=3)
    trainer.fit(module, zoo.loader(40, 4, rank=dist.get_rank(), world_size=2))
    return events, trainer.global_step


@pytest.mark.parametrize(
    ("name", "plays"),
    slow_unless(lambda name, plays: plays, [*((name, True) for name in STRATEGIES), ("zero1_custom", False)]),
)
def test_a_program_that_catches_an_error_of_all_ranks_goes_on(
    pool: RankPool, tmp_path: Path, name: str, plays: bool
) -> None:
    if name == "zero3_custom" and is_before("2.13"):
        pytest.skip("FSDP2 cannot continue after an exception")
    expected = ["logs a ValueError"] * plays + ["a callback reads", "has ended"]
    assert pool.run(2, fail_on_all_and_go_on, name, str(tmp_path), plays) == [(expected, 3)] * 2
    assert (tmp_path / "saved.ckpt").exists()


def fail_at_the_end(ranks_that_fail: tuple[int, ...]) -> tuple[str, bool]:
    """The error, and whether teardown has come to its end."""
    ended, module = list[str](), Fails()
    module.who = ranks_that_fail
    closing = patch.object(ShardedDataParallel, "close", side_effect=torch.OutOfMemoryError("when it was closed"))
    with closing, pytest.raises((ValueError, torch.OutOfMemoryError)) as raised:
        make_trainer(zero1(checkpoint_io=Ends(ended))).fit(module, zoo.loader(16, 4))
    return str(raised.value), "has ended" in ended


def test_the_first_error_is_seen_also_if_it_is_of_the_end(pool: RankPool) -> None:
    assert pool.run(2, fail_at_the_end, (0, 1)) == [("a fault of this rank's own", True)] * 2
    assert pool.run(2, fail_at_the_end, ()) == [("when it was closed", True)] * 2
