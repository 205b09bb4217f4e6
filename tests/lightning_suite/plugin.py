"""Points Lightning's own tests at ZeRO1Strategy: a pytest plugin, for a checkout of Lightning.

    make test-lightning LIGHTNING=/path/to/pytorch-lightning

Lightning's names of DDP make ZeRO1Strategy, and with ``--zero1-single-device`` so does a Trainer that was given no
strategy and gets one CPU device, as most of these tests do. What cannot pass stands in ``exceptions.txt``, with the
reason.
"""

from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from lightning.pytorch import strategies
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

from lightning_parstrat import ZeRO1Strategy

EXCEPTIONS = Path(__file__).with_name("exceptions.txt")
_LAUNCHERS = (("", "popen"), ("_spawn", "spawn"), ("_fork", "fork"), ("_notebook", "fork"))
_UNUSED = ("", "_find_unused_parameters_false", "_find_unused_parameters_true")
_OF_DDP_ALONE = ("find_unused_parameters", "static_graph", "gradient_as_bucket_view")


class KnownException(NamedTuple):
    """A pattern of test ids, whether it is excepted on single devices alone, and why."""

    pattern: str
    single_device_only: bool
    reason: str


def known_exceptions() -> list[KnownException]:
    """The lines of the file: scope, pattern and reason, between bars; a line with # at its start is a comment."""
    lines = [line for line in EXCEPTIONS.read_text().splitlines() if line.strip() and not line.startswith("#")]
    fields = [[field.strip() for field in line.split("|", 2)] for line in lines]
    return [KnownException(pattern, scope == "single device", reason) for scope, pattern, reason in fields]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--zero1-single-device", action="store_true", help="also where a test asks for no strategy at all")


def pytest_configure(config: pytest.Config) -> None:
    _rename_ddp()
    if config.getoption("--zero1-single-device"):
        _choose_zero1_for_single_devices()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        for known in known_exceptions():
            applies = config.getoption("--zero1-single-device") or not known.single_device_only
            if applies and fnmatch(item.nodeid, f"*{known.pattern}"):
                item.add_marker(pytest.mark.skip(reason=known.reason))


def _make_zero1(**arguments: Any) -> ZeRO1Strategy:
    return ZeRO1Strategy(**{name: value for name, value in arguments.items() if name not in _OF_DDP_ALONE})


def _rename_ddp() -> None:
    for launcher, start_method in _LAUNCHERS:
        for unused in _UNUSED:
            strategies.StrategyRegistry.register(
                f"ddp{launcher}{unused}", _make_zero1, description="", override=True, start_method=start_method
            )


def _choose_zero1_for_single_devices() -> None:
    choose = _AcceleratorConnector._choose_strategy

    def choose_zero1(connector: _AcceleratorConnector) -> Any:
        choice = choose(connector)
        single = isinstance(choice, strategies.SingleDeviceStrategy) and choice.root_device.type == "cpu"
        return ZeRO1Strategy() if single else choice

    _AcceleratorConnector._choose_strategy = choose_zero1  # type: ignore[method-assign]
