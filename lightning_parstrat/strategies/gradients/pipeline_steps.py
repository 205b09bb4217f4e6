"""A step of a pipeline: the module's step on micro-batches, and one loss, whose backward gives the gradients."""

import functools
import inspect
import random
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_parstrat.core.digests import digest
from lightning_parstrat.core.micro_batches import (
    check_samples,
    count_samples,
    cut_batch,
    has_no_mean,
    join_outputs,
    mean_over,
    signature,
)
from lightning_parstrat.core.tensor_trees import replace_leaves
from lightning_parstrat.distributed.comm.agreement import all_gather_object, any_rank, broadcast_object
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.gradients.loss_weights import InconsistentWeightsError
from lightning_parstrat.distributed.pipeline.cut_module import PipelineError, fault_of_left
from lightning_parstrat.distributed.pipeline.holders import HeldParts
from lightning_parstrat.distributed.pipeline.schedule import Loss, Pipeline, Seed, replayed
from lightning_parstrat.distributed.torch_compat import has_memory
from lightning_parstrat.strategies.data.random_numbers import rng_state, set_rng_state
from lightning_parstrat.strategies.gradients.accumulation import LOSS_WEIGHT
from lightning_parstrat.strategies.gradients.pipeline_differences import Differences, fault_of_buffers, fault_of_metrics
from lightning_parstrat.strategies.lightning_compat import unwrapped


class _Call(NamedTuple):
    """One call of ``self.log``. A metric is given by its name in the module."""

    name: str
    value: Any
    kwargs: dict[str, Any]


class _Told(NamedTuple):
    """The message of a rank to the others after a step.

    Attributes:
        fault: What has failed.
        lines: What to warn of.
        result: From the rank of the last stage, what its step has returned.
        calls: From there, what it has logged.
        buffers: See :meth:`Differences.changed_buffers`.
        gathers: See :meth:`Differences.gathers`.
        trained: Which parameters are trained from now on.
        settings: What the step has set in groups of optimizers.
        stops: Whether the fit is to end.
    """

    fault: str | None
    lines: list[str]
    result: Any
    calls: list[_Call]
    buffers: dict[str, float]
    gathers: dict[str, int]
    trained: int
    settings: int
    stops: bool


class PipelineSteps:
    """Runs the steps of a module that is cut into stages. Its methods are collective.

    Args:
        strategy: The strategy with the module.
        pipeline: Runs the stages of this rank.
        parts: What this rank holds of the module.
        control: The ranks of the pipeline. Messages are in host memory.
        same_data: The ranks with this one's data. Messages are in host memory.
        replicas: The ranks that do the same with other data. Messages are in host memory.
        of_stage: The ranks that hold the same stages. Messages are in host memory.
        micro_batches: Their number.
        batch_sizes: How many samples the batches of loaders have that are known, for training (True) and evaluation.
    """

    def __init__(
        self,
        strategy: DDPStrategy,
        pipeline: Pipeline,
        parts: HeldParts,
        control: Any,
        same_data: Any,
        replicas: Collectives,
        of_stage: Collectives,
        micro_batches: int,
        batch_sizes: Mapping[bool, Collection[int]],
    ) -> None:
        self._strategy, self._pipeline, self._parts = strategy, pipeline, parts
        self._control, self._same_data, self._replicas, self._of_stage = control, same_data, replicas, of_stage
        self._micro_batches = micro_batches
        self._batch_sizes = batch_sizes
        self._checked = set[str]()
        self.has_trained = False
        """Whether a step has shown which rank holds what is in no block."""
        self._shapes: dict[Any, list[Any]] = {}
        self._trained = 0
        self._settings_before: list[Any] = []
        self._differences = Differences(self._module, parts.own_blocks, pipeline, micro_batches)
        self._warned = set[str]()

    @property
    def _module(self) -> Any:
        return self._strategy.lightning_module

    def _cut_batch(self, name: str, batch: Any, most: int | None = None) -> tuple[list[Any], list[int]]:
        if name not in self._checked:
            check_samples(batch, self._batch_sizes[name == "training_step"])
            self._checked.add(name)
        return cut_batch(batch, self._micro_batches if most is None else min(self._micro_batches, most))

    def train(self, batch: Any, *args: Any) -> Any:
        """Runs forward and backward of the micro-batches of a batch.

        Returns:
            The loss. Its backward adds the gradients, times its own, to those of the parameters. If the module's step
            returns weights, the loss and the sum of the weights.

        Raises:
            PipelineError: The step cannot be cut, or has failed. Raised on all ranks of the pipeline.
            ValueError: The module has got new parameters.
        """
        self._parts.check()
        micro_batches, sizes = self._cut_batch("training_step", batch)
        sharded = self._parts.sharded
        losses: dict[int, tuple[Tensor, float]] = {}

        def loss(number: int, output: Any) -> Tensor | None:
            value, weight = _loss_and_weight(output)
            if any(isinstance(other, int) != (weight is None) for _, other in losses.values()):
                raise InconsistentWeightsError(
                    "`training_step` returned a `loss_weight` for some micro-batches of a batch and none for others."
                    " Return it for all, 0 if there is nothing to learn from."
                )
            if sharded is not None:
                sharded.note_loss(value)
            losses[number] = (value.detach(), sizes[number] if weight is None else weight)
            scale = sizes[number] / sum(sizes) if weight is None else weight
            # 0 times NaN is NaN, and would make the whole batch NaN.
            return value * scale if scale else None

        parameters = [one for one in self._module.parameters() if has_memory(one)]
        before = [one.grad for one in parameters]
        for one in parameters:
            one.grad = None
        taken = self._run("training_step", micro_batches, args, loss)
        # In its first step, FSDP2 cannot reduce what has not run.
        if sharded is not None and (self.has_trained or not any_rank(self._pipeline.fault is not None, self._replicas)):
            try:
                sharded.reduce(self._replicas, self._of_stage)
            except ValueError as error:
                self._pipeline.fault = self._pipeline.fault or error
        if not self.has_trained and self._pipeline.fault is None:
            self._pipeline.fault = fault_of_left(self._differences.left())
        last = self._tell(losses, taken, sizes)[self._pipeline.last_rank]
        if not self.has_trained and any_rank(any(weight for _, weight in last.result.values()), self._replicas):
            dropped = self._settle()
            # They have no gradient here, and cannot be used any longer.
            kept = [pair for pair in zip(parameters, before, strict=True) if pair[0] not in dropped]
            parameters, before = [one for one, _ in kept], [gradient for _, gradient in kept]
            self.has_trained = True
        self._parts.sum_gradients()
        gradients = [(one, one.grad) for one in parameters if one.grad is not None]
        for one, gradient in zip(parameters, before, strict=True):
            one.grad = gradient
        taken.log(last.calls)
        return self._output(last.result, gradients)

    def _run(self, name: str, micro_batches: Sequence[Any], args: Sequence[Any], loss: Loss) -> "_Taken":
        """Runs a step on micro-batches, and takes what they log."""
        taken, plugin = _Taken(self._module, name == "training_step"), self._strategy.precision_plugin
        kind = name.removesuffix("ing_step").removesuffix("idation_step").removesuffix("_step")
        context = getattr(plugin, f"{kind}_step_context")
        self._differences.begin(name)
        self._settings_before = self._settings()

        def step(number: int, is_last: bool) -> Any:
            with taken.taking(number, is_last), context(), self._differences.watching(number, is_last):
                return getattr(self._module, name)(micro_batches[number], *args)

        # The second of an evaluation's arguments is the number of the loader.
        shapes = self._shapes_of(name, micro_batches, step, args[1:])
        if self._parts.sharded is not None:
            # They stay gathered until the step has ended.
            self._parts.sharded.gather()
        # Hooks may have drawn on some ranks alone, such as for a picture on rank 0.
        base = broadcast_object(int(torch.randint(2**62, ())), self._same_data)
        with _random_numbers(self._strategy.root_device, base) as seed:
            self._pipeline.run(step, loss, shapes, seed, trains=kind == "train")
        if self._parts.sharded is not None and kind != "train":
            # Hooks that follow read and write shards.
            self._parts.sharded.free()
        return taken

    def _settle(self) -> Mapping[Tensor, nn.Parameter]:
        """Leaves what is in no block to the ranks that have used it, before any optimizer has stepped."""
        dropped = self._parts.settle(self._control, self._replicas)
        replace_stepped(self._strategy.optimizers, dropped)
        self._pipeline.settle()
        return dropped

    def _output(self, losses: Mapping[int, tuple[Tensor, float]], gradients: list[tuple[Tensor, Tensor]]) -> Any:
        values, weights = zip(*losses.values(), strict=True)
        is_weighed = any(isinstance(weight, float) for weight in weights)
        total = sum(weights)
        sharded = self._parts.sharded
        if is_weighed and sharded is not None and sharded.are_sharded:
            # Shards have the mean over pipelines of what is weighed by the losses' own weights.
            totals = torch.tensor([total], dtype=torch.float64)
            self._replicas.all_reduce(totals).wait()
            total = float(totals) / self._replicas.world_size
        mean = mean_over(values, weights) if sum(weights) else torch.zeros(())
        scale = (1 / total if total else 1.0) if is_weighed else 1.0
        loss = replayed(mean.to(self._strategy.root_device), gradients, scale)
        return {"loss": loss, LOSS_WEIGHT: total} if is_weighed else loss

    def evaluate(self, name: str, batch: Any, *args: Any) -> Any:
        """Runs a step of an evaluation.

        Args:
            name: The module's method, such as ``validation_step``.
            batch: The batch.
            *args: Its other arguments.

        Returns:
            What one step on the whole batch would return, on all ranks.

        Raises:
            PipelineError: The step cannot be cut, or has failed. Raised on all ranks.
        """
        micro_batches, sizes = self._cut_batch(name, batch, count_samples(batch))
        outputs: dict[int, Any] = {}
        taken, joined, is_last = self._run(name, micro_batches, args, outputs.__setitem__), None, self._pipeline.is_last
        try:
            joined = join_outputs([*outputs.values()], sizes) if is_last and self._pipeline.fault is None else None
        except Exception as error:
            self._pipeline.fault = error
        no_mean = any(map(has_no_mean, outputs.values(), sizes))
        last = self._tell(joined, taken, sizes, no_mean)[self._pipeline.last_rank]
        taken.log(last.calls)
        device = self._strategy.root_device
        return joined if is_last else replace_leaves(last.result, lambda tensor: tensor.to(device))

    def _shapes_of(
        self, name: str, micro_batches: Sequence[Any], step: Callable[[int, bool], Any], loader: tuple[Any, ...]
    ) -> list[Any]:
        found, fault, looked = [], None, False
        trained = self._number_of_trained()
        if trained != self._trained:
            # Parameters were frozen or unfrozen: other activations need gradients.
            self._trained = trained
            self._pipeline.settle()
        for number, micro_batch in enumerate(micro_batches):
            key = (name, loader, trained, signature(micro_batch))
            if key not in self._shapes and fault is None:
                looked = True
                state = rng_state()
                try:
                    if self._parts.sharded is not None:
                        self._parts.sharded.check()
                    self._shapes[key] = self._pipeline.cut.shapes(functools.partial(step, number, False))
                except Exception as error:
                    fault = error
                finally:
                    set_rng_state(state)
            found.append(self._shapes.get(key))
        if looked:
            # All ranks have the same batch, and so look at the same time.
            faults = all_gather_object(None if fault is None else repr(fault), self._control)
            if any(faults):
                self._shapes.clear()
            self._raise(fault, faults)
        return found

    def _tell(self, result: Any, taken: "_Taken", sizes: Sequence[int], no_mean: bool = False) -> list[_Told]:
        """The messages of all ranks after a step. Raises the error of any rank whose step has failed."""
        calls: list[_Call] = []
        try:
            calls = taken.joined(sizes)
        except Exception as error:
            self._pipeline.fault = self._pipeline.fault or error
        fault = self._pipeline.fault
        ends, settings = self._pipeline.is_last, self._settings()
        own = _Told(
            None if fault is None else repr(fault),
            [*self._differences.lines(no_mean)],
            replace_leaves(result, lambda tensor: tensor.detach().cpu()) if ends else None,
            calls if ends else [],
            self._differences.changed_buffers(),
            self._differences.gathers(),
            self._number_of_trained(),
            digest(settings) if settings != self._settings_before else 0,
            self._module.trainer.should_stop,
        )
        told: list[_Told] = all_gather_object(own, self._control)
        self._raise(fault, [one.fault for one in told])
        if (several := fault_of_buffers([one.buffers for one in told])) is not None:
            raise several
        if (apart := fault_of_metrics([one.gathers for one in told])) is not None:
            raise apart
        if len({one.trained for one in told}) > 1:
            raise PipelineError(
                "A step has set `requires_grad` after the last block of a stage, or in shards. Other ranks do not see"
                " that. Set it in a hook, such as `on_train_batch_start`."
            )
        if len({one.settings for one in told}) > 1:
            raise PipelineError(
                "A step has set a number of an optimizer's group, such as the learning rate, after the first block."
                " Other ranks do not see that. Set it in a hook, such as `on_train_batch_end`, which runs on all ranks."
            )
        if any(one.stops for one in told):
            self._module.trainer.should_stop = True
        for line in dict.fromkeys(line for one in told for line in one.lines if line not in self._warned):
            rank_zero_warn(line)
            self._warned.add(line)
        return told

    def _number_of_trained(self) -> int:
        return digest([one.requires_grad for one in self._module.parameters()])

    def _settings(self) -> list[Any]:
        """The numbers in groups of optimizers. Tensors of a device would make the host wait."""
        groups = [group for one in self._strategy.optimizers for group in one.param_groups]
        return [
            [(key, value) for key, value in one.items() if isinstance(value, (int, float, tuple))] for one in groups
        ]

    def _raise(self, own: Exception | None, faults: Sequence[str | None]) -> None:
        reason = PipelineError.__name__
        found = [(not one.startswith(reason), rank, one) for rank, one in enumerate(faults) if one is not None]
        # If a block returns other shapes than expected, those after it fail as well, and their errors do not say why.
        if own is not None and (isinstance(own, PipelineError) or all(is_other for is_other, *_ in found)):
            raise own
        if found:
            _, rank, fault = min(found)
            raise PipelineError(f"rank {rank}: {fault}") from own


def replace_stepped(optimizers: Iterable[Optimizer], replaced: Mapping[Tensor, nn.Parameter]) -> None:
    """Lets optimizers step other parameters, which have no state yet."""
    for optimizer in map(unwrapped, optimizers):
        for old in replaced.keys() & optimizer.state.keys():
            del optimizer.state[old]
        for group in optimizer.param_groups:
            group["params"] = [replaced.get(one, one) for one in group["params"]]


def _loss_and_weight(output: Any) -> tuple[Tensor, float | None]:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise PipelineError(
            f"`training_step` has returned {type(output).__name__} without a loss of one element. A pipeline needs a"
            " loss in every step."
        )
    weight = output.get(LOSS_WEIGHT) if isinstance(output, Mapping) else None
    return loss.reshape(()), None if weight is None else float(weight)


@contextmanager
def _random_numbers(device: torch.device, base: int) -> Generator[Seed, None, None]:
    """Yields what seeds a place of a micro-batch's step. Afterwards each rank continues as before."""
    # `torch.manual_seed` takes 3 ms without a GPU: it keeps its call, with a trace of the stack, for a later one.
    modules = [] if device.type == "cpu" else [torch.get_device_module(device)]
    state = rng_state()

    def seed(number: int, place: int) -> None:
        for seeded in (torch.default_generator, *modules):
            seeded.manual_seed((base + number * 1_000_003 + place) % 2**63)
        random.seed(base + number * 1_000_003 + place)
        np.random.seed((base + number * 1_000_003 + place) % 2**32)

    try:
        yield seed
    finally:
        set_rng_state(state)


class _Taken:
    """Takes what a step logs for each micro-batch, and logs once, on all ranks, what the whole batch would have logged.

    Args:
        module: The module, whose ``log`` is replaced meanwhile.
        trains: Whether the step is one of training.
    """

    def __init__(self, module: Any, trains: bool) -> None:
        self._module, self._trains = module, trains
        self._calls: dict[int, list[_Call]] = {}

    @contextmanager
    def taking(self, number: int, is_last: bool) -> Generator[None, None, None]:
        """Within it, calls of ``log`` are taken in the last stage, and dropped in others."""
        calls: list[_Call] = []
        own = vars(self._module)
        had = own.get("log")
        own["log"] = functools.partial(self._take, calls if is_last else None)
        try:
            yield
        finally:
            del own["log"]
            if had is not None:
                own["log"] = had
        if is_last:
            self._calls[number] = calls

    def _take(self, calls: list[_Call] | None, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if calls is None:
            return
        if isinstance(value, Tensor) and not has_memory(value):
            raise PipelineError(
                f"`self.log({name!r}, ...)` takes what another stage computes: the output of an earlier block,"
                " parameters, or a loss that a block keeps. The last stage logs, and gets the output of the block"
                " before it. Pass on what it needs through the blocks, also if this is the loss of the step."
            )
        kwargs.update(zip(_names_of_log(type(self._module))[3:], args, strict=False))
        calls.append(_Call(name, self._portable(value), kwargs))

    def _portable(self, value: Any) -> Any:
        if isinstance(value, Metric):
            found = (name for name, one in self._module.named_modules() if one is value)
            if (place := next(found, None)) is None:
                raise PipelineError(
                    f"A {type(value).__name__} is logged that is no submodule, so other ranks do not find it. Keep it"
                    " in an attribute, or in a ModuleDict or ModuleList."
                )
            return place
        # A copy, as code may change it. Not on the host: the backward need not wait for it.
        # Numbers become tensors here, in the step's precision, as Lightning does it.
        is_tensor = isinstance(value, Tensor)
        return value.detach().clone() if is_tensor else torch.tensor(value, dtype=torch.get_default_dtype())

    def joined(self, sizes: Sequence[int]) -> list[_Call]:
        """The calls of a step on the whole batch, given the number of samples of each micro-batch."""
        found: dict[tuple[str, int], list[tuple[_Call, int]]] = {}
        for number in sorted(self._calls):
            seen = Counter[str]()
            for call in self._calls[number]:
                # A step may log under a condition, and one name twice.
                found.setdefault((call.name, seen[call.name]), []).append((call, sizes[number]))
                seen[call.name] += 1
        return [call for calls in found.values() for call in self._joined(calls)]

    def _joined(self, alike: Sequence[tuple[_Call, int]]) -> list[_Call]:
        name, value, kwargs = alike[0][0]
        counts = [size for _, size in alike]
        if kwargs.get("batch_size") is not None:
            counts = [call.kwargs["batch_size"] for call, _ in alike]
            kwargs = {**kwargs, "batch_size": sum(counts)}
        if isinstance(value, str):
            return self._of_metric(name, value, kwargs)
        values = [call.value.cpu() for call, _ in alike]
        return [_Call(name, _together(values, counts, kwargs.get("reduce_fx", "mean")), kwargs)]

    def _of_metric(self, name: str, metric: str, kwargs: Mapping[str, Any]) -> list[_Call]:
        """Logs a metric at the end of the epoch. What it returned for its last micro-batch is no value of the step."""
        at_end = {**kwargs, "on_step": False, "on_epoch": True}
        usual = {"on_step": self._trains, "on_epoch": not self._trains}
        if not all(usual[key] if kwargs.get(key) is None else kwargs[key] for key in usual):
            return [_Call(name, metric, at_end)]
        # Lightning gives the epoch's value this name then, and shows callbacks both.
        hidden = {**at_end, "logger": False, "prog_bar": False}
        return [_Call(f"{name}_epoch", metric, at_end), _Call(name, metric, hidden)]

    def log(self, calls: Sequence[_Call]) -> None:
        """Logs what :meth:`joined` has returned on the rank of the last stage."""
        for name, value, kwargs in calls:
            # Lightning reduces it over ranks where it is.
            logged = self._module.get_submodule(value) if isinstance(value, str) else value.to(self._module.device)
            self._module.log(name, logged, **kwargs)


def _together(values: list[Tensor], sizes: Sequence[int], reduce_fx: Any) -> Tensor:
    how = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}.get(getattr(reduce_fx, "__name__", reduce_fx))
    return mean_over(values, sizes) if how is None else how(torch.stack(values), dim=0)


@functools.cache
def _names_of_log(cls: Any) -> list[str]:
    return list(inspect.signature(cls.log).parameters)
