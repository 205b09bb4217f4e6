"""The buckets of a live DistributedDataParallel: what caps come to, and another reducer with other buckets."""

import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import torch.distributed
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import distributed as ddp_module

from lightning_parstrat.core.tuning import Caps

_MIB = 2**20

# What DDP itself builds its reducer with; private, as the wrapper's parts are.
_torch: Any = torch.distributed
_ddp: Any = ddp_module


class DDPBuckets:
    """Exchanges the reducer of ``ddp`` for one with other buckets, and foretells which those are. Not collective.

    torch assigns parameters to buckets by caps: one is full when its size reaches its cap. Usually that is done anew
    after the first backward, in the order in which gradients became ready. Where a backward looks for unused parameters
    (and the graph is not static) it never is: buckets stay in the reverse order of registration, and are made from the
    other end.

    Args:
        ddp: Its buckets are the default.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        # Its parts are private to torch.
        self._ddp = cast(Any, ddp)
        self.parameters: list[Tensor]
        self.parameters, self._expect_sparse = self._ddp._build_params_for_reducer()
        # None in versions of torch that have no caps for single buckets.
        self._default: Any = getattr(ddp, "_bucket_config", None)
        # Asked for once: later it is refused where parameters have been unfrozen or added.
        self._names = self._ddp._build_debug_param_to_name_mapping(self.parameters)
        self.are_default = True
        self._rebuilds = ddp.static_graph or not ddp.find_unused_parameters

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that has most bytes."""
        return self.parameters[self.order([0.0] * len(self.parameters))[0]].dtype

    @property
    def nbytes(self) -> list[int]:
        """Bytes of each parameter's gradient."""
        return [parameter.numel() * parameter.element_size() for parameter in self.parameters]

    def reason_not_to_change(self) -> str | None:
        """Why buckets must stay as they are, if they must."""
        if self._ddp._use_python_reducer:
            return "torch.compile sends gradients by itself"
        if self._default is None:
            return "this version of torch has no caps for single buckets"
        if any(self._expect_sparse):
            return "there are sparse gradients, which travel by themselves"
        if getattr(self._ddp, "mixed_precision", None) is not None:
            return "DDP's own mixed precision sends gradients in another dtype"
        if len(self.parameters) < 2:
            return "there is one parameter"
        return None

    def order(self, ready_seconds: Sequence[float]) -> list[int]:
        """The parameters of the dtype and device that has most bytes, in the order in which buckets are filled."""
        nbytes = Counter[tuple[Any, ...]]()
        for parameter, size in zip(self.parameters, self.nbytes, strict=True):
            nbytes[_key(parameter)] += size
        chosen = max(nbytes, key=lambda key: nbytes[key])
        return [index for index in self._all_in_order(ready_seconds) if _key(self.parameters[index]) == chosen]

    def assigned(self, caps: Caps | None, ready_seconds: Sequence[float]) -> list[list[int]]:
        """The parameters of each bucket, in the order in which they are sent; None for the default's caps."""
        config = self._default
        default = [config.first_bucket_bytes_cap, config.bucket_bytes_cap]
        limits = list(config.per_bucket_bytes_caps or default) if caps is None else list(caps)
        if self._rebuilds:
            order = self._all_in_order(ready_seconds)
            in_order, sparse = [self.parameters[index] for index in order], [False] * len(order)
            buckets, _ = _torch._compute_bucket_assignment_by_size(in_order, limits, sparse, order)
            return [list(bucket) for bucket in buckets]
        if caps is not None:
            limits.reverse()
        buckets, _ = _torch._compute_bucket_assignment_by_size(self.parameters, limits, self._expect_sparse)
        return [list(reversed(bucket)) for bucket in reversed(buckets)]

    def filled_from_the_first(self, caps: Caps) -> Caps:
        """Caps by which buckets that are made from the other end are those that ``caps`` make from this one."""
        first, sparse = list(reversed(self.parameters)), list(reversed(self._expect_sparse))
        buckets, _ = _torch._compute_bucket_assignment_by_size(first, list(caps), sparse)
        nbytes = list(reversed(self.nbytes))
        return tuple(sum(nbytes[index] for index in bucket) for bucket in buckets)

    def adopt(self, caps: Caps | None) -> None:
        """Gives the wrapper a reducer with these caps, or with the default's. Between steps; all ranks must.

        Gradients stay, and with them the memory of the old buckets, until the next backward has moved them.

        Raises:
            ValueError: A parameter has been frozen since; everything is as it was.
        """
        if not all(parameter.requires_grad for parameter in self.parameters):
            raise ValueError("parameters have been frozen since training began")
        before = dict(vars(self._ddp))
        try:
            self._exchange_reducer(caps)
        except BaseException:
            vars(self._ddp).update(before)
            raise
        self.are_default = caps is None

    def _exchange_reducer(self, caps: Caps | None) -> None:
        ddp, config = self._ddp, self._default
        if caps is not None:
            limits = caps if self._rebuilds else tuple(reversed(caps))
            config = _ddp._BucketCapacityConfig.create(None, [cap / _MIB for cap in limits], False)
        ddp._bucket_config = config
        ddp.bucket_bytes_cap = config.bucket_bytes_cap
        ddp.bucket_bytes_cap_list = list(config.per_bucket_bytes_caps)
        ddp.bucket_bytes_cap_default = config.first_bucket_bytes_cap < config.bucket_bytes_cap
        # The old one's hooks on the parameters go with it.
        ddp._ddp_init_helper(self.parameters, self._expect_sparse, self._names, ddp.static_graph)
        ddp._has_rebuilt_buckets = False
        if ddp.static_graph:
            ddp.static_graph = False
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ddp._set_static_graph()
        for hook, state in ddp._comm_hooks:
            _torch._register_comm_hook(ddp.reducer, state, hook)

    def _all_in_order(self, ready_seconds: Sequence[float]) -> list[int]:
        positions = range(len(self.parameters))
        if self._rebuilds:
            with_gradient = [index for index in reversed(positions) if ready_seconds[index] > 0]
            # What a static graph leaves out comes last.
            without = [index for index in positions if not ready_seconds[index] > 0]
            return sorted(with_gradient, key=lambda index: ready_seconds[index]) + without
        return list(reversed(positions))


def _key(parameter: Tensor) -> tuple[Any, ...]:
    return parameter.dtype, parameter.device
