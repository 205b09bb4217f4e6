"""The base of all strategies: the parts of a strategy, and the order in which Lightning's calls reach them."""

import difflib
import functools
import inspect
import itertools
import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.types import ReduceOp
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parstrat._namespaces import PACKAGES
from lightning_parstrat.core.accumulation import PartialWindow
from lightning_parstrat.core.policy import (
    CheckpointFormat,
    ClipScope,
    CommonPolicy,
    DivisionPolicy,
    NonfiniteGradients,
    RankShares,
)
from lightning_parstrat.distributed.comm.module_states import check_whole
from lightning_parstrat.distributed.comm.work import waited_seconds, waiting
from lightning_parstrat.distributed.gradients.clipping import StepGradients, step_gradients
from lightning_parstrat.distributed.gradients.loss_weights import watch_gradients
from lightning_parstrat.strategies.checkpoint.checkpoint_io import DurableCheckpointIO
from lightning_parstrat.strategies.checkpoint.checkpoints import Checkpoints
from lightning_parstrat.strategies.checkpoint.preemption import Preemption
from lightning_parstrat.strategies.checkpoint.resume import Resume
from lightning_parstrat.strategies.checkpoint.training_state import TrainingState
from lightning_parstrat.strategies.data.even import users_own
from lightning_parstrat.strategies.data.rank_shares import DividedRanks
from lightning_parstrat.strategies.evaluation import SamplesOnce
from lightning_parstrat.strategies.gradients.accumulation import Accumulation, GradientHooks
from lightning_parstrat.strategies.gradients.clipping import GradientNorm
from lightning_parstrat.strategies.launch.elastic import adopt_started, started_ranks
from lightning_parstrat.strategies.launch.ranks import Ranks
from lightning_parstrat.strategies.lightning_compat import before_resume, lacks_inner_io
from lightning_parstrat.strategies.parts import Part
from lightning_parstrat.strategies.report import Report


class ComposedStrategy(DDPStrategy):
    """DDP made of parts: exact accumulation and clipping, durable checkpoints, preemption, and missing ranks by name.

    Args:
        state_dict_type: The layout of a checkpoint: ``"full"`` or ``"sharded"``. ``"full"`` writes what ``ddp``
            would: one file, from rank 0, which any strategy reads. ``"sharded"`` writes a folder, each rank its part,
            without a gather. This package's strategies read the folder at any world size.
            ``lightning-parstrat consolidate`` turns it into a full checkpoint. All nodes must see the folder.
            ``checkpoint_io`` is not used for it.
        async_save: Whether a thread writes the sharded checkpoint while training continues. Training waits until each
            rank has copied its part to host memory. At most one save is in progress. The next save, and the end of
            training, wait for it.
        exact_evaluation: Whether validation and test see each sample once. Lightning's sampler gives all ranks equally
            many samples. If the number of ranks does not divide the samples, some are repeated, and metrics count them
            twice. ``True`` leaves the repeated ones out, so that metrics are those of one process. A rank may then have
            one sample less than another. Off by default, as under ``ddp``.
        partial_window: What divides the gradients of a short accumulation window at the end of an epoch.
            ``"exact"`` takes the mean over the window's micro-batches. ``"lightning"`` divides by
            ``accumulate_grad_batches``, as stock Lightning does, so that such a step is too small.
        clip_scope: Whose gradients the clipping norm covers. ``"optimizer"`` takes the gradients of the optimizer that
            steps, ``"global"`` those of all optimizers together.
        norm_type: p of the norm that clips, a positive number or ``inf``.
        nonfinite_grads: What to do when gradients are NaN or infinite on any rank. ``"propagate"`` steps all the same.
            ``"skip"`` leaves parameters and optimizer state as they are, on all ranks. ``"raise"`` ends the training on
            all ranks. ``"skip"`` and ``"raise"`` make the host wait in every step.
        rank_shares: How the samples of a micro-batch are divided among ranks. ``"equal"`` gives all ranks as many.
            ``"auto"`` measures the ranks in the first micro-batches, and gives fast ranks more. A list has a number for
            each rank: ``[3, 1]`` gives rank 0 three times as many as rank 1. Results are those of equal shares, since
            each loss counts by its samples.
        max_share: The most that a rank may get of a micro-batch, in equal shares. It bounds the memory of activations.
        keep_global_batch: Whether a training that resumes on another number of ranks keeps the samples of each step.
            ``accumulate_grad_batches`` follows, as large as it must be for batches no larger than ``batch_size``.
        stall_warning_seconds: After how many seconds without progress a rank that waits for others logs one line. The
            line names the call or hook, and the missing ranks with the place that each has reached. ``None`` logs
            nothing before the ``timeout``.
        **kwargs: Arguments of the base class.

    Raises:
        ValueError: A value is not allowed. The message lists the allowed ones.
    """

    @property
    @abstractmethod
    def flag(self) -> str:
        """The name that the strategy is registered under. Messages begin with it."""

    _takes_shards: ClassVar[bool] = False
    """Whether a module's parameters may already be in shards."""

    _of_one_training: ClassVar[frozenset[str]] = frozenset()
    """Attributes that belong to one training and its ranks. Copies have None instead."""

    def __init__(
        self,
        state_dict_type: CheckpointFormat = "full",
        async_save: bool = False,
        exact_evaluation: bool = False,
        partial_window: PartialWindow = "exact",
        clip_scope: ClipScope = "optimizer",
        norm_type: float | Literal["inf"] = 2.0,
        nonfinite_grads: NonfiniteGradients = "propagate",
        stall_warning_seconds: float | None = 15.0,
        rank_shares: RankShares = "equal",
        max_share: float = 2.0,
        keep_global_batch: bool = False,
        **kwargs: Any,
    ) -> None:
        _check_names(type(self), kwargs)
        division = DivisionPolicy(rank_shares=rank_shares, max_share=max_share, keep_global_batch=keep_global_batch)
        policy = CommonPolicy(
            state_dict_type=state_dict_type,
            async_save=async_save,
            exact_evaluation=exact_evaluation,
            partial_window=partial_window,
            clip_scope=clip_scope,
            norm_type=norm_type,
            nonfinite_grads=nonfinite_grads,
            stall_warning_seconds=stall_warning_seconds,
        )
        super().__init__(**kwargs)
        self._is_timed = False
        """Whether the seconds of a forward are measured."""
        self._ranks = Ranks(self, self.flag, self._timeout, policy, self._module_called)
        self._resume = Resume(self, self._ranks)
        self._fit_report = Report(self, self.flag, self._bytes_sent, self._resume.loaded_seconds)
        hooks = GradientHooks(
            self._watch, self._step_gradients, self._end_backward, self._before_step, self._fit_report.say
        )
        state, synchronize = self._make_training_state(), self._synchronize_parameters
        self._checkpoints = Checkpoints(self, self._ranks, policy, state, self._resume, synchronize, self._entries)
        self._accumulation = Accumulation(self, self._ranks, policy, hooks)
        self._parts: list[Part] = [
            self._ranks,
            self._resume,
            self._checkpoints,
            self._accumulation,
            self._fit_report,
            # Its end of a training may be an exception.
            Preemption(self, self._ranks, self._resume, self.wait_for_saves, self._end_step, synchronize),
        ]
        """Hooks are called in this order. At the end they are called in the reverse order."""
        if exact_evaluation:
            self._parts.append(SamplesOnce(self))
        self._shares: DividedRanks | None = None
        if keep_global_batch or rank_shares != "equal":
            self._shares = DividedRanks(
                self,
                self._ranks,
                self._resume.divide,
                division,
                lambda: self._checkpoints.loaded_entries,
                self._timed,
                self._fit_report.say,
            )
            # Before the part that makes samplers.
            self._parts.insert(1, self._shares)

    # What a strategy may override.

    def _make_training_state(self) -> TrainingState:
        """The state of the module and the optimizers, for checkpoints."""
        return TrainingState(self)

    def _share_batch(self, batch: Any) -> Any:
        """The batch of ranks that share data, from what this rank's loader has returned. Collective if any do."""
        return batch

    def _watch(self, note: Callable[[Tensor], None]) -> Callable[[], None]:
        """Passes the gradients of the next backward to a function, until what it returns is called."""
        return watch_gradients(self.lightning_module.parameters(), note)

    def _step_gradients(self, optimizers: Sequence[Optimizer]) -> StepGradients:
        """The gradients that optimizers are about to step with. Collective if they are sharded."""
        return step_gradients(optimizers)

    def _end_backward(self, ends_window: bool, has_run: bool) -> None:
        """Turns the mean over ranks that a window's backward has left into the mean over the window. Collective.

        Args:
            ends_window: Whether a step follows.
            has_run: Whether there was a backward. If not, earlier ones of the window have left their gradients.
        """

    def _before_step(self) -> None:
        """Runs between the closure and the optimizer's step."""

    def _end_step(self, signals: int) -> int:
        """Runs at the end of a step. Collective.

        Args:
            signals: Signals to save or to end that came to ranks which train together.

        Returns:
            Those that all ranks answer now, the same on all.
        """
        return signals

    def _synchronize_parameters(self) -> None:
        """Runs before parameters are evaluated, saved or returned, if all ranks can be reached. Collective."""

    def _bytes_sent(self) -> int | None:
        """The messages of this rank so far. None if the host cannot see them, nor how long it has waited."""
        return None

    def _module_called(self) -> str:
        """The submodule that is being called, if it is known. Any thread may ask."""
        return ""

    def _entries(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """The strategy's entries in a checkpoint. Rank 0's are saved. Collective.

        Args:
            checkpoint: Lightning's entries.
        """
        return {} if self._shares is None else self._shares.entry

    def _timed(self, run: Callable[[], Any]) -> tuple[Any, float]:
        """Runs a forward when all ranks begin theirs. Otherwise an early rank would wait for others within it.

        Returns:
            What it returned, and its seconds without those in which it has waited for other ranks. Collective.
        """
        self._ranks.wait_for_all()
        self._is_timed, began, waited = True, self._now(), waited_seconds()
        try:
            output = run()
            return output, self._now() - began - (waited_seconds() - waited)
        finally:
            self._is_timed = False

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Within it, this rank waits for others. If a forward is timed, a GPU does its own work before."""
        if self._is_timed:
            self._now()
        with waiting():
            yield
            if self._is_timed:
                self._now()

    def _now(self) -> float:
        """A time in seconds, when the device has done its work."""
        if self.root_device.type == "cuda":
            torch.cuda.synchronize(self.root_device)
        return time.perf_counter()

    # What users may call.

    @property
    def grad_norm(self) -> Tensor | None:
        """The norm of the last step's gradients before clipping, over all ranks: a 0-d tensor, equal on all of them.

        It is measured for clipping by norm, for :class:`~lightning_parstrat.GradNormMonitor`, and for
        ``nonfinite_grads="skip"`` and ``"raise"``. Otherwise it is None.
        """
        return self._accumulation.grad_norm

    @property
    def skipped_steps(self) -> int:
        """How many steps of this training were skipped, the same on all ranks.

        A step is skipped for one of three reasons. Gradients were not finite (``nonfinite_grads="skip"``). The loss
        scale of 16-mixed was too large. No micro-batch had any weight. Fused optimizers in 16-mixed skip steps on the
        device, and this property waits for the device.
        """
        return self._accumulation.skipped_steps

    def on_gradient_norm(self, listener: Callable[[GradientNorm], None]) -> None:
        """Calls ``listener`` with the norm of every step of the next training, after the step.

        Call it before every training, in a callback's ``setup``. The norm is then measured, with clipping or without.
        """
        self._accumulation.on_gradient_norm(listener)

    def note_choice(self, measured: Mapping[str, Any]) -> None:
        """Lets fits say what ``lightning-parstrat tune`` has measured, and warn if it is another training.

        Args:
            measured: What the command has written, and the path of its file.
        """
        self._fit_report.chosen = measured

    def wait_for_saves(self) -> None:
        """Returns when no checkpoint is being written. If one is, all ranks must call it.

        Raises:
            CheckpointNotSavedError: The checkpoint could not be written.
            RuntimeError: Ranks have not written their part.
        """
        self._checkpoints.wait_for_saves()

    # What the strategy is, to Python and to Lightning.

    @override
    def __repr__(self) -> str:
        """Names the Trainer that takes this strategy. Lightning shows this text if it refuses a foreign strategy."""
        own = DDPStrategy.__module__.partition(".strategies.")[0]
        (other,) = PACKAGES.keys() - {own}
        name = next(cls.__name__ for cls in type(self).__mro__ if cls.__module__.startswith(f"{PACKAGES[own]}."))
        hint = f"; for {other}, write `from {PACKAGES[other]} import {name}`" if other in sys.modules else ""
        return f"<{type(self).__name__} for the Trainer of {own}{hint}>"

    @override
    def __getstate__(self) -> dict[str, Any]:
        """Leaves out process groups and their users, for programs that copy or pickle a trainer."""
        state: dict[str, Any] = super().__getstate__()
        return {name: None if name in self._of_one_training else value for name, value in state.items()}

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Registers nothing: the names are registered by :mod:`lightning_parstrat.strategies.registry`."""

    # Set-up.

    @override
    def _configure_launcher(self) -> None:
        """Looks at the ranks that torchelastic has started, before anything depends on the number of ranks.

        The Trainer calls this within ``Trainer()``, once the numbers of nodes and devices are known.
        """
        started = started_ranks(self.cluster_environment)
        if started is not None:
            adopt_started(self, started)
        super()._configure_launcher()

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The number of ranks that a sampler splits the data among, and the number of this rank among them."""
        # Lightning multiplies the nodes by this node's devices. Nodes may have different numbers of devices.
        return {"num_replicas": self._ranks.data_ranks, "rank": self._ranks.data_rank}

    @override
    def setup_distributed(self) -> None:
        """Joins the other ranks. Collective."""
        self._ranks.join(super().setup_distributed)
        before_resume(self.lightning_module.trainer, self._checkpoints.check_found)

    @override
    def setup(self, trainer: Trainer) -> None:
        """Sets up the module as Lightning does, after a check that the module is whole. Collective.

        Raises:
            ValueError: The module's parameters are in shards.
        """
        if not self._takes_shards:
            check_whole(self.lightning_module, self.flag)
        super().setup(trainer)

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        """Creates the optimizers. Collective."""
        for part in self._parts:
            part.setup_optimizers()
        super().setup_optimizers(trainer)

    @override
    def setup_precision_plugin(self) -> None:
        """Begins a fit. Collective.

        The plugin is replaced here, and not when it is set: spawned processes must get the user's plugin by pickle.
        """
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            for part in self._parts:
                part.begin_fit()
        super().setup_precision_plugin()

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Prepares a loader of training or evaluation. Collective."""
        # A module may return the same loaders in every epoch. Then this is the stand-in of the epoch before.
        dataloader = super().process_dataloader(users_own(dataloader))
        for part in self._parts:
            dataloader = part.process_dataloader(dataloader)
        return dataloader

    # A fit, in the order of its calls.

    @override
    def on_train_start(self) -> None:
        """Begins the training."""
        super().on_train_start()
        for part in self._parts:
            part.on_train_start()

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Moves a batch that the loader has returned."""
        self._resume.end_fetch()
        return super().batch_to_device(self._share_batch(batch), device, dataloader_idx)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Begins a batch."""
        super().on_train_batch_start(batch, batch_idx)
        self._accumulation.begin_batch()
        self._fit_report.note_step()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Runs the user's training step, and keeps the weight of its loss."""
        run = functools.partial(super().training_step, *args, **kwargs)
        output, samples = (run(), None) if self._shares is None else self._shares.training_step(run)
        self._accumulation.note_output(output, samples)
        return output

    @override
    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Within it, gradients accumulate locally. No gradient is sent."""
        with self._accumulation.block(), super().block_backward_sync():
            yield

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        """Begins a backward."""
        super().pre_backward(closure_loss)
        self._accumulation.begin_backward(closure_loss)

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """Runs the rest of the closure, clips and steps. Or skips the step on all ranks."""
        return self._accumulation.step(super().optimizer_step, optimizer, closure, *args, **kwargs)

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: ReduceOp | str | None = "mean") -> Any:
        """Reduces a tensor over all ranks. Collective. The mean of integers is a floating-point number."""
        is_whole = isinstance(tensor, Tensor) and not (tensor.is_floating_point() or tensor.is_complex())
        if is_whole and isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg"):
            # Lightning divides for a mean, and casts the quotient to the tensor's dtype: here, to an integer.
            tensor = tensor.float()
        with self._waiting():
            return super().reduce(tensor, group, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gathers a tensor of all ranks. Collective."""
        with self._waiting():
            return super().all_gather(tensor, group, sync_grads)

    @override
    def on_validation_start(self) -> None:
        """Begins a validation, which no step's time contains."""
        super().on_validation_start()
        self._fit_report.pause()
        self._begin_evaluation()

    @override
    def on_test_start(self) -> None:
        """Begins a test."""
        super().on_test_start()
        self._begin_evaluation()

    @override
    def on_predict_start(self) -> None:
        """Begins a prediction."""
        super().on_predict_start()
        self._begin_evaluation()

    def _begin_evaluation(self) -> None:
        for part in self._parts:
            part.on_evaluation_start()

    @override
    def on_validation_end(self) -> None:
        """Ends a validation."""
        super().on_validation_end()
        self._fit_report.resume()

    @override
    def on_train_end(self) -> None:
        """Ends the training."""
        super().on_train_end()
        for part in self._parts:
            part.on_train_end()

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Logs which ranks are missing or late, if that may be the cause. Not collective: one rank alone may do it."""
        super().on_exception(exception)
        for part in self._parts:
            part.on_exception(exception)

    @override
    def teardown(self) -> None:
        """Restores the user's objects. Not collective after an exception."""
        for part in reversed(self._parts):
            part.teardown()
        super().teardown()

    # Checkpoints.

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        """The user's plugin for writing and reading files. The default is :class:`DurableCheckpointIO`."""
        if self._checkpoint_io is None:
            self._checkpoint_io = DurableCheckpointIO()
        elif lacks_inner_io(self._checkpoint_io):
            self._checkpoint_io.checkpoint_io = DurableCheckpointIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        self._checkpoint_io = io

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state. The state of a sharded module is on rank 0's host. Collective."""
        return self._checkpoints.module_state(super().lightning_module_state_dict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The unsharded state in torch's own format, on rank 0's host. Other ranks get the groups alone. Collective."""
        return self._checkpoints.optimizer_state(super().optimizer_state, optimizer)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Saves on all ranks or on none. Collective, unless an exception came on some ranks only.

        Raises:
            CheckpointNotSavedError: Another rank could not write.
            RuntimeError: Ranks did not take part. Earlier checkpoints are unchanged.
        """
        self._checkpoints.save(super().save_checkpoint, checkpoint, filepath, storage_options)

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Waits for all ranks. Skipped at the end of a save that some ranks did not take part in."""
        # Lightning ends every save with a barrier.
        if not self._checkpoints.leaves_out_barrier(args):
            with self._waiting():
                super().barrier(*args, **kwargs)

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Removes a checkpoint, but not before its successor is complete."""
        self._checkpoints.remove(super().remove_checkpoint, filepath)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads a checkpoint of any strategy and world size. Collective: all ranks succeed, or all raise.

        Raises:
            MisconfigurationException: It is not a checkpoint, or it is damaged, or a newer version has written it. Or
                a rank cannot read it, or another Slurm job has saved it for its own requeue.
        """
        return self._checkpoints.load(super().load_checkpoint, checkpoint_path, weights_only)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Gives each optimizer its state. Each rank keeps its part.

        Raises:
            ValueError: The state belongs to other optimizers or other parameters. The message names them.
        """
        self._checkpoints.load_optimizers(checkpoint)


def _check_names(strategy: type, names: Iterable[str]) -> None:
    """Raises an error for arguments that neither a class of the strategy has, nor DDP, if it wraps the module."""
    taken = [
        inspect.signature(one.__init__).parameters
        for one in itertools.takewhile(lambda one: one is not DDPStrategy, strategy.__mro__)
    ]
    if all(any(one.kind is one.VAR_KEYWORD for one in parameters.values()) for parameters in taken):
        taken += [inspect.signature(one.__init__).parameters for one in (DDPStrategy, DistributedDataParallel)]
    known = set[str]().union(*taken)
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            advice = f"Did you mean {close[0]!r}?" if close else "docs/arguments.md lists all arguments."
            raise TypeError(f"{strategy.__name__} has no argument {name!r}. {advice}")
