"""torch DDP under our name: gradients live in the buckets, so that they are not held twice."""

from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.strategies.registry import _StrategyRegistry
from typing_extensions import override

from lightning_parstrat.strategies.accumulation import AccumulationAwareStrategy


class TunedDDPStrategy(AccumulationAwareStrategy):
    """Trains with torch's DistributedDataParallel, whose buckets hold the gradients themselves.

    Args:
        gradient_as_bucket_view: Whether ``param.grad`` is a view into DDP's bucket, which saves one copy of all
            gradients. torch's own default is False.
        process_group_backend: Backend of the process group, such as ``"nccl"`` or ``"gloo"``; by default the one that
            suits the device.
        timeout: How long a collective may take before the run ends with an error.
        start_method: How the processes are launched.
        **kwargs: Every further argument of :class:`~lightning.pytorch.strategies.DDPStrategy` and of
            :class:`~torch.nn.parallel.DistributedDataParallel`.
    """

    def __init__(
        self,
        gradient_as_bucket_view: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
            gradient_as_bucket_view=gradient_as_bucket_view,
            **kwargs,
        )

    @override
    def _scale_reduced_gradients(self) -> None:
        """Multiplies all gradients where their mean over ranks is not the window's: one pass, in those steps alone."""
        if self._scale is None or self._scale() == 1.0 / self.world_size:
            return
        gradients = [p.grad for p in self._training_module.parameters() if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, self._scale() * self.world_size)

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Registers nothing: the names are registered by :mod:`lightning_parstrat.strategies.registry`."""
