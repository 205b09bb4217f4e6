from collections.abc import Iterator

import pytest

from tests.pool import RankPool


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
