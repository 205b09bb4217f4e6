"""Updated parameters are all-gathered: every rank sends the shard it stepped, and receives the other ranks'.

Gathers continue while the next buckets step, the next batch is loaded and the next forward begins. A read of a
parameter waits for its bucket. All buckets have arrived before the next backward.

While a bucket is gathered, its parameters are of a subclass of ``nn.Parameter``. The subclass' ``__torch_function__``
waits for the bucket before it runs an operation. Then it gives the parameters their class back. Every holder of a
reference is covered: modules, penalties over a list of weights, ``state_dict``, optimizers, callbacks, copies. A read
of shape, dtype or gradient alone does not wait. After a parameter has arrived, reading it costs nothing more. To mark
and unmark a parameter takes some tenths of a microsecond.

Only C++ code that reads a parameter without torch could read it early. Examples are an extension that a module calls,
or a captured CUDA graph. So a called module waits for the parameters that it holds. If its forward is not its class's,
it also waits for its children's, as that forward may not call them.
"""

import copy
import functools
import threading
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.comm.work import DONE, Streams, Work, marked
from lightning_parstrat.distributed.engine.buckets import ParameterBucket
from lightning_parstrat.distributed.torch_compat import GRADIENT_HOOKS, own_parameters

_IN_FLIGHT: dict[int, Callable[[], None]] = {}
"""The function that waits for a marked parameter, by the parameter's identity. Buckets hold the marked parameters."""

_WATCH: list[RemovableHandle] = []
"""The hook by which modules wait for their parameters: one for the process, while any parameter is marked."""


def _attributes(names: str) -> list[Any]:
    return [getattr(Tensor, name) for name in names.split()]


_KNOWN = "shape dtype device layout ndim grad requires_grad is_leaf grad_fn itemsize nbytes is_cuda is_meta is_sparse"
_ASKS = "size dim numel stride element_size is_floating_point is_complex is_contiguous __hash__ __len__"
_OF_GRADIENTS = "requires_grad_ register_hook register_post_accumulate_grad_hook"
NEEDS_NO_CONTENT: set[Any] = {
    *(attribute.__get__ for attribute in (*_attributes(_KNOWN), *GRADIENT_HOOKS)),
    *(attribute.__set__ for attribute in (*_attributes("grad requires_grad"), *GRADIENT_HOOKS)),
    *_attributes(_ASKS),
    *_attributes(_OF_GRADIENTS),
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
}


class InFlightParameter(nn.Parameter):
    """A parameter whose new values are being gathered. It is never instantiated: :func:`mark` swaps classes."""

    @classmethod
    @override
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in NEEDS_NO_CONTENT:
            found = _marked_in([args, kwargs or {}])
            if found:
                wait_for_parameters(found)
            else:
                # A marked parameter is inside an object of the caller's.
                for arrive in list(_IN_FLIGHT.values()):
                    arrive()
        # nn.Parameter's function calls `func` unchanged, and does not change the class of the result.
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # The copy gets the class that this parameter has after it has arrived.
        wait_for_parameters([self])
        return copy.deepcopy(self, memo)


def mark(parameters: Iterable[Tensor], arrive: Callable[[], None]) -> None:
    """Calls ``arrive`` before any read of one of ``parameters``. ``arrive`` calls :func:`unmark`."""
    if not _WATCH:
        _WATCH.append(register_module_forward_pre_hook(_hook()))
    for parameter in parameters:
        _IN_FLIGHT[id(parameter)] = arrive
        parameter.__class__ = InFlightParameter


def unmark(parameters: Iterable[Tensor]) -> None:
    """Turns ``parameters`` into ordinary ones again."""
    for parameter in parameters:
        _IN_FLIGHT.pop(id(parameter), None)
        parameter.__class__ = nn.Parameter
    # A global hook costs every module call of the process some microseconds. It is removed with the last parameter.
    while _WATCH and not _IN_FLIGHT:
        _WATCH.pop().remove()


def wait_for_parameters(parameters: Iterable[Tensor]) -> None:
    """Waits for those of ``parameters`` that are in flight."""
    for parameter in parameters:
        arrive = _IN_FLIGHT.get(id(parameter))
        if arrive is not None:
            arrive()
        elif type(parameter) is InFlightParameter:
            # A copy with the class from before the arrival.
            parameter.__class__ = nn.Parameter  # type: ignore[assignment]


def wait_for_parameters_in(module: nn.Module) -> None:
    """Waits for the parameters that a module and its children hold."""
    if _IN_FLIGHT:
        wait_for_parameters([parameter for parameter in module.parameters() if type(parameter) is InFlightParameter])


@functools.cache
def _hook() -> Callable[[nn.Module, Any], None]:
    # A compiler would trace the hooks of a module that is compiled in place.
    return cast(Callable[..., None], torch.compiler.disable(_wait_for_parameters_of))  # type: ignore[no-untyped-call]


def _wait_for_parameters_of(module: nn.Module, _: Any) -> None:
    held = module.parameters() if "forward" in vars(module) else own_parameters(module).values()
    in_flight = [p for p in held if type(p) is InFlightParameter]
    if in_flight:
        wait_for_parameters(in_flight)


def _marked_in(values: Any) -> list[Tensor]:
    """All marked parameters in nested arguments."""
    if isinstance(values, InFlightParameter):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (list, tuple)):
        return []
    return [found for value in values for found in _marked_in(value)]


class _Gather(NamedTuple):
    """A bucket in flight. ``stream`` is the stream that launched it.

    If ``is_guarded``, its parameters may be in flight after the step: a read of one waits for it.
    """

    work: Work
    buffer: Tensor
    is_guarded: bool
    stream: Hashable


class ParameterGatherer:
    """All-gathers flat buckets in place.

    Launching is collective, waiting is not: a rank may wait earlier than others.

    Args:
        collectives: Carry the parameters.
        streams: Streams of the parameters' device.
    """

    def __init__(self, collectives: Collectives, streams: Streams) -> None:
        self.collectives = collectives
        self.streams = streams
        self.overlaps = False
        self._in_flight: dict[ParameterBucket, _Gather] = {}
        # A thread that saves a checkpoint reads parameters, too.
        self._lock = threading.RLock()

    @property
    def is_busy(self) -> bool:
        """Whether any parameters are in flight."""
        return bool(self._in_flight)

    def launch(self, bucket: ParameterBucket) -> None:
        """Sends this rank's shard of ``bucket``, in which some rank has stepped. Receives the other ranks' shards.

        Collective: all ranks launch the same buckets in the same order. Call :meth:`finish_prompt` afterwards.

        Args:
            bucket: The bucket.
        """
        overlaps = self.overlaps and bucket.is_read_through_parameters
        buffer = bucket.parameters_to_send()
        with marked(f"zero1_custom: all-gather parameters of bucket {bucket.index}"):
            work = self.collectives.all_gather(buffer, bucket.layout.bounds)
        # A bucket that sends nothing has arrived at once.
        is_guarded = overlaps and work is not DONE
        with self._lock:
            self._in_flight[bucket] = _Gather(work, buffer, is_guarded, self.streams.current())
        # A graph that saved the old values must not run backward with the new ones: torch raises an error for it.
        stepped = [slot.parameter for slot in bucket.slots if slot.used or slot.parameter.grad is not None]
        torch.autograd.graph.increment_version(stepped)
        if is_guarded:
            mark(bucket.parameters, partial(self._arrive, bucket))

    def finish_prompt(self) -> None:
        """Waits for buckets that could be read without a guard."""
        with self._lock:
            prompt = [bucket for bucket, gather in self._in_flight.items() if not gather.is_guarded]
        for bucket in prompt:
            self._arrive(bucket)

    def finish(self) -> None:
        """Waits for everything in flight. Not collective."""
        for bucket in list(self._in_flight):
            self._arrive(bucket)

    def abandon(self) -> None:
        """Waits as :meth:`finish` does. Call it after an exception, when other ranks may have ended."""
        try:
            self.finish()
        except RuntimeError:
            for bucket in list(self._in_flight):
                if self._in_flight.pop(bucket).is_guarded:
                    unmark(bucket.parameters)

    def _arrive(self, bucket: ParameterBucket) -> None:
        with self._lock:
            gather = self._in_flight.get(bucket)
            if gather is None:
                return
            here = self.streams.current()
            mark_of_wait = marked(f"zero1_custom: wait for parameters of bucket {bucket.index}")
            with mark_of_wait, self.streams.on(gather.stream):
                self.collectives.wait(gather.work)
                bucket.finish_gather(gather.buffer)
                # Last: another thread that finds an ordinary parameter reads it at once.
                del self._in_flight[bucket]
                if gather.is_guarded:
                    unmark(bucket.parameters)
            if here != gather.stream:
                # The reader's stream waits. The launching stream, which reads next in most trainings, has waited for
                # the collective.
                self.streams.wait_for(gather.stream)
