"""What DistributedDataParallel builds its reducer with, which is private: behind plain names, each with what it is for.

As in :mod:`lightning_parstrat.distributed.torch_compat`, whose versions of torch hold here, too.

Used through this file: what for | what happens without it.

    torch.nn.parallel.distributed.DistributedDataParallel._build_params_for_reducer
        what DDP sends, in its order | ddp_tuned cannot change buckets: adapt this file, or give `bucket_cap_mb` a
        number
    torch.nn.parallel.distributed.DistributedDataParallel._build_debug_param_to_name_mapping
        a reducer wants names | ddp_tuned cannot change buckets: adapt this file, or give `bucket_cap_mb` a number
    torch.nn.parallel.distributed.DistributedDataParallel._bucket_config
        the caps of buckets | buckets are left as they are; a report says so
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
    torch.nn.parallel.distributed._BucketCapacityConfig
        caps of single buckets | ddp_tuned cannot change buckets: adapt this file, or give `bucket_cap_mb` a number
    torch.distributed._compute_bucket_assignment_by_size
        foretells DDP's buckets | ddp_tuned cannot change buckets: adapt this file, or give `bucket_cap_mb` a number
"""

import warnings
from collections.abc import Sequence
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import distributed as ddp_module

_dist: Any = dist
_ddp_module: Any = ddp_module


def parameters_for_reducer(ddp: DistributedDataParallel) -> tuple[list[Tensor], list[bool]]:
    """What DDP sends gradients of, in its order, and of which it expects sparse ones."""
    parameters, expect_sparse = cast(Any, ddp)._build_params_for_reducer()
    return parameters, expect_sparse


def names_for_reducer(ddp: DistributedDataParallel, parameters: Sequence[Tensor]) -> dict[int, str]:
    """The names by which a reducer knows ``parameters``. Refused where some were unfrozen or added since."""
    names: dict[int, str] = cast(Any, ddp)._build_debug_param_to_name_mapping(parameters)
    return names


def bucket_caps(ddp: DistributedDataParallel) -> Any:
    """The caps that the wrapper's buckets were made by; None in versions that have no caps for single buckets."""
    return getattr(ddp, "_bucket_config", None)


def comm_hook_states(ddp: DistributedDataParallel) -> list[object]:
    """What the wrapper's communication hooks keep from call to call."""
    return [state for _, state in cast(Any, ddp)._comm_hooks]


def make_bucket_caps(mebibytes: Sequence[float]) -> Any:
    """Caps for :func:`exchange_reducer`, one for each bucket."""
    return _ddp_module._BucketCapacityConfig.create(None, list(mebibytes), False)


def sends_by_compiled_code(ddp: DistributedDataParallel) -> bool:
    """Whether torch.compile sends gradients, rather than a reducer."""
    return bool(cast(Any, ddp)._use_python_reducer)


def assign_to_buckets(
    tensors: Sequence[Tensor], caps: Sequence[int], sparse: Sequence[bool], order: Sequence[int] | None = None
) -> list[list[int]]:
    """Which tensors come into each bucket, by position, or by the numbers in ``order``; as DDP decides it."""
    buckets, _ = _dist._compute_bucket_assignment_by_size(tensors, caps, sparse, *([] if order is None else [order]))
    return [list(bucket) for bucket in buckets]


def exchange_reducer(
    ddp: DistributedDataParallel,
    parameters: Sequence[Tensor],
    expect_sparse: Sequence[bool],
    names: dict[int, str],
    caps: Any,
) -> None:
    """Gives the wrapper a new reducer. All ranks must; where it raises, attributes have changed.

    Args:
        ddp: The wrapper.
        parameters: See :func:`parameters_for_reducer`.
        expect_sparse: As above.
        names: See :func:`names_for_reducer`.
        caps: See :func:`bucket_caps` and :func:`make_bucket_caps`.

    Raises:
        RuntimeError: The old one still waits for gradients of the last backward, which were not averaged.
    """
    wrapper = cast(Any, ddp)
    # Else this would hide what torch says in the next forward.
    wrapper._check_reducer_finalized()
    old = wrapper.reducer
    wrapper._bucket_config = caps
    wrapper.bucket_bytes_cap = caps.bucket_bytes_cap
    wrapper.bucket_bytes_cap_list = list(caps.per_bucket_bytes_caps)
    wrapper.bucket_bytes_cap_default = caps.first_bucket_bytes_cap < caps.bucket_bytes_cap
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
