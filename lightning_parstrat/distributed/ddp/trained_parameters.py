"""Which parameters are trained, during the whole training: torch's DDP checks once, when it wraps the module.

Gradients that torch's reducer does not send are averaged after the backward. Parameters that the reducer would wait for
in vain take part with zeros. So every step is right, even if parameters are frozen, unfrozen, added or removed before
or within it. There is one exception: a parameter that is frozen for a forward alone counts as unused. If a change
lasts, the reducer is rebuilt, and gradients are sent in buckets again.
"""

import operator
from collections.abc import Collection, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from lightning_parstrat.core.digests import digest
from lightning_parstrat.core.wording import listed
from lightning_parstrat.distributed.comm.agreement import (
    all_gather_object,
    all_have_same,
    any_rank_for_each,
)
from lightning_parstrat.distributed.comm.control_messages import ControlMessages
from lightning_parstrat.distributed.comm.liveness import NoCollectivesError, names_of
from lightning_parstrat.distributed.comm.module_states import broadcast_tensors
from lightning_parstrat.distributed.comm.work import Exchange
from lightning_parstrat.distributed.ddp.reducers import (
    Wrap,
    exchange_reducer,
    reason_to_keep,
    sent_by,
    trainable,
)
from lightning_parstrat.distributed.torch_compat import held_by

_IS_TRAINABLE = operator.attrgetter("requires_grad")


class DifferentParametersError(NoCollectivesError):
    """The ranks have not trained the same parameters in a step. Raised on all of them."""


class TrainedParameters:
    """Averages the gradients of all trained parameters, not only of those for which the reducer was made.

    A backward that sends gradients costs a check of every module's parameters: 0.1 to 0.2 microseconds for each module
    and each parameter. It also costs one control message, for which it does not wait. If a parameter is trained that
    the reducer does not send, it waits: the ranks must agree first that all of them have it.

    A reducer that finds unused parameters never waits in vain, and ranks may use different parameters. With such a
    reducer, unfrozen parameters count. Otherwise, parameters with a gradient count. After a change has lasted for two
    steps, the reducer is rebuilt.

    Args:
        ddp: The wrapper, before its first step.
        wrap: Makes a wrapper that sends the parameters trained at that time. None leaves the reducer unchanged.
        messages: Carry the values that the ranks compare.
    """

    def __init__(self, ddp: DistributedDataParallel, wrap: Wrap | None, messages: ControlMessages) -> None:
        self._ddp = ddp
        self._wrap = wrap
        self._messages = messages
        self._control = messages.control
        self._message: Exchange | None = None
        self._finds_unused = ddp.find_unused_parameters and not ddp.static_graph
        self.sent = sent_by(ddp)
        """The parameters that the reducer sends, and whether it expects a sparse gradient of each."""
        # All parameters that the wrapper has made equal on all ranks.
        self._equal = set(ddp.module.parameters())
        self._names: dict[Tensor, str] = {}
        self._accumulators: dict[Tensor, Any] = {}
        """The nodes of the graph by which the reducer notices gradients."""
        self._hooks: dict[Tensor, RemovableHandle] = {}
        self._fired: set[Tensor] = set()
        self._sends = False
        # The differences of the last backward. The reducer sends the first parameters, but they are frozen or gone. The
        # second ones are averaged beside it.
        self._idle: list[Tensor] = []
        self._beside: list[Tensor] = []
        self._without: list[Tensor] = []
        self._frozen_in_forward: list[Tensor] = []
        # Numbers of the changes in the backwards of this step and of the one before. 0 is no change.
        self._numbers: set[int] = set()
        self._numbers_before: set[int] = set()
        self._read_module()

    def begin_forward(self) -> bool:
        """Call before a forward whose backward sends gradients, or that begins a window. Collective after a change.

        Returns:
            Whether the reducer was rebuilt. Everything made for the old one is then void.
        """
        exchanged = False
        if self._numbers:
            before, self._numbers_before, self._numbers = self._numbers_before, self._numbers, set()
            # If parts are frozen alternately in every step, a rebuild would otherwise happen in every step.
            lasts = len(self._numbers_before) == 1 and self._numbers_before == before != {0}
            wanted = {*self.sent, *self._beside}.difference(self._idle)
            exchanged = lasts and self._is_alike() and self._exchange(wanted)
        self._frozen_in_forward = self._frozen()
        return exchanged

    def _frozen(self) -> list[Tensor]:
        """Parameters that the reducer sends, but that are frozen now."""
        # Usually none is: in C this takes half as long.
        return [] if all(map(_IS_TRAINABLE, self.sent)) else [one for one in self.sent if not one.requires_grad]

    def begin_backward(self, loss: Tensor, sends: bool) -> None:
        """Call before each backward of ``loss``, when DDP is prepared for it. If it sends gradients, collective.

        Raises:
            DifferentParametersError: The ranks have not trained the same parameters in the last backward that sent.
        """
        held = list(chain.from_iterable(self._views))
        # Not `==`, which compares tensors by element.
        if len(held) != len(self._held) or not all(map(operator.is_, held, self._held)):
            self._read_module()
        self._sends = sends
        if not sends:
            return
        self.settle()
        # What the reducer sends, but may be out of the graph: frozen at forward or now, or removed.
        in_doubt = () if self._finds_unused else (*self._frozen_in_forward, *self._frozen(), *self._removed)
        waits = list(dict.fromkeys(in_doubt))
        reached = _reached_by(loss, waits) if waits else set()
        self._idle = [one for one in waits if one not in reached]
        # As if they had not taken part: optimizers step parameters that have a gradient.
        frozen = {one for one in waits if not one.requires_grad}
        self._without = [one for one in waits if one.grad is None and (one in frozen or one not in reached)]
        if self._idle:
            # They take part with zeros, by a separate backward: the user's sees them unchanged.
            sparse = [one for one in self._idle if self.sent[one]]
            with torch.enable_grad(), trainable(self._idle):
                nothing = [_nothing_of(one, self.sent[one]) for one in self._idle]
            # A frozen parameter accumulates nothing, and its hooks run all the same. A sparse gradient must exist.
            with trainable(sparse):
                torch.autograd.backward(nothing)

    @torch.no_grad()
    def end_backward(self) -> None:
        """Call after the backward, before gradients are read. Averages what the reducer has not. Collective."""
        if not self._sends:
            return
        self._sends = False
        for parameter in self._without:
            parameter.grad = None
        self._without = []
        self._beside = self._found_beside()
        self._fired.clear()
        idle = sorted(f"without {self._label(one)}" for one in self._idle)
        beside = [f"with {self._label(one)}, {one.dtype}, new: {one not in self._equal}" for one in self._beside]
        number = digest([*idle, *beside]) if idle or beside else 0
        self._numbers.add(number)
        self._message = self._messages.launch(number=number)
        # Other ranks do not know of a change that they do not have. Only changes on all ranks may be sent.
        if self._beside and self._is_alike():
            self._average(self._beside)

    def settle(self) -> None:
        """Checks whether all ranks trained the same parameters in the last backward that sent. Collective.

        Raises:
            DifferentParametersError: They did not.
        """
        if not self._is_alike():
            left_out, added = (f"{self._label(one)}: left out" for one in self._idle), self._beside
            differing = [*left_out, *(f"{self._label(one)}: trained" for one in added)]
            by_rank: list[list[str]] = all_gather_object(differing, self._control.group)
            lines = []
            for one in sorted({one for of_rank in by_rank for one in of_rank}):
                ranks = [rank for rank, of_rank in enumerate(by_rank) if one in of_rank]
                if len(ranks) < len(by_rank):
                    lines.append(f"{one} by {names_of(ranks)} alone")
            raise DifferentParametersError(
                "The ranks do not train the same parameters in the same step:\n  "
                + listed(lines or ["they differ in their dtypes, or in which of them are new"], "\n  ")
                + "\nSet `requires_grad` alike on all ranks, and add and remove parameters alike: look for code that"
                " depends on the rank or on its data. Where ranks use different parameters on purpose, give"
                " find_unused_parameters=True."
            )

    def _is_alike(self) -> bool:
        return self._message is None or bool(self._message.wait().is_alike)

    def close(self) -> None:
        """Removes the hooks. Not collective."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def names_without_gradient(self) -> list[str]:
        """Names of parameters that the reducer sends and that have no gradient now. Not collective."""
        return [self._names[one] for one in self.sent if one.grad is None]

    def _read_module(self) -> None:
        module, ignored = self._ddp.module, self._ddp.parameters_to_ignore
        self._views = held_by(module.modules())
        self._held = list(chain.from_iterable(self._views))
        names: dict[Tensor, str] = {one: name for name, one in module.named_parameters() if name not in ignored}
        # A removed parameter keeps its name.
        self._names = {**{one: self._names.get(one, "") for one in self.sent}, **names}
        self._removed = [one for one in self.sent if one not in names]
        self._equal &= set(self._names)
        self._check_accumulators()
        beside = names.keys() - self.sent.keys()
        for parameter in self._hooks.keys() - beside:
            self._hooks.pop(parameter).remove()
        for parameter in beside - self._hooks.keys():
            if parameter.is_floating_point() or parameter.is_complex():
                # A frozen parameter may be unfrozen at any time. One that was made in inference mode never is.
                with suppress(RuntimeError), trainable([parameter]):
                    note = self._fired.add
                    self._hooks[parameter] = parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]

    def _check_accumulators(self) -> None:
        """Raises an error if the reducer does not notice a parameter's gradient any longer."""
        for one in (one for one in self.sent if one.requires_grad):
            with torch.enable_grad():
                view: Any = one.view_as(one)
            node = view.grad_fn.next_functions[0][0]
            if self._accumulators.setdefault(one, node) is not node:
                raise RuntimeError(
                    f"{self._label(one)}: its memory was replaced in the training, as `register_parametrization` and"
                    " `Tensor.set_` do. DDP does not notice its gradient any longer. Do that before the training, or"
                    " take `strategy='zero1_custom'`."
                )

    def _found_beside(self) -> list[Tensor]:
        chosen = self._fired & self._hooks.keys()
        if self._finds_unused:
            # Other ranks may use a parameter that this rank does not use.
            chosen |= {one for one in self._hooks if one.requires_grad}
        # All ranks must send them in the same order.
        return sorted(chosen, key=self._label)

    def _label(self, parameter: Tensor) -> str:
        return f"{self._names[parameter]!r} of shape {tuple(parameter.shape)}"

    def _average(self, parameters: Sequence[Tensor]) -> None:
        """Leaves the mean over ranks in ``param.grad``. Collective: all ranks have these parameters."""
        group = self._ddp.process_group
        # Each rank has made added parameters by its own random numbers.
        broadcast_tensors([one for one in parameters if one not in self._equal], group)
        self._equal.update(parameters)
        used = any_rank_for_each([one.grad is not None for one in parameters], self._control)
        for parameter in (one for one, is_used in zip(parameters, used, strict=True) if is_used):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.div_(self._control.world_size)
            if self._control.world_size > 1:
                dist.all_reduce(parameter.grad, group=group)

    def _exchange(self, wanted: Collection[Tensor]) -> bool:
        ddp = self._ddp
        if self._wrap is None or reason_to_keep(ddp) is not None:
            # Every step is right all the same, but takes longer.
            return False
        with trainable(wanted, ddp.module.parameters()):
            sent = sent_by(ddp)
        if not sent or not all_have_same(digest([self._label(one) for one in sent]), self._control):
            return False
        exchange_reducer(ddp, sent.keys(), self._wrap, None, self._control)
        self.sent, self._numbers_before, self._accumulators = sent, set(), {}
        self._read_module()
        return True


def _nothing_of(parameter: Tensor, sparse: bool) -> Tensor:
    """0, with zeros as the gradient of ``parameter``, whatever values the parameter has."""
    if sparse:
        rows = torch.empty(0, dtype=torch.long, device=parameter.device)
        return torch.nn.functional.embedding(rows, parameter, sparse=True).sum()
    nothing = parameter.reshape(-1)[:0].sum()
    return nothing.real if nothing.is_complex() else nothing


def _reached_by(loss: Tensor, wanted: Collection[Tensor]) -> set[Tensor]:
    """The parameters of ``wanted`` that are in the graph of ``loss``. Nodes are searched until all are found."""
    left = set(wanted)
    waiting: list[Any] = [loss.grad_fn]
    seen: set[Any] = {None}
    while waiting and left:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            left.discard(getattr(node, "variable", None))
            waiting += [following for following, _ in node.next_functions]
    return set(wanted) - left
