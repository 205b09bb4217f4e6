"""What DistributedDataParallel builds its reducer with, which is private: behind plain names, each with what it is for.

As in :mod:`lightning_parstrat.distributed.torch_compat`, whose versions of torch hold here, too.

Used through this file: what for | what happens without it.

    torch.nn.parallel.distributed.DistributedDataParallel._build_params_for_reducer
        what DDP sends, in its order | ddp_tuned cannot change buckets: adapt this file, or give `bucket_cap_mb` a
        number
    torch.nn.parallel.distributed.DistributedDataParallel._bucket_config
        since torch 2.13: the caps of buckets, beside DDP's attributes | ddp_tuned cannot change buckets: adapt this
        file, or give `bucket_cap_mb` a number
    torch.nn.parallel.distributed.DistributedDataParallel._use_python_reducer
        torch.compile sends gradients by itself | ddp_tuned cannot change buckets: adapt this file, or give
        `bucket_cap_mb` a number
    torch.nn.parallel.distributed.DistributedDataParallel._ddp_init_helper
        makes a reducer | ddp_tuned cannot change buckets: adapt this file, or give `bucket_cap_mb` a number
    torch.nn.parallel.distributed.DistributedDataParallel._has_rebuilt_buckets
        lets a new reducer order its buckets | ddp_tuned cannot change buckets: adapt this file, or give `bucket_cap_mb`
        a number
    torch.nn.parallel.distributed.DistributedDataParallel._set_static_graph
        tells a new reducer of a static graph | ddp_tuned cannot change buckets: adapt this file, or give
        `bucket_cap_mb` a number
    torch.nn.parallel.distributed.DistributedDataParallel._comm_hooks
        hooks that a new reducer must have, too | ddp_tuned cannot change buckets: adapt this file, or give
        `bucket_cap_mb` a number
    torch.nn.parallel.distributed.DistributedDataParallel._check_reducer_finalized
        raises torch's own error where the old reducer still waits for a gradient | ddp_tuned cannot change buckets:
        adapt this file, or give `bucket_cap_mb` a number
    torch.nn.parallel.distributed.DistributedDataParallel._remove_autograd_hooks
        takes the old reducer off the parameters, whoever still holds it | as `_check_reducer_finalized`
    torch.distributed._register_comm_hook
        registers them | ddp_tuned cannot change buckets: adapt this file, or give `bucket_cap_mb` a number
    torch.distributed._DEFAULT_FIRST_BUCKET_BYTES
        the default's first cap | ddp_tuned cannot change buckets: adapt this file, or give `bucket_cap_mb` a number
    torch.distributed._compute_bucket_assignment_by_size
        tells the buckets of a list of sizes from the other end | ddp_tuned takes no list of sizes with
        `find_unused_parameters`
"""

import dataclasses
import warnings
from collections.abc import Sequence
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


def names_for_reducer(ddp: DistributedDataParallel, parameters: Sequence[Tensor]) -> dict[int, str]:
    """The names by which a reducer knows ``parameters``."""
    names = {parameter: name for name, parameter in ddp.module.named_parameters()}
    return {position: names[parameter] for position, parameter in enumerate(parameters)}


def bucket_caps(ddp: DistributedDataParallel) -> BucketCaps:
    """The caps that the wrapper's buckets were made by."""
    wrapper = cast(Any, ddp)
    first = _dist._DEFAULT_FIRST_BUCKET_BYTES if wrapper.bucket_bytes_cap_default else wrapper.bucket_bytes_cap
    return BucketCaps(first, wrapper.bucket_bytes_cap, tuple(wrapper.bucket_bytes_cap_list))


def comm_hook_states(ddp: DistributedDataParallel) -> list[object]:
    """What the wrapper's communication hooks keep from call to call."""
    return [state for _, state in cast(Any, ddp)._comm_hooks]


def sends_by_compiled_code(ddp: DistributedDataParallel) -> bool:
    """Whether torch.compile sends gradients, rather than a reducer."""
    return bool(cast(Any, ddp)._use_python_reducer)


def assign_to_buckets(tensors: Sequence[Tensor], caps: Sequence[int], sparse: Sequence[bool]) -> list[list[int]]:
    """Which tensors come into each bucket, by position; as DDP decides it."""
    buckets, _ = _dist._compute_bucket_assignment_by_size(tensors, caps, sparse)
    return [list(bucket) for bucket in buckets]


def exchange_reducer(
    ddp: DistributedDataParallel,
    parameters: Sequence[Tensor],
    expect_sparse: Sequence[bool],
    names: dict[int, str],
    caps: BucketCaps,
) -> None:
    """Gives the wrapper a new reducer. All ranks must; where it raises, attributes have changed.

    Args:
        ddp: The wrapper.
        parameters: See :func:`parameters_for_reducer`.
        expect_sparse: As above.
        names: See :func:`names_for_reducer`.
        caps: Of its buckets.

    Raises:
        RuntimeError: The old one still waits for gradients of the last backward, which were not averaged.
    """
    wrapper = cast(Any, ddp)
    # Else this would hide what torch says in the next forward.
    wrapper._check_reducer_finalized()
    old = wrapper.reducer
    _set_bucket_caps(wrapper, caps)
    wrapper._ddp_init_helper(parameters, expect_sparse, names, wrapper.static_graph)
    wrapper._has_rebuilt_buckets = False
    if wrapper.static_graph:
        wrapper.static_graph = False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wrapper._set_static_graph()
    for hook, state in wrapper._comm_hooks:
        _dist._register_comm_hook(wrapper.reducer, state, hook)
    # Only now that nothing can fail any more. Its hooks would go with it, but somebody may hold it.
    old._remove_autograd_hooks()


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
