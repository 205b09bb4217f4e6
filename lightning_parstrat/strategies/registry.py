"""The strategy names, and the lazy callables behind them."""

from types import ModuleType
from typing import Any

_LAUNCHERS = (("", "popen"), ("_spawn", "spawn"), ("_fork", "fork"), ("_notebook", "fork"))
_ZERO1 = "ZeRO-1: optimizer state sharded over the ranks"
_ZERO2 = "ZeRO-2: optimizer state and accumulated gradients sharded over the ranks"
_ZERO3 = "ZeRO-3: parameters, gradients and optimizer state sharded over the ranks by FSDP2"
_UNUSED = (("", None), ("_find_unused_parameters_false", False), ("_find_unused_parameters_true", True))


def create_tuned_ddp(**init_args: Any) -> Any:
    """Returns a :class:`~lightning_parstrat.TunedDDPStrategy`. The class is imported on the first call."""
    from lightning_parstrat.strategies.ddp import TunedDDPStrategy

    return TunedDDPStrategy(**init_args)


def create_zero1(**init_args: Any) -> Any:
    """Returns a :class:`~lightning_parstrat.ZeRO1Strategy`. The class is imported on the first call."""
    from lightning_parstrat.strategies.zero1 import ZeRO1Strategy

    return ZeRO1Strategy(**init_args)


def create_zero2(**init_args: Any) -> Any:
    """Returns a :class:`~lightning_parstrat.ZeRO2Strategy`. The class is imported on the first call."""
    from lightning_parstrat.strategies.zero1 import ZeRO2Strategy

    return ZeRO2Strategy(**init_args)


def create_zero3(**init_args: Any) -> Any:
    """Returns a :class:`~lightning_parstrat.ZeRO3Strategy`. The class is imported on the first call."""
    from lightning_parstrat.strategies.zero3 import ZeRO3Strategy

    return ZeRO3Strategy(**init_args)


def register_strategies(module: ModuleType) -> None:
    """Registers every name in the ``StrategyRegistry`` of Lightning's strategies module. A second call is harmless.

    The names mirror Lightning's for ``ddp``, so that every user of a ``ddp*`` flag can switch. They are ``ddp_tuned``,
    ``zero1_custom``, ``zero2_custom`` and ``zero3_custom``. Each name also has the launcher suffixes ``_spawn``,
    ``_fork`` and ``_notebook``. Each of these has ``_find_unused_parameters_true`` and ``_false``. The ``zero*``
    strategies always find unused parameters.

    ``zero1`` and ``ddp_zero1`` are other names of ``zero1_custom``, and so on. Some libraries look for "ddp" in the
    name to decide whether to split the data among ranks.

    Args:
        module: Lightning's strategies module, fully imported.
    """
    for launcher, start_method in _LAUNCHERS:
        for unused, find_unused in _UNUSED:
            ddp_args = {} if find_unused is None else {"find_unused_parameters": find_unused}
            for names, create, description, init_args in (
                (("ddp_tuned",), create_tuned_ddp, "DDP with tuned gradient buckets", ddp_args),
                (("zero1_custom", "zero1", "ddp_zero1"), create_zero1, _ZERO1, {}),
                (("zero2_custom", "zero2", "ddp_zero2"), create_zero2, _ZERO2, {}),
                (("zero3_custom", "zero3", "ddp_zero3"), create_zero3, _ZERO3, {}),
            ):
                for name in names:
                    module.StrategyRegistry.register(
                        f"{name}{launcher}{unused}",
                        create,
                        description=f"{description} (`start_method={start_method!r}`)",
                        # A second call must be harmless: `import lightning_parstrat` may follow the entry point's call.
                        override=True,
                        start_method=start_method,
                        **init_args,
                    )
