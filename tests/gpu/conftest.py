"""The fixtures of this folder beside those of all tests."""

import pytest


@pytest.fixture
def cuda(device: str) -> str:
    if device != "cuda":
        pytest.skip("needs a CUDA device")
    return device
