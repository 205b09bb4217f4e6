"""Where the tests of this folder run: on a GPU where there is one, else on CPUs, with what can be tried there."""

from collections.abc import Iterator

import pytest
import torch

from tests.gpu.trainings import meet
from tests.pool import RankError, RankPool


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    chosen = request.config.getoption("--device")
    return chosen or ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def cuda(device: str) -> str:
    if device != "cuda":
        pytest.skip("needs a CUDA device")
    return device


@pytest.fixture(scope="session")
def ranks(device: str) -> Iterator[RankPool]:
    """For tests of one rank."""
    pool = RankPool(device)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def two(device: str) -> Iterator[RankPool]:
    """For tests of two: of one GPU if need be, which NVIDIA does not promise to work."""
    pool = RankPool(device)
    try:
        assert pool.run(2, meet, timeout=40.0) == [3.0, 3.0]
    except RankError as error:
        if device == "cpu":
            raise
        pytest.skip(f"NCCL refuses two ranks on one GPU: {' '.join(str(error).split())[-300:]}")
    yield pool
    pool.close()
