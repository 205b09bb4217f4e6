"""A wrong argument's name is met with the right one. (On a command line: see test_cli.py.)"""

import copy
import pickle
import re
from typing import Any

import pytest

from lightning_parstrat import TunedDDPStrategy, ZeRO1Strategy, ZeRO2Strategy, ZeRO3Strategy

OURS = (TunedDDPStrategy, ZeRO1Strategy, ZeRO2Strategy, ZeRO3Strategy)


class Mine(ZeRO1Strategy):
    """A user's own."""

    def __init__(self, own: int = 1, **kwargs: Any) -> None:
        super().__init__(timeout=None, **kwargs)


WRONG: list[tuple[type[Any], dict[str, Any], str]] = [
    (ZeRO1Strategy, {"bucket_cap": 4}, "ZeRO1Strategy() .*'bucket_cap'. Did you mean 'bucket_cap_mb'?"),
    (ZeRO1Strategy, {"unlike_any": 2}, "got an unexpected keyword argument 'unlike_any'."),
    (TunedDDPStrategy, {"find_unused_parameter": True}, "TunedDDPStrategy() .*'find_unused_parameters'?"),
    (ZeRO3Strategy, {"offload": 2, "auto_wrap": 3}, "'offload'..*'auto_wrap'. Did you mean 'auto_wrap_policy'?"),
    (Mine, {"comm_type": 2}, "Mine() .*Did you mean 'comm_dtype'?"),
    (Mine, {"owned": 2}, "Mine() .*Did you mean 'own'?"),
]


def test_python_names_the_strategy_and_the_right_argument() -> None:
    for strategy, arguments, words in WRONG:
        with pytest.raises(TypeError) as refused:
            strategy(**arguments)
        assert re.search(".*".join(map(re.escape, words.split(".*"))), str(refused.value), re.DOTALL), refused.value
        assert "DDPStrategy.__init__" not in str(refused.value)
    assert isinstance(Mine(own=2, bucket_cap_mb=4, static_graph=True), ZeRO1Strategy)


@pytest.mark.parametrize("ours", OURS)
def test_a_strategy_is_copied_with_its_parts(ours: type[Any]) -> None:
    # As a launcher does that spawns processes.
    for copied in (copy.deepcopy(ours()), pickle.loads(pickle.dumps(ours()))):
        assert all(part._strategy is copied for part in copied._parts)
