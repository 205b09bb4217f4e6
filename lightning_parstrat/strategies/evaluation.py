"""Validation, test and prediction on ranks with different numbers of batches, and without samples that count twice.

Evaluation sends nothing of its own between batches, so ranks may have different numbers of them, or none: each goes
through all that it has. Where some rank does not know the length of a loader, all wait for each other at its end, and
what its steps have logged is combined. Only where a step has a collective of the user's
(``self.log(..., sync_dist=True, on_step=True)``, ``self.all_gather``) all must go on together; then they look, from the
first such collective on, whether all still do.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.types import ReduceOp
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from typing_extensions import override

from lightning_parstrat.core.wording import counted
from lightning_parstrat.distributed.comm.agreement import extremes_over_ranks
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.comm.watch import watching
from lightning_parstrat.strategies.data.even import StandIn, all_batches
from lightning_parstrat.strategies.launch.ranks import RanksStrategy
from lightning_parstrat.strategies.lightning_compat import (
    call_after_last_batch,
    give_back_loop,
    leave_storing_to_others,
    logged_values,
    store_logged,
    takes_turns,
    trainer_of,
)
from lightning_parstrat.strategies.logged_values import complete_logged

_UNKNOWN = 2**60
"""Stands for the length of a loader that does not know its own: more than any."""

_NO_BATCH = object()

_END = 2**39
"""Stands for the step after a loader's last: more than any."""


class EvaluatingStrategy(RanksStrategy):
    """DDP that evaluates on ranks with different numbers of batches.

    Args:
        exact_evaluation: Whether validation and test see each sample once. Lightning's sampler gives all ranks equally
            many: where their number does not divide the samples, some come twice, and metrics count them twice.
            ``True`` leaves these out, so that metrics are those of one process; a rank may then have one sample less
            than another. Off by default, as under ``ddp``.
        **kwargs: Arguments of the base class.

    Raises:
        ValueError: A value is not allowed; the message says which are.
    """

    _not_copied = RanksStrategy._not_copied | {"_evaluations", "_under_way"}

    def __init__(self, exact_evaluation: bool = False, **kwargs: Any) -> None:
        if not isinstance(exact_evaluation, bool):
            raise ValueError(f"Invalid exact_evaluation: {exact_evaluation!r}. Must be True or False.")
        self._exact_evaluation = exact_evaluation
        # By what Lightning calls their loaders: the sanity check's are those of validation.
        self._evaluations: dict[str, EvaluatedLoaders] | None = None
        self._under_way: _UnderWay | None = None
        # Whether some rank has no batch of what others evaluate: it would miss what they send in their first step.
        self._validated_by_some = False
        super().__init__(**kwargs)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Prepares a loader for evaluation. Collective: one all-reduce of 16 bytes; training loaders are left."""
        dataloader = super().process_dataloader(dataloader)
        loaders = self._evaluated_loaders()
        if self.world_size == 1 or loaders is None:
            return dataloader
        if self._exact_evaluation and isinstance(dataloader, DataLoader):
            leave_out_padding(dataloader)
        followed, lengths = loaders.add(dataloader)
        if lengths.least == 0 < lengths.most:
            self._note_empty()
        return followed

    def _note_empty(self) -> None:
        self._validated_by_some = True

    def _evaluated_loaders(self) -> "EvaluatedLoaders | None":
        """Those of the evaluation that runs or is being set up; None in training."""
        trainer = trainer_of(self._training_module)
        stage = None if trainer is None else trainer.state.stage
        if stage is None or stage == RunningStage.TRAINING:
            return None
        if self._evaluations is None:
            self._evaluations = {}
        prefix = stage.dataloader_prefix or ""
        if prefix not in self._evaluations:
            limit = getattr(trainer, f"limit_{prefix}_batches")
            self._evaluations[prefix] = EvaluatedLoaders(
                prefix, limit, self._control, self._note_empty, self._is_in_step
            )
        return self._evaluations[prefix]

    @override
    def on_validation_start(self) -> None:
        """Begins a pass over the loaders."""
        super().on_validation_start()
        self._begin_pass()

    @override
    def on_test_start(self) -> None:
        """Begins a pass over the loaders."""
        super().on_test_start()
        self._begin_pass()

    @override
    def on_predict_start(self) -> None:
        """Begins a pass over the loaders."""
        super().on_predict_start()
        self._begin_pass()

    def _begin_pass(self) -> None:
        trainer = trainer_of(self._training_module)
        loaders = self._evaluated_loaders() if self.world_size > 1 else None
        if trainer is None or loaders is None:
            return
        loop = _loop_of(trainer)
        self._under_way = _UnderWay(loaders, loop)
        loaders.begin_pass(takes_turns(loop))
        call_after_last_batch(loop, self._end_batches)
        if loaders.any_is_unknown:
            leave_storing_to_others(loop)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Moves a batch to the device. Of evaluated loaders the first of another one ends those before: collective."""
        # A user may move another one within a step.
        if self._under_way is not None and not self._is_in_step():
            self._end_loaders(dataloader_idx)
            self._under_way.loaders.begin_step()
        return super().batch_to_device(batch, device, dataloader_idx)

    def _end_batches(self) -> None:
        """Ends the batches of a pass. Nothing of it has been logged yet."""
        if self._under_way is not None and self._under_way.loaders.any_is_unknown:
            self._end_loaders()

    def _end_loaders(self, before: int | None = None) -> None:
        """Ends with the loaders before one, or with all, each on all ranks."""
        if self._under_way is None:
            return
        loaders, loop = self._under_way
        while loaders.turn < (loaders.turns if before is None else before):
            ranks_may_differ = loaders.end_turn()
            # Lightning numbers them only where there are several.
            values = logged_values(loop, loaders.turn if loaders.turns > 1 else None)
            if loaders.any_is_unknown and values is not None:
                if ranks_may_differ:
                    complete_logged(values, self._training_module, self._control, self.reduce)
                store_logged(loop)
            loaders.next_turn()

    def _is_in_step(self) -> bool:
        return self._under_way is not None and _has_batch(self._under_way.loop)

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: ReduceOp | str | None = "mean") -> Any:
        """Reduces a tensor over all ranks. Collective. The mean of integers is a floating-point number."""
        self._meet("a value is reduced over ranks, as self.log(..., sync_dist=True, on_step=True) does")
        is_whole = isinstance(tensor, Tensor) and not (tensor.is_floating_point() or tensor.is_complex())
        if is_whole and isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg"):
            # Lightning divides means by the mean number of samples, which it would cut off to an integer.
            tensor = tensor.float()
        return super().reduce(tensor, group, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Gathers a tensor of all ranks. Collective."""
        self._meet("self.all_gather")
        return super().all_gather(tensor, *args, **kwargs)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Gives all ranks an object of one of them. Collective."""
        self._meet("strategy.broadcast")
        return super().broadcast(obj, src)

    @override
    def barrier(self, name: str | None = None) -> None:
        """Waits for all ranks. Collective."""
        self._meet("strategy.barrier")
        super().barrier(name)
        # Lightning's own, with which each set-up of loaders begins.
        if self._evaluations and name is not None and name.endswith("_dataloader()"):
            self._evaluations.pop(name.removesuffix("_dataloader()"), None)

    def _steps_to_follow(self) -> int | None:
        """Within a step: how many more of its loader other ranks have, where it is this rank's last; 0 where it is not.

        None where ranks do not know from the beginning how many steps each has, or one has none.
        """
        if self._under_way is None or not self._is_in_step():
            return None
        trainer = self._training_module.trainer
        return self._under_way.loaders.steps_to_follow(
            trainer.num_sanity_val_steps if trainer.sanity_checking else None
        )

    def _meet(self, collective: str) -> None:
        if self._under_way is not None and self._is_in_step():
            self._under_way.loaders.meet(collective)

    @override
    def on_validation_end(self) -> None:
        """Ends a pass over the loaders."""
        super().on_validation_end()
        self._end_pass()

    @override
    def on_test_end(self) -> None:
        """Ends a pass over the loaders."""
        super().on_test_end()
        self._end_pass()

    @override
    def on_predict_end(self) -> None:
        """Ends a pass over the loaders."""
        super().on_predict_end()
        self._end_pass()

    def _end_pass(self) -> None:
        for loaders in (self._evaluations or {}).values():
            loaders.has_begun = False
        if self._under_way is not None:
            give_back_loop(self._under_way.loop)
            self._under_way = None

    @override
    def teardown(self) -> None:
        """Forgets the loaders."""
        self._end_pass()
        self._evaluations = None
        self._validated_by_some = False
        super().teardown()


def leave_out_padding(dataloader: DataLoader[Any]) -> None:
    """Has a distributed sampler draw each sample once, on one rank, instead of making ranks equal by repeating some.

    Other samplers are left, and so is one that leaves samples out rather than repeat some (``drop_last=True``).

    Raises:
        MisconfigurationException: There are fewer samples than ranks, so that some would have nothing to evaluate.
    """
    # Lightning leaves the loader's own where it puts its sampler into a batch sampler of the user's.
    found = (dataloader.sampler, getattr(dataloader.batch_sampler, "sampler", None))
    sampler = next((one for one in found if isinstance(one, DistributedSampler)), None)
    if sampler is None or sampler.drop_last:
        return
    samples = len(sampler.dataset)  # type: ignore[arg-type]
    if samples < sampler.num_replicas:
        raise MisconfigurationException(
            f"exact_evaluation=True needs a sample for every rank, and a loader has {counted(samples, 'sample')} for"
            f" {sampler.num_replicas} ranks. Evaluate on fewer ranks, or leave exact_evaluation out: then samples are"
            " repeated."
        )
    # It repeats samples up to the one number, and takes every n-th of them, which must be the other.
    sampler.total_size = samples
    sampler.num_samples = len(range(sampler.rank, samples, sampler.num_replicas))


class Lengths(NamedTuple):
    """How many batches ranks have of a loader, at most and at least; :data:`_UNKNOWN` where one does not know."""

    most: int
    least: int

    @property
    def are_equal(self) -> bool:
        """Whether all ranks know theirs, and it is the same."""
        return self.most == self.least != _UNKNOWN

    @property
    def may_be_none(self) -> bool:
        """Whether some rank may have no batch while another one has."""
        return self.most == _UNKNOWN or self.least == 0 < self.most


class EvaluatedLoaders:
    """Loaders of one kind of evaluation, and whether ranks must stay together while they go through one.

    Where some rank does not know the first loader's length, ranks compare before its first batch whether all have one:
    an all-reduce of 16 bytes on the host. Further batches send nothing, unless a step of theirs has had a collective:
    from then on ranks compare before every step of the loader. At the end of a loader of unknown length they compare
    where they are: who has one more step, with a collective in it, would wait for the others.

    Args:
        prefix: What Lightning calls the loaders: val, test or predict.
        limit: How many batches of a loader the Trainer takes at most, or which part of them.
        control: Compares.
        note_empty: Is called where a rank turns out to have no batch of the first loader.
        is_in_step: Tells whether a step is under way.

    Attributes:
        has_begun: Whether the first batch of a pass over the loaders has been fetched.
        turn: Which loader ranks are at; 0 where they go through all together.
    """

    def __init__(
        self,
        prefix: str,
        limit: int | float | None,
        control: Collectives,
        note_empty: Callable[[], None],
        is_in_step: Callable[[], bool],
    ) -> None:
        self._prefix, self._limit, self._control = prefix, limit, control
        self._note_empty, self._is_in_step = note_empty, is_in_step
        self.has_begun = False
        self.turn = 0
        self._takes_turns = True
        self._step = 0
        self._lengths: list[Lengths] = []
        self._own_lengths: list[int] = []
        # By the turns in whose steps all ranks meet.
        self._collectives: dict[int, str] = {}

    def add(self, dataloader: Any) -> tuple[Any, Lengths]:
        """Adds the next loader. Collective: one all-reduce of 16 bytes.

        Returns:
            The loader, or what stands for it and tells of its batches, if some rank does not know how many it has; and
            how many batches ranks have.
        """
        with watching("the comparison of all ranks' data loaders"):
            own = self._limited(sized_len(dataloader))
            lengths = Lengths(*extremes_over_ranks(own, self._control))
        self._lengths.append(lengths)
        self._own_lengths.append(own)
        if lengths.most == _UNKNOWN:
            return _TellsOfBatches(dataloader, self, len(self._lengths) - 1), lengths
        return dataloader, lengths

    def _limited(self, length: int | None) -> int:
        if length is None:
            return _UNKNOWN
        return int(length * self._limit) if isinstance(self._limit, float) else min(length, self._limit or length)

    @property
    def any_is_unknown(self) -> bool:
        """Whether some rank does not know how many batches it has of some loader."""
        return any(lengths.most == _UNKNOWN for lengths in self._lengths)

    @property
    def turns(self) -> int:
        """How often ranks come to the end of loaders."""
        return len(self._lengths) if self._takes_turns else 1

    def begin_pass(self, takes_turns: bool) -> None:
        """Begins with the first loader, or with all where they do not take turns."""
        self._takes_turns = takes_turns
        self.turn = self._step = 0

    def begin_step(self) -> None:
        """Counts a step. Collective where steps of the loader have collectives: an all-reduce of 16 bytes.

        Raises:
            MisconfigurationException: Some ranks have no such step.
        """
        self._step += 1
        if self.turn in self._collectives:
            self._compare()

    def end_turn(self) -> bool:
        """Ends with a loader. Collective where the length of some is unknown, and this one's is, or is zero: 16 bytes.

        Returns:
            Whether ranks may differ in what they have logged: some may have had no batch.

        Raises:
            MisconfigurationException: Some ranks are in a step that has a collective.
        """
        self._step = _END
        # Where all are known, a rank without any batch leaves out the evaluation, and does not come here.
        may_differ = self.any_is_unknown and any(self._lengths[loader].may_be_none for loader in self._loaders())
        if may_differ:
            self._compare()
        return may_differ

    def next_turn(self) -> None:
        """Goes on to the next loader."""
        self.turn, self._step = self.turn + 1, 0

    def _loaders(self) -> range:
        return range(self.turn, self.turn + 1) if self._takes_turns else range(len(self._lengths))

    def steps_to_follow(self, at_most: float | None) -> int | None:
        """How many more steps of the loader others have, where this rank is in its last one. Not collective.

        Args:
            at_most: How many steps the sanity check takes of each loader; None outside of it.

        Returns:
            0 before the last one; None where some rank does not know the number of its steps, or has none, or where
            steps fetch their own batches.
        """
        known = self._takes_turns and not self.any_is_unknown and self._lengths[self.turn].least > 0
        if not known or self._step == 0:
            return None
        own, most = self._own_lengths[self.turn], self._lengths[self.turn].most
        if at_most is not None:
            own, most = int(min(own, at_most)), int(min(most, at_most))
        return most - own if self._step == own else 0

    def meet(self, collective: str) -> None:
        """Is told of a collective in a step or its hooks: all ranks take part, and must be able to.

        Raises:
            MisconfigurationException: Ranks have different numbers of batches.
        """
        unsure = [loader for loader in self._loaders() if not self._lengths[loader].are_equal]
        for loader in unsure:
            if self._lengths[loader].most != _UNKNOWN:
                self._refuse(loader, collective)
        if unsure and self.turn not in self._collectives:
            self._collectives[self.turn] = collective
            self._compare()

    def fetched(self, batches: Iterator[Any], loader: int) -> Any:
        """A loader's next batch, or a mark that there is none. Collective at first, and where steps fetch themselves.

        Raises:
            MisconfigurationException: Some ranks have one and some have none, and steps have collectives.
        """
        batch = next(batches, _NO_BATCH)
        # All ranks begin with the first loader, together; they may come to the others at different times.
        is_first, self.has_begun = loader == 0 and not self.has_begun, True
        if is_first and self._differs(int(batch is _NO_BATCH)):
            self._note_empty()
        if batch is not _NO_BATCH and self._is_in_step():
            self.begin_step()
        return batch

    def _compare(self) -> None:
        if self._differs(self.turn << 40 | self._step):
            unsure = [loader for loader in self._loaders() if not self._lengths[loader].are_equal]
            self._refuse(unsure[0], self._collectives.get(self.turn, "which the error of another rank names"))

    def _differs(self, place: int) -> bool:
        with watching("the comparison of batches that are evaluated"):
            most, least = extremes_over_ranks(place, self._control)
        return most != least

    def _refuse(self, loader: int, collective: str) -> NoReturn:
        # What a callback does about the exception must not look for ranks that have their own.
        self._collectives.clear()
        lengths = self._lengths[loader]
        found = f"between {lengths.least} and {lengths.most}" if lengths.most != _UNKNOWN else "different numbers of"
        raise MisconfigurationException(
            f"The ranks have {found} batches of {self._prefix}_dataloader {loader}, and every rank takes part in a"
            f" collective of its step ({collective}): the others would wait for a rank that has ended. Log with"
            " on_step=False, which combines ranks when all have ended; gather after the last batch; or give all ranks"
            " equally many batches."
        )


class _TellsOfBatches(StandIn):
    """Stands for a loader of which some rank does not know how many batches it has; yields all, and says so."""

    def __init__(self, dataloader: Any, loaders: EvaluatedLoaders, index: int) -> None:
        super().__init__(dataloader)
        self._loaders, self._index = loaders, index

    @override
    def __iter__(self) -> Iterator[Any]:
        batches = all_batches(self._dataloader)
        while (batch := self._loaders.fetched(batches, self._index)) is not _NO_BATCH:
            yield batch

    @override
    def __len__(self) -> int:
        # On no rank, so that all ask for it, or none.
        raise TypeError("the data loader of some rank does not know its length")


class _UnderWay(NamedTuple):
    """A pass over loaders, and Lightning's loop that does it."""

    loaders: EvaluatedLoaders
    loop: Any


def _loop_of(trainer: Trainer) -> Any:
    loops = {
        TrainerFn.VALIDATING: trainer.validate_loop,
        TrainerFn.TESTING: trainer.test_loop,
        TrainerFn.PREDICTING: trainer.predict_loop,
    }
    loop = loops.get(trainer.state.fn) if trainer.state.fn is not None else None
    return loop or trainer.fit_loop.epoch_loop.val_loop


def _has_batch(loop: Any) -> bool:
    """Whether an evaluation has a batch that its hooks have not ended with."""
    progress = loop.batch_progress.current
    return bool(progress.ready > progress.completed)
