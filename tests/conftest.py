from collections.abc import Iterator

import pytest
import torch

from tests import devices
from tests.pool import RankError, RankPool

LONG_FILES = (
    "test_positions.py",
    "test_kills.py",
    "test_routes.py",
    "test_exceptions.py",
    "test_parity.py",
    "test_elastic.py",
    "test_gpu_bench.py",
    "test_benchmarks.py",
    "test_faults.py",
    "test_callbacks.py",
    "test_checkpoint_memory.py",
    "test_namespaces.py",
    "test_waits_programs.py",
    "test_realistic_trainings.py",
    "test_fake_ranks.py",
    "test_dataloaders.py",
    "test_registration.py",
    "test_nonfinite.py",
    "test_wheel.py",
    "test_examples.py",
)
"""The longest first: one worker would be left alone with them at the end."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        choices=("cpu", "cuda"),
        help="of tests/gpu, by default a GPU where there is one; and of tables",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begins with what takes long. Within a file as many ranks follow each other, so that they stay joined."""
    files = {path: number for number, path in enumerate(dict.fromkeys(item.path for item in items))}
    places = {name: place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: (places.get(item.path.name, len(places)), files[item.path], _ranks(item)))


def _ranks(item: pytest.Item) -> int:
    """How many a test says it has; most that do not say have two."""
    callspec = getattr(item, "callspec", None)
    size = 2 if callspec is None else callspec.params.get("world_size", 2)
    # A table without rows for this device has a mark in the place of a number.
    return size if isinstance(size, int) else 2


@pytest.fixture
def own_pool() -> Iterator[RankPool]:
    """For tests after which a process group is not fit for use."""
    ranks = RankPool()
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    ranks = RankPool()
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """Where tests/gpu and the tables run: on a GPU where there is one, else on CPUs, with what can be tried there."""
    chosen = request.config.getoption("--device")
    return chosen or ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def ranks(device: str) -> Iterator[RankPool]:
    """For tests of one rank on the device."""
    pool = RankPool(device)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def two(device: str) -> Iterator[RankPool]:
    """For tests of two: of one GPU if need be, which NVIDIA does not promise to work."""
    pool = RankPool(device)
    try:
        assert pool.run(2, devices.meet, timeout=40.0) == [3.0, 3.0]
    except RankError as error:
        if device == "cpu":
            raise
        pytest.skip(f"NCCL refuses two ranks on one GPU: {' '.join(str(error).split())[-300:]}")
    yield pool
    pool.close()


@pytest.fixture
def pool_of_device(request: pytest.FixtureRequest, world_size: int) -> RankPool:
    """For the tables of trainings: on CPUs, or on the device that ``--device`` names."""
    chosen = "pool" if request.config.getoption("--device") is None else "ranks" if world_size == 1 else "two"
    return request.getfixturevalue(chosen)
