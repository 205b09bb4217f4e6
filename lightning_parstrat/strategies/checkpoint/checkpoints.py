"""Durable checkpoints: saved by all ranks or by none, complete or absent, and read at any world size."""

import logging
import os
import uuid
from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from pathlib import Path
from typing import Any

from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parstrat.core.policy import CommonPolicy
from lightning_parstrat.core.tuning import MEASURES
from lightning_parstrat.core.wording import counted
from lightning_parstrat.distributed.checkpoint.folder import (
    OF_ANOTHER_JOB,
    CheckpointNotSavedError,
    is_sharded_checkpoint,
)
from lightning_parstrat.distributed.checkpoint.reading import ShardedCheckpoint
from lightning_parstrat.distributed.checkpoint.writing import save_sharded
from lightning_parstrat.distributed.comm.agreement import all_gather_object, all_have_same, all_or_none
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.comm.liveness import names_of
from lightning_parstrat.distributed.comm.process_groups import watching
from lightning_parstrat.distributed.durable_files import recover, remove_atomically
from lightning_parstrat.distributed.engine.state import MASTER_WEIGHTS, check_shapes
from lightning_parstrat.distributed.engine.stepping import has_master_weights, is_sharded
from lightning_parstrat.strategies.checkpoint.checkpoint_io import (
    CHECKPOINT_KEY,
    FORMAT,
    check_readable,
    local_path,
)
from lightning_parstrat.strategies.checkpoint.preemption import check_job, job_number
from lightning_parstrat.strategies.checkpoint.resume import Resume
from lightning_parstrat.strategies.checkpoint.training_state import TrainingState
from lightning_parstrat.strategies.launch.ranks import Ranks
from lightning_parstrat.strategies.lightning_compat import give_back_resume, trainer_of, unwrapped
from lightning_parstrat.strategies.parts import Part

_AFTER_SAVING = "Trainer.save_checkpoint"

_SAVE = "`trainer.save_checkpoint()`"
_SAVE_ON_ALL = "Call it on all ranks: each may have a part of the state."

_Load = Callable[[str | Path, bool | None], dict[str, Any]]

log = logging.getLogger(__name__)


class Checkpoints(Part):
    """Saves and loads the same checkpoints as ``ddp``, or folders of shards.

    The argument ``by_lightning`` of a method is the method of Lightning's strategy.

    Args:
        strategy: The strategy that it is a part of.
        ranks: The strategy's ranks.
        policy: The format, and how to save.
        state: The state of the module and the optimizers.
        resume: The place of the training.
        synchronize: Called before the state is read, if all ranks can be reached.
        entries: Returns the strategy's own entries in a checkpoint, given Lightning's.
    """

    _of_one_training = frozenset({"_loaded", "_wait"})

    def __init__(
        self,
        strategy: DDPStrategy,
        ranks: Ranks,
        policy: CommonPolicy,
        state: TrainingState,
        resume: Resume,
        synchronize: Callable[[], None],
        entries: Callable[[Mapping[str, Any]], dict[str, Any]],
    ) -> None:
        super().__init__(strategy)
        self._ranks, self._policy, self._state, self._resume = ranks, policy, state, resume
        self._synchronize, self._entries = synchronize, entries
        self.loaded_entries: Mapping[str, Any] = {}
        """This package's entries in the checkpoint that was loaded."""
        self._loaded: ShardedCheckpoint | None = None
        # Waits for the save in progress, of which there is at most one. When it has succeeded, others are removed.
        self._wait: Callable[[], None] | None = None
        self._obsolete: list[Path] = []
        self._absent: list[int] = []
        self._trains = False

    @property
    def are_sharded(self) -> bool:
        """Whether checkpoints are folders of shards."""
        return self._policy.state_dict_type == "sharded"

    @override
    def setup_optimizers(self) -> None:
        """Makes all process groups that a training will use, so that the first save does not."""
        if self._ranks.world_size > 1:
            _ = self._ranks.control

    def module_state(self, by_lightning: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The module's state. Collective if it is sharded, and after an exception: ranks wait a few seconds then."""
        self._resume.begin()
        # When Lightning saves, it asks for this first: before anything waits for other ranks.
        self._absent = self._ranks.out_of_reach()
        if self._absent and not self._can_save_alone:
            return {}
        if not self._absent:
            self._synchronize()
        if self._state.is_whole:
            return by_lightning()
        with watching(_SAVE, _SAVE_ON_ALL):
            self._ranks.wait_for_all()
            return self._state.of_module(self.are_sharded)

    def optimizer_state(
        self, by_lightning: Callable[[Optimizer], dict[str, Any]], optimizer: Optimizer
    ) -> dict[str, Any]:
        """The unsharded state in torch's own format, on rank 0's host. Other ranks get the groups alone. Collective.

        For a sharded checkpoint nothing is gathered: placeholders take the place of tensors.
        """
        optimizer = unwrapped(optimizer)
        if not self._state.is_sharded(optimizer):
            return by_lightning(optimizer)
        if self._absent:
            return {"state": {}, "param_groups": []}
        with watching(_SAVE, _SAVE_ON_ALL):
            # First a barrier. In a gather, a rank that comes later would be noticed by some ranks only.
            self._ranks.wait_for_all()
            return self._state.of_optimizer(optimizer, self.are_sharded)

    def save(
        self,
        by_lightning: Callable[[dict[str, Any], str | Path, Any], None],
        checkpoint: dict[str, Any],
        filepath: str | Path,
        storage_options: Any,
    ) -> None:
        """Saves on all ranks or on none. Collective, unless an exception came on some ranks only.

        Full: rank 0 holds the unsharded state in host memory while it writes. Sharded: each rank holds only its part.

        Raises:
            CheckpointNotSavedError: Another rank could not write.
            RuntimeError: Ranks did not take part. Earlier checkpoints are unchanged.
        """
        if self._absent:
            if self._can_save_alone:
                by_lightning(self._with_own_entries(checkpoint, None), filepath, storage_options)
                return
            log.warning(
                f"{self._ranks.flag}: rank {self._ranks.rank} was to save {filepath} after an exception. That needs all"
                f" ranks, and {names_of(self._absent)} cannot be reached: nothing was saved. Checkpoints that were"
                " saved before are intact."
            )
            return
        if MEASURES in os.environ:
            return
        if not self._ranks.have_joined:
            # Spawned processes have not started yet, or have ended. There are no ranks to wait for.
            by_lightning(self._state.with_own_storage(checkpoint), filepath, storage_options)
            return
        with watching(f"{_SAVE} of {filepath}", _SAVE_ON_ALL):
            self._ranks.wait_for_all()
            checkpoint = self._state.completed(checkpoint, gathers=not self.are_sharded)
            control = self._ranks.control
            checkpoint = self._with_own_entries(checkpoint, control)
            if self.are_sharded:
                self._save_sharded(checkpoint, filepath, storage_options)
                return
            # Other ranks wait for rank 0's result. Without it they would continue, and hang in the next collective.
            all_or_none(
                lambda: by_lightning(self._state.with_own_storage(checkpoint), filepath, storage_options),
                control,
                lambda failed: CheckpointNotSavedError(_who_and_why(failed, f"could not save {filepath}")),
                shows_own=True,
            )

    def _save_sharded(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any) -> None:
        if storage_options is not None:
            raise TypeError("`storage_options` do not apply to a sharded checkpoint: leave them out.")
        path = local_path(filepath)
        if path is None:
            raise MisconfigurationException(
                f"state_dict_type='sharded' writes to a folder that all nodes share, and {filepath} is elsewhere."
                " Choose a local `dirpath`, or state_dict_type='full'."
            )
        self.wait_for_saves()
        tensors = self._state.tensors()
        if self._strategy.is_global_zero:
            checkpoint = tensors.with_placeholders(self._state.with_own_storage(checkpoint))
        # Before and after training, no later call would wait for the end of the save.
        asynchronous = self._policy.async_save and self._trains and not self._ranks.is_interrupted
        self._wait = save_sharded(checkpoint, path, tensors, self._ranks.of_checkpoints, asynchronous)

    def _with_own_entries(self, checkpoint: dict[str, Any], control: Collectives | None) -> dict[str, Any]:
        # By the number of the save, ranks that load compare whether they read the same checkpoint.
        own = {"format": FORMAT, "save": uuid.uuid4().int >> 65, "slurm_job": job_number()}
        own.update(self._entries(checkpoint))
        return self._resume.with_place({**checkpoint, CHECKPOINT_KEY: own}, control)

    @property
    def _can_save_alone(self) -> bool:
        """Whether this rank could write a checkpoint without the others, because it has all of the state."""
        return not self.are_sharded and self._state.is_whole and not any(map(is_sharded, self._state.optimizers))

    def remove(self, by_lightning: Callable[[str | Path], None], filepath: str | Path) -> None:
        """Removes a checkpoint, but not before its successor is complete."""
        local = local_path(filepath)
        if self._wait is not None and local is not None:
            self._obsolete.append(local)
        else:
            by_lightning(filepath)

    def check_found(self, path: object) -> None:
        """Compares over all ranks whether they resume. Collective: one all-reduce of 16 bytes.

        Args:
            path: The checkpoint that this rank has found, or None.

        Raises:
            MisconfigurationException: Some ranks resume, and others do not.
        """
        if self._ranks.world_size == 1 or all_have_same(bool(path), self._ranks.control):
            return
        found = all_gather_object(path and str(path), self._ranks.control.group)
        without = [rank for rank, found_there in enumerate(found) if not found_there]
        raise MisconfigurationException(
            f"Some ranks resume from {next(filter(None, found))}, and {names_of(without)} found no checkpoint. All"
            f" nodes must see the same files. If they do: {OF_ANOTHER_JOB}"
        )

    def load(
        self,
        by_lightning: _Load,
        path: str | Path,
        weights_only: bool | None,
    ) -> dict[str, Any]:
        """Loads a checkpoint of any strategy and world size. Collective: all ranks succeed, or all raise.

        A full one is mapped into memory, so that ranks of one node share it. Of a sharded one, each rank reads the
        weights, and later its part of the optimizers' states.

        Raises:
            MisconfigurationException: It is not a checkpoint, or is damaged, or a newer version has written it. Or a
                rank cannot read it.
        """
        self.wait_for_saves()
        what = f"loading {path}"
        with watching(what):
            checkpoint = self._all_or_none(lambda: self._open(by_lightning, path, weights_only), what)
            own = checkpoint.get(CHECKPOINT_KEY, {})
            # By the number of the save, they also differ if some have found a file and some a folder.
            if self._ranks.have_joined and not all_have_same(own.get("save", 0), self._ranks.control):
                raise MisconfigurationException(f"Ranks have read different checkpoints at {path}: {OF_ANOTHER_JOB}")
        self.loaded_entries = own
        check_job(own, path)
        self._resume.load(checkpoint, own)
        # Hooks get the same as under stock strategies.
        return {key: value for key, value in checkpoint.items() if key != CHECKPOINT_KEY}

    def _open(self, by_lightning: _Load, path: str | Path, weights_only: bool | None) -> dict[str, Any]:
        """The content. Of a folder, without the optimizers' tensors."""
        self._loaded, local = None, local_path(path)
        if local is not None:
            recover(local)
        if local is not None and is_sharded_checkpoint(local):
            self._loaded = ShardedCheckpoint(local, weights_only)
            check_readable(self._loaded.skeleton, path)
            return self._state.filled(self._loaded)
        checkpoint = by_lightning(path, weights_only)
        check_readable(checkpoint, path)
        return checkpoint

    def _all_or_none(self, action: Callable[[], Any], what: str) -> Any:
        """The result of an action, if it succeeds on all ranks. Collective."""
        # Connected before the action. If connecting failed within it, a second try would wait as long again.
        control = self._ranks.control if self._ranks.have_joined else None
        return all_or_none(
            action,
            control,
            lambda failed: MisconfigurationException(
                f"{_who_and_why(failed, f'failed in {what}')}. All nodes must see the same files."
            ),
            shows_own=True,
        )

    def load_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        """Gives each optimizer its state. Each rank keeps its part.

        Raises:
            ValueError: The state belongs to other optimizers or other parameters. The message names them.
        """
        states, optimizers = checkpoint["optimizer_states"], self._state.optimizers
        if not states and optimizers:
            rank_zero_warn(f"{self._ranks.flag}: the checkpoint has weights alone. The optimizers begin without state.")
        elif len(states) != len(optimizers):
            raise ValueError(
                f"The checkpoint has the state of {counted(len(states), 'optimizer')}, and the module has"
                f" {len(optimizers)}. `configure_optimizers` must return as many as when it was saved."
            )
        names = {parameter: name for name, parameter in self._module.named_parameters()}
        for optimizer, state in zip(optimizers, states, strict=False):
            check_shapes(optimizer, state, names)
            if MASTER_WEIGHTS in state and not has_master_weights(optimizer):
                rank_zero_warn(
                    f"{self._ranks.flag}: the checkpoint has master weights, and this training has none. It begins with"
                    " the rounded weights. Set `precision`, `gather_dtype` and `master_weights` as before to keep them."
                )
            if not is_sharded(optimizer):
                # No other optimizer steps master weights. They would be read whole.
                state = {key: value for key, value in state.items() if key != MASTER_WEIGHTS}
            if (loaded := self._loaded) is not None:
                cuts = self._state.cuts_of(optimizer)
                read = partial(loaded.own_parts, optimizer, state, cuts)
                with watching("loading an optimizer's state"):
                    state = self._all_or_none(read, "reading its part")
            optimizer.load_state_dict(self._state.own_part(optimizer, state, is_mapped=self._loaded is None))
            device = self._strategy.root_device
            for parameter, values in optimizer.state.items():
                if isinstance(values, MutableMapping):
                    # Not counts of steps: `load_state_dict` has placed those already.
                    values.update({key: move_data_to_device(v, device) for key, v in values.items() if key != "step"})
                else:
                    optimizer.state[parameter] = move_data_to_device(values, device)
        self._loaded = None
        if self._trainer.state.fn == TrainerFn.FITTING:
            # Not earlier, because Lightning makes the training's loaders next.
            self._resume.before_loaders()

    @override
    def on_train_start(self) -> None:
        """Makes callbacks wait for a save in progress before they look for a free name.

        Raises:
            MisconfigurationException: A callback links to the latest checkpoint.
        """
        saving = [callback for callback in self._trainer.callbacks if isinstance(callback, ModelCheckpoint)]
        for callback in saving if self._policy.async_save else ():
            if callback.save_last == "link":
                raise MisconfigurationException(
                    "`ModelCheckpoint(save_last='link')` would link to a checkpoint that async_save=True is still"
                    " writing. Use `save_last=True`."
                )
            vars(callback).setdefault("file_exists", partial(_exists_when_saved, callback, self.wait_for_saves))
        self._trains = True

    @override
    def on_train_end(self) -> None:
        """Waits for the checkpoint that is being written."""
        self._trains = False
        self.wait_for_saves()

    def wait_for_saves(self) -> None:
        """Returns when no checkpoint is being written. If one is, all ranks must call it.

        Raises:
            CheckpointNotSavedError: The checkpoint could not be written.
            RuntimeError: Ranks have not written their part.
        """
        if self._wait is not None:
            with watching("the end of a save"):
                self._finish_save()

    def _finish_save(self) -> None:
        # Cleared first: a failed save has ended, too, and must not be waited for again.
        (wait, self._wait), (obsolete, self._obsolete) = (self._wait, None), (self._obsolete, [])
        try:
            if wait is not None:
                wait()
        except RuntimeError:
            kept = [str(path) for path in obsolete if path.exists()]
            if kept:
                rank_zero_warn(f"Kept because its successor was not saved: {', '.join(kept)}.")
            raise
        for path in obsolete if self._strategy.is_global_zero else ():
            remove_atomically(path)

    def leaves_out_barrier(self, names: tuple[Any, ...]) -> bool:
        """Whether to skip a barrier. It is skipped at the end of a save that some ranks did not take part in."""
        if not self._absent or names[:1] != (_AFTER_SAVING,):
            return False
        self._absent = []
        return True

    @override
    def teardown(self) -> None:
        """Waits for a checkpoint that is still being written, for example after an exception."""
        self._trains = False
        try:
            self._finish_save()
        # Only a warning: in teardown, an error would hide the error that ended the training.
        except RuntimeError as error:
            rank_zero_warn(f"A checkpoint was not saved: {error}")
        # An exception may come before there is a Trainer.
        trainer = trainer_of(self._strategy.lightning_module)
        if trainer is not None:
            give_back_resume(trainer)
        for callback in [] if trainer is None else trainer.callbacks:
            if getattr(vars(callback).get("file_exists"), "func", None) is _exists_when_saved:
                del callback.file_exists
        self._loaded, self.loaded_entries = None, {}


def _exists_when_saved(
    callback: ModelCheckpoint, wait: Callable[[], None], filepath: str | Path, trainer: Trainer
) -> bool:
    """Replaces a ModelCheckpoint's ``file_exists``: first it waits for a save that may make that file. Collective.

    ModelCheckpoint adds a version to a name that exists. It calls this before each save, which would wait as well.
    """
    wait()
    return type(callback).file_exists(callback, filepath, trainer)


def _who_and_why(failed: Mapping[int, str], how: str) -> str:
    return f"{names_of(list(failed)).capitalize()} {how}: {next(iter(failed.values()))}"
