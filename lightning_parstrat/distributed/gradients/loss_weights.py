"""Weights of micro-batches: the factor of each loss, and the total over all ranks by which the sum is divided.

In the first step of a training, the ranks agree whether all of them give weights, and of what size. From then on the
total is in the step's control message.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_parstrat.core.accumulation import reference_weight
from lightning_parstrat.distributed.comm.agreement import all_gather_object
from lightning_parstrat.distributed.comm.control_messages import ControlMessages, WeightSum
from lightning_parstrat.distributed.comm.work import marked
from lightning_parstrat.distributed.engine.cuts import local

Watch = Callable[[Callable[[Tensor], None]], Callable[[], None]]
"""Passes the gradients of the next backward to a function, until what it returns is called."""

WEIGHT_CAME_LATE = (
    "`training_step` returned a `loss_weight` now and none before. Return it in every step, from the first."
)


def watch_gradients(parameters: Iterable[Tensor], note: Callable[[Tensor], None]) -> Callable[[], None]:
    """Passes the gradient of each parameter that is trained to a function. Not collective.

    Returns:
        A function that ends it.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    hooks = [one.register_hook(note) for one in trained]  # type: ignore[no-untyped-call]

    def end() -> None:
        for hook in hooks:
            hook.remove()

    return end


class InconsistentWeightsError(ValueError):
    """A ``loss_weight`` is missing on some ranks or steps, or is no weight, or is 0 and its gradients are NaN."""


class LossWeights:
    """Turns a window's sum of gradients into their weighted mean.

    Every micro-batch's loss is multiplied by its weight over a reference that all ranks share. If weights are on a GPU,
    the host waits for them after backward has been queued. It also waits once in the training's first step. The host
    has to know whether a step has any weight: without weight, nothing is stepped.

    Args:
        messages: Carry the sums of weights.
    """

    def __init__(self, messages: ControlMessages) -> None:
        self.reference = 1.0
        self._messages = messages
        self._is_sent = False
        self._used: bool | None = None
        self._reference_known = False
        self._window: dict[int, float | _HostCopy] = {}
        self._looks: dict[int, _Look] = {}
        self._fault: str | None = None

    @property
    def used(self) -> bool:
        """Whether micro-batches have weights. Before the first weight is known, False."""
        return bool(self._used)

    def note_fault(self, fault: str) -> None:
        """Makes the next :meth:`total` raise on all ranks.

        Args:
            fault: What happened on this rank.
        """
        self._fault = fault

    def begin_window(self) -> None:
        """Drops the weights of micro-batches whose gradients have been used, or dropped."""
        self.end_backward()
        self._window.clear()
        self._looks.clear()

    def add(self, micro_batch: int, weight: Any, watch: Watch = lambda _: lambda: None) -> float | Tensor | None:
        """Takes the weight of the micro-batch whose backward comes next.

        Collective in the first step of a training.

        Args:
            micro_batch: Its number in the window. The same number again (by a closure) replaces its weight.
            weight: A number or a tensor of one element. If the module gives none, None.
            watch: Passes on gradients. If the weight is 0, or on a GPU, they are checked until :meth:`end_backward`.
                0 times NaN is NaN, and would make the whole window NaN.

        Returns:
            The factor of the micro-batch's loss. If losses stay as they are, None. It is a tensor only on a GPU.

        Raises:
            InconsistentWeightsError: In the first step, on all ranks: only some give weights, or one gives an invalid
                weight. In a later step, on this rank: it gives a weight and earlier steps did not.
        """
        if self._used is False:
            if weight is None:
                return None
            raise InconsistentWeightsError(WEIGHT_CAME_LATE)
        value = self._read(weight)
        if not self._reference_known:
            self._agree(value, weight is not None)
        if not self._used:
            return None
        self.end_backward()
        self._window[micro_batch], self._is_sent = value, False
        if isinstance(value, _HostCopy) or value == 0:
            self._looks[micro_batch] = _Look(watch)
        return (value.on_device if isinstance(value, _HostCopy) else value) / self.reference

    def end_backward(self) -> None:
        """Ends the check of gradients. Call it after a failed backward, too."""
        for look in self._looks.values():
            look.end()

    def total(self) -> float:
        """The sum of the window's weights over all ranks, divided by the reference. The next reference follows it.

        Call it when the window's control message has been launched. If none was launched since the last weight, because
        the window's last backward has sent nothing, it is collective.

        Raises:
            InconsistentWeightsError: A weight on any rank was negative, not finite or missing. Or it was 0 and the
                micro-batch's gradients are not finite. Raised on all ranks.
        """
        # If weights have come since the latest message, alike on all ranks, another one.
        if not self._is_sent:
            self._messages.launch()
        summed = self._messages.latest().weights
        self._check(summed)
        total = summed.weight / self.reference
        if summed.weight > 0:
            self.reference = reference_weight(summed.weight / summed.given)
        return total

    def _agree(self, weight: "float | _HostCopy", given: bool) -> None:
        """Finds out whether micro-batches have weights, whether on a GPU, and their size if any is not 0."""
        ranks = self._messages.control.world_size
        values = torch.tensor(self._with_faults(float(weight), float(given)), dtype=torch.float64)
        with marked("lightning_parstrat: sum loss weights over ranks"):
            self._messages.control.all_reduce(values).wait()
        summed = WeightSum(*values.tolist())
        self._check(summed)
        if 0 < summed.given < ranks:
            raise InconsistentWeightsError(
                f"`training_step` returned a `loss_weight` on {summed.given:.0f} of {ranks} ranks; this one"
                f" {'did' if given else 'did not'}. Return it on all ranks, 0 if there is nothing to learn from."
            )
        self._used = given
        if given:
            self._messages.weigh = self._for_message
        self._reference_known = not given or summed.weight > 0
        if summed.weight > 0:
            self.reference = reference_weight(summed.weight / ranks)

    def _for_message(self) -> WeightSum:
        self._is_sent = True
        for micro_batch, look in self._looks.items():
            if float(self._window[micro_batch]) == 0 and not look.is_finite():
                self._fault = _NOT_FINITE
        return self._with_faults(sum(map(float, self._window.values())), float(len(self._window)))

    def _with_faults(self, weight: float, given: float) -> WeightSum:
        return WeightSum(weight, given, 0.0 if self._fault is None else 1.0)

    def _check(self, summed: WeightSum) -> None:
        if summed.faults:
            faults = enumerate(all_gather_object(self._fault, self._messages.control.group))
            raise InconsistentWeightsError("\n".join(f"rank {rank}: {fault}" for rank, fault in faults if fault))
        if not math.isfinite(summed.weight):
            raise InconsistentWeightsError("The `loss_weight`s of all ranks add up to more than a float can hold.")

    def _read(self, weight: Any) -> "float | _HostCopy":
        """A weight as a number. An invalid weight counts 0, and is an error on all ranks with the next total."""
        if weight is None:
            if self._used:
                self._fault = (
                    "`training_step` returned a `loss_weight` before and none now. Return it in every step, 0 if"
                    " there is nothing to learn from."
                )
            return 0.0
        if isinstance(weight, Tensor) and weight.numel() == 1 and weight.is_cuda:
            return _HostCopy(weight, self)
        try:
            return self.checked(float("nan" if isinstance(weight, (str, bytes)) else weight))
        except (TypeError, ValueError, ArithmeticError, RuntimeError):
            self._fault = f"Invalid loss_weight: {weight!r}. Must be a number or a tensor of one element."
            return 0.0

    def checked(self, value: float) -> float:
        """The value, if it is a weight. Otherwise 0, and an error on all ranks with the next total."""
        if math.isfinite(value) and value >= 0:
            return value
        self._fault = f"Invalid loss_weight: {value}. Must be finite and at least 0."
        return 0.0


class _HostCopy:
    """A GPU's number that is being copied to the host. The host waits for the copy only when it reads the number.

    Args:
        weight: One element on a CUDA device.
        weights: Checks the number after it has arrived.
    """

    def __init__(self, weight: Tensor, weights: LossWeights) -> None:
        self.on_device = weight.detach().reshape(()).float()
        self._weights = weights
        self._host = torch.empty((), dtype=torch.float32, pin_memory=True)
        self._host.copy_(self.on_device, non_blocking=True)
        self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._arrived.record()
        self._value: float | None = None

    def __float__(self) -> float:
        if self._value is None:
            self._arrived.synchronize()
            self._value = self._weights.checked(float(self._host))
        return self._value


_NOT_FINITE = (
    "The gradients of a micro-batch whose `loss_weight` is 0 are not finite: its loss is a mean over nothing, 0 / 0."
    " Divide by `mask.sum().clamp(min=1)`, for which its gradients are zeros."
)


class _Look:
    """Whether the gradients of one backward are finite: a sum of each, on its device. Only a read waits on the host.

    Args:
        watch: Passes on the gradients until :attr:`end` is called.
    """

    def __init__(self, watch: Watch) -> None:
        self._sums: list[Tensor] = []
        self.end = watch(self._note)

    def _note(self, gradient: Tensor) -> None:
        self._sums.append(local(gradient).sum())

    def is_finite(self) -> bool:
        """Waits for the device."""
        return all(bool(one.isfinite()) for one in self._sums)
