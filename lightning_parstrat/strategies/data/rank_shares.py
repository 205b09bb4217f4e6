"""Ranks of unequal speed get unequal parts of each micro-batch, and steps keep their samples under any number of ranks.

All ranks draw the order of samples that one process would see, and cut it into steps, micro-batches and their parts.
Each rank takes its own part, and its loss counts by its samples.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import BatchSampler, DistributedSampler
from typing_extensions import override

from lightning_parstrat.core.global_batch import Cost, GlobalBatches, cost_of, cut, fastest_cut, time_of_equal_shares
from lightning_parstrat.core.policy import DivisionPolicy
from lightning_parstrat.distributed.comm.agreement import all_gather_object
from lightning_parstrat.strategies.data.global_batches import Division
from lightning_parstrat.strategies.data.places import knows_its_place, positioned_sampler
from lightning_parstrat.strategies.launch.ranks import Ranks
from lightning_parstrat.strategies.lightning_compat import iterators_in_training, trainer_of
from lightning_parstrat.strategies.parts import Part

GLOBAL_BATCHES = "global_batches"
"""The key of the entry in checkpoints."""

_NOT_MEASURED = 2
"""Micro-batches after which ranks are measured. The first ones allocate memory."""

_MEASURED = 8

_MOST_CUTS = 2
"""The first cut shows what a micro-batch costs whatever its size. The second one counts on that."""

_WEIGHTS = (
    "Each loss counts by its samples, which is right for a mean over samples. If `training_step` returns a mean over"
    " tokens, return their number as `loss_weight`. A contrastive loss needs rank_shares='equal'."
)


class Timing(NamedTuple):
    """A strategy's functions to time a forward.

    Attributes:
        begin: Returns when the forward has nothing in flight to wait for. What it returns is called after the forward,
            and returns the seconds for which the forward has gathered parameters.
        now: A time in seconds, when the device has done its work.
    """

    begin: Callable[[], Callable[[], float]]
    now: Callable[[], float]


class DividedRanks(Part):
    """Divides the samples of a training among its ranks.

    Args:
        strategy: The strategy that it is a part of.
        ranks: The strategy's ranks.
        divide: Makes the next loader's sampler divide its samples.
        policy: How to divide.
        loaded_entries: Returns this package's entries in the checkpoint that was loaded.
        timing: How to time a forward.
        say: Logs a line once.
    """

    _of_one_training = frozenset({"_division"})

    def __init__(
        self,
        strategy: DDPStrategy,
        ranks: Ranks,
        divide: Callable[[Division], None],
        policy: DivisionPolicy,
        loaded_entries: Callable[[], Mapping[str, Any]],
        timing: Timing,
        say: Callable[[str], None],
    ) -> None:
        super().__init__(strategy)
        self._ranks, self._divides, self._policy = ranks, divide, policy
        self._loaded_entries, self._timing, self._say = loaded_entries, timing, say
        self._division: Division | None = None
        self._users_accumulate: int | None = None
        self._begin()

    def _begin(self) -> None:
        self._cuts_made, self._trained, self._measures_at = 0, 0, _NOT_MEASURED
        self._measured: list[tuple[int, float]] = []
        self._costs: list[Cost] = []

    @property
    def entry(self) -> dict[str, Any]:
        """What a checkpoint keeps: the samples of a step, and the shares."""
        division = self._division
        if division is None:
            return {}
        own = {"step": division.batches.step, "unit": division.batches.unit, "cuts_made": self._cuts_made}
        return {GLOBAL_BATCHES: {**own, "cuts": [[begin, list(shares)] for begin, shares in division.cuts]}}

    @override
    def setup_optimizers(self) -> None:
        """Forgets the training before."""
        self._division = None
        self._begin()

    # The division.

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        """Makes the sampler of a training's loader divide its samples. Not collective.

        Raises:
            MisconfigurationException: The loader's samples cannot be divided, or their losses cannot be weighed.
        """
        if self._trainer.training and positioned_sampler(dataloader) is None:
            self._check(dataloader)
            # A loader that replaces another one keeps the shares.
            self._division = self._divide(dataloader.batch_sampler.batch_size, self._division)
            self._divides(self._division)
        return dataloader

    def _check(self, dataloader: Any) -> None:
        shares, ranks = self._policy.rank_shares, self._ranks.world_size
        asked = "keep_global_batch=True" if shares == "equal" else f"rank_shares={shares!r}"
        batches = getattr(dataloader, "batch_sampler", None)
        is_dealt = type(batches) is BatchSampler and isinstance(batches.sampler, DistributedSampler)
        if not (is_dealt and knows_its_place(dataloader)):
            over = type(getattr(dataloader, "dataset", None)).__name__
            raise MisconfigurationException(
                f"{asked} needs a `DataLoader` with a map-style dataset, a `batch_size`, and Lightning's distributed"
                f" sampler. Here is a {type(dataloader).__name__} over {over}, with the batch sampler"
                f" {type(batches).__name__}. Give one without a `batch_sampler`, or leave {asked} out."
            )
        if not self._module.automatic_optimization:
            raise MisconfigurationException(
                f"{asked} weighs losses by their samples, which needs automatic optimization. Set"
                f" `self.automatic_optimization = True`, or leave {asked} out."
            )
        if any(isinstance(one, GradientAccumulationScheduler) for one in self._trainer.callbacks):
            raise MisconfigurationException(
                f"{asked} needs steps of equally many samples, and GradientAccumulationScheduler changes their number."
                f" Leave out one of the two."
            )
        if not isinstance(shares, str) and len(shares) != ranks:
            raise MisconfigurationException(
                f"{asked} has {len(shares)} numbers, and there are {ranks} ranks. Give one number for each rank."
            )

    def _divide(self, size: int, before: Division | None) -> Division:
        ranks, trainer = self._ranks.world_size, self._trainer
        if self._users_accumulate is None:
            self._users_accumulate = trainer.accumulate_grad_batches
        accumulate, unit = self._users_accumulate, size * ranks
        saved: Mapping[str, Any] = self._loaded_entries().get(GLOBAL_BATCHES, {})
        step = unit * accumulate
        if saved and self._policy.keep_global_batch and saved["step"] != step:
            step, unit = saved["step"], saved["unit"]
            trainer.accumulate_grad_batches = math.ceil(step / (size * ranks))
            self._refuse_frequencies(accumulate)
            self._say(
                f"keep_global_batch: a step has {step} samples, as in the checkpoint, by accumulate_grad_batches="
                f"{trainer.accumulate_grad_batches} instead of {accumulate}. What counts batches, such as"
                " val_check_interval, counts these."
            )
        batches = GlobalBatches(step=step, unit=unit, micro_batches=trainer.accumulate_grad_batches)
        return Division(batches, self._ranks.rank, self._cuts(saved) if before is None else before.cuts)

    def _refuse_frequencies(self, accumulate: int) -> None:
        for config in self._strategy.lr_scheduler_configs if self._changes(accumulate) else ():
            if config.interval == "step" and config.frequency != 1:
                raise MisconfigurationException(
                    f"keep_global_batch=True changes accumulate_grad_batches from {accumulate} to"
                    f" {self._trainer.accumulate_grad_batches}, and Lightning counts a scheduler's"
                    f" frequency={config.frequency} in batches. Set frequency=1, and let the scheduler count steps."
                )

    def _changes(self, accumulate: int) -> bool:
        return self._trainer.accumulate_grad_batches != accumulate

    def _cuts(self, saved: Mapping[str, Any]) -> list[tuple[int, list[float]]]:
        """The shares, from which micro-batch of the epoch on."""
        shares, ranks = self._policy.rank_shares, self._ranks.world_size
        if not isinstance(shares, str):
            return [(0, [float(share) for share in shares])]
        cuts = [(int(begin), [float(one) for one in parts]) for begin, parts in saved.get("cuts", ())]
        if shares == "auto" and cuts and len(cuts[-1][1]) == ranks:
            self._cuts_made = int(saved["cuts_made"])
            return cuts
        return [(0, [1.0] * ranks)]

    @override
    def on_train_start(self) -> None:
        """Logs the division."""
        if len(iterators_in_training(self._trainer)) > 1:
            raise MisconfigurationException(
                "rank_shares and keep_global_batch divide the samples of one training loader, and there are several."
                " Combine their datasets into one, or leave these arguments out."
            )
        if self._division is not None and self._ranks.world_size > 1:
            parts = self._parts_of(self._division)
            self._say(f"ranks have {_shown(parts)} samples of a micro-batch. {_WEIGHTS}")

    def _parts_of(self, division: Division) -> list[int]:
        return cut(division.batches.step // division.batches.micro_batches, division.cuts[-1][1])

    @override
    def on_train_end(self) -> None:
        """Logs what equal shares would cost."""
        if self._costs and self._division is not None:
            parts = self._parts_of(self._division)
            ratio = time_of_equal_shares(parts, self._costs)
            self._say(
                f"ranks had {_shown(parts)} samples of a micro-batch. Equal shares would take {ratio:.2f} times as long"
                " to compute, as measured in forward."
            )

    @override
    def teardown(self) -> None:
        """Gives the Trainer its own `accumulate_grad_batches` again."""
        trainer = trainer_of(self._strategy.lightning_module)
        if trainer is not None and self._users_accumulate is not None:
            trainer.accumulate_grad_batches = self._users_accumulate
        self._users_accumulate = None

    # A step.

    def training_step(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, int | None]:
        """Runs a training step, and times it if ranks are measured. Collective then.

        Args:
            run: Runs it as Lightning's strategy does, with the arguments that follow.
            *args: Passed to ``run``.
            **kwargs: Passed to ``run``.

        Returns:
            What it returned, and the samples of this rank's micro-batch. These are None if there is no division.
        """
        if self._division is None:
            return run(*args, **kwargs), None
        samples = self._division.samples(self._trainer.fit_loop.epoch_loop.batch_idx)
        measured = self._trained - self._measures_at
        self._trained += 1
        most_cuts = _MOST_CUTS if self._policy.rank_shares == "auto" else 1
        measures = self._policy.rank_shares != "equal" and self._cuts_made < most_cuts and self._ranks.world_size > 1
        if not measures or measured < 0:
            return run(*args, **kwargs), samples
        output, seconds = self._timed(run, *args, **kwargs)
        # Without samples of its own, it had one that counts nothing.
        self._measured.append((max(1, samples or 0), seconds))
        if measured == _MEASURED - 1:
            self._compare(self._division)
        return output, samples

    def _timed(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, float]:
        gathering = self._timing.begin()
        # Otherwise a rank that has come early would wait for the others in the step.
        self._ranks.wait_for_all()
        began = self._timing.now()
        output = run(*args, **kwargs)
        return output, self._timing.now() - began - gathering()

    def _compare(self, division: Division) -> None:
        """Makes a new cut by what the ranks have measured. Collective."""
        own = (cost_of(self._measured), division.drawn)
        found: list[tuple[Cost, int]] = all_gather_object(own, self._ranks.control.group)
        self._costs = [Cost(*cost) for cost, _ in found]
        self._cuts_made += 1
        if self._policy.rank_shares != "auto":
            return
        number = division.batches.step // division.batches.micro_batches
        most = math.ceil(self._policy.max_share * number / self._ranks.world_size)
        parts = fastest_cut(number, self._costs, most)
        # What is drawn already, on any rank, stays as it is.
        begin = max(drawn for _, drawn in found)
        division.cuts.append((begin, [float(part) for part in parts]))
        self._measures_at = self._trained + begin - division.drawn + _NOT_MEASURED
        ratio = time_of_equal_shares(parts, self._costs)
        self._say(
            f"rank_shares='auto': ranks get {_shown(parts)} samples of a micro-batch from now on. Equal shares take"
            f" {ratio:.2f} times as long to compute, as measured in forward."
        )


def _shown(parts: list[int]) -> str:
    shown = " + ".join(map(str, parts[:8]))
    return shown if len(parts) <= 8 else f"{shown} + ... ({min(parts)} to {max(parts)} on {len(parts)} ranks)"
