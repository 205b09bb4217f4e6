"""The strategy names, and the lazy callables behind them."""

from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any


def _create(dotted: str, **init_args: Any) -> Any:
    """A strategy. Its class is imported on the first call, from the package of this file or its twin."""
    module, _, name = dotted.partition(".")
    return getattr(import_module(f"{__package__}.{module}"), name)(**init_args)


_LAUNCHERS = (("", "popen"), ("_spawn", "spawn"), ("_fork", "fork"), ("_notebook", "fork"))
_UNUSED = (("", None), ("_find_unused_parameters_false", False), ("_find_unused_parameters_true", True))
_STRATEGIES = (
    (("ddp_tuned",), partial(_create, "ddp.TunedDDPStrategy"), "DDP with tuned gradient buckets"),
    (
        ("zero1_custom", "zero1", "ddp_zero1"),
        partial(_create, "zero1.ZeRO1Strategy"),
        "ZeRO-1: optimizer state sharded over the ranks",
    ),
    (
        ("zero2_custom", "zero2", "ddp_zero2"),
        partial(_create, "zero1.ZeRO2Strategy"),
        "ZeRO-2: optimizer state and accumulated gradients sharded over the ranks",
    ),
    (
        ("zero3_custom", "zero3", "ddp_zero3"),
        partial(_create, "zero3.ZeRO3Strategy"),
        "ZeRO-3: parameters, gradients and optimizer state sharded over the ranks by FSDP2",
    ),
    (
        ("pipeline_custom", "pipeline", "ddp_pipeline"),
        partial(_create, "pipeline.PipelineStrategy"),
        "Pipeline parallelism: the module's blocks in stages on different ranks, by torch's schedules",
    ),
    (
        ("auto_custom",),
        partial(_create, "auto.AutoStrategy"),
        "the strategy that `lightning-parstrat tune` has found to be the fastest, from chosen.yaml",
    ),
)
"""Names, what makes the strategy, and a description."""


def register_strategies(module: ModuleType) -> None:
    """Registers every name in the ``StrategyRegistry`` of Lightning's strategies module. A second call is harmless.

    The names mirror Lightning's for ``ddp``, so that every user of a ``ddp*`` flag can switch. They are ``ddp_tuned``,
    ``zero1_custom``, ``zero2_custom``, ``zero3_custom``, ``pipeline_custom`` and ``auto_custom``. Each also has the
    launcher suffixes ``_spawn``, ``_fork`` and ``_notebook``. Each of these has ``_find_unused_parameters_true`` and
    ``_false``. Only ``ddp_tuned`` needs to be told: the others always find unused parameters.

    ``zero1`` and ``ddp_zero1`` are other names of ``zero1_custom``, and so on. Some libraries look for "ddp" in the
    name to decide whether to split the data among ranks.

    Args:
        module: Lightning's strategies module, fully imported.
    """
    for launcher, start_method in _LAUNCHERS:
        for unused, find_unused in _UNUSED:
            for names, create, description in _STRATEGIES:
                # The others find unused parameters anyway.
                takes_choice = find_unused is not None and names == ("ddp_tuned",)
                for name in names:
                    module.StrategyRegistry.register(
                        f"{name}{launcher}{unused}",
                        create,
                        description=f"{description} (`start_method={start_method!r}`)",
                        # A second call must be harmless: `import lightning_parstrat` may follow the entry point's call.
                        override=True,
                        start_method=start_method,
                        **({"find_unused_parameters": find_unused} if takes_choice else {}),
                    )
