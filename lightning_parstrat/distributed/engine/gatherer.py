"""Updated parameters are all-gathered: every rank sends the shard it stepped, and receives the others'.

Gathers run on while the next buckets step, the next batch is loaded and the next forward begins; who reads a parameter
waits for its bucket. All have arrived before the next backward.

While a bucket is gathered, its parameters are of a subclass of ``nn.Parameter`` whose ``__torch_function__`` waits for
the bucket before it lets the operation go on, and gives the parameters their own class back. Whoever holds a reference
is served: modules, penalties over a list of weights, ``state_dict``, optimizers, callbacks, copies. What asks for
shape, dtype, or gradient alone does not wait. Nothing is paid once a parameter has arrived; to mark and unmark one
takes some tenths of a microsecond.

Only C++ code that takes a parameter without asking torch could read one early, such as an extension called by its
module, or a captured CUDA graph: so modules that are called wait for what they hold, and for what their children hold
where another forward than their class's may not call those.
"""

import copy
import functools
import threading
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any, NamedTuple

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
"""What waits for a marked parameter, by its identity; marked parameters are held by their buckets."""

_WATCH: list[RemovableHandle] = []
"""The hook that has modules wait for what they hold: one for the process, while any parameter is marked."""


def _attributes(names: str) -> list[Any]:
    return [getattr(Tensor, name) for name in names.split()]


_KNOWN = "shape dtype device layout ndim grad requires_grad is_leaf grad_fn itemsize nbytes is_cuda is_meta is_sparse"
NEEDS_NO_CONTENT: set[Any] = {
    *(attribute.__get__ for attribute in (*_attributes(_KNOWN), *GRADIENT_HOOKS)),
    *(attribute.__set__ for attribute in (*_attributes("grad requires_grad"), *GRADIENT_HOOKS)),
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.stride,
    Tensor.element_size,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.is_contiguous,
    Tensor.requires_grad_,
    Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook,
    Tensor.__hash__,
    Tensor.__len__,
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
}


class InFlightParameter(nn.Parameter):
    """A parameter whose new values are being gathered. Never instantiated: :func:`mark` swaps classes."""

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
                # One is hidden in an object of the caller's.
                for arrive in list(_IN_FLIGHT.values()):
                    arrive()
        # A parameter's own calls the function as it is, and leaves the class of what it returns alone.
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # The copy is of the class that this has once it has arrived.
        wait_for_parameters([self])
        return copy.deepcopy(self, memo)


def mark(parameters: Iterable[Tensor], arrive: Callable[[], None]) -> None:
    """Has ``arrive`` called before anyone reads one of ``parameters``; it calls :func:`unmark`."""
    if not _WATCH:
        _WATCH.append(register_module_forward_pre_hook(_hook()))
    for parameter in parameters:
        _IN_FLIGHT[id(parameter)] = arrive
        parameter.__class__ = InFlightParameter


def unmark(parameters: Iterable[Tensor]) -> None:
    """Makes of ``parameters`` ordinary ones again."""
    for parameter in parameters:
        _IN_FLIGHT.pop(id(parameter), None)
        parameter.__class__ = nn.Parameter
    # A global hook costs every module call of the process some microseconds: it goes with the last parameter.
    while _WATCH and not _IN_FLIGHT:
        _WATCH.pop().remove()


def wait_for_parameters(parameters: Iterable[Tensor]) -> None:
    """Waits for those of ``parameters`` that are in flight."""
    for parameter in parameters:
        arrive = _IN_FLIGHT.get(id(parameter))
        if arrive is not None:
            arrive()
        elif type(parameter) is InFlightParameter:
            # A copy that something made of the class as it was.
            parameter.__class__ = nn.Parameter  # type: ignore[assignment]


def wait_for_parameters_in(module: nn.Module) -> None:
    """Waits for those that a module and its children hold."""
    if _IN_FLIGHT:
        wait_for_parameters([parameter for parameter in module.parameters() if type(parameter) is InFlightParameter])


@functools.cache
def _hook() -> Callable[[nn.Module, Any], None]:
    # A module that is compiled in place calls hooks where a compiler looks at all that is called.
    hook: Callable[[nn.Module, Any], None] = torch.compiler.disable(_wait_for_parameters_of)  # type: ignore[no-untyped-call]
    return hook


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
    """A bucket in flight; ``stream`` is the one it was launched from.

    ``is_guarded`` says that its parameters may be in flight after the step: who reads one waits for it.
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
        streams: Those of the parameters' device.
    """

    def __init__(self, collectives: Collectives, streams: Streams) -> None:
        self.collectives = collectives
        self.streams = streams
        self.overlaps = False
        self.steps = 0
        """How many times :meth:`finish_prompt` was called."""
        self._in_flight: dict[ParameterBucket, _Gather] = {}
        # A thread that saves a checkpoint reads parameters, too.
        self._lock = threading.RLock()

    @property
    def is_busy(self) -> bool:
        """Whether any parameters are in flight."""
        return bool(self._in_flight)

    def launch(self, bucket: ParameterBucket) -> None:
        """Sends this rank's shard of ``bucket``, in which some rank has stepped, and begins to receive the others'.

        Collective: all ranks launch the same buckets in the same order. :meth:`finish_prompt` is to follow.

        Args:
            bucket: The bucket.
        """
        overlaps = self.overlaps and bucket.is_read_through_parameters
        buffer = bucket.parameters_to_send()
        with marked(f"zero1_custom: all-gather parameters of bucket {bucket.index}"):
            work = self.collectives.all_gather(buffer, bucket.layout.bounds)
        # What has nothing to send is there at once.
        is_guarded = overlaps and work is not DONE
        with self._lock:
            self._in_flight[bucket] = _Gather(work, buffer, is_guarded, self.streams.current())
        # A graph that saved the old values must not be run backward with the new ones: torch raises on it.
        stepped = [slot.parameter for slot in bucket.slots if slot.used or slot.parameter.grad is not None]
        torch.autograd.graph.increment_version(stepped)
        if is_guarded:
            mark(bucket.parameters, partial(self._arrive, bucket))

    def finish_prompt(self) -> None:
        """Waits for buckets that somebody could read without being noticed."""
        self.steps += 1
        with self._lock:
            prompt = [bucket for bucket, gather in self._in_flight.items() if not gather.is_guarded]
        for bucket in prompt:
            self._arrive(bucket)

    def finish(self) -> None:
        """Waits for all that is in flight. Not collective."""
        for bucket in list(self._in_flight):
            self._arrive(bucket)

    def abandon(self) -> None:
        """Waits as :meth:`finish` does after an exception, when other ranks may not be there any more."""
        try:
            self.finish()
        except RuntimeError:
            for bucket in list(self._in_flight):
                self._in_flight.pop(bucket)
                unmark(bucket.parameters)

    def _arrive(self, bucket: ParameterBucket) -> None:
        with self._lock:
            gather = self._in_flight.get(bucket)
            if gather is None:
                return
            mark_of_wait = marked(f"zero1_custom: wait for parameters of bucket {bucket.index}")
            with mark_of_wait, self.streams.on(gather.stream):
                self.collectives.wait(gather.work)
                bucket.finish_gather(gather.buffer)
                # Last: another thread that finds an ordinary parameter reads it at once.
                del self._in_flight[bucket]
                unmark(bucket.parameters)
            if self.streams.current() != gather.stream:
                # The reader's. The launching one, which reads next in most trainings, has waited for the collective.
                self.streams.wait_for(gather.stream)
