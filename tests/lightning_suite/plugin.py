"""Points Lightning's own tests at one of our strategies: a pytest plugin, for a checkout of Lightning.

    make test-lightning LIGHTNING=/path/to/pytorch-lightning LIGHTNING_STRATEGY=ddp_tuned

Lightning's names of DDP make the strategy that ``--ddp-is`` names, and with ``--single-devices`` so does a Trainer that
was given no strategy and gets one CPU device, as most of these tests do. ``--ddp-is=ddp`` is stock DDP in the same
places: what fails there is not ours to pass. What else cannot pass stands in ``exceptions.txt``, with the reason.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.pytorch import strategies
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

from lightning_parstrat import TunedDDPStrategy, ZeRO1Strategy

SCOPES = {
    "any": ("ddp", "ddp_tuned", "zero1_custom", "zero2_custom"),
    "wrapper": ("ddp", "ddp_tuned"),
    "ours": ("ddp_tuned", "zero1_custom", "zero2_custom"),
}
"""Stock DDP passes what only ours do not; the rest is no difference between them."""

EXCEPTIONS = Path(__file__).with_name("exceptions.txt")
_STRATEGIES: dict[str, Callable[..., strategies.Strategy]] = {
    "ddp": strategies.DDPStrategy,
    "ddp_tuned": TunedDDPStrategy,
    "zero1_custom": ZeRO1Strategy,
    "zero2_custom": functools.partial(ZeRO1Strategy, shard_gradients=True),
}


class KnownException(NamedTuple):
    """A test, by the end of its id; a key of :data:`SCOPES`, whose strategies do not pass it; and why."""

    test: str
    scope: str
    reason: str


def known_exceptions() -> list[KnownException]:
    """The lines of the file: scope, test and reason, between bars; a line with # at its start is a comment."""
    lines = [line for line in EXCEPTIONS.read_text().splitlines() if line.strip() and not line.startswith("#")]
    fields = [[field.strip() for field in line.split("|", 2)] for line in lines]
    return [KnownException(test, scope, reason) for scope, test, reason in fields]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--ddp-is", choices=sorted(_STRATEGIES), default="zero1_custom", help="what DDP's names make")
    parser.addoption("--single-devices", action="store_true", help="also where a test asks for no strategy at all")


def pytest_configure(config: pytest.Config) -> None:
    # Lightning reruns some tests where a plugin for that is installed.
    config.addinivalue_line("markers", "flaky: may be run again")
    # After each test Lightning waits for this thread, which looks for children every five seconds.
    _ChildProcessObserver.__init__.__defaults__ = (0.02,)
    strategy = config.getoption("--ddp-is")
    if strategy != "ddp":
        _rename_ddp(_STRATEGIES[strategy])
    if config.getoption("--single-devices"):
        _choose_for_single_devices(_STRATEGIES[strategy])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    strategy = config.getoption("--ddp-is")
    for item in items:
        for known in known_exceptions():
            if item.nodeid.endswith(known.test) and strategy in SCOPES[known.scope]:
                item.add_marker(pytest.mark.skip(reason=known.reason))


def _rename_ddp(make: Callable[..., strategies.Strategy]) -> None:
    for name, entry in list(strategies.StrategyRegistry.items()):
        if entry["strategy"] is strategies.DDPStrategy:
            strategies.StrategyRegistry.register(name, make, description="", override=True, **entry["init_params"])


def _choose_for_single_devices(make: Callable[..., strategies.Strategy]) -> None:
    choose = _AcceleratorConnector._choose_strategy

    def choose_ours(connector: _AcceleratorConnector) -> Any:
        choice = choose(connector)
        single = isinstance(choice, strategies.SingleDeviceStrategy) and choice.root_device.type == "cpu"
        return make() if single else choice

    _AcceleratorConnector._choose_strategy = choose_ours  # type: ignore[method-assign]
