"""The strategy names, and the lazy callables behind them."""

from types import ModuleType
from typing import Any

_LAUNCHERS = (("", "popen"), ("_spawn", "spawn"), ("_fork", "fork"), ("_notebook", "fork"))
_ZERO1 = "ZeRO-1: optimizer state sharded over the ranks"
_UNUSED = (("", None), ("_find_unused_parameters_false", False), ("_find_unused_parameters_true", True))


def create_tuned_ddp(**init_args: Any) -> Any:
    """Returns a :class:`~lightning_parstrat.TunedDDPStrategy`, importing it only now."""
    from lightning_parstrat.strategies.ddp import TunedDDPStrategy

    return TunedDDPStrategy(**init_args)


def create_zero1(**init_args: Any) -> Any:
    """Returns a :class:`~lightning_parstrat.ZeRO1Strategy`, importing it only now."""
    from lightning_parstrat.strategies.zero1 import ZeRO1Strategy

    return ZeRO1Strategy(**init_args)


def register_strategies(module: ModuleType) -> None:
    """Registers every name in the ``StrategyRegistry`` of Lightning's strategies module; calling it again is harmless.

    The names mirror Lightning's for ``ddp``, so that every user of a ``ddp*`` flag can switch: ``ddp_tuned`` and
    ``zero1_custom``, each with the launcher suffixes ``_spawn``, ``_fork``, ``_notebook``, and each of these with
    ``_find_unused_parameters_true`` and ``_false``. ``zero1_custom`` always finds unused parameters. ``ddp_zero1`` is
    the same, for libraries that know by the name whether to split the data among ranks.

    Args:
        module: Lightning's strategies module, fully imported.
    """
    for launcher, start_method in _LAUNCHERS:
        for unused, find_unused in _UNUSED:
            ddp_args = {} if find_unused is None else {"find_unused_parameters": find_unused}
            for name, create, description, init_args in (
                ("ddp_tuned", create_tuned_ddp, "DDP with tuned gradient buckets", ddp_args),
                ("zero1_custom", create_zero1, _ZERO1, {}),
                ("ddp_zero1", create_zero1, _ZERO1, {}),
            ):
                module.StrategyRegistry.register(
                    f"{name}{launcher}{unused}",
                    create,
                    description=f"{description} (`start_method={start_method!r}`)",
                    # Registering again must be harmless: `import lightning_parstrat` may follow the entry point's.
                    override=True,
                    start_method=start_method,
                    **init_args,
                )
