"""A step over micro-batches, by one of torch's pipeline schedules."""

import functools
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from typing_extensions import override

from lightning_parstrat.core.stages import Stages
from lightning_parstrat.core.tensor_trees import leaves
from lightning_parstrat.distributed.pipeline.cut_module import CutModule, PipelineError
from lightning_parstrat.distributed.pipeline.holders import HeldParts
from lightning_parstrat.distributed.torch_compat import is_view

_CLASSES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "looped_bfs": "LoopedBFS",
    "zero_bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
"""torch's schedules by our names."""
_SPLITS_BACKWARD = ("zero_bubble", "zbv", "dualpipev")

Step = Callable[[int, bool], Any]
"""Runs the module's step on the micro-batch of this number, and is told whether in the last stage."""
Loss = Callable[[int, Any], Tensor | None]
"""Makes the loss of a micro-batch of what its step has returned. None if it counts nothing."""
Seed = Callable[[int, int], None]
"""Seeds random numbers for a micro-batch, and for a place in its step."""


def takes_many(schedule: str) -> bool:
    """Whether a schedule runs several stages on a rank."""
    return issubclass(get_schedule_class(_CLASSES[schedule]), PipelineScheduleMulti)


def turns_back(schedule: str) -> bool:
    """Whether the stages of a schedule go back over the ranks."""
    return schedule in ("zbv", "dualpipev")


class _Shaped(PipelineStage):
    """A stage whose micro-batches may differ in their shapes.

    Attributes:
        received: The tensors that the stage receives, by micro-batch. They have no values.
        sent: The tensors that it sends.
        pipeline: Keeps what has failed.
    """

    pipeline: "Pipeline"
    received: Sequence[Sequence[Tensor]] = ()
    sent: Sequence[Sequence[Tensor]] = ()

    @override
    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.is_first:
            self._fit(self.args_recv_info[fwd_chunk_id], self.received[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    @override
    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.has_backward and not self.is_last:
            self._fit(self.grad_recv_info[bwd_chunk_id], self.sent[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    @override
    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        ends = kwargs.get("full_backward", True)
        self._guarded(bwd_chunk_id, ends, super().backward_one_chunk, *args, **kwargs)

    @override
    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self._guarded(bwd_chunk_id, True, super().backward_weight_one_chunk, *args, **kwargs)

    def _guarded(self, chunk: int, ends: bool, run: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Runs a backward. If it fails, now or before, the earlier stage gets zeros and does not wait."""
        if self.pipeline.fault is None:
            try:
                with self.pipeline.cut.backward(self.stage_index, chunk, ends):
                    run(chunk, *args, **kwargs)
                return
            except Exception as error:
                # torch describes the tensors, and chains what was raised.
                fault = error.__cause__ if isinstance(error.__cause__, Exception) else error
                self.pipeline.fault = _kept(self.pipeline.explained(fault))
        received = [] if self.is_first else self.received[chunk]
        self.bwd_cache[chunk] = tuple(
            torch.zeros(like.shape, dtype=like.dtype, device=self.device) if like.requires_grad else None
            for like in received
        )
        self.fwd_cache.pop(chunk, None)

    @override
    def get_local_bwd_output(self, mb_index: int) -> Any:
        # If a rank has two stages in a row, torch asks in an evaluation, too.
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()  # type: ignore[no-untyped-call]

    @override
    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def _fit(self, infos: Sequence[Any], shapes: Sequence[Tensor]) -> None:
        for info, like in zip(infos, shapes, strict=True):
            if info.buffer is not None and info.buffer.shape != like.shape:
                info.buffer = torch.empty(like.shape, dtype=like.dtype, device=self.device)

    @override
    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        gradients = self.bwd_cache.get(bwd_chunk_id, ())
        if self.has_backward and not self.is_first:
            # What a loss does not depend on has no gradient, and the stage before waits for one. Gloo sends memory,
            # whatever the strides.
            self.bwd_cache[bwd_chunk_id] = tuple(
                torch.zeros(like.shape, dtype=like.dtype, device=self.device)
                if gradient is None and like.requires_grad
                else None
                if gradient is None
                else gradient.contiguous()
                for gradient, like in zip(gradients, self.received[bwd_chunk_id], strict=True)
            )
        return super().get_bwd_send_ops(bwd_chunk_id)


class _StageModule(nn.Module):
    """The module of a stage, for torch. After a fault it returns zeros, so that no other rank waits.

    Args:
        run: Runs the stage for the received tensors and the number of a micro-batch.
        parameters: The parameters that this stage holds.
    """

    def __init__(self, run: Callable[[Sequence[Tensor], int], Any], parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self._run = run
        self.own = nn.ParameterList(parameters)

    @override
    def forward(self, *received: Tensor, number: Tensor) -> Any:
        return self._run(received, int(number))


class Pipeline:
    """Runs the stages of this rank on micro-batches.

    Args:
        cut: Runs a step in stages.
        stages: How blocks and ranks are divided.
        parts: What this rank holds of the module.
        schedule: The name of a schedule.
        micro_batches: Their number in a step.
        group: The ranks of this pipeline.
        device: The device of this rank.

    Raises:
        ValueError: The schedule does not allow so many micro-batches.
    """

    def __init__(
        self,
        cut: CutModule,
        stages: Stages,
        parts: HeldParts,
        schedule: str,
        micro_batches: int,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self.cut, self._stages, self._parts = cut, stages, parts
        self._name, self._micro_batches, self._group, self._device = schedule, micro_batches, group, device
        self.rank = dist.get_rank(group)
        """This rank among those of the pipeline."""
        self.last_rank = stages.rank_of(stages.count - 1)
        """The rank of the last stage."""
        self.own = stages.of_rank(self.rank)
        self.is_last = self.rank == self.last_rank
        """Whether this rank has the last stage."""
        self._schedules: dict[bool, tuple[Any, list[_Shaped]]] = {}
        """torch's schedules for training and evaluation, and their stages."""
        self._step: Step | None = None
        self._loss: Loss | None = None
        self._shapes: list[list[Any]] = []
        self._given = 0
        self._seed: Seed = lambda *_: None
        self.fault: Exception | None = None
        """The error of this rank in the step."""

    def run(self, step: Step, loss: Loss, shapes: list[list[Any]], seed: Seed, trains: bool) -> None:
        """Runs forward and backward of a step's micro-batches. Gradients are added to the parameters'. Collective.

        A rank whose part has failed continues with zeros, and :attr:`fault` is its error.

        Args:
            step: Runs the module's step on a micro-batch.
            loss: See :data:`Loss`. Called on the rank of the last stage.
            shapes: By micro-batch, the output of each block without values. An evaluation may have fewer micro-batches.
            seed: See :data:`Seed`.
            trains: Whether there are backwards.
        """
        count = self._micro_batches
        self._step, self._loss, self._seed, self.fault = step, loss, seed, None
        # Of micro-batches that are not there, torch sends zeros.
        self._given, self._shapes = len(shapes), [*shapes, *shapes[-1:] * (count - len(shapes))]
        if trains not in self._schedules:
            if trains:
                self._refuse_frozen()
            self._schedules[trains] = self._make_schedule()
        schedule, torch_stages = self._schedules[trains]
        for stage in torch_stages:
            own = self._stages.blocks(stage.stage_index)
            stage.received = [_tensors(outputs[own.start - 1]) if own.start else [] for outputs in self._shapes]
            stage.sent = [[] if stage.is_last else _tensors(outputs[own.stop - 1]) for outputs in self._shapes]
        begins, ends = 0 in self.own, self._stages.count - 1 in self.own
        inputs = (torch.zeros(count, 1, device=self._device),) if begins else ()
        # torch cuts these three into one element for each micro-batch.
        target = torch.zeros(count, device=self._device) if ends else None
        numbers = torch.arange(count)
        run = schedule.step if trains else schedule.eval
        try:
            run(*inputs, target=target, losses=[], return_outputs=False, number=numbers)
        finally:
            self._step = self._loss = None
            self.cut.forget_runs()

    def explained(self, fault: Exception) -> Exception:
        """An error that says what torch's does not. The same if there is none."""
        if "to not have been used in the graph" in str(fault):
            return PipelineError(
                "A step asks for a gradient by a tensor with which another stage computes, such as the input."
                " Each stage has its own part of the graph. Compute the penalty within a block, or take a strategy that"
                " keeps the module whole."
            )
        if self._name not in _SPLITS_BACKWARD or "graph a second time" not in str(fault):
            return fault
        return ValueError(
            f"schedule={self._name!r} splits backwards, and torch fails there if a parameter is used in several places"
            " outside of the blocks. Set schedule='1f1b' or 'interleaved'."
        )

    def _refuse_frozen(self) -> None:
        """Raises an error if a stage receives nothing that needs a gradient, from which torch splits a backward."""
        ends = self._stages.bounds[1:-1] if self._name in _SPLITS_BACKWARD else ()
        if any(not any(one.requires_grad for one in _tensors(self._shapes[0][end - 1])) for end in ends):
            raise ValueError(
                f"schedule={self._name!r} splits backwards, and torch loses gradients after stages in which nothing is"
                " trained. Set schedule='1f1b' or 'interleaved', or train a parameter of the first stage."
            )

    def _make_schedule(self) -> tuple[Any, list[_Shaped]]:
        stages = [self._make_stage(stage) for stage in self.own]
        given: Any = stages if takes_many(self._name) else stages[0]
        make = get_schedule_class(_CLASSES[self._name])
        try:
            made = make(given, self._micro_batches, loss_fn=lambda output, _: output, scale_grads=False)
        except ValueError as error:
            raise ValueError(
                f"schedule={self._name!r} of {self._stages.count} stages does not take microbatches="
                f"{self._micro_batches}: {error} Set another number of micro-batches, or another schedule."
            ) from error
        return made, stages

    def _make_stage(self, stage: int) -> _Shaped:
        own, is_last = self._stages.blocks(stage), stage == self._stages.count - 1

        def run(received: Sequence[Tensor], number: int) -> Any:
            return self._run(stage, received if own.start else (), number)

        start = torch.zeros(1, 1, device=self._device)
        made = _Shaped(
            _StageModule(run, self._parts.of_stage(stage)),
            stage,
            self._stages.count,
            self._device,
            input_args=tuple(map(_on_meta, _tensors(self._shapes[0][own.start - 1]))) if own.start else start,
            output_args=torch.zeros(()) if is_last else tuple(map(_on_meta, _tensors(self._shapes[0][own.stop - 1]))),
            group=self._group,
        )
        made.pipeline = self
        return made

    def _run(self, stage: int, received: Sequence[Tensor], number: int) -> Any:
        is_last = stage == self._stages.count - 1
        if self._step is None or self._loss is None:
            raise AssertionError("a stage was run outside of a step")
        step = self._step
        try:
            if self.fault is None and number < self._given:
                output = self.cut.run(
                    stage,
                    number,
                    lambda: step(number, is_last),
                    received,
                    self._shapes[number],
                    functools.partial(self._seed, number),
                    keeps=stage == self.own[-1],
                )
                made = self._loss(number, output) if is_last else tuple(map(_sendable, _tensors(output)))
                if made is not None:
                    return made
        except Exception as error:
            self.fault = _kept(self.explained(error))
        # Other ranks do not know of a fault yet. They get zeros that depend on what was received, for the backward.
        given = [one for one in received if one.requires_grad] or [
            one for one in self._parts.of_stage(stage) if one.requires_grad
        ]
        zero: Any = sum(one.float().sum() * 0 for one in given[:1])
        if is_last:
            return torch.zeros((), device=self._device) + zero
        end = self._stages.blocks(stage).stop - 1
        return tuple(
            torch.zeros(one.shape, dtype=one.dtype, device=self._device) + (zero if one.requires_grad else 0)
            for one in _tensors(self._shapes[number][end])
        )

    def settle(self) -> None:
        """Rebuilds schedules in the next step, as this rank holds other parameters now."""
        self._schedules.clear()


def _kept(fault: Exception) -> Exception:
    """A fault that is kept until the step has ended. Its frames hold tensors, and other ranks still need zeros."""
    if isinstance(fault, torch.OutOfMemoryError):
        traceback.clear_frames(fault.__traceback__)
    return fault


def _tensors(tree: Any) -> list[Tensor]:
    return [tensor for _, tensor in leaves(tree)]


def _sendable(tensor: Tensor) -> Tensor:
    # Schedules that split backwards detach it in place, which autograd refuses for a view.
    return tensor.clone(memory_format=torch.contiguous_format) if is_view(tensor) else tensor.contiguous()


def _on_meta(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device="meta").requires_grad_(like.requires_grad)


def replayed(value: Tensor, gradients: list[tuple[Tensor, Tensor]], scale: float) -> Tensor:
    """A loss whose backward adds gradients that exist already to those of the parameters. Not collective.

    Args:
        value: The loss, 0-d.
        gradients: Parameters with their gradients, which it multiplies in place.
        scale: What they are multiplied by, besides the gradient of the loss.
    """
    anchor = value.detach().clone().requires_grad_()

    def add(outer: Tensor) -> None:
        for parameter, gradient in gradients:
            own = gradient.mul_(outer * scale)
            parameter.grad = own if parameter.grad is None else parameter.grad + own
        gradients.clear()

    anchor.register_hook(add)  # type: ignore[no-untyped-call]
    # No leaf, as a loss is none.
    return anchor.clone()
