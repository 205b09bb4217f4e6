"""A wrong argument is refused when a strategy is made. (On a command line: see test_cli.py.)"""

import copy
import pickle
from typing import Any

import pytest

from lightning_parstrat import PipelineStrategy, TunedDDPStrategy, ZeRO1Strategy, ZeRO2Strategy, ZeRO3Strategy

OURS = (PipelineStrategy, TunedDDPStrategy, ZeRO1Strategy, ZeRO2Strategy, ZeRO3Strategy)


@pytest.mark.parametrize("ours", [ZeRO1Strategy, ZeRO2Strategy, ZeRO3Strategy])
def test_an_argument_that_there_is_not_is_named(ours: type[Any]) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'bucket_cap'"):
        ours(bucket_cap=4)


@pytest.mark.parametrize("ours", OURS)
def test_a_strategy_is_copied_with_its_parts(ours: type[Any]) -> None:
    # As a launcher does that spawns processes.
    for copied in (copy.deepcopy(ours()), pickle.loads(pickle.dumps(ours()))):
        assert all(part._strategy is copied for part in copied._parts)
