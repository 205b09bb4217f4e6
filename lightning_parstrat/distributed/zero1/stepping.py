"""Optimizers that step something else than their groups show, such as shards, by a ``step`` on the object.

Whoever goes by the class passes it by: ``Adam.step(optimizer)``, or ``optimizer.step`` kept from before the training. A
step taken so is refused.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_parstrat.distributed.profiling import marked
from lightning_parstrat.distributed.torch_compat import note_step_called

_STEPS = "_steps_otherwise"
"""On an optimizer while a step of its own runs, in which its class may step."""


def stepping_by(steps: Callable[[Optimizer, Callable[[], Any] | None, dict[str, Any]], Any]) -> Callable[..., Any]:
    """A ``step`` to be put on an optimizer's object, where Python finds it before the class's.

    Hooks of a step run once, around ``steps``, and see what the groups show.

    Args:
        steps: Steps an optimizer, given its closure and further arguments.
    """

    @Optimizer.profile_hook_step
    def between_hooks(self: Optimizer, closure: Callable[[], Any] | None = None, **arguments: Any) -> Any:
        return steps(self, closure, arguments)

    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        # For schedulers, whose wrapper of `step` this may stand in for.
        note_step_called(self)
        own = vars(self)
        is_nested = _STEPS in own
        own[_STEPS] = True
        try:
            return between_hooks(self, *args, **kwargs)
        finally:
            if not is_nested:
                own.pop(_STEPS, None)

    return step


def refuse_step_of_class(optimizer: Optimizer, *_: Any) -> None:
    """A hook before ``step`` of the optimizer's class, which knows nothing of shards.

    Raises:
        RuntimeError: The class's ``step`` was called otherwise than by the object's own.
    """
    if _STEPS not in vars(optimizer):
        name = type(optimizer).__name__
        raise RuntimeError(
            f"`{name}.step` was called, not `step` of the object, which alone knows of the shards that it steps. Call"
            f" `optimizer.step()`, not `{name}.step(optimizer)`, nor an `optimizer.step` kept from before the training."
        )


class ShownGroups:
    """Has an optimizer's groups hold other tensors for a while.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._parameters: list[list[Tensor]] | None = None
        self._mark: AbstractContextManager[object] | None = None

    def show(self, stand_ins: Sequence[Sequence[Tensor]], name: str = "") -> None:
        """Has each group hold its part of ``stand_ins`` instead of its parameters.

        Args:
            stand_ins: Of each group.
            name: For a trace, which shows how long.
        """
        if name:
            self._mark = marked(name)
            self._mark.__enter__()
        groups = self._optimizer.param_groups
        self._parameters = [group["params"] for group in groups]
        for group, tensors in zip(groups, stand_ins, strict=True):
            group["params"] = list(tensors)

    def restore(self) -> None:
        """Gives the groups their parameters back, if they have not got them."""
        if self._parameters is not None:
            # `load_state_dict` replaces the dictionaries; their order stays.
            for group, parameters in zip(self._optimizer.param_groups, self._parameters, strict=True):
                group["params"] = parameters
            self._parameters = None
        if self._mark is not None:
            self._mark.__exit__(None, None, None)
            self._mark = None


class ClosureEvaluatedAgainError(RuntimeError):
    """An optimizer called its closure a second time within one step."""


class OneEvaluation:
    """A closure that may be called once.

    Args:
        closure: What is evaluated.
        optimizer: The optimizer's name, for the message.
    """

    def __init__(self, closure: Callable[[], Any], optimizer: str) -> None:
        self._closure = closure
        self._optimizer = optimizer
        self._evaluated = False

    def __call__(self) -> Any:
        """Returns what the closure does.

        Raises:
            ClosureEvaluatedAgainError: It was called before.
        """
        if self._evaluated:
            raise ClosureEvaluatedAgainError(
                f"{self._optimizer} evaluates its closure more than once per step, which sharded optimizer state does"
                " not allow. With partition='auto' every rank steps an optimizer that does so, as under `ddp`."
            )
        self._evaluated = True
        return self._closure()
