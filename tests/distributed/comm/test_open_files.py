"""The limit of open files is raised where ranks may need it, and left where not."""

import resource
from collections.abc import Iterator

import pytest

from lightning_parstrat.distributed.comm.open_files import allow_open_files, files_needed, most_open_files

LIMIT = resource.RLIMIT_NOFILE
SOFT, HARD = 300, resource.getrlimit(LIMIT)[1]


@pytest.fixture(autouse=True)
def _low_limit() -> Iterator[None]:
    before = resource.getrlimit(LIMIT)
    resource.setrlimit(LIMIT, (SOFT, HARD))
    yield
    resource.setrlimit(LIMIT, before)


@pytest.mark.parametrize(("needed", "soft"), [(SOFT, SOFT), (SOFT + 1, HARD), (2**40, HARD)])
def test_the_soft_limit_is_raised_to_the_hard_one_where_that_may_be_needed(needed: int, soft: int) -> None:
    allow_open_files(needed)
    assert resource.getrlimit(LIMIT) == (soft, HARD)
    # Once more, there is nothing to do.
    allow_open_files(needed)
    assert resource.getrlimit(LIMIT) == (soft, HARD)


def test_the_most_there_may_be_is_the_hard_limit() -> None:
    assert most_open_files() == (None if HARD == resource.RLIM_INFINITY else HARD)


@pytest.mark.parametrize(
    ("ranks", "on_cpu", "needed"), [(1, True, 262), (16, True, 352), (512, False, 1792), (1024, True, 6400)]
)
def test_files_needed(ranks: int, on_cpu: bool, needed: int) -> None:
    assert files_needed(ranks, on_cpu) == needed
