"""Differences between steps in a pipeline and steps on the whole batch by one process, as first steps show them."""

import math
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_parstrat.core.tensor_trees import are_same
from lightning_parstrat.core.wording import listed
from lightning_parstrat.distributed.pipeline.cut_module import PipelineError, left_tensors
from lightning_parstrat.distributed.pipeline.schedule import Pipeline
from lightning_parstrat.distributed.torch_compat import version_of

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class Differences:
    """Watches the first step of each kind, such as ``validation_step``. Not collective.

    Args:
        module: The module.
        own_blocks: This rank's blocks by their names.
        pipeline: Runs the stages of this rank.
        micro_batches: Their number.
    """

    def __init__(
        self, module: nn.Module, own_blocks: Mapping[str, nn.Module], pipeline: Pipeline, micro_batches: int
    ) -> None:
        self._module, self._own_blocks = module, dict(own_blocks)
        self._pipeline, self._micro_batches = pipeline, micro_batches
        self._begun, self._first = set[str](), ""
        self._left_before = dict[str, Tensor]()
        self._buffers_before = dict[str, tuple[Tensor, Tensor]]()
        self._changed = dict[bool, set[str]]()
        """Buffers and attributes that have changed in the last stage, and before."""

    def begin(self, name: str) -> None:
        """Call when a step of that name begins."""
        self._first = "" if name in self._begun else name
        self._begun.add(name)
        self._changed = {True: set(), False: set()}
        is_trained = self._first == "training_step"
        self._buffers_before = {n: (one, one.clone()) for n, one in self._module.named_buffers() if is_trained}

    @contextmanager
    def watching(self, number: int, is_last: bool) -> Generator[None, None, None]:
        """Within it, a stage of the step runs on a micro-batch.

        Args:
            number: The number of the micro-batch.
            is_last: Whether it is the last stage.
        """
        if not self._first:
            yield
            return
        if number == 1:
            # What a block keeps, such as a table, is there after the first micro-batch, and stays.
            self._left_before = left_tensors(self._own_blocks)
        before = self._content()
        try:
            yield
        finally:
            after = self._content()
            self._changed[is_last] |= {name for name in after if before.get(name) != after[name]}

    def _content(self) -> dict[str, Any]:
        """Digests that show whether the module's attributes, and its buffers but those of norms, have changed."""
        norms = tuple(f"{name}." for name, one in self._module.named_modules() if isinstance(one, BATCH_NORMS))
        buffers = {name: one for name, one in self._module.named_buffers() if not name.startswith(norms)}
        own = {f"self.{name}": one for name, one in vars(self._module).items() if name[0] != "_" and name != "log"}
        return {name: _shown(one) for name, one in {**buffers, **own}.items()}

    def left(self) -> dict[str, Tensor]:
        """Values that blocks have left on their modules since the second micro-batch began, by their places."""
        found = left_tensors(self._own_blocks)
        return {place: one for place, one in found.items() if self._left_before.get(place) is not one}

    def changed_buffers(self) -> dict[str, float]:
        """Buffers that the first training step has changed on this rank, with the sum of magnitudes. Later none."""
        now = dict(self._module.named_buffers())
        found = {
            name: float(now[name].detach().to(torch.complex128).nan_to_num().abs().sum())
            for name, (buffer, value) in self._buffers_before.items()
            if name in now and not (now[name] is buffer and are_same(buffer, value))
        }
        self._buffers_before = {}
        return found

    def gathers(self) -> dict[str, int]:
        """How many tensors this rank would gather to compute each metric, after a first step. Later none."""
        named = self._module.named_modules() if self._first else ()
        return {name: _gathers_of(one) for name, one in named if isinstance(one, Metric)}

    def lines(self, returns_no_mean: bool) -> Iterator[str]:
        """Warnings after a first step. None after others.

        Args:
            returns_no_mean: Whether an evaluation's step has returned what has no mean over micro-batches.
        """
        if not self._first:
            return
        # After the step, as Hugging Face registers them in it.
        if hooked := self._pipeline.cut.hooked:
            yield (
                f"Forward hooks are registered in blocks, on {listed(hooked)}. Each rank runs the hooks in its own"
                " stages. If the loss takes what they collect, such as router losses, it is wrong. Return that from the"
                " blocks, or take a strategy that keeps the module whole."
            )
        left, is_cut, trains = [*self.left()], self._micro_batches > 1, self._first == "training_step"
        if left and is_cut:
            yield (
                f"Blocks leave tensors on their modules, which other ranks do not see: {listed(left)}. What reads"
                " them on another rank reads old values, or none."
            )
        buffers = sorted(name for name in self._changed[True] | self._changed[False] if not name.startswith("self."))
        if buffers and trains and is_cut:
            yield (
                f"A step changes buffers: {listed(buffers)}. It does so for each micro-batch, as under accumulation."
                " Change what counts batches in `on_train_batch_start`."
            )
        later = sorted(name for name in self._changed[True] - self._changed[False] if name.startswith("self."))
        if later and self._pipeline.last_rank:
            yield (
                f"`{self._first}` changes {listed(later)} on the rank of the last stage alone. Hooks on other ranks"
                f" see what was before. {'Log it' if trains else 'Return it, as hooks get that on all ranks'}."
            )
        if returns_no_mean and is_cut:
            yield (
                f"`{self._first}` returns whole numbers, or tensors whose first dimension is not the samples. Hooks get"
                " their mean over micro-batches, and not those of the whole batch. Return tensors with an element for"
                " each sample, or log counts with `reduce_fx='sum'`."
            )


def fault_of_buffers(changed: Sequence[Mapping[str, float]]) -> PipelineError | None:
    """The error for buffers that several ranks have changed, and not alike. None if there are none."""
    sums = defaultdict[str, list[float]](list)
    for of_rank in changed:
        for name, own in of_rank.items():
            sums[name].append(own)
    # All ranks run the code before the first block, and kernels of a GPU may round differently each time.
    several = [name for name, found in sums.items() if not math.isclose(min(found), max(found), rel_tol=1e-4)]
    if not several:
        return None
    return PipelineError(
        f"Stages on several ranks change {listed(several)}, and each rank keeps its own values. Several stages call one"
        " module, such as a BatchNorm before and after the blocks. Make a module for each call, or take a strategy that"
        " keeps the module whole."
    )


def _gathers_of(metric: Metric) -> int:
    gathered = []

    def gather(state: Tensor, group: Any) -> list[Tensor]:
        gathered.append(group)
        return [state]

    metric.sync(gather, distributed_available=lambda: True)
    metric.unsync()
    return len(gathered)


def fault_of_metrics(gathers: Sequence[Mapping[str, int]]) -> PipelineError | None:
    """The error for metrics for which ranks would wait, as their states are lists of different lengths. Or None."""
    apart = [name for name in gathers[0] if len({of_rank.get(name) for of_rank in gathers}) > 1]
    if not apart:
        return None
    return PipelineError(
        f"A step updates {listed(apart)} on the rank of the last stage alone. torchmetrics gathers items of its lists"
        " one by one, and other ranks have none. Return from the step what the metric needs, and update it in"
        " `on_validation_batch_end` or `on_test_batch_end`, which get that on all ranks."
    )


def _shown(value: Any) -> Any:
    """A token that differs if a value has been replaced, or changed in place."""
    if isinstance(value, Tensor):
        return id(value), 0 if value.is_inference() else version_of(value)
    if isinstance(value, dict):
        return id(value), {key: _shown(one) for key, one in value.items()}
    if isinstance(value, (list, set)):
        return id(value), len(value)
    return value if isinstance(value, (int, float, str)) else id(value)
