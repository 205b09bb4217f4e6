"""Validation and test without repeated samples, and evaluations whose every step needs all ranks.

Under ``zero1_custom`` and ``ddp_tuned`` an evaluation is the same as under ``ddp``. Ranks may have different numbers of
batches, and logged values are combined when a loader ends. Under ``zero3_custom`` all ranks gather parameters in every
step.
"""

import copy
import math
from collections import Counter
from collections.abc import Callable
from itertools import islice
from typing import Any, NoReturn

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, DistributedSampler
from typing_extensions import override

from lightning_parstrat.core.wording import counted
from lightning_parstrat.distributed.comm.agreement import extremes_over_ranks
from lightning_parstrat.distributed.comm.process_groups import watching
from lightning_parstrat.strategies.data.even import Even, while_all_have_one
from lightning_parstrat.strategies.data.places import positioned_sampler
from lightning_parstrat.strategies.launch.ranks import Ranks
from lightning_parstrat.strategies.lightning_compat import call_after_batches, give_back_loop, takes_turns
from lightning_parstrat.strategies.parts import Part

_UNKNOWN = 2**60
"""The length of a loader that does not know it: larger than any real length."""

_GATHERS = "zero3_custom gathers parameters from all ranks in every step"


def _evaluates(trainer: Trainer) -> bool:
    """Whether an evaluation runs or is being set up."""
    return trainer.state.stage not in (None, RunningStage.TRAINING)


class SamplesOnce(Part):
    """Makes the distributed sampler of an evaluation's loader draw each sample once, on one rank.

    Lightning repeats some to make ranks equal. Other samplers are left, and so is one that leaves samples out rather
    than repeat some (``drop_last=True``).

    Args:
        strategy: The strategy that it is a part of.
    """

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        """Returns the loader with such a sampler. It is a copy: the user's may be that of a training, too.

        Raises:
            MisconfigurationException: There are so few samples that some ranks would have no batch.
        """
        if not _evaluates(self._trainer) or not isinstance(dataloader, DataLoader):
            return dataloader
        found = copy.copy(dataloader)
        # The loader refuses to set attributes. A change of its `__dict__` bypasses that check.
        attributes = vars(found)
        attributes["_iterator"] = None
        if (in_training := positioned_sampler(found)) is not None:
            in_training.remove(found)
        # If the user has a batch sampler, Lightning puts its sampler into that, and leaves the loader's own sampler.
        samplers = (found.sampler, getattr(found.batch_sampler, "sampler", None))
        sampler = next((one for one in samplers if isinstance(one, DistributedSampler)), None)
        if sampler is None or sampler.drop_last:
            return dataloader
        samples, ranks = len(sampler.dataset), sampler.num_replicas
        # Those of a batch, if an incomplete one is dropped.
        fewest = found.batch_size if found.drop_last and found.batch_size else 1
        if samples // ranks < fewest:
            raise MisconfigurationException(
                f"exact_evaluation=True needs {counted(fewest, 'sample')} for every rank, and a loader has"
                f" {counted(samples, 'sample')} for {ranks} ranks. Evaluate on fewer ranks, or with drop_last=False."
                " Or leave exact_evaluation out: then samples are repeated."
            )
        once = copy.copy(sampler)
        # `total_size` ends the repetition, and `num_samples` must be the number of every n-th sample up to it.
        once.total_size = samples
        once.num_samples = len(range(sampler.rank, samples, ranks))
        for name in ("sampler", "batch_sampler"):
            # A batch sampler may have it in several places.
            same = {id(sampler): once, id(sampler.dataset): sampler.dataset}
            attributes[name] = copy.deepcopy(attributes[name], same)
        return found


class StepsOfAllRanks(Part):
    """Steps of an evaluation in which every step is collective: a rank follows other ranks that have more steps.

    If all ranks know a loader's length, a rank knows its last step, and how many more steps others have. Otherwise the
    ranks compare before each batch whether all have one.

    Args:
        strategy: The strategy that it is a part of.
        ranks: The strategy's ranks.
        at_end: Called when a loader has no more batches, before its logged values are combined.
    """

    _of_one_training = frozenset({"_loop"})

    def __init__(self, strategy: DDPStrategy, ranks: Ranks, at_end: Callable[[], None]) -> None:
        super().__init__(strategy)
        self._ranks, self._at_end = ranks, at_end
        self._loop: Any = None
        self._step = 0
        self._steps_to_follow: Counter[float] = Counter()
        self._uneven = ""

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        """The loader, or a stand-in for it if some rank does not know its length. Collective: 16 bytes.

        Raises:
            MisconfigurationException: Some ranks have a batch and some have none.
        """
        trainer, control = self._trainer, self._ranks.control
        if not _evaluates(trainer):
            return dataloader
        prefix = trainer.state.stage.dataloader_prefix
        length = sized_len(dataloader)
        with watching("the comparison of all ranks' data loaders"):
            most, least = extremes_over_ranks(_UNKNOWN if length is None else length, control)
        if most == _UNKNOWN:
            given = getattr(trainer, f"limit_{prefix}_batches")
            limit = given if isinstance(given, int) else None

            def refuse(number: int) -> NoReturn:
                had = counted(number, "batch", "batches")
                _refuse(f"After {had} of a {prefix}_dataloader a rank has none left, while another one has")

            name = "batch that is evaluated"
            return Even(dataloader, lambda batches: islice(while_all_have_one(batches, control, name, refuse), limit))
        if least == 0 < most:
            _refuse(f"A rank has no batch of a {prefix}_dataloader, while another one has {most}")
        return dataloader

    @override
    def on_evaluation_start(self) -> None:
        """Begins a pass over the loaders. Collective: 16 bytes for each loader of known length.

        Raises:
            MisconfigurationException: Ranks have different numbers of batches, and a rank cannot know its last step.
        """
        trainer = self._trainer
        stage, fits = trainer.state.stage, trainer.state.fn == TrainerFn.FITTING
        self._loop = trainer.fit_loop.epoch_loop.val_loop if fits else getattr(trainer, f"{stage.value}_loop")
        name, numbers = f"{stage.dataloader_prefix}_dataloader", self._loop.max_batches
        self._step, last, self._uneven = 0, 0.0, ""
        self._steps_to_follow.clear()
        with watching("the comparison of all ranks' numbers of batches"):
            for loader, own in enumerate(numbers):
                last += own
                if math.isfinite(own):
                    most, least = extremes_over_ranks(int(own), self._ranks.control)
                    self._steps_to_follow[last] += most - int(own)
                    if most != least:
                        self._uneven = f"The ranks have between {least} and {most} batches of {name} {loader}"
        if not (takes_turns(self._loop) and math.isfinite(last)):
            self.check_all_have("the loaders are evaluated together, or beside one that does not know its length")
        call_after_batches(self._loop, self._at_end)

    def check_all_have(self, what: str) -> None:
        """Checks that all ranks have equally many batches. Some steps cannot be followed without a batch.

        Args:
            what: The reason, for the error.

        Raises:
            MisconfigurationException: Some ranks have fewer batches of a loader.
        """
        if self._uneven:
            _refuse(f"{self._uneven}, and {what}")

    def to_follow(self) -> int:
        """How many steps of a loader other ranks have yet. Call it after each step. Not collective.

        It is 0 before this rank's last step of a loader. The count is that of the rank with the most batches.
        """
        self._step += 1
        return self._steps_to_follow[self._step]

    @override
    def teardown(self) -> None:
        """Forgets the loaders, and restores Lightning's loop."""
        if self._loop is not None:
            give_back_loop(self._loop)
        self._loop = None


def _refuse(what: str) -> NoReturn:
    raise MisconfigurationException(
        f"{what}: {_GATHERS}. Give all ranks equally many batches: by the sampler, by how files are distributed over"
        " the ranks, or by the Trainer's `limit_val_batches`, `limit_test_batches` or `limit_predict_batches`."
    )
