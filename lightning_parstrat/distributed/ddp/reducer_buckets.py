"""The buckets of a live DistributedDataParallel: predicts those that caps lead to, and exchanges the reducer."""

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
    """Exchanges the reducer of ``ddp`` for one with other buckets, and predicts these. Not collective.

    torch assigns parameters to buckets by caps: a bucket is full when its size reaches its cap. Usually this is done
    again after the first backward, in the order in which gradients became ready. Where backward looks for unused
    parameters (and the graph is not static) it is not: buckets stay in the reverse order of registration, and are
    filled from the other end.

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
        # Only now: torch raises if parameters have been unfrozen or added since.
        self._names = self._ddp._build_debug_param_to_name_mapping(self.parameters)
        self.are_default = True
        self._rebuilds = ddp.static_graph or not ddp.find_unused_parameters

    @property
    def dtype(self) -> torch.dtype:
        """The dtype with the most bytes."""
        return self.parameters[self.order([0.0] * len(self.parameters))[0]].dtype

    @property
    def nbytes(self) -> list[int]:
        """Bytes of each parameter's gradient."""
        return [parameter.numel() * parameter.element_size() for parameter in self.parameters]

    def reason_not_to_change(self) -> str | None:
        """Why buckets cannot be changed; None where they can."""
        if self._ddp._use_python_reducer:
            return "torch.compile sends gradients by itself"
        if self._default is None:
            return "this version of torch has no caps for single buckets"
        if any(self._expect_sparse):
            return "there are sparse gradients, which travel by themselves"
        if getattr(self._ddp, "mixed_precision", None) is not None:
            return "DDP's own mixed precision sends gradients in another dtype"
        if len(self.parameters) < 2:
            return "there are fewer than two parameters"
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
            # torch's own function: a prediction that differed from what the reducer does would be worth nothing.
            buckets, _ = _torch._compute_bucket_assignment_by_size(in_order, limits, sparse, order)
            return [list(bucket) for bucket in buckets]
        if caps is not None:
            # Here torch fills buckets from the end that is sent last.
            limits.reverse()
        buckets, _ = _torch._compute_bucket_assignment_by_size(self.parameters, limits, self._expect_sparse)
        return [list(reversed(bucket)) for bucket in reversed(buckets)]

    def filled_from_the_first(self, caps: Caps) -> Caps:
        """Caps that give, filled from the other end, the buckets that ``caps`` give from this one."""
        first, sparse = list(reversed(self.parameters)), list(reversed(self._expect_sparse))
        buckets, _ = _torch._compute_bucket_assignment_by_size(first, list(caps), sparse)
        nbytes = list(reversed(self.nbytes))
        return tuple(sum(nbytes[index] for index in bucket) for bucket in buckets)

    def adopt(self, caps: Caps | None) -> None:
        """Gives the wrapper a reducer with these caps, or with the default's. All ranks must call it, between steps.

        Gradients keep the memory of the old buckets until the next backward has moved them.

        Raises:
            ValueError: A parameter has been frozen since; nothing has changed.
        """
        if not all(parameter.requires_grad for parameter in self.parameters):
            raise ValueError("parameters have been frozen since training began")
        before = dict(vars(self._ddp))
        try:
            self._exchange_reducer(caps)
        # torch builds the new reducer in several steps: a wrapper left between two of them could not train on.
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
        # This drops the old reducer, which removes its hooks from the parameters.
        ddp._ddp_init_helper(self.parameters, self._expect_sparse, self._names, ddp.static_graph)
        ddp._has_rebuilt_buckets = False
        if ddp.static_graph:
            # `_set_static_graph` does nothing where the flag is set, and the new reducer would not hear of it. Its
            # warning about unused parameters was given when the user made the wrapper.
            ddp.static_graph = False
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ddp._set_static_graph()
        # Hooks belong to a reducer, and the new one has none.
        for hook, state in ddp._comm_hooks:
            _torch._register_comm_hook(ddp.reducer, state, hook)

    def _all_in_order(self, ready_seconds: Sequence[float]) -> list[int]:
        positions = range(len(self.parameters))
        if self._rebuilds:
            with_gradient = [index for index in reversed(positions) if ready_seconds[index] > 0]
            # A static graph appends parameters without a gradient.
            without = [index for index in positions if not ready_seconds[index] > 0]
            return sorted(with_gradient, key=lambda index: ready_seconds[index]) + without
        return list(reversed(positions))


def _key(parameter: Tensor) -> tuple[Any, ...]:
    return parameter.dtype, parameter.device
