"""What DistributedDataParallel builds its reducer with, which is private: behind plain names, each with what it is for.

As in :mod:`lightning_parstrat.distributed.torch_compat`, whose versions of torch hold here, too.

Used through this file: what for | what happens without it.

    torch.nn.parallel.distributed.DistributedDataParallel._build_params_for_reducer
        what DDP sends, in its order | ddp_tuned cannot change buckets: adapt this file, or give `bucket_cap_mb` a
        number
    torch.nn.parallel.distributed.DistributedDataParallel._bucket_config
        since torch 2.13: the caps of buckets, beside DDP's attributes | as `_build_params_for_reducer`
    torch.nn.parallel.distributed.DistributedDataParallel._use_python_reducer
        torch.compile sends gradients by itself | as `_build_params_for_reducer`
    torch.nn.parallel.distributed.DistributedDataParallel._ddp_init_helper
        makes a reducer | as `_build_params_for_reducer`
    torch.nn.parallel.distributed.DistributedDataParallel._has_rebuilt_buckets
        lets a new reducer order its buckets | as `_build_params_for_reducer`
    torch.nn.parallel.distributed.DistributedDataParallel._set_static_graph
        shows a new reducer a static graph | as `_build_params_for_reducer`
    torch.nn.parallel.distributed.DistributedDataParallel._comm_hooks
        hooks that a new reducer must have, too | as `_build_params_for_reducer`
    torch.nn.parallel.distributed.DistributedDataParallel._check_reducer_finalized
        raises torch's own error where the old reducer still waits for a gradient | as `_build_params_for_reducer`
    torch.nn.parallel.distributed.DistributedDataParallel._remove_autograd_hooks
        takes the old reducer off the parameters, whoever still holds it | as `_build_params_for_reducer`
    torch.distributed._register_comm_hook
        registers them | as `_build_params_for_reducer`
    torch.distributed._DEFAULT_FIRST_BUCKET_BYTES
        the default's first cap | as `_build_params_for_reducer`
"""

import dataclasses
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

_dist: Any = dist


class BucketCaps(NamedTuple):
    """By what sizes a wrapper's buckets are made, in bytes.

    Attributes:
        first: Of the first bucket, where ``single`` is empty.
        others: Of all others.
        single: Of each bucket; the last is that of all further ones, too.
    """

    first: int
    others: int
    single: tuple[int, ...] = ()


def parameters_for_reducer(ddp: DistributedDataParallel) -> tuple[list[Tensor], list[bool]]:
    """What DDP sends gradients of, in its order, and of which it expects sparse ones."""
    parameters, expect_sparse = cast(Any, ddp)._build_params_for_reducer()
    return parameters, expect_sparse


def bucket_caps(ddp: DistributedDataParallel) -> BucketCaps:
    """The caps that the wrapper's buckets were made by."""
    wrapper = cast(Any, ddp)
    first = _dist._DEFAULT_FIRST_BUCKET_BYTES if wrapper.bucket_bytes_cap_default else wrapper.bucket_bytes_cap
    return BucketCaps(first, wrapper.bucket_bytes_cap, tuple(wrapper.bucket_bytes_cap_list))


def comm_hook_states(ddp: DistributedDataParallel) -> list[object]:
    """What the wrapper's communication hooks keep from call to call."""
    return [state for _, state in cast(Any, ddp)._comm_hooks]


def reason_to_keep_reducer(ddp: DistributedDataParallel) -> str | None:
    """Why the wrapper cannot be given another reducer; None if it can."""
    if cast(Any, ddp)._use_python_reducer:
        return "torch.compile sends gradients by itself"
    if getattr(ddp, "mixed_precision", None) is not None:
        return "DDP's own mixed precision sends gradients in another dtype"
    return None


@contextmanager
def trainable(parameters: Collection[Tensor], others: Iterable[Tensor] = ()) -> Iterator[None]:
    """Within it ``parameters`` require gradients, and those of ``others`` that are not among them do not."""
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
    ddp: DistributedDataParallel, parameters: Sequence[Tensor], expect_sparse: Sequence[bool], caps: BucketCaps
) -> None:
    """Gives the wrapper a new reducer, between steps. All ranks must; where it raises, nothing has changed.

    Gradients keep the memory of the old buckets until the next backward has moved them.

    Args:
        ddp: The wrapper.
        parameters: See :func:`parameters_for_reducer`.
        expect_sparse: As above.
        caps: Of its buckets.

    Raises:
        RuntimeError: The old one still waits for gradients of the last backward, which were not averaged.
    """
    wrapper, before = cast(Any, ddp), dict(vars(ddp))
    # Else this would hide what torch says in the next forward.
    wrapper._check_reducer_finalized()
    try:
        with trainable(parameters):
            _make_reducer(wrapper, parameters, expect_sparse, caps)
    # torch builds the new reducer in several steps: a wrapper left between two of them could not train on.
    except BaseException:
        vars(ddp).update(before)
        raise
    # Only now that nothing can fail any more. Its hooks would go with it, but somebody may hold it.
    before["reducer"]._remove_autograd_hooks()


def _make_reducer(wrapper: Any, parameters: Sequence[Tensor], expect_sparse: Sequence[bool], caps: BucketCaps) -> None:
    names = {parameter: name for name, parameter in wrapper.module.named_parameters()}
    _set_bucket_caps(wrapper, caps)
    # What was removed from the module meanwhile has none.
    names_by_position = {position: names.get(parameter, "") for position, parameter in enumerate(parameters)}
    wrapper._ddp_init_helper(parameters, expect_sparse, names_by_position, wrapper.static_graph)
    wrapper._has_rebuilt_buckets = False
    if wrapper.static_graph:
        wrapper.static_graph = False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wrapper._set_static_graph()
    for hook, state in wrapper._comm_hooks:
        _dist._register_comm_hook(wrapper.reducer, state, hook)


def remove_hooks(ddp: DistributedDataParallel) -> None:
    """Takes the wrapper's reducer off the parameters, after which it reduces nothing. Not collective.

    Else the module cannot be trained by another wrapper while somebody, such as a traceback, still holds this one.
    """
    cast(Any, ddp).reducer._remove_autograd_hooks()


def _set_bucket_caps(wrapper: Any, caps: BucketCaps) -> None:
    wrapper.bucket_bytes_cap = caps.others
    wrapper.bucket_bytes_cap_list = list(caps.single)
    wrapper.bucket_bytes_cap_default = caps.first < caps.others
    if hasattr(wrapper, "_bucket_config"):
        wrapper._bucket_config = dataclasses.replace(
            wrapper._bucket_config,
            bucket_bytes_cap=caps.others,
            per_bucket_bytes_caps=caps.single,
            first_bucket_bytes_cap=caps.first,
        )
