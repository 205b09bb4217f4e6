"""Checkpoints that all ranks write: the same training state as a full one, at any world size, by any strategy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_parstrat.cli.main import main
from lightning_parstrat.distributed.sharded_reading import ShardedCheckpoint
from lightning_parstrat.strategies.checkpoints import CHECKPOINT_KEY
from tests.pool import RankPool
from tests.strategies.parity import by_flag, train, zero1
from tests.strategies.test_checkpoints import GLOBAL_BATCH, MODULES, load, resume


def tuned(**arguments: Any) -> Any:
    from lightning_parstrat import TunedDDPStrategy

    return by_flag(TunedDDPStrategy, find_unused_parameters=True, **arguments)


SAVING: dict[str, Callable[[], Any]] = {
    "full": lambda: zero1(),
    "sharded": lambda: zero1(checkpoint_format="sharded"),
    "async": lambda: zero1(checkpoint_format="sharded", async_save=True),
    "tuned": lambda: tuned(checkpoint_format="sharded"),
}


def write(module: str, strategy: str, path: str) -> None:
    batch = GLOBAL_BATCH // dist.get_world_size()
    callback = ModelCheckpoint(dirpath=Path(path).parent, filename=Path(path).stem, save_top_k=-1)
    train(
        MODULES[module],
        SAVING[strategy](),
        samples_per_rank=4 * batch,
        batch_size=batch,
        callbacks=[callback],
        enable_checkpointing=True,
    )


def assert_same(actual: Any, expected: Any, where: str = "") -> None:
    """Equality of nested values, bit by bit."""
    if isinstance(expected, dict):
        assert list(actual) == list(expected), where
        for key in expected:
            assert_same(actual[key], expected[key], f"{where}/{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), where
        for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert_same(one, other, f"{where}/{index}")
    elif isinstance(expected, torch.Tensor):
        assert actual.stride() == expected.stride() and actual.dtype == expected.dtype, where
        assert torch.equal(actual, expected), where
    else:
        assert actual == expected, where


def whole(path: Path) -> dict[str, Any]:
    checkpoint = ShardedCheckpoint(path, weights_only=True)
    filled: dict[str, Any] = checkpoint.filled(checkpoint.skeleton)
    return filled


def without_own(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint without what is not of the training's state: our own key, and the paths that callbacks note."""
    return {key: value for key, value in checkpoint.items() if key not in (CHECKPOINT_KEY, "callbacks")}


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("strategy", ["sharded", "async"])
def test_a_sharded_checkpoint_holds_what_a_full_one_does(
    pool: RankPool, tmp_path: Path, module: str, strategy: str
) -> None:
    for kind in ("full", strategy):
        pool.run(3, write, module, kind, str(tmp_path / f"{kind}.ckpt"))
    folder = tmp_path / f"{strategy}.ckpt"
    assert {path.name for path in folder.iterdir()} == {
        ".metadata", "checkpoint.pt", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp"
    }  # fmt: skip
    assert_same(without_own(whole(folder)), without_own(load(tmp_path / "full.ckpt")))


@pytest.mark.parametrize("module", ["scheduled", "gan", "adafactor"])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (("sharded", 2), ("zero1", 3)),
        (("sharded", 3), ("zero1", 2)),
        (("sharded", 2), ("zero1", 1)),
        (("async", 2), ("tuned", 2)),
        (("tuned", 2), ("zero1", 2)),
    ],
)
def test_training_goes_on_at_another_world_size(
    pool: RankPool, tmp_path: Path, module: str, source: tuple[str, int], target: tuple[str, int]
) -> None:
    path = tmp_path / "a.ckpt"
    pool.run(source[1], write, module, source[0], str(path))
    full = tmp_path / "full.ckpt"
    torch.save(whole(path), full)
    expected, expected_step = pool.run(1, resume, module, "single", str(full))[0]
    for parameters, step in pool.run(target[1], resume, module, target[0], str(path)):
        assert step == expected_step
        for actual, reference in zip(parameters, expected, strict=True):
            torch.testing.assert_close(actual, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("module", ["convolutional", "tied", "gan"])
def test_consolidated_it_is_the_full_one(pool: RankPool, tmp_path: Path, module: str) -> None:
    for kind in ("full", "sharded"):
        pool.run(2, write, module, kind, str(tmp_path / f"{kind}.ckpt"))
    folder, made = tmp_path / "sharded.ckpt", tmp_path / "made.ckpt"
    assert main(["consolidate", str(folder), str(made)]) == 0
    expected = load(tmp_path / "full.ckpt")
    assert_same(without_own(load(made)), without_own(expected))
    assert_same(load(made)[CHECKPOINT_KEY]["rng"], expected[CHECKPOINT_KEY]["rng"])
    # Tied weights are written once.
    assert made.stat().st_size < 1.05 * (tmp_path / "full.ckpt").stat().st_size
    assert main(["consolidate", str(folder), str(made)]) == 2
