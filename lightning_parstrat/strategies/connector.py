"""Improves the error with which Lightning refuses some Slurm jobs, before it creates a strategy of this package."""

import functools
import os
from types import ModuleType
from typing import Any


def explain_wrong_job_size(module: ModuleType) -> None:
    """Makes Lightning's error for ``--ntasks`` say what to write instead, if a strategy of this package was chosen.

    Nothing more is refused, and under other strategies the error stays Lightning's own. Calling it again is harmless.

    Args:
        module: ``lightning.pytorch.trainer.connectors.accelerator_connector``, fully imported.
    """
    connector = module._AcceleratorConnector
    original = connector._choose_and_init_cluster_environment
    # Wrapped before: `functools.wraps` leaves this mark.
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def choose_and_init_cluster_environment(self: Any) -> Any:
        try:
            return original(self)
        except RuntimeError as error:
            wrong = _wrong_job_size(self, module.StrategyRegistry)
            if wrong is None:
                raise
            raise wrong from error

    connector._choose_and_init_cluster_environment = choose_and_init_cluster_environment


def _wrong_job_size(connector: Any, registry: Any) -> Exception | None:
    # Not at the top: this module is imported while Lightning's own import is still running.
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    from lightning_parstrat.strategies.launch.job_size import wrong_job_size
    from lightning_parstrat.strategies.launch.ranks import RanksStrategy
    from lightning_parstrat.strategies.registry import create_tuned_ddp, create_zero1

    asked_for = connector._strategy_flag
    if isinstance(asked_for, str):
        ours = asked_for in registry and registry[asked_for]["strategy"] in (create_tuned_ddp, create_zero1)
    else:
        ours = isinstance(asked_for, RanksStrategy)
    if not ours:
        return None
    wrong = wrong_job_size(os.environ, connector._num_nodes_flag, len(connector._parallel_devices))
    return None if wrong is None else MisconfigurationException(wrong)
