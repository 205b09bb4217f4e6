"""What of Lightning is private, and used all the same: behind plain names, each with what it is for.

The rest of the package asks here, so that what another version of Lightning has changed is one file's work. Names are
dotted; what only objects have stands under the class, or else the module, whose source assigns it. All were seen in
the versions of :data:`LIGHTNING_SEEN`. ``tests/test_private_names.py`` reads the two lists, and holds them against what
is installed and against the package's sources.

Used through this file: what for | what happens without it.

    lightning.pytorch.core.optimizer.LightningOptimizer._to_lightning_optimizer
        wraps optimizers that are set, as Lightning's own setter does | zero1_custom does not begin
    lightning.pytorch.core.optimizer._MockOptimizer
        stands in where a module has no optimizer; it is not sharded | zero1_custom cannot be imported
    lightning.pytorch.core.module.LightningModule._current_fx_name
        the hook that a rank is within, for whoever waits for it | lines about waits do not name it
    lightning.pytorch.callbacks.ModelCheckpoint._last_global_step_saved
        knows whether the last step was saved already, when training is told to end | a training that SIGTERM ends fails
        instead of saving
    lightning.pytorch.callbacks.ModelCheckpoint._save_last_checkpoint
        saves what `ckpt_path='last'` finds | a training that SIGTERM ends fails instead of saving
    lightning.pytorch.trainer.Trainer._checkpoint_connector
        names the checkpoint from which a Slurm job goes on when it runs again | a Slurm job that is preempted fails
        instead of saving
    lightning.pytorch.trainer.Trainer._signal_connector
        takes SIGTERM over from Lightning | a training does not begin: SIGTERM and Slurm's signals could not be handled
    lightning.pytorch.trainer.connectors.signal_connector._SignalConnector._original_handlers
        lets Lightning bring back the user's handler, not ours | an exception when a training has ended
    lightning.pytorch.trainer.connectors.signal_connector._HandlersCompose
        finds the user's handler among Lightning's | strategies cannot be imported
    lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop._broadcast_sigterm_tensor
        is left out: ranks agree on signals here, and Lightning would ask once more in every batch | one more broadcast
        in every batch
    lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop._batches_that_stepped
        is what loggers count by; and is set back in a checkpoint of an earlier batch | GradNormMonitor fails; a
        checkpoint saved within an accumulation window fails
    lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop._should_check_val_fx
        tells whether a validation comes next, and whether a training that resumes after an epoch's last batch ends that
        epoch first | a save after a batch, and a training that resumes at its begin, fail
    lightning.pytorch.loops.evaluation_loop._EvaluationLoop._restart_stage
        has a training that resumes run a validation that was due | it is passed over, and what it draws shifts random
        numbers
    lightning.pytorch.loops.evaluation_loop._EvaluationLoop._combined_loader
        the loaders that are evaluated, one after the other or together | an evaluation fails at its begin
    lightning.pytorch.loops.evaluation_loop._EvaluationLoop._store_dataloader_outputs
        the moment before the results of a loader are combined over ranks | zero3_custom combines results of ranks that
        have called different modules, or waits
    lightning.pytorch.strategies.launchers._SubprocessScriptLauncher
        is the launcher that ours stands in for under torchrun | strategies cannot be imported
    lightning.fabric.utilities.distributed._DatasetSamplerWrapper._sampler
        the user's sampler within Lightning's distributed one, whose generator is saved | training does not begin
    lightning.pytorch.loops.fit_loop._FitLoop._combined_loader
        the loaders that are trained on | a training fails at its begin
    lightning.pytorch.loops.fit_loop._FitLoop._data_fetcher
        knows how many batches it has fetched ahead | a training fails at its begin
    lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop._on_before_fetch
        the moment before a batch is fetched, when loaders with a state of their own are asked for it | a checkpoint
        within an epoch has their state of a batch too late
    lightning.pytorch.utilities.combined_loader.CombinedLoader._iterator
        the iterators of these loaders | a training fails at its begin
    lightning.pytorch.utilities.combined_loader._MaxSizeCycle._consumed
        which loaders have come to their end in the epoch | a training that resumes within an epoch fails at its begin
        where loaders begin again
    lightning.pytorch.utilities.combined_loader.CombinedLoader._mode
        how they are put together | a checkpoint within an epoch cannot be saved

Read or overridden on themselves by classes in ``strategies/``: what for | what happens without it.

    lightning.pytorch.strategies.ddp.DDPStrategy._timeout
        how long a collective may take | a training does not begin
    lightning.pytorch.strategies.ddp.DDPStrategy._ddp_kwargs
        what the user has told DDP | ddp_tuned does not begin
    lightning.pytorch.strategies.ddp.DDPStrategy._register_ddp_hooks
        is overridden: hooks are registered on every device | ddp_tuned: `comm_hook` has no effect
    lightning.pytorch.strategies.ddp.DDPStrategy._pl_static_graph_delay_done
        is set back for a new wrapper of a static graph | a second training of one strategy with static_graph=True sends
        no first gradients
    lightning.pytorch.strategies.ddp.DDPStrategy._configure_launcher
        is overridden: the first moment at which the numbers of nodes and devices are known | under torchrun and Slurm
        another number of ranks than the Trainer was told of is refused late, or not at all
    lightning.pytorch.strategies.Strategy._launcher
        is set where torchelastic has started the ranks | under torchrun Lightning refuses another number of ranks than
        it was told of
    lightning.pytorch.strategies.Strategy._checkpoint_io
        the user's way of writing files, or none | a training does not begin
    lightning.pytorch.strategies.Strategy._optimizers
        what the overridden property `optimizers` holds | zero1_custom trains nothing
    lightning.pytorch.strategies.Strategy._lightning_optimizers
        what `LightningModule.optimizers()` shows | manual optimization steps optimizers that are not sharded
    lightning.pytorch.plugins.precision.Precision._after_closure
        is overridden: completes a window whose last micro-batch had no backward | gradients of such a window are not
        reduced
    lightning.pytorch.plugins.precision.Precision._clip_gradients
        is overridden: looks at gradients before every step, and unscales them | `nonfinite_grads` and `grad_norm` have
        no effect
"""

import functools
import signal
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch import __version__ as lightning_version
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.core.optimizer import LightningOptimizer, _MockOptimizer
from lightning.pytorch.loops.evaluation_loop import RestartStage
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.connectors.signal_connector import _HandlersCompose
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from lightning_parstrat.distributed.engine.stepping import lend_methods
from lightning_parstrat.distributed.torch_compat import TORCH_SEEN, is_newer

LIGHTNING_SEEN = ("2.6.0", "2.6.6")
"""The versions of Lightning that the names above were seen in, and the tests, or the quick ones, have run with."""


def untried_versions(torch_version: str, lightning_version: str) -> str | None:
    """What is to be said of versions newer than those that were tried; None where they were.

    Args:
        torch_version: Of torch.
        lightning_version: Of Lightning.
    """
    compared = (("torch", torch_version, TORCH_SEEN), ("lightning", lightning_version, LIGHTNING_SEEN))
    newer = [(name, found, seen) for name, found, seen in compared if is_newer(found, seen)]
    if not newer:
        return None
    found = " and ".join(f"{name} {found}" for name, found, _ in newer)
    tried = " and ".join(f"{name} up to {seen[-1]}" for name, _, seen in newer)
    return (
        f"lightning_parstrat was tried with {tried}, and {found} is installed, which is newer. Training goes on."
        " If something fails that works under `ddp`, install the version that was tried, or a newer lightning-parstrat."
    )


@functools.cache
def warn_of_untried_versions() -> None:
    """Warns on rank 0, once in a process, where torch or Lightning is newer than what was tried."""
    message = untried_versions(torch.__version__, lightning_version)
    if message is not None:
        rank_zero_warn(message)


class BetweenBatches(Callback):
    """A callback with nothing to do within a step: Lightning passes over hooks that cannot be called.

    To call one takes a dozen calls more, five times in every step, whether or not it does anything. Where there is
    something to do when a batch begins, the hook is set on the object.
    """

    on_train_batch_start = None  # type: ignore[assignment]
    on_before_zero_grad = None  # type: ignore[assignment]
    on_before_backward = None  # type: ignore[assignment]
    on_after_backward = None  # type: ignore[assignment]
    on_before_optimizer_step = None  # type: ignore[assignment]


def unwrapped(optimizer: Any) -> Any:
    """The optimizer within Lightning's wrapper, which has its name and its attributes."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def wrapped(optimizer: Optimizer, strategy: Any) -> LightningOptimizer:
    """Lightning's wrapper of an optimizer, which steps through the strategy."""
    wrapper = LightningOptimizer._to_lightning_optimizer(optimizer, strategy)
    # It inherits the optimizer's class, and asks the optimizer itself only for what the class has not.
    lend_methods(wrapper.optimizer, wrapper)
    return wrapper


def stands_for_none(optimizer: Any) -> bool:
    """Whether it is what Lightning puts where ``configure_optimizers`` returns None."""
    return isinstance(optimizer, _MockOptimizer)


def trainer_of(module: LightningModule | None) -> Trainer | None:
    """The module's Trainer, if it has one."""
    try:
        return None if module is None else module.trainer
    except RuntimeError:
        return None


def current_hook(module: LightningModule) -> str:
    """The name of the hook that Lightning is calling, such as "training_step"; empty between hooks. Any thread."""
    return getattr(module, "_current_fx_name", None) or ""


def window_is_open(trainer: Trainer) -> bool:
    """Whether gradients go on accumulating after the latest batch; Lightning steps at the last one of an epoch."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    ready = progress.current.ready
    is_last = progress.is_last_batch or ready == trainer.num_training_batches
    return ready % trainer.accumulate_grad_batches != 0 and not is_last


def batches_that_stepped(trainer: Trainer) -> int:
    """What loggers count by: batches that ended an accumulation window."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def logs_after_this_batch(trainer: Trainer) -> bool:
    """Whether ``log_every_n_steps`` has loggers write after the batch that ends."""
    if trainer.log_every_n_steps == 0:
        return False
    return (batches_that_stepped(trainer) + 1) % trainer.log_every_n_steps == 0 or trainer.should_stop


def sampler_within(sampler: Any) -> Any:
    """The user's sampler within Lightning's distributed one; None of any other."""
    return sampler.dataset._sampler if type(sampler) is DistributedSamplerWrapper else None


def iterators_in_training(trainer: Trainer) -> list[tuple[Any, Any]]:
    """The loaders that are trained on, each with the iterator that batches come from, or None where there is none."""
    combined = trainer.fit_loop._combined_loader
    if combined is None:
        return []
    iterators = [] if combined._iterator is None else combined._iterator.iterators
    return list(zip(combined.flattened, iterators or [None] * len(combined.flattened), strict=True))


def replace_loaders(trainer: Trainer, by: Callable[[Any], Any]) -> None:
    """Replaces the loaders that are trained on, in whatever holds them together."""
    combined = trainer.fit_loop._combined_loader
    if combined is not None:
        combined.flattened = list(map(by, combined.flattened))


def batches_fetched_ahead(trainer: Trainer) -> int:
    """How many batches were fetched that no step has been given."""
    return len(getattr(trainer.fit_loop._data_fetcher, "batches", ()))


def batches_fetched(trainer: Trainer) -> int:
    """How many batches of the epoch were fetched, also by the training that was saved within it; in an epoch only."""
    return trainer.fit_loop._data_fetcher.fetched


def before_fetches(trainer: Trainer, function: Callable[[Trainer], None]) -> None:
    """Has a function called before batches are fetched, until :func:`fetches_alone`.

    Those that Lightning fetches ahead before the first epoch, or from loaders that are made anew, are left out.
    """
    loop = trainer.fit_loop.epoch_loop

    def called_before() -> None:
        function(trainer)
        type(loop)._on_before_fetch(loop)

    # On the instance, not on the class: other Trainers of this process keep theirs.
    loop._on_before_fetch = called_before


def fetches_alone(trainer: Trainer) -> None:
    """Undoes :func:`before_fetches`."""
    vars(trainer.fit_loop.epoch_loop).pop("_on_before_fetch", None)


def mode_of_loaders(trainer: Trainer) -> str:
    """How the loaders that are trained on are put together: "min_size", "max_size_cycle" or "max_size"."""
    combined = trainer.fit_loop._combined_loader
    return "min_size" if combined is None else combined._mode


def ended_in_epoch(trainer: Trainer) -> Sequence[bool]:
    """Of each loader that is trained on whether it has come to its end in the epoch; empty where none begins again."""
    combined = trainer.fit_loop._combined_loader
    iterator = None if combined is None else combined._iterator
    return [] if iterator is None or mode_of_loaders(trainer) != "max_size_cycle" else list(iterator._consumed)


def count_as_ended(trainer: Trainer, ended: Sequence[bool]) -> None:
    """Has an epoch that goes on wait no more for the end of loaders that have come to it, and began again.

    Args:
        trainer: The Trainer.
        ended: Of each loader that is trained on; may be shorter.
    """
    combined = trainer.fit_loop._combined_loader
    iterator = None if combined is None else combined._iterator
    if iterator is not None and mode_of_loaders(trainer) == "max_size_cycle":
        for number, has_ended in enumerate(ended[: len(iterator._consumed)]):
            iterator._consumed[number] |= has_ended


def ends_epoch_first(trainer: Trainer) -> bool:
    """Whether a training that resumes ends an epoch before it trains, and then makes the loaders' iterators anew.

    That is so after a save that followed the validation after an epoch's last batch.
    """
    loop = trainer.fit_loop.epoch_loop
    progress = loop.batch_progress
    is_over = progress.is_last_batch or progress.current.ready == trainer.num_training_batches
    return bool(
        loop.restarting
        and loop.restarted_on_last
        and is_over
        and loop._should_check_val_fx(trainer.fit_loop._data_fetcher)
    )


def validation_is_due(trainer: Trainer) -> bool:
    """Whether a validation comes next, after a batch that was trained on; not of one that is due by the clock."""
    loop = trainer.fit_loop.epoch_loop
    progress = loop.batch_progress.current
    is_after_batch = progress.completed < progress.processed == progress.ready
    is_by_batches = trainer.val_check_batch is not None and not trainer.should_stop
    return bool(is_after_batch and is_by_batches and loop._should_check_val_fx(trainer.fit_loop._data_fetcher))


def validate_first(trainer: Trainer) -> None:
    """Has a training that resumes after a batch validate, before it trains or ends the epoch."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    # As if it had been saved within that validation, which Lightning runs then, here from its begin.
    loop._restart_stage = RestartStage.RESTARTED_MID_EVALUATION
    loop.restarting = False


def takes_turns(loop: Any) -> bool:
    """Whether an evaluation goes through its loaders one after the other, not through all together."""
    return bool(loop._combined_loader._mode == "sequential")


def call_after_batches(loop: Any, callback: Callable[[], None]) -> None:
    """Has ``callback`` called when a loader that is evaluated has no more batches, before its results are combined.

    Args:
        loop: The evaluation's, until :func:`give_back_loop`.
        callback: Called once a loader; in a prediction, which combines nothing, once a pass.
    """
    name = "_store_dataloader_outputs" if hasattr(loop, "_store_dataloader_outputs") else "on_run_end"

    def called_before() -> Any:
        callback()
        return getattr(type(loop), name)(loop)

    # On the instance, not on the class: other Trainers of this process keep theirs.
    setattr(loop, name, called_before)


def give_back_loop(loop: Any) -> None:
    """Undoes :func:`call_after_batches`."""
    vars(loop).pop("_store_dataloader_outputs", None)
    vars(loop).pop("on_run_end", None)


def count_one_step_less(fit_loop: dict[str, Any]) -> None:
    """Has the fit loop's part of a checkpoint count one batch less that ended a window."""
    fit_loop["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1


def lacks_inner_io(io: CheckpointIO) -> bool:
    """Whether a plugin leaves writing to another one, which has not been given to it yet."""
    inner: CheckpointIO | None = io
    # As AsyncCheckpointIO does, and whatever a user has made in its manner.
    while hasattr(inner, "checkpoint_io"):
        inner = inner.checkpoint_io
    return inner is None


def save_last(callback: ModelCheckpoint, trainer: Trainer) -> None:
    """Saves what the callback calls the last checkpoint, unless it has after this step. Collective."""
    if callback._last_global_step_saved != trainer.global_step or not callback.last_model_path:
        counts = {"epoch": torch.tensor(trainer.current_epoch), "step": torch.tensor(trainer.global_step)}
        callback._save_last_checkpoint(trainer, {**trainer.callback_metrics, **counts})


def averaged_copies(trainer: Trainer) -> list[torch.nn.Module]:
    """The copies of the module in which callbacks keep averages of its weights."""
    averaging = [one for one in trainer.callbacks if isinstance(one, (WeightAveraging, StochasticWeightAveraging))]
    held = [value for callback in averaging for value in vars(callback).values()]
    copies = [one.module if isinstance(one, AveragedModel) else one for one in held]
    return [one for one in copies if isinstance(one, LightningModule) and one is not trainer.lightning_module]


def path_for_slurm_job(trainer: Trainer) -> str:
    """Where a Slurm job that runs again looks for its checkpoint."""
    return trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir)


def users_handler(handler: Any) -> Callable[[int, FrameType | None], Any] | None:
    """What a program had set for a signal before Lightning, whose handler goes on calling it."""
    if not isinstance(handler, _HandlersCompose):
        return None
    first, users = handler.signal_handlers[0], handler.signal_handlers[-1]
    # The first of SIGTERM's is a method of Lightning's.
    is_lightnings = getattr(users, "__self__", None) is first.__self__
    return users if callable(users) and not is_lightnings else None


def forget_sigterm(trainer: Trainer) -> None:
    """Has Lightning not end the training for a SIGTERM that it has noted."""
    trainer._signal_connector.received_sigterm = False


def bring_back_after_training(trainer: Trainer, signum: signal.Signals, handler: Any, instead_of: Any) -> None:
    """Has Lightning set ``handler`` when training has ended, where it would set ``instead_of``."""
    originals = trainer._signal_connector._original_handlers
    if originals.get(signum) == instead_of:
        originals[signum] = handler


def leave_out_sigterm_broadcast(loop: Any) -> None:
    """Keeps Lightning's loop over batches from broadcasting in each whether rank 0 has received SIGTERM."""
    loop._broadcast_sigterm_tensor = _nothing


def broadcast_sigterm_again(loop: Any) -> None:
    """Undoes :func:`leave_out_sigterm_broadcast`."""
    vars(loop).pop("_broadcast_sigterm_tensor", None)


def _nothing() -> None:
    """Stands in for what the ranks agree on elsewhere."""


SubprocessScriptLauncher = _SubprocessScriptLauncher
"""Starts the script once more for every rank, or leaves that to whoever has started this one. To be derived from."""


def returns_weights(strategy: Strategy) -> bool:
    """Whether ranks were forked or spawned by a process that takes rank 0's ``state_dict`` when a training ends."""
    return strategy.launcher is not None and not isinstance(strategy.launcher, SubprocessScriptLauncher)
