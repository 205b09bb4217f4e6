"""Durable checkpoints: saved by all ranks or by none, complete or absent, and read at any world size."""

import logging
import uuid
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parstrat.core.policy import CheckpointFormat, CheckpointPolicy
from lightning_parstrat.core.tensor_trees import replace_leaves
from lightning_parstrat.core.wording import counted
from lightning_parstrat.distributed.checkpoint.cuts import Cut
from lightning_parstrat.distributed.checkpoint.folder import (
    OF_ANOTHER_JOB,
    CheckpointNotSavedError,
    is_sharded_checkpoint,
)
from lightning_parstrat.distributed.checkpoint.pieces import (
    CheckpointPieces,
    TensorSource,
    placeholder,
    with_placeholders_for_state,
)
from lightning_parstrat.distributed.checkpoint.reading import ShardedCheckpoint
from lightning_parstrat.distributed.checkpoint.writing import save_sharded
from lightning_parstrat.distributed.comm.agreement import (
    all_have_same,
    all_or_none,
    any_rank,
    any_rank_for_each,
    gather_object,
)
from lightning_parstrat.distributed.comm.breadcrumbs import watching
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.comm.liveness import missing_ranks_named, names_of
from lightning_parstrat.distributed.comm.process_groups import checkpoint_group, control_group
from lightning_parstrat.distributed.durable_files import recover, remove_atomically
from lightning_parstrat.distributed.zero1.cuts import cuts_in_buckets
from lightning_parstrat.distributed.zero1.gradient_bucket import ParameterSlot
from lightning_parstrat.distributed.zero1.optimizer_sharding import is_sharded, sharding_of
from lightning_parstrat.distributed.zero1.state import StandIn, check_shapes, gather_state_dict
from lightning_parstrat.strategies.checkpoint.checkpoint_io import (
    CHECKPOINT_KEY,
    FORMAT,
    DurableCheckpointIO,
    check_readable,
    local_path,
    local_path_of_folder,
)
from lightning_parstrat.strategies.checkpoint.pending_save import PendingSave, exists_when_saved, prepare_callbacks
from lightning_parstrat.strategies.checkpoint.resume import (
    RNG,
    VALIDATION_IS_DUE,
    RandomNumbers,
    ResumePoints,
    can_be_resumed,
    from_which_training_goes_on,
    loaders_of_rank,
)
from lightning_parstrat.strategies.checkpoint.states_in_files import (
    left_to_files,
    own_states,
    restored_files,
    with_states_of_all,
)
from lightning_parstrat.strategies.data.positions import LOADERS, LoaderPositions
from lightning_parstrat.strategies.launch.ranks import RanksStrategy
from lightning_parstrat.strategies.lightning_compat import (
    fetches_alone,
    iterators_in_training,
    lacks_inner_io,
    trainer_of,
    unwrapped,
)

_AFTER_SAVING = "Trainer.save_checkpoint"

_SAVE = "`trainer.save_checkpoint()`"
_SAVE_ON_ALL = "Call it on all ranks: only rank 0 writes a full checkpoint."

log = logging.getLogger(__name__)


class CheckpointingStrategy(RanksStrategy):
    """DDP with durable checkpoints, from which training resumes as if it had not stopped.

    Args:
        checkpoint_format: ``"full"`` writes what ``ddp`` would: one file, from rank 0, which any strategy reads.
            ``"sharded"`` writes a folder, each rank its part, without gathering anything; this package's strategies
            read it at any world size, and ``lightning-parstrat consolidate`` turns it into a full one. All nodes must
            see the folder. ``checkpoint_io`` is not used for it.
        async_save: Whether training goes on as soon as each rank has copied its part to host memory, while a thread
            writes the sharded checkpoint. At most one save is in progress; the next save, and the end of training,
            wait for it.
        **kwargs: Arguments of the base class.

    Raises:
        ValueError: A value is not allowed; the message says which are.
    """

    def __init__(self, checkpoint_format: CheckpointFormat = "full", async_save: bool = False, **kwargs: Any) -> None:
        self._checkpoint_policy = CheckpointPolicy(checkpoint_format=checkpoint_format, async_save=async_save)
        self._loaded: ShardedCheckpoint | None = None
        self._loaded_entries: Mapping[str, Any] = {}
        self._pending = PendingSave()
        self._random = RandomNumbers()
        self._positions = LoaderPositions()
        self._resume_points = ResumePoints(self._positions)
        self._absent: list[int] = []
        self._goes_on = False
        self._trains = False
        super().__init__(**kwargs)

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        """The user's plugin for writing and reading files; by default :class:`DurableCheckpointIO`."""
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
    def setup_optimizers(self, trainer: Trainer) -> None:
        """Creates the optimizers, and all process groups that their training will use: not in the first save."""
        self._goes_on = False
        if self.world_size > 1:
            control_group(self._timeout)
        super().setup_optimizers(trainer)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state. Collective after an exception: ranks wait a few seconds for each other."""
        self._go_on()
        # Lightning asks for this first when it saves: before anything waits for the others.
        self._absent = self._out_of_reach()
        if self._absent and not self._can_save_alone:
            return {}
        return super().lightning_module_state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The unsharded state on rank 0's host in torch's own format; elsewhere the groups alone. Collective.

        For a sharded checkpoint nothing is gathered: placeholders take the place of tensors.
        """
        optimizer = unwrapped(optimizer)
        if is_sharded(optimizer):
            return self._state_of_sharded(optimizer)
        state = super().optimizer_state(optimizer)
        if self._saves_sharded:
            return with_placeholders_for_state(state, optimizer, self._position_of(optimizer))
        return state

    def _state_of_sharded(self, optimizer: Optimizer) -> dict[str, Any]:
        if self._absent:
            return {"state": {}, "param_groups": []}
        what = "Gathering the optimizer's state"
        with missing_ranks_named(self._liveness, what), watching(_SAVE, _SAVE_ON_ALL):
            # First a barrier that names who does not come: in a gather, a missing rank would only be a timeout.
            self._wait_for_all()
            return gather_state_dict(optimizer, 0, self._stand_in_for(optimizer) if self._saves_sharded else None)

    def _stand_in_for(self, optimizer: Optimizer) -> StandIn:
        number = self._position_of(optimizer)

        def stand_in(position: int, entry: str, slot: ParameterSlot, dtype: torch.dtype) -> Tensor:
            return placeholder(slot.parameter.shape, slot.strides, dtype, TensorSource(number, position, entry))

        return stand_in

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Saves on all ranks or on none. Collective, except after an exception on some ranks only.

        Full: rank 0 holds the unsharded state in host memory while it writes. Sharded: each rank only holds its part.

        Raises:
            CheckpointNotSavedError: Another rank could not write.
            MissingRanksError: Ranks did not take part; checkpoints that were saved before are unchanged.
        """
        if self._absent:
            self._save_alone(checkpoint, filepath, storage_options)
            return
        if not self._has_ranks:
            # Spawned processes have not started yet, or have ended: there are no ranks to wait for.
            super().save_checkpoint(self._as_saved(checkpoint), filepath, storage_options)
            return
        what = f"Saving {filepath}"
        with missing_ranks_named(self._liveness, what), watching(f"{_SAVE} of {filepath}", _SAVE_ON_ALL):
            self._wait_for_all()
            if self._saves_sharded:
                self._save_sharded(checkpoint, filepath, storage_options)
            else:
                self._save_full(self._completed(checkpoint), filepath, storage_options)

    def _save_alone(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None) -> None:
        if self._can_save_alone:
            resumes = self._gather_resume_states(None, can_be_resumed(checkpoint))
            loaders = resumes[LOADERS]
            # A place for each rank: of one alone, a training among several would take the rest for all that is left.
            absent = [[None] * len(of_rank) for of_rank in loaders["ranks"]] * (self.world_size - 1)
            resumes = {**resumes, LOADERS: {**loaders, "ranks": [*loaders["ranks"], *absent]}}
            super().save_checkpoint(self._with_own_entries(checkpoint, resumes), filepath, storage_options)
            return
        log.warning(
            f"{self.flag}: rank {self.global_rank} was to save {filepath} after an exception. That needs all ranks, and"
            f" {names_of(self._absent)} cannot be reached: nothing was saved. Checkpoints that were saved before are"
            " intact."
        )

    def _save_full(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None) -> None:
        # The others wait for rank 0's result: without it they would train on, and hang in the next collective.
        save = super().save_checkpoint
        all_or_none(
            lambda: save(self._as_saved(checkpoint), filepath, storage_options),
            self._control,
            lambda failed: CheckpointNotSavedError(_who_and_why(failed, f"could not save {filepath}")),
            shows_own=True,
        )

    def _save_sharded(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None) -> None:
        if storage_options is not None:
            raise TypeError("`storage_options` do not apply to a sharded checkpoint: leave them out.")
        path = local_path_of_folder(filepath)
        self.wait_for_saves()
        resumes = self._gather_resume_states(None, any_rank(can_be_resumed(checkpoint), self._control))
        checkpoint = self._with_own_entries(checkpoint, left_to_files(resumes, self.world_size))
        optimizers = [unwrapped(optimizer) for optimizer in self.optimizers]
        cuts = {None: self._cuts_of_parameters(), **{n: self._cuts_of(one) for n, one in enumerate(optimizers)}}
        pieces = CheckpointPieces(self._written_parameters(), optimizers, cuts, self._groups_with_a_copy)
        if self.is_global_zero:
            checkpoint = pieces.with_placeholders(self._as_saved(checkpoint))
        # Before and after training, nothing would wait for the save to end.
        asynchronous = self._checkpoint_policy.async_save and self._trains and not self._is_interrupted
        group = checkpoint_group(self._timeout)
        save = save_sharded(checkpoint, path, pieces, own_states(resumes), group, asynchronous)
        if save is not None:
            self._pending.begin(save)

    def _completed(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Adds this package's entries, and sets it back to where training can resume. Collective."""
        # Agreed, as a user's hook may have changed the checkpoint on some ranks only.
        goes_on = any_rank(can_be_resumed(checkpoint), self._control)
        return self._with_own_entries(checkpoint, self._gather_resume_states(self._control, goes_on))

    def _with_own_entries(self, checkpoint: dict[str, Any], resumes: Mapping[str, Any]) -> dict[str, Any]:
        # By the number of the save, ranks that load find out whether they read the same one.
        own = {"format": FORMAT, "save": uuid.uuid4().int >> 65, **self._own_entries()}
        if can_be_resumed(checkpoint):
            trainer = self._training_module.trainer
            point = self._resume_points.point_of_save(trainer)
            own.update(resumes, **{VALIDATION_IS_DUE: point.validation_is_due})
            checkpoint = from_which_training_goes_on(checkpoint, trainer, point, self._resume_points.epoch_has_ended)
        return {**checkpoint, CHECKPOINT_KEY: own}

    def _gather_resume_states(self, control: Collectives | None, goes_on: bool) -> dict[str, Any]:
        """Each rank's random numbers, and where its loaders stand; without ``control`` this rank's.

        Collective in ``control``: some 10 KB from each rank to rank 0.

        Args:
            control: Of all ranks.
            goes_on: Whether the checkpoint keeps them; otherwise loaders are not asked, which draws from some samplers.
        """
        trainer = self._training_module.trainer
        point = self._resume_points.point_of_save(trainer)
        within_epoch = point.has_iterators
        if goes_on and within_epoch:
            self._positions.warn_of_lost(trainer, point.positions)
        own = (point.rng, self._positions.state(point.positions if goes_on else (), within_epoch))
        of_ranks = [own] if control is None else gather_object(own, control.group)
        rngs, loaders = zip(*of_ranks, strict=True) if of_ranks else ((), ())
        return {
            RNG: {"states": list(rngs), "within_epoch": within_epoch},
            LOADERS: {"ranks": list(loaders), "within_epoch": within_epoch},
        }

    def _own_entries(self) -> dict[str, Any]:
        """This package's entries of a checkpoint, under :data:`CHECKPOINT_KEY`."""
        return {}

    def _as_saved(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """The checkpoint with tensors whose storage holds nothing else."""
        return checkpoint

    def _written_parameters(self) -> Mapping[str, Tensor]:
        """Parameters that all ranks have, or have a part of, and write together; their names are the same on all."""
        return dict(self._training_module.named_parameters())

    def _cuts_of_parameters(self) -> Mapping[Tensor, Cut]:
        """How ranks share these out, where that is given."""
        return {}

    def _cuts_of(self, optimizer: Optimizer) -> Mapping[Tensor, Cut]:
        """How an optimizer's state of its parameters is cut; of the rest, every rank has the whole."""
        return cuts_in_buckets(sharding_of(optimizer).slots) if is_sharded(optimizer) else {}

    @property
    def _groups_with_a_copy(self) -> Sequence[Sequence[int]]:
        """Of each copy of what is sharded the ranks that together hold it, in the order of their shards."""
        # By the optimizers: they stay sharded when the training has ended.
        sharded = [sharding_of(one) for one in map(unwrapped, self.optimizers) if is_sharded(one)]
        groups = (sharding.shard_groups.groups for sharding in sharded if sharding.buckets)
        return next(groups, (range(self.world_size),))

    @property
    def _can_save_alone(self) -> bool:
        """Whether this rank could write a checkpoint without the others: no rank has all of a sharded state."""
        return not self._saves_sharded and not any(is_sharded(unwrapped(one)) for one in self.optimizers)

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Removes a checkpoint, but not before its successor is complete."""
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
        """Loads a checkpoint of any strategy and world size. Collective: all ranks succeed, or none.

        A full one is mapped into memory, so that ranks of one node share it. Of a sharded one, only the weights are
        read, by the ranks in turn, which broadcast them; of the optimizers' states, each rank later reads its part.

        Raises:
            MisconfigurationException: It is not a checkpoint, is damaged or newer, or a rank cannot read it.
        """
        self.wait_for_saves()
        what = f"loading {checkpoint_path}"
        with watching(what):
            checkpoint = self._all_or_none(lambda: self._open(checkpoint_path, weights_only), what)
            if self._agreed_sharded(checkpoint is None, checkpoint_path):
                # Apart, as ranks read the weights together: none may have failed before.
                checkpoint = self._all_or_none(self._filled, what)
                own = self._with_states_of_ranks(checkpoint.get(CHECKPOINT_KEY, {}), what)
                checkpoint = {**checkpoint, CHECKPOINT_KEY: own}
        own = self._loaded_entries = checkpoint.get(CHECKPOINT_KEY, {})
        if self._has_ranks and not all_have_same(own.get("save", 0), self._control):
            raise MisconfigurationException(
                f"Ranks have read different checkpoints at {checkpoint_path}: {OF_ANOTHER_JOB}"
            )
        self._resume_points.load(checkpoint, own.get(VALIDATION_IS_DUE), trainer_of(self.lightning_module))
        self._random.load(own.get(RNG), self.global_rank, self.world_size)
        given = loaders_of_rank(checkpoint, own.get(LOADERS, {}), self.global_rank, self.world_size)
        self._positions.load(own.get(LOADERS), given)
        # Hooks are given what stock strategies would give them.
        return {key: value for key, value in checkpoint.items() if key != CHECKPOINT_KEY}

    def _open(self, path: str | Path, weights_only: bool | None) -> dict[str, Any] | None:
        """What a file holds; None for a folder, of which only the skeleton is read here."""
        self._loaded = None
        local = local_path(path)
        if local is not None:
            recover(local)
        if local is not None and is_sharded_checkpoint(local):
            self._loaded = ShardedCheckpoint(local, weights_only, self._control.group if self._has_ranks else None)
            check_readable(self._loaded.skeleton, path)
            return None
        checkpoint = super().load_checkpoint(path, weights_only)
        check_readable(checkpoint, path)
        return checkpoint

    def _agreed_sharded(self, is_sharded: bool, path: str | Path) -> bool:
        """Whether the ranks have found a sharded checkpoint. Collective."""
        if not self._has_ranks:
            return is_sharded
        some, others = any_rank_for_each([is_sharded, not is_sharded], self._control)
        if some and others:
            raise MisconfigurationException(f"{path} is a file on some nodes and a folder on others.")
        return some

    def _filled(self) -> dict[str, Any]:
        if self._loaded is None:
            raise AssertionError("a sharded checkpoint was to be read before it was opened")
        states = {key: value for key, value in self._loaded.skeleton.items() if key == "optimizer_states"}
        rest = {key: value for key, value in self._loaded.skeleton.items() if key not in states}
        cuts: dict[Any, Cut] = {("state_dict", name): cut for name, cut in self._cuts_of_weights().items()}
        return {**self._loaded.filled(rest, cuts.get), **states}

    def _cuts_of_weights(self) -> Mapping[str, Cut]:
        """How those weights are cut of which this rank loads its part alone, by their names in the checkpoint."""
        return {}

    def _with_states_of_ranks(self, own: Mapping[str, Any], what: str) -> dict[str, Any]:
        """This package's entries with what ranks have said alone. Collective: all ranks succeed, or none."""
        rank, size = (self.global_rank, self.world_size) if self._has_ranks else (0, 1)
        loaded = self._loaded
        if loaded is None:
            raise AssertionError("a sharded checkpoint was to be read before it was opened")
        files = restored_files(own, rank, size)
        read = self._all_or_none(lambda: {each: loaded.own_of(each) for each in files}, what)
        # Apart, as it is collective itself.
        return with_states_of_all(own, read, self._control if self._has_ranks else None)

    def _all_or_none(self, action: Callable[[], Any], what: str) -> Any:
        """What an action returns, if it succeeds on all ranks. Collective."""
        # Connected before: an action that could not connect would be followed by a second try, which waits as long.
        control = self._control if self._has_ranks else None
        return all_or_none(
            action,
            control,
            lambda failed: MisconfigurationException(
                f"{_who_and_why(failed, f'failed in {what}')}. All nodes must see the same files."
            ),
            shows_own=True,
        )

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Gives each optimizer its state, of which each rank keeps its part.

        Raises:
            ValueError: The state belongs to other optimizers or other parameters; the message says which.
        """
        states = checkpoint["optimizer_states"]
        if not states and self.optimizers:
            rank_zero_warn(
                f"{self.flag}: the checkpoint has weights, but no optimizer's state: the optimizers begin anew."
            )
        elif len(states) != len(self.optimizers):
            raise ValueError(
                f"The checkpoint has the state of {counted(len(states), 'optimizer')}, and the module has"
                f" {len(self.optimizers)}. `configure_optimizers` must return as many as when it was saved."
            )
        module = self.lightning_module
        names = {} if module is None else {parameter: name for name, parameter in module.named_parameters()}
        # Lightning's wrapper would load the state into itself.
        for optimizer, state in zip(map(unwrapped, self.optimizers), states, strict=False):
            check_shapes(optimizer, state, names)
            optimizer.load_state_dict(self._own_part(optimizer, state))
            _to_device(optimizer, self.root_device)
        self._loaded = None
        trainer = trainer_of(module)
        if trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            # Only now: Lightning makes the training's loaders next, and whatever draws before would shift their
            # shuffling.
            self._random.before_loaders()

    def _own_part(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        if self._loaded is not None:
            loaded, what, cuts = self._loaded, "reading its part", self._cuts_of(optimizer)
            with watching("loading an optimizer's state"):
                return self._all_or_none(lambda: loaded.own_parts(optimizer, state, cuts), what)
        if is_sharded(optimizer):
            return state
        # Mapped tensors would be stepped in place: each page copied on its first write, and the file kept open.
        copied: dict[str, Any] = replace_leaves(state, torch.clone)
        return copied

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Has loaders that are trained on know their place, from which a checkpoint's training goes on."""
        trainer = self._training_module.trainer
        if trainer.training:
            control = self._control if self._has_ranks else None
            self._positions.follow(dataloader, trainer, lambda fails: any_rank(fails, control) if control else fails)
        return super().process_dataloader(dataloader)

    @override
    def on_train_start(self) -> None:
        """Restores the checkpoint's random numbers where training resumes within an epoch."""
        super().on_train_start()
        trainer = self._training_module.trainer
        if self._checkpoint_policy.async_save:
            prepare_callbacks([c for c in trainer.callbacks if isinstance(c, ModelCheckpoint)], self.wait_for_saves)
        self._go_on()
        self._random, self._trains = RandomNumbers(), True

    def _go_on(self) -> None:
        """Begins where a checkpoint was saved: when training starts, or before a callback saves then."""
        trainer = trainer_of(self.lightning_module)
        if self._trains or trainer is None or not trainer.training or not iterators_in_training(trainer):
            return
        # Each time: what callbacks draw meanwhile was not drawn before.
        self._random.before_training(trainer)
        if not self._goes_on:
            self._positions.begin_training(trainer)
            self._resume_points.begin_training(trainer)
            self._goes_on = True

    @override
    def on_validation_end(self) -> None:
        """Notes what a validation has drawn."""
        super().on_validation_end()
        self._resume_points.end_validation()

    @override
    def on_train_end(self) -> None:
        """Waits for the checkpoint that is being written."""
        super().on_train_end()
        self._positions.end_training(self._training_module.trainer)
        self._trains = False
        self.wait_for_saves()

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Notes where the loaders stand, for a checkpoint that is saved all the same. Not collective."""
        super().on_exception(exception)
        # What a loader of the user's raises when it is asked must not stand in for this exception.
        with suppress(Exception):
            if self._trains:
                self._positions.end_training(self._training_module.trainer)

    def wait_for_saves(self) -> None:
        """Returns when no checkpoint is being written. If one is, all ranks must call it.

        Raises:
            CheckpointNotSavedError: It could not be written.
            MissingRanksError: Ranks have not written their part.
        """
        if self._pending.is_under_way:
            what = "Saving a checkpoint while training went on"
            with missing_ranks_named(self._liveness, what), watching("the end of a save"):
                self._pending.finish(self.is_global_zero)

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Waits for all ranks, except at the end of a save that some ranks did not take part in."""
        # Lightning ends every save with a barrier of this name, to which absent ranks do not come.
        if self._absent and args[:1] == (_AFTER_SAVING,):
            self._absent = []
            return
        super().barrier(*args, **kwargs)

    @override
    def teardown(self) -> None:
        """Waits for a checkpoint that is still being written, as after an exception."""
        self._trains = False
        self._pending.abandon()
        # An exception may have been raised before there was a Trainer.
        trainer = trainer_of(self.lightning_module)
        if trainer is not None:
            fetches_alone(trainer)
        for callback in [] if trainer is None else trainer.callbacks:
            if getattr(vars(callback).get("file_exists"), "func", None) is exists_when_saved:
                del callback.file_exists
        self._loaded = None
        self._loaded_entries = {}
        self._random = RandomNumbers()
        self._positions.release()
        super().teardown()

    def _position_of(self, optimizer: Optimizer) -> int:
        return [unwrapped(one) for one in self.optimizers].index(unwrapped(optimizer))


def _who_and_why(failed: Mapping[int, str], how: str) -> str:
    return f"{names_of(list(failed)).capitalize()} {how}: {next(iter(failed.values()))}"


def _to_device(optimizer: Optimizer, device: torch.device) -> None:
    """Moves an optimizer's state, but for counts of steps, which its ``load_state_dict`` has put where they belong."""
    for parameter, state in optimizer.state.items():
        if isinstance(state, MutableMapping):
            state.update({key: move_data_to_device(value, device) for key, value in state.items() if key != "step"})
        else:
            optimizer.state[parameter] = move_data_to_device(state, device)
