"""Functions with plain names for the private names of Lightning that the package uses.

The rest of the package calls these functions, so that a change in Lightning concerns one file. Names are dotted. An
attribute of objects alone is listed under the class, or else the module, whose source assigns it. All names were seen
in the versions of :data:`LIGHTNING_SEEN`. ``tests/test_private_names.py`` reads the two lists, and compares them with
the installed version and the package's sources.

Used through this file: what for | what happens without it.

    lightning.pytorch.core.optimizer.LightningOptimizer._to_lightning_optimizer
        wraps optimizers that are set, as Lightning's own setter does | zero1_custom does not begin
    lightning.pytorch.core.optimizer._MockOptimizer
        stands in if a module has no optimizer; it is not sharded | zero1_custom cannot be imported
    lightning.fabric.utilities.device_dtype_mixin._DeviceDtypeModuleMixin._device
        Tells the module its device, as its tensors move one by one | `self.device` is the host's under zero3_custom
        and pipeline_custom.
    lightning.pytorch.core.module.LightningModule._current_fx_name
        the hook that a rank is within, for lines about waits | these lines do not name it
    lightning.pytorch.callbacks.ModelCheckpoint._last_global_step_saved
        knows whether the last step was saved already, when SIGTERM ends training | a training that SIGTERM ends fails
        instead of saving
    lightning.pytorch.callbacks.ModelCheckpoint._save_last_checkpoint
        saves what `ckpt_path='last'` finds | a training that SIGTERM ends fails instead of saving
    lightning.pytorch.trainer.Trainer._checkpoint_connector
        names the checkpoint from which a requeued Slurm job resumes; calls back before it loads one | a training does
        not begin
    lightning.pytorch.trainer.Trainer._signal_connector
        takes signals over from Lightning | a training does not begin: signals could not be handled
    lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop._broadcast_sigterm_tensor
        is left out, because ranks agree on signals here | Lightning broadcasts once more in every batch
    lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop._batches_that_stepped
        is the step that loggers record; is set back in a checkpoint of an earlier batch | GradNormMonitor fails, and a
        save within a window, too
    lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop._should_check_val_fx
        knows whether a validation comes next, and whether a resumed training ends an epoch first | a save after a batch
        fails, and a resume at its begin, too
    lightning.pytorch.loops.evaluation_loop._EvaluationLoop._restart_stage
        makes a training that resumes run a validation that was due | the validation is skipped, and random numbers
        differ
    lightning.pytorch.loops.evaluation_loop._EvaluationLoop._combined_loader
        the evaluation's loaders, in sequence or together | an evaluation fails at its begin
    lightning.pytorch.loops.evaluation_loop._EvaluationLoop._store_dataloader_outputs
        the moment before the results of a loader are combined over ranks | zero3_custom combines results of ranks that
        have called different modules, or hangs
    lightning.pytorch.strategies.launchers._SubprocessScriptLauncher
        whether processes come back with weights, as forked and spawned ones do | strategies cannot be imported
    lightning.fabric.utilities.distributed._DatasetSamplerWrapper._sampler
        the user's sampler within Lightning's distributed one, whose generator is saved | training does not begin
    lightning.pytorch.loops.fit_loop._FitLoop._combined_loader
        the training's loaders | a training fails at its begin
    lightning.pytorch.loops.fit_loop._FitLoop._data_fetcher
        knows how many batches it has fetched | a training fails at its begin
    lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop._on_before_fetch
        the moment before a batch is fetched, when loaders with own states are asked for it | a checkpoint within an
        epoch has the state of a later batch
    lightning.pytorch.utilities.combined_loader.CombinedLoader._iterator
        the iterators of the training's loaders | a training fails at its begin
    lightning.pytorch.utilities.combined_loader._MaxSizeCycle._consumed
        which loaders have ended in the epoch | if loaders begin again, a training that resumes within an epoch fails at
        its begin
    lightning.pytorch.utilities.combined_loader.CombinedLoader._mode
        how the loaders are combined | a checkpoint within an epoch cannot be saved

Read or overridden on themselves by classes in ``strategies/``: what for | what happens without it.

    lightning.pytorch.strategies.ddp.DDPStrategy._timeout
        how long a collective may take | a training does not begin
    lightning.pytorch.strategies.ddp.DDPStrategy._ddp_kwargs
        the user's arguments for DDP | ddp_tuned does not begin
    lightning.pytorch.strategies.ddp.DDPStrategy._register_ddp_hooks
        is overridden: hooks are registered on every device | ddp_tuned: `comm_hook` has no effect
    lightning.pytorch.strategies.ddp.DDPStrategy._pl_static_graph_delay_done
        is set back for a new wrapper of a static graph | with static_graph=True, a strategy's second training sends no
        first gradients
    lightning.pytorch.strategies.ddp.DDPStrategy._configure_launcher
        is overridden: first, the numbers of nodes and devices are known there | under torchrun and Slurm another number
        of ranks than the Trainer's is refused late, or never
    lightning.pytorch.strategies.Strategy._launcher
        is set if torchelastic has started the ranks | under torchrun Lightning refuses another number of ranks than the
        Trainer's
    lightning.pytorch.strategies.Strategy._checkpoint_io
        the user's plugin for files, or None | a training does not begin
    lightning.pytorch.strategies.Strategy._optimizers
        what the overridden property `optimizers` holds | zero1_custom trains nothing
    lightning.pytorch.strategies.Strategy._lightning_optimizers
        what `LightningModule.optimizers()` returns | manual optimization steps optimizers that are not sharded
    lightning.pytorch.plugins.precision.Precision._clip_gradients
        is overridden: measures gradients before every step, and unscales them | `nonfinite_grads` and `grad_norm` have
        no effect
"""

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch import __version__ as lightning_version
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.core.optimizer import LightningOptimizer, _MockOptimizer
from lightning.pytorch.loops.evaluation_loop import RestartStage
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel
from torchmetrics import Metric

from lightning_parstrat.distributed.engine.stepping import lend_methods
from lightning_parstrat.distributed.torch_compat import TORCH_SEEN

LIGHTNING_SEEN = ("2.6.0", "2.6.6")
"""Versions of Lightning that have the names above, and with which all tests or the quick ones have passed."""


def minor(version: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def untried_versions(torch_version: str, lightning_version: str) -> str | None:
    """The warning about versions of torch and Lightning that are newer than the tested ones. None if none is."""
    compared = (("torch", torch_version, TORCH_SEEN), ("lightning", lightning_version, LIGHTNING_SEEN))
    # A version without numbers is not newer.
    newer = [f"{name} up to {seen[-1]} (here: {v})" for name, v, seen in compared if minor(v) > max(map(minor, seen))]
    if not newer:
        return None
    return (
        f"lightning_parstrat was tried with {' and '.join(newer)}. Training continues. If something fails that works"
        " under `ddp`, install the version that was tried, or a newer lightning-parstrat."
    )


@functools.cache
def warn_of_untried_versions() -> None:
    """Warns on rank 0, once in a process, if torch or Lightning is newer than the tested versions."""
    message = untried_versions(torch.__version__, lightning_version)
    if message is not None:
        rank_zero_warn(message)


def unwrapped(optimizer: Any) -> Any:
    """The optimizer within Lightning's wrapper. The wrapper has its name and its attributes."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def wrapped(optimizer: Optimizer, strategy: Any) -> LightningOptimizer:
    """Lightning's wrapper of an optimizer. It steps through the strategy."""
    wrapper = LightningOptimizer._to_lightning_optimizer(optimizer, strategy)
    # The wrapper inherits the optimizer's class. It finds the methods of the class, not those set on the optimizer.
    lend_methods(wrapper.optimizer, wrapper)
    return wrapper


def trained(optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """The user's optimizers, without Lightning's stand-in for a ``configure_optimizers`` that returns None."""
    return [one for one in map(unwrapped, optimizers) if not isinstance(one, _MockOptimizer)]


def trainer_of(module: LightningModule | None) -> Trainer | None:
    """The module's Trainer, if it has one."""
    try:
        return None if module is None else module.trainer
    except RuntimeError:
        return None


def current_hook(module: LightningModule) -> str:
    """The name of the hook that Lightning is calling, such as "training_step". Empty between hooks. Any thread."""
    return getattr(module, "_current_fx_name", None) or ""


def window_is_open(trainer: Trainer) -> bool:
    """Whether gradients accumulate further after the latest batch. Lightning always steps at the last of an epoch."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    ready = progress.current.ready
    is_last = progress.is_last_batch or ready == trainer.num_training_batches
    return ready % trainer.accumulate_grad_batches != 0 and not is_last


def epoch_is_over(trainer: Trainer) -> bool:
    """Whether the last batch of an epoch was trained on. It may have been fetched earlier."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    return bool(progress.is_last_batch) and progress.current.processed == progress.current.ready


def batches_that_stepped(trainer: Trainer) -> int:
    """The number of batches that ended an accumulation window. Loggers record it as the step."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def set_batches_that_stepped(trainer: Trainer, number: int) -> None:
    """Sets what :func:`batches_that_stepped` returns."""
    trainer.fit_loop.epoch_loop._batches_that_stepped = number


def logs_after_this_batch(trainer: Trainer) -> bool:
    """Whether ``log_every_n_steps`` makes loggers write after the batch that ends."""
    if trainer.log_every_n_steps == 0:
        return False
    return (batches_that_stepped(trainer) + 1) % trainer.log_every_n_steps == 0 or trainer.should_stop


def sampler_within(sampler: Any) -> Any:
    """The user's sampler within Lightning's distributed one. None for any other sampler."""
    return sampler.dataset._sampler if type(sampler) is DistributedSamplerWrapper else None


def iterators_in_training(trainer: Trainer) -> list[tuple[Any, Any]]:
    """The training's loaders, each with the iterator of its batches, or with None if it has no iterator."""
    combined = trainer.fit_loop._combined_loader
    if combined is None:
        return []
    iterators = [] if combined._iterator is None else combined._iterator.iterators
    # Of loaders that Lightning takes one after the other, one has an iterator.
    return list(zip_longest(combined.flattened, iterators))


def forget_loaders(trainer: Trainer) -> None:
    """Makes Lightning make the training's loaders again. They may have been made for a count of steps."""
    trainer.fit_loop._combined_loader = None


def replace_loaders(trainer: Trainer, by: Callable[[Any], Any]) -> None:
    """Replaces the training's loaders within Lightning's `CombinedLoader`."""
    combined = trainer.fit_loop._combined_loader
    if combined is not None:
        combined.flattened = list(map(by, combined.flattened))


def batches_fetched(trainer: Trainer) -> int:
    """How many batches of the epoch were fetched, also before a resume within it. Call it within an epoch only."""
    return trainer.fit_loop._data_fetcher.fetched


def before_fetches(trainer: Trainer, function: Callable[[Trainer], None]) -> None:
    """Makes Lightning call a function before it fetches a batch, until :func:`give_back_loop`.

    Batches that Lightning fetches ahead before the first epoch, or from rebuilt loaders, are left out.
    """
    _call_before(trainer.fit_loop.epoch_loop, "_on_before_fetch", functools.partial(function, trainer))


def _call_before(loop: Any, method: str, function: Callable[[], None]) -> None:
    def called_before() -> Any:
        function()
        return getattr(type(loop), method)(loop)

    # On the instance, not on the class, so that other Trainers of this process are unchanged.
    setattr(loop, method, called_before)


def mode_of_loaders(trainer: Trainer) -> str:
    """How the training's loaders are combined: "min_size", "max_size_cycle" or "max_size"."""
    combined = trainer.fit_loop._combined_loader
    return "min_size" if combined is None else combined._mode


def ended_in_epoch(trainer: Trainer) -> Sequence[bool]:
    """For each loader of the training, whether it has ended in the epoch. Empty if no loader begins again."""
    combined = trainer.fit_loop._combined_loader
    iterator = None if combined is None else combined._iterator
    return [] if iterator is None or mode_of_loaders(trainer) != "max_size_cycle" else list(iterator._consumed)


def count_as_ended(trainer: Trainer, ended: Sequence[bool]) -> None:
    """Marks loaders that had ended before a resume, so that the epoch does not wait for their end again.

    Args:
        trainer: The Trainer.
        ended: For each loader of the training. May be shorter.
    """
    combined = trainer.fit_loop._combined_loader
    iterator = None if combined is None else combined._iterator
    if iterator is not None and mode_of_loaders(trainer) == "max_size_cycle":
        for number, has_ended in enumerate(ended[: len(iterator._consumed)]):
            iterator._consumed[number] |= has_ended


def ends_epoch_first(trainer: Trainer) -> bool:
    """Whether a resumed training ends an epoch before it trains, and then makes new iterators of the loaders.

    This happens after a save that followed the validation after an epoch's last batch.
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
    """Whether a validation comes next, after a training batch. A validation that is due by time does not count."""
    loop = trainer.fit_loop.epoch_loop
    progress = loop.batch_progress.current
    is_after_batch = progress.completed < progress.processed == progress.ready
    is_by_batches = trainer.val_check_batch is not None and not trainer.should_stop
    return bool(is_after_batch and is_by_batches and loop._should_check_val_fx(trainer.fit_loop._data_fetcher))


def validate_first(trainer: Trainer) -> None:
    """Makes a training that resumes after a batch validate, before it trains or ends the epoch."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    # Lightning runs a validation that a save has interrupted. Here it runs that validation from its begin.
    loop._restart_stage = RestartStage.RESTARTED_MID_EVALUATION
    loop.restarting = False


def takes_turns(loop: Any) -> bool:
    """Whether an evaluation uses its loaders one after the other, and not all together."""
    return bool(loop._combined_loader._mode == "sequential")


def call_after_batches(loop: Any, callback: Callable[[], None]) -> None:
    """Makes Lightning call ``callback`` when an evaluation's loader has ended, before its results are combined.

    Args:
        loop: The loop of the evaluation. :func:`give_back_loop` undoes it.
        callback: Called once a loader. In a prediction, which combines nothing, it is called once a pass.
    """
    name = "_store_dataloader_outputs" if hasattr(loop, "_store_dataloader_outputs") else "on_run_end"
    _call_before(loop, name, callback)


def give_back_loop(loop: Any) -> None:
    """Gives a loop its own methods again."""
    of_evaluation = ("_store_dataloader_outputs", "on_run_end", "increment_progress_to_evaluation_end")
    for name in (*of_evaluation, "_on_before_fetch"):
        vars(loop).pop(name, None)


def count_one_step_less(fit_loop: dict[str, Any]) -> None:
    """Subtracts a batch that ended a window from the counts in the fit loop's part of a checkpoint."""
    fit_loop["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1


def lacks_inner_io(io: CheckpointIO) -> bool:
    """Whether a plugin leaves writing to another plugin, and has not got one yet."""
    inner: CheckpointIO | None = io
    # AsyncCheckpointIO does so, and users' plugins that are made in the same way.
    while hasattr(inner, "checkpoint_io"):
        inner = inner.checkpoint_io
    return inner is None


def save_last(callback: ModelCheckpoint, trainer: Trainer) -> None:
    """Saves the callback's last checkpoint, unless the callback has saved it after this step. Collective."""
    if callback._last_global_step_saved != trainer.global_step or not callback.last_model_path:
        counts = {"epoch": torch.tensor(trainer.current_epoch), "step": torch.tensor(trainer.global_step)}
        callback._save_last_checkpoint(trainer, {**trainer.callback_metrics, **counts})


def follow_device(module: LightningModule, device: torch.device) -> None:
    """Moves what a module computes with besides its tensors: states of metrics, and what its ``device`` says."""
    for part in module.modules():
        if isinstance(part, Metric):
            part.to(device)
        elif isinstance(part, LightningModule):
            part._device = device


def averaged_copies(trainer: Trainer) -> list[torch.nn.Module]:
    """The copies of the module in which callbacks average its weights."""
    averaging = [one for one in trainer.callbacks if isinstance(one, (WeightAveraging, StochasticWeightAveraging))]
    held = [value for callback in averaging for value in vars(callback).values()]
    copies = [one.module if isinstance(one, AveragedModel) else one for one in held]
    return [one for one in copies if isinstance(one, LightningModule) and one is not trainer.lightning_module]


def path_for_slurm_job(trainer: Trainer) -> str:
    """The path at which a requeued Slurm job looks for its checkpoint."""
    return trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir)


def before_resume(trainer: Trainer, check: Callable[[object], None]) -> None:
    """Calls a function with the checkpoint's path, or None, before the Trainer loads it or begins without one."""
    connector = trainer._checkpoint_connector

    def resume_start(path: object = None, *args: Any, **kwargs: Any) -> None:
        check(path)
        type(connector).resume_start(connector, path, *args, **kwargs)

    connector.resume_start = resume_start


def give_back_resume(trainer: Trainer) -> None:
    """Undoes :func:`before_resume`."""
    vars(trainer._checkpoint_connector).pop("resume_start", None)


def leave_signals_alone(trainer: Trainer) -> None:
    """Keeps Lightning from handling signals in the next training. Ranks agree on them elsewhere.

    Its handler of SIGTERM, and its loop in each batch, broadcast whether rank 0 has received it.
    """
    trainer._signal_connector.received_sigterm = False
    trainer._signal_connector.register_signal_handlers = lambda: None
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None


def give_back_signals(trainer: Trainer) -> None:
    """Undoes :func:`leave_signals_alone`."""
    vars(trainer._signal_connector).pop("register_signal_handlers", None)
    vars(trainer.fit_loop.epoch_loop).pop("_broadcast_sigterm_tensor", None)


def returns_weights(strategy: Strategy) -> bool:
    """Whether ranks were forked or spawned by a process that takes rank 0's ``state_dict`` when a training ends."""
    return strategy.launcher is not None and not isinstance(strategy.launcher, _SubprocessScriptLauncher)
