import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests import devices
from tests.alone import beside_others
from tests.held_time import HeldTime
from tests.pool import RankError, RankPool

LONG_FILES = (
    "test_elastic.py",
    "test_benchmarks.py",
    "test_kills.py",
    "test_exceptions.py",
    "test_two_jobs.py",
    "test_example_configs.py",
    "test_launchers.py",
    "test_callbacks.py",
    "test_parity.py",
    "test_realistic_trainings.py",
    "test_random_faults.py",
    "test_dataloaders.py",
    "test_nonfinite.py",
    "test_ddp.py",
    "test_wheel.py",
    "test_registration.py",
    "test_examples.py",
    "test_cli.py",
)
"""One worker would be left alone with them at the end."""

LEFT_TO_SLOW = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        choices=("cpu", "cuda"),
        help="of tests/gpu, by default a GPU where there is one; and of tables",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT_TO_SLOW] = 0
    config.pluginmanager.register(Workers())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begins with what takes long. Within a file as many ranks follow each other, so that they stay joined."""
    files = {path: number for number, path in enumerate(dict.fromkeys(item.path for item in items))}
    items.sort(key=lambda item: (item.path.name not in LONG_FILES, files[item.path], _ranks(item)))


def _ranks(item: pytest.Item) -> int:
    """How many a test says it has; most that do not say have two."""
    callspec = getattr(item, "callspec", None)
    return 2 if callspec is None else callspec.params.get("world_size", 2)


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if "slow" in marks and "cluster" not in marks and "not slow" in item.config.option.markexpr:
            item.config.stash[LEFT_TO_SLOW] += 1


class Workers:
    """Of several workers each has left the same tests: they tell the one process that reports."""

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["left_to_slow"] = session.config.stash[LEFT_TO_SLOW]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        left = getattr(node, "workeroutput", {}).get("left_to_slow", 0)
        node.config.stash[LEFT_TO_SLOW] = max(node.config.stash[LEFT_TO_SLOW], left)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    left = config.stash[LEFT_TO_SLOW]
    if left:
        terminalreporter.write_sep("=", f"{left} slow tests were left to make test-slow")


@pytest.fixture(autouse=True)
def _alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests that measure are not disturbed by those of another worker."""
    marked = request.node.get_closest_marker("alone") is not None
    # Each worker has a folder in that of the run.
    with beside_others(tmp_path_factory.getbasetemp().parent, alone=marked):
        yield


@pytest.fixture
def held_time(monkeypatch: pytest.MonkeyPatch) -> HeldTime:
    """What asks ``time.perf_counter`` gets the time that the test has let pass."""
    held = HeldTime()
    monkeypatch.setattr(time, "perf_counter", held)
    return held


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
