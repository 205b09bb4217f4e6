from collections.abc import Iterator

import pytest

from tests.pool import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    ranks = RankPool()
    yield ranks
    ranks.close()
