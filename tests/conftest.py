from collections.abc import Iterator

import pytest

from tests.pool import RankPool

SLOW_FILES = (
    "test_elastic.py",
    "test_ddp.py",
    "test_benchmarks.py",
    "test_example_configs.py",
    "test_launchers.py",
    "test_wheel.py",
    "test_exceptions.py",
    "test_kills.py",
    "test_examples.py",
    "test_cli.py",
    "test_job_size.py",
    "test_registration.py",
)
"""Few tests, but long: most start programs of their own."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begins with what takes long: one worker would be left alone with it at the end."""
    items.sort(key=lambda item: item.path.name not in SLOW_FILES)


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
