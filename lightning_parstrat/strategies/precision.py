"""Lightning's precision plugins, clipping and unscaling shards instead of full parameters.

The plugin's class is swapped for a subclass, so that the object stays the user's. It keeps its ``__qualname__``, under
which Lightning files a plugin's state in checkpoints.
"""

from typing import Any, TypeGuard

import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parstrat.distributed.clipping import clip_gradients_by_norm, clip_gradients_by_value
from lightning_parstrat.distributed.optimizer import ShardedOptimizer


class ShardedPrecision(Precision):
    """What differs for optimizers whose state is sharded; other optimizers are passed on."""

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clamps the shards' gradients. Not collective once the gradients are there."""
        if _is_stepped_by_shards(optimizer):
            clip_gradients_by_value(optimizer, clip_val)
        else:
            super().clip_grad_by_value(optimizer, clip_val)

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Scales the shards' gradients by the norm of the whole. Collective."""
        if _is_stepped_by_shards(optimizer):
            clip_gradients_by_norm(optimizer, clip_val)
        else:
            super().clip_grad_by_norm(optimizer, clip_val)


class ShardedGradScaler(torch.amp.GradScaler):
    """A gradient scaler that unscales shards, and skips a step on all ranks when any found a non-finite gradient."""

    @override
    def _unscale_grads_(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> dict[torch.device, torch.Tensor]:
        if not _is_stepped_by_shards(optimizer):
            return super()._unscale_grads_(optimizer, *args, **kwargs)
        sharding = optimizer._sharding
        sharding.finish_gradients()
        with sharding.shard_groups(optimizer):
            found = super()._unscale_grads_(optimizer, *args, **kwargs)
        # A rank without gradients in its shards has looked at nothing, and takes part all the same.
        device = sharding.device
        return {device: sharding.maximum_over_ranks(found.get(device, torch.zeros((), device=device)))}


def shard_precision(plugin: Precision) -> None:
    """Swaps the classes of the plugin and of its gradient scaler; doing it again changes nothing."""
    if not isinstance(plugin, ShardedPrecision):
        plugin.__class__ = _subclass(type(plugin), ShardedPrecision, Precision)
    scaler = plugin.scaler if isinstance(plugin, MixedPrecision) else None
    if scaler is not None and not isinstance(scaler, ShardedGradScaler):
        scaler.__class__ = _subclass(type(scaler), ShardedGradScaler, torch.amp.GradScaler)


def _is_stepped_by_shards(optimizer: Any) -> TypeGuard[ShardedOptimizer]:
    """Whether gradients are in the shards alone; exposed, they are in ``param.grad``, where stock code works."""
    return isinstance(optimizer, ShardedOptimizer) and not optimizer._sharding.exposes_gradients


def _subclass(cls: type, mixin: type, base: type) -> type:
    """A subclass of ``cls`` that asks ``mixin`` before ``base``: what the user's own class overrides stays first."""
    bases = (mixin,) if cls is base else (cls, mixin)
    return type(cls.__name__, bases, {"__module__": cls.__module__, "__qualname__": cls.__qualname__})
