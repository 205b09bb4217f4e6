"""A wrong argument's name is met with the right one. (On a command line: see test_cli.py.)"""

import copy
import inspect
import pickle
import re
from typing import Any

import pytest
from lightning.pytorch import strategies
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import lightning_parstrat
from lightning_parstrat import TunedDDPStrategy, ZeRO1Strategy, ZeRO3Strategy
from lightning_parstrat.core.argument_names import STANDS_FOR

OURS = (TunedDDPStrategy, ZeRO1Strategy, ZeRO3Strategy)
OTHERS = (
    strategies.DDPStrategy,
    strategies.FSDPStrategy,
    strategies.DeepSpeedStrategy,
    strategies.ModelParallelStrategy,
    DistributedDataParallel,
    FullyShardedDataParallel,
    fully_shard,
)


def named(callables: Any) -> set[str]:
    """All names of arguments, but for those of what is wrapped."""
    found = {
        one.name
        for each in callables
        for one in inspect.signature(each).parameters.values()
        if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
    }
    return found - {"module"}


def test_the_table_names_nothing_that_no_strategy_has() -> None:
    known = named(OTHERS).union(*(ours.known_arguments() for ours in OURS))
    assert STANDS_FOR.keys() <= known


def test_what_the_table_says_of_our_own_arguments_is_so() -> None:
    for name, line in STANDS_FOR.items():
        owners = {ours for ours in OURS if name in ours.known_arguments()}
        if line.startswith("It is an argument of "):
            assert {ours.__name__ for ours in owners} == set(re.findall(r"\w+Strategy", line)), name
        for strategy, argument in re.findall(r"(\w+Strategy)\((\w+)=", line):
            assert argument in getattr(lightning_parstrat, strategy).known_arguments(), line


class Mine(ZeRO1Strategy):
    """A user's own."""

    def __init__(self, own: int = 1, **kwargs: Any) -> None:
        super().__init__(timeout=None, **kwargs)


WRONG: list[tuple[type[Any], dict[str, Any], str]] = [
    (ZeRO1Strategy, {"bucket_cap": 4}, "ZeRO1Strategy() .*'bucket_cap'. Did you mean 'bucket_cap_mb'?"),
    (ZeRO1Strategy, {"stage": 2}, "ZeRO1Strategy(shard_gradients=True)"),
    (ZeRO1Strategy, {"unlike_any": 2}, "got an unexpected keyword argument 'unlike_any'."),
    (ZeRO3Strategy, {"expose_gradients": 4}, "ZeRO3Strategy() .*It is an argument of ZeRO1Strategy."),
    (ZeRO3Strategy, {"auto_wrap_policy": 2}, 'ZeRO3Strategy() .*`wrap=["Block"]`'),
    (ZeRO3Strategy, {"cpu_offload": 2, "stage": 3}, "'cpu_offload'. Nothing is moved.*'stage'. The class"),
    (TunedDDPStrategy, {"find_unused_parameter": True}, "TunedDDPStrategy() .*'find_unused_parameters'?"),
    (Mine, {"reduce_type": 2}, "Mine() .*Did you mean 'reduce_dtype'?"),
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


def test_no_base_class_is_shown_or_made() -> None:
    bases = {cls for ours in OURS for cls in ours.__mro__ if cls.__module__.startswith("lightning_parstrat.")} - {*OURS}
    assert len(bases) == 2
    for base in bases:
        # A command line's help lists what can be made.
        assert inspect.isabstract(base)
    for ours in OURS:
        assert ours.__name__ in repr(ours()) and "Wrapperless" not in repr(ours())
