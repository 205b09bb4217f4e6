"""The reducer of a live DistributedDataParallel: which gradients it sends, in which dtype, and its replacement."""

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from lightning_parstrat.distributed.comm.agreement import all_or_none
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.torch_compat import check_reducer_finalized, remove_hooks, sends_when_compiled

CommHook = Literal["bf16", "fp16"] | None
Wrap = Callable[[int | None], DistributedDataParallel]
"""Wraps the module once more without sending anything, in buckets of so many bytes, or in those of the first."""


def sent_by(ddp: DistributedDataParallel) -> dict[Tensor, bool]:
    """The parameters whose gradients a new reducer would send, in its order, and whether it expects sparse ones."""
    sent: dict[Tensor, bool] = {}
    for prefix, owner in ddp.module.named_modules():
        sparse = isinstance(owner, (nn.Embedding, nn.EmbeddingBag)) and owner.sparse
        for name, parameter in owner.named_parameters(recurse=False):
            # As torch does, even if the prefix is empty.
            if parameter.requires_grad and f"{prefix}.{name}" not in ddp.parameters_to_ignore:
                sent.setdefault(parameter, sparse)
    return sent


def reason_to_keep(ddp: DistributedDataParallel) -> str | None:
    """The reason why the wrapper cannot get another reducer. If it can, None."""
    if sends_when_compiled(ddp):
        return "torch.compile sends gradients by itself"
    if getattr(ddp, "mixed_precision", None) is not None:
        return "DDP's own mixed precision sends gradients in another dtype"
    return None


@contextmanager
def trainable(parameters: Collection[Tensor], others: Iterable[Tensor] = ()) -> Iterator[None]:
    """Within it, ``parameters`` require gradients, and those of ``others`` that are not among them do not."""
    chosen = set(parameters)
    before = [(one, one.requires_grad) for one in {*chosen, *others}]
    try:
        for one, required in before:
            if required != (one in chosen):
                one.requires_grad_(one in chosen)
        yield
    finally:
        for one, required in before:
            if one.requires_grad != required:
                one.requires_grad_(required)


def exchange_reducer(
    ddp: DistributedDataParallel,
    parameters: Collection[Tensor],
    wrap: Wrap,
    size: int | None,
    control: Collectives | None,
) -> None:
    """Gives the wrapper a new reducer, between steps. Collective. A rank on which it fails keeps the old one.

    The wrapper takes over the parts of a second wrapper of the same module. Gradients keep the memory of the old
    buckets until the next backward has moved them.

    Args:
        ddp: The wrapper.
        parameters: The parameters whose gradients the new reducer is to send.
        wrap: Makes the second wrapper.
        size: The size of its buckets.
        control: Compares whether it has worked on all ranks. None is for one process alone.

    Raises:
        RuntimeError: It has failed on some rank. For example, the old reducer still waits for gradients of the last
            backward, which were not averaged. Raised on all ranks.
    """
    all_or_none(lambda: _exchange(ddp, parameters, wrap, size), control, _not_made)


def _exchange(ddp: DistributedDataParallel, parameters: Collection[Tensor], wrap: Wrap, size: int | None) -> None:
    # Otherwise the exchange would hide torch's error of the next forward.
    check_reducer_finalized(ddp)
    with warnings.catch_warnings(), trainable(parameters, ddp.module.parameters()):
        # The first wrapper has given the same warnings.
        warnings.simplefilter("ignore")
        second = wrap(size)
    # Only now, when nothing can fail any more. The reducer's end would remove its hooks, but a reference may keep it.
    remove_hooks(ddp)
    kept = vars(nn.Module()).keys() | {"require_backward_grad_sync", "require_forward_param_sync"}
    vars(ddp).update({name: value for name, value in vars(second).items() if name not in kept})


def _not_made(failed: dict[int, str]) -> RuntimeError:
    rank, said = next(iter(failed.items()))
    return RuntimeError(f"DDP's reducer could not be rebuilt on rank {rank}: {said}")


def bf16_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """The ``bf16_compress_hook`` of torch, under a name that torch does not refuse without NCCL: Gloo supports it."""
    return default_hooks.bf16_compress_hook(state, bucket)


def register_comm_hook(ddp: DistributedDataParallel, name: str) -> None:
    """Sends all gradients through the hook of that name, on any device. All ranks must call it.

    Both halve the bytes of fp32 gradients, and sum them in 16 bits.
    """
    ddp.register_comm_hook(ddp.process_group, bf16_hook if name == "bf16" else default_hooks.fp16_compress_hook)
