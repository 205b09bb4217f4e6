"""Checkpoints that survive: saved by all ranks or by none, whole or not at all, and read at any world size."""

import copy
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parstrat.core.policy import CheckpointFormat, CheckpointPolicy
from lightning_parstrat.core.tensor_trees import replace_leaves
from lightning_parstrat.distributed.checkpoint.pieces import (
    CheckpointPieces,
    Placeholders,
    TensorSource,
    with_placeholders_for_state,
)
from lightning_parstrat.distributed.checkpoint.reading import ShardedCheckpoint, is_sharded_checkpoint
from lightning_parstrat.distributed.checkpoint.writing import CheckpointNotSavedError, save_sharded
from lightning_parstrat.distributed.comm.agreement import all_gather_object, broadcast_object
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.comm.liveness import missing_ranks_named, names_of
from lightning_parstrat.distributed.comm.process_groups import checkpoint_group
from lightning_parstrat.distributed.durable_files import recover, remove_atomically
from lightning_parstrat.distributed.zero1.gradient_bucket import ParameterSlot
from lightning_parstrat.distributed.zero1.optimizer_sharding import is_sharded
from lightning_parstrat.distributed.zero1.state_dict import check_shapes, gather_state_dict
from lightning_parstrat.strategies.checkpoint.checkpoint_io import DurableCheckpointIO, check_is_checkpoint, local_path
from lightning_parstrat.strategies.checkpoint.pending_save import FileExists, PendingSave
from lightning_parstrat.strategies.checkpoint.resume import (
    RNG,
    RandomNumbers,
    ResumePoints,
    from_which_training_goes_on,
)
from lightning_parstrat.strategies.launch.ranks import RanksStrategy
from lightning_parstrat.strategies.lightning_compat import lacks_inner_io, optimizer_to_device, trainer_of, unwrapped

CHECKPOINT_KEY = "lightning_parstrat"
"""Where a checkpoint keeps what is this package's alone. Other strategies pass over it."""

FORMAT = 1
"""Of what is under that key, and of sharded checkpoints."""

_AFTER_SAVING = "Trainer.save_checkpoint"

log = logging.getLogger(__name__)


class CheckpointingStrategy(RanksStrategy):
    """DDP whose checkpoints are whole and durable, and from which training goes on as if it had not stopped.

    Args:
        checkpoint_format: ``"full"`` writes what ``ddp`` would: one file, from rank 0, which any strategy reads.
            ``"sharded"`` writes a folder, each rank its part, without gathering anything; this package's strategies
            read it at any world size, and ``lightning-parstrat consolidate`` makes a full one of it. All nodes must
            see the folder.
        async_save: Whether training goes on as soon as each rank has copied its part to host memory, while a thread
            writes the sharded checkpoint. At most one is under way; the next save, and the end of training, wait for
            it. ``checkpoint_io`` has no part in sharded checkpoints.
        **kwargs: Arguments of the base class.

    Raises:
        ValueError: A value is not allowed; the message says which are.
    """

    def __init__(self, checkpoint_format: CheckpointFormat = "full", async_save: bool = False, **kwargs: Any) -> None:
        self._checkpoint_policy = CheckpointPolicy(checkpoint_format=checkpoint_format, async_save=async_save)
        self._placeholders = Placeholders()
        self._loaded: ShardedCheckpoint | None = None
        self._loaded_entries: Mapping[str, Any] = {}
        self._pending = PendingSave()
        self._random = RandomNumbers()
        self._resume_points = ResumePoints()
        self._absent: list[int] = []
        self._loaded_loaders: list[Any] | None = None
        self._trains = False
        super().__init__(**kwargs)

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        """How files are written and read: the user's way, or durably."""
        if self._checkpoint_io is None:
            self._checkpoint_io = DurableCheckpointIO()
        elif lacks_inner_io(self._checkpoint_io):
            self._checkpoint_io.checkpoint_io = DurableCheckpointIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        self._checkpoint_io = io

    @property
    def _saves_sharded(self) -> bool:
        return self._checkpoint_policy.checkpoint_format == "sharded"

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state. The first that Lightning asks for when it saves: after an exception, who is there?"""
        self._absent = []
        if self._is_interrupted and self.world_size > 1:
            self._absent = self._liveness.missing("save after an exception")
        if self._absent and not self._can_save_alone:
            return {}
        return super().lightning_module_state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The unsharded state on rank 0 in torch's own format, on the host; elsewhere the groups alone. Collective.

        In a sharded checkpoint nothing is gathered: stand-ins are in the place of tensors.
        """
        optimizer = unwrapped(optimizer)
        if is_sharded(optimizer):
            return self._state_of_sharded(optimizer)
        state = super().optimizer_state(optimizer)
        if self._saves_sharded:
            return with_placeholders_for_state(state, optimizer, self._position_of(optimizer), self._placeholders)
        return state

    def _state_of_sharded(self, optimizer: Optimizer) -> dict[str, Any]:
        if self._absent:
            return {"state": {}, "param_groups": []}
        with missing_ranks_named(self._liveness, "Gathering the optimizer's state"):
            self._wait_for_all()
            if not self._saves_sharded:
                return gather_state_dict(optimizer, destination=0)
            number = self._position_of(optimizer)

            def stand_in(position: int, entry: str, slot: ParameterSlot, dtype: torch.dtype) -> Tensor:
                source = TensorSource(number, position, entry)
                return self._placeholders.issue(slot.parameter.shape, slot.strides, dtype, source)

            return gather_state_dict(optimizer, destination=0, stand_in=stand_in)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Saves on all ranks or on none. Collective, but after an exception that is not everybody's.

        Full: rank 0 holds the whole state in host memory while it writes. Sharded: nobody holds more than its part.

        Raises:
            CheckpointNotSavedError: Another rank could not write.
            MissingRanksError: Ranks did not come; what was saved before is as it was.
        """
        if self._absent:
            self._save_alone(checkpoint, filepath, storage_options)
            return
        if not self._has_ranks:
            # Processes that were spawned have ended, or have not begun: there is nobody to wait for.
            super().save_checkpoint(self._as_saved(checkpoint), filepath, storage_options)
            return
        with missing_ranks_named(self._liveness, f"Saving {filepath}"):
            self._wait_for_all()
            checkpoint = self._completed(checkpoint, self._control)
            if self._saves_sharded:
                self._save_sharded(checkpoint, filepath, storage_options)
            else:
                self._save_full(checkpoint, filepath, storage_options)

    def _save_alone(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None) -> None:
        if self._can_save_alone:
            super().save_checkpoint(self._completed(checkpoint, None), filepath, storage_options)
            return
        log.warning(
            f"{self.flag}: rank {self.global_rank} was to save {filepath} after an exception. That takes all ranks, and"
            f" {names_of(self._absent)} did not come: nothing was saved. What was saved before is as it was."
        )

    def _save_full(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None) -> None:
        failure: Exception | None = None
        try:
            super().save_checkpoint(self._as_saved(checkpoint), filepath, storage_options)
        except Exception as error:
            failure = error
        told = broadcast_object(None if failure is None else repr(failure), self._control.group)
        if failure is not None:
            raise failure
        if told is not None:
            raise CheckpointNotSavedError(f"Rank 0 could not save {filepath}: {told}")

    def _save_sharded(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None) -> None:
        if storage_options is not None:
            raise TypeError("`storage_options` have no meaning for a sharded checkpoint: leave them out.")
        path = _local(filepath)
        self.wait_for_saves()
        slots = self._sharded_slots()
        optimizers = [unwrapped(optimizer) for optimizer in self.optimizers]
        pieces = CheckpointPieces(self._training_module, optimizers, slots, self.global_rank, self.world_size)
        if self.is_global_zero:
            checkpoint = pieces.with_placeholders(self._as_saved(checkpoint), self._placeholders)
        # Before and after training nobody would wait for it.
        asynchronous = self._checkpoint_policy.async_save and self._trains and not self._is_interrupted
        group = checkpoint_group(self._timeout)
        try:
            save = save_sharded(checkpoint, path, pieces, self._placeholders, group, asynchronous)
        finally:
            self._placeholders = Placeholders()
        if save is not None:
            self._pending.begin(save)

    def _completed(self, checkpoint: dict[str, Any], control: Collectives | None) -> dict[str, Any]:
        """With what is ours, and of the moment from which training can go on. Collective in ``control``."""
        own = {"format": FORMAT, **self._own_entries()}
        trainer = self._training_module.trainer
        point = self._resume_points.point_of_save()
        # By all ranks in any case: a hook may have changed the checkpoint of some.
        random = self._random.gather(trainer, point, control)
        if "optimizer_states" in checkpoint and "loops" in checkpoint:
            own[RNG] = random
            checkpoint = from_which_training_goes_on(checkpoint, trainer, point)
        return {**checkpoint, CHECKPOINT_KEY: own}

    def _own_entries(self) -> dict[str, Any]:
        """What a checkpoint is to keep under :data:`CHECKPOINT_KEY`."""
        return {}

    def _as_saved(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """The checkpoint with tensors whose storage holds nothing else."""
        return checkpoint

    def _sharded_slots(self) -> Mapping[Tensor, ParameterSlot]:
        """Where the module's parameters lie that are sharded."""
        return {}

    @property
    def _can_save_alone(self) -> bool:
        """Whether this rank could write a checkpoint without the others: no rank has all of a sharded state."""
        return not self._saves_sharded and not any(is_sharded(unwrapped(one)) for one in self.optimizers)

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Removes a checkpoint, but not before its successor is whole."""
        local = local_path(filepath)
        if self._pending.is_under_way and local is not None:
            self._pending.remove_later(local)
        elif local is not None and is_sharded_checkpoint(local):
            if self.is_global_zero:
                remove_atomically(local)
        else:
            super().remove_checkpoint(filepath)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads a checkpoint of any strategy and world size. Collective: all ranks, or none.

        A full one is mapped into memory, so that ranks of one node share it. Of a sharded one, the weights are read, of
        the state of optimizers later each rank's part.

        Raises:
            MisconfigurationException: It is none, is damaged or of a newer format, or a rank cannot read it.
        """
        self.wait_for_saves()
        checkpoint: dict[str, Any] = {}
        failure: Exception | None = None
        try:
            checkpoint = self._load(checkpoint_path, weights_only)
        except Exception as error:
            failure = error
        if self._has_ranks:
            self._raise_together(failure, f"loading {checkpoint_path}")
        elif failure is not None:
            raise failure
        own = self._loaded_entries = checkpoint.get(CHECKPOINT_KEY, {})
        self._random.load(own.get(RNG), self.global_rank, self.world_size)
        fit_loop = checkpoint.get("loops", {}).get("fit_loop", {})
        self._loaded_loaders = copy.deepcopy(fit_loop.get("state_dict", {}).get("combined_loader"))
        return checkpoint

    def _load(self, path: str | Path, weights_only: bool | None) -> dict[str, Any]:
        self._loaded = None
        local = local_path(path)
        if local is not None:
            recover(local)
        if local is not None and is_sharded_checkpoint(local):
            loaded = ShardedCheckpoint(local, weights_only)
            check_is_checkpoint(loaded.skeleton, path)
            states = loaded.skeleton.get("optimizer_states")
            checkpoint = loaded.filled({k: v for k, v in loaded.skeleton.items() if k != "optimizer_states"})
            if states is not None:
                checkpoint["optimizer_states"] = states
            self._loaded = loaded
        else:
            checkpoint = super().load_checkpoint(path, weights_only)
            check_is_checkpoint(checkpoint, path)
        found = checkpoint.get(CHECKPOINT_KEY, {}).get("format", FORMAT)
        if found > FORMAT:
            raise MisconfigurationException(
                f"{path} was saved by a newer lightning-parstrat (its format is {found}, this version reads {FORMAT})."
                " Upgrade it: `pip install -U lightning-parstrat`."
            )
        return checkpoint

    def _raise_together(self, failure: Exception | None, what: str) -> None:
        """Raises on all ranks where one has failed. Collective."""
        failures = all_gather_object(None if failure is None else repr(failure), self._control.group)
        if failure is not None:
            raise failure
        failed = [rank for rank, told in enumerate(failures) if told is not None]
        if failed:
            raise MisconfigurationException(
                f"{names_of(failed).capitalize()} failed in {what}: {failures[failed[0]]}. All nodes must see the same"
                " files."
            )

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Gives each optimizer its state, of which each rank keeps its part.

        Raises:
            ValueError: It is the state of other optimizers or of other parameters; the message says which.
        """
        states = checkpoint["optimizer_states"]
        if len(states) != len(self.optimizers):
            raise ValueError(
                f"The checkpoint has the state of {len(states)} optimizers, and the module has {len(self.optimizers)}."
                " `configure_optimizers` must return as many as when it was saved."
            )
        names = {parameter: name for name, parameter in self._training_module.named_parameters()}
        for optimizer, state in zip(self.optimizers, states, strict=True):
            check_shapes(unwrapped(optimizer), state, names)
            optimizer.load_state_dict(self._own_part(unwrapped(optimizer), state))
            optimizer_to_device(optimizer, self.root_device)
        self._loaded = None
        if self._training_module.trainer.state.fn == TrainerFn.FITTING:
            self._random.before_loaders()

    def _own_part(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        if self._loaded is not None:
            return self._loaded.own_parts(optimizer, state)
        if is_sharded(optimizer):
            return state
        # What was mapped from a file would be written to later, page by page.
        copied: dict[str, Any] = replace_leaves(state, torch.clone)
        return copied

    @override
    def on_train_start(self) -> None:
        """Goes on with the random numbers of the checkpoint, where training goes on within an epoch."""
        super().on_train_start()
        trainer = self._training_module.trainer
        if self._checkpoint_policy.async_save:
            self._prepare_callbacks([c for c in trainer.callbacks if isinstance(c, ModelCheckpoint)])
        self._random.before_training()
        self._resume_points.note(trainer, self._loaded_loaders)
        self._loaded_loaders = None
        self._trains = True

    def _prepare_callbacks(self, callbacks: list[ModelCheckpoint]) -> None:
        if any(callback.save_last == "link" for callback in callbacks):
            raise MisconfigurationException(
                "`ModelCheckpoint(save_last='link')` would make the link before the checkpoint is there that"
                " async_save=True is still writing. Use `save_last=True`."
            )
        for callback in callbacks:
            if "file_exists" not in vars(callback):
                callback.file_exists = FileExists(callback, self._pending)

    @override
    def on_train_end(self) -> None:
        """Waits for the checkpoint that is being written."""
        super().on_train_end()
        self._trains = False
        self.wait_for_saves()

    def wait_for_saves(self) -> None:
        """Returns when no checkpoint is being written. All ranks must call it, where one is.

        Raises:
            CheckpointNotSavedError: It could not be written.
            MissingRanksError: Ranks have not written their part.
        """
        if self._pending.is_under_way:
            with missing_ranks_named(self._liveness, "Saving a checkpoint while training went on"):
                self._pending.finish(self.is_global_zero)

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Waits for all ranks, but for those that are not there to end a save."""
        if self._absent and args[:1] == (_AFTER_SAVING,):
            self._absent = []
            return
        super().barrier(*args, **kwargs)

    @override
    def teardown(self) -> None:
        """Waits for the checkpoint that is being written, if an exception has kept training from doing so."""
        self._trains = False
        self._pending.abandon()
        # An exception may have come before there was a Trainer.
        trainer = trainer_of(self.lightning_module)
        for callback in [] if trainer is None else trainer.callbacks:
            if isinstance(vars(callback).get("file_exists"), FileExists):
                del callback.file_exists
        self._loaded = None
        self._loaded_entries = {}
        self._random = RandomNumbers()
        self._placeholders = Placeholders()
        super().teardown()

    def _position_of(self, optimizer: Optimizer) -> int:
        return [unwrapped(one) for one in self.optimizers].index(unwrapped(optimizer))


def _local(filepath: str | Path) -> Path:
    local = local_path(filepath)
    if local is None:
        raise MisconfigurationException(
            f"checkpoint_format='sharded' writes to a folder that all nodes share, and {filepath} is elsewhere. Choose"
            " a local `dirpath`, or checkpoint_format='full'."
        )
    return local
