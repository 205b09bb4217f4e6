"""The place of a training's loader: noted before each fetch, saved in checkpoints, and restored by a resume.

When a checkpoint is saved, batches may have been fetched that were not trained on, and workers may have drawn further.
So each loader is noted before each fetch. For a map-style loader that is a number of batches in a pass. For a loader
with a `state_dict`, such as torchdata's StatefulDataLoader, it is that state.
"""

import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, IterableDataset

from lightning_parstrat.distributed.torch_compat import present_pass
from lightning_parstrat.strategies.data.even import users_own
from lightning_parstrat.strategies.data.samplers import Pass, PositionedSampler
from lightning_parstrat.strategies.lightning_compat import ended_in_epoch, iterators_in_training

Place = dict[str, Any]
"""The place of a loader, as a checkpoint keeps it.

``position`` is the position of its pass after the trained batches, or None if nothing was drawn. ``generators`` are the
states of its generators and its sampler's. ``begun_again`` says whether it had ended in the epoch. A loader with a
`state_dict` has only that and its ``state``, which is None if it begins a pass.
"""


class Moment(NamedTuple):
    """A loader between two fetches.

    Attributes:
        loader: The loader.
        sampler: Its sampler, if it knows its place.
        in_pass: The pass of such a loader, if it has an iterator.
        batches: How many batches its iterator has handed out in that pass.
        has_ended: Whether it has ended in the epoch.
        state: A copy of the state of a loader that has a `state_dict`.
        continues: Whether the next epoch continues that pass.
    """

    loader: Any
    sampler: PositionedSampler | None
    in_pass: Pass | None
    batches: int
    has_ended: bool
    state: Any
    continues: bool

    def place(self, within_epoch: bool) -> Place | None:
        """The loader's place. None if it is not known. More may have been drawn since this moment."""
        if is_stateful(self.loader):
            return {"begun_again": self.has_ended, "state": self.state if within_epoch or self.continues else None}
        if self.sampler is None:
            return None
        in_pass = self.in_pass if within_epoch else None
        return {
            "position": None if in_pass is None or in_pass.begin is None else in_pass.position(self.batches),
            "generators": self.sampler.generator_states(),
            "begun_again": self.has_ended,
        }


def moments(trainer: Trainer, given: Sequence[Any] | None = None) -> list[Moment]:
    """This moment of each of the training's loaders.

    Args:
        trainer: The Trainer.
        given: Before an epoch's first batch: the states that were given to loaders with a `state_dict`, in their
            order. A loader may apply it with its first batch only, and may report an earlier end until then.
    """
    ended, states, found = ended_in_epoch(trainer), iter(given or ()), []
    for number, (loader, iterator) in enumerate(iterators_in_training(trainer)):
        in_pass, batches = present_pass(iterator)
        known = in_pass if isinstance(in_pass, Pass) else None
        state, continues = None, False
        if is_stateful(loader):
            continues = _continues(loader, trainer)
            is_new = given is None or (not given and continues)
            state = _copied(loader.state_dict()) if is_new else next(states, None)
        # Lightning may have fetched a batch before the training, or before the epoch of a loader that it made anew.
        batches = batches if given is None else 0
        has_ended = number < len(ended) and ended[number]
        found.append(Moment(loader, positioned_sampler(loader), known, batches, has_ended, state, continues))
    return found


def _continues(loader: Any, trainer: Trainer) -> bool:
    """Whether a pass over a loader continues when `limit_train_batches` ends an epoch, as that of a stream does.

    A loader with a length begins another pass with each epoch, and so do those of torch and torchdata.
    """
    own, limit = users_own(loader), trainer.limit_train_batches
    begins = isinstance(own, DataLoader) or type(own).__module__.partition(".")[0] == "torchdata"
    return not begins and sized_len(loader) is None and (isinstance(limit, int) or limit < 1.0)


def places_at(loaders: Sequence[Moment], within_epoch: bool) -> list[Place | None]:
    """The places of all loaders of a training. None for those that are not known."""
    # A loader that is used twice has one sampler and one state.
    users = [id(users_own(moment.loader)) for moment in loaders]
    return [
        None if within_epoch and users.count(user) > 1 else moment.place(within_epoch)
        for user, moment in zip(users, loaders, strict=True)
    ]


def states_in(places: Sequence[Place | None]) -> list[Any]:
    """The loaders' own states among these places, as Lightning saves them. Empty if an epoch begins."""
    states = [place["state"] for place in places if place is not None and "state" in place]
    return [] if None in states else states


def _copied(state: Any) -> Any:
    # For a large state, `copy.deepcopy` would take several times as long.
    try:
        return pickle.loads(pickle.dumps(state))
    # A user's class may raise anything. The training continues, and a save fails, because it pickles the state, too.
    except Exception:
        return state


def is_stateful(owner: Any) -> bool:
    """Whether a loader or a sampler keeps its own place."""
    return hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict")


def knows_its_place(dataloader: Any) -> bool:
    """Whether a loader is torch's own, has indices, hands out batches in order, and has no own state."""
    if not isinstance(dataloader, DataLoader) or type(dataloader).__iter__ is not DataLoader.__iter__:
        return False
    sampler = dataloader.sampler if dataloader.batch_sampler is None else dataloader.batch_sampler
    return (
        not any(is_stateful(one) for one in (dataloader, sampler, getattr(sampler, "sampler", None)))
        and positioned_sampler(dataloader) is None
        and getattr(dataloader, "in_order", True)
        and not isinstance(dataloader.dataset, IterableDataset)
    )


def positioned_sampler(dataloader: Any) -> PositionedSampler | None:
    """The sampler that makes a loader know its place. None for other loaders."""
    attributes = getattr(dataloader, "__dict__", {})
    samplers = (attributes.get(name) for name in ("batch_sampler", "sampler"))
    # By its type, because `isinstance` sees the object that it stands for.
    return next((one for one in samplers if type(one) is PositionedSampler), None)


def set_epoch(dataloader: Any, epoch: int) -> None:
    """Sets the epoch of a loader's samplers. Lightning does so later, when the epoch's order may have been drawn."""
    of_batches = getattr(dataloader, "batch_sampler", None)
    samplers = {id(one): one for one in (getattr(dataloader, "sampler", None), getattr(of_batches, "sampler", None))}
    for sampler in samplers.values():
        if callable(getattr(sampler, "set_epoch", None)):
            sampler.set_epoch(epoch)
