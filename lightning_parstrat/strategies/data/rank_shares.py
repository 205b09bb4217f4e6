"""Ranks of unequal speed get unequal parts of each micro-batch, and steps keep their samples under any number of ranks.

All ranks draw the order of samples that one process would see, and cut it into steps, micro-batches and their parts.
Each rank takes its own part, and its loss counts by its samples.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import BatchSampler, DistributedSampler
from typing_extensions import override

from lightning_parstrat.core.global_batch import Cost, Division, cost_of, fastest_cut, time_of_equal_shares
from lightning_parstrat.core.policy import DivisionPolicy
from lightning_parstrat.core.wording import listed
from lightning_parstrat.distributed.comm.agreement import all_gather_object, all_have_same
from lightning_parstrat.strategies.data.places import knows_its_place, positioned_sampler
from lightning_parstrat.strategies.launch.ranks import Ranks
from lightning_parstrat.strategies.lightning_compat import iterators_in_training, sampler_within, trainer_of
from lightning_parstrat.strategies.parts import Part

GLOBAL_BATCHES = "global_batches"
"""The key of the entry in checkpoints."""

_NOT_MEASURED = 2
"""Micro-batches after which ranks are measured. The first ones allocate memory."""

_MEASURED = 8

_MOST_CUTS = 2
"""The first cut shows what a micro-batch costs whatever its size. The second one counts on that."""


class DividedRanks(Part):
    """Divides the samples of a training among its ranks.

    Args:
        strategy: The strategy that it is a part of.
        ranks: The strategy's ranks.
        divide: Makes the next loader's sampler divide its samples.
        policy: How to divide.
        loaded_entries: Returns this package's entries in the checkpoint that was loaded.
        timed: Runs a forward when all ranks begin theirs. Returns what that returned, and its seconds without gathers.
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
        timed: Callable[[Callable[[], Any]], tuple[Any, float]],
        say: Callable[[str], None],
    ) -> None:
        super().__init__(strategy)
        self._ranks, self._divides, self._policy = ranks, divide, policy
        self._loaded_entries, self._timed, self._say = loaded_entries, timed, say
        self._division: Division | None = None
        self._users_accumulate: int | None = None
        self._trains = False
        # How many cuts were measured, and the micro-batches before the next measurement.
        self._cuts_made, self._waits = 0, _NOT_MEASURED
        self._measured: list[tuple[int, float]] = []

    @property
    def entry(self) -> dict[str, Any]:
        """The state for checkpoints: the samples of a step, and the shares."""
        own = self._division
        if own is None:
            return {}
        cuts = list(own.cuts)
        return {GLOBAL_BATCHES: {"step": own.step, "unit": own.unit, "cuts_made": self._cuts_made, "cuts": cuts}}

    # The division.

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        """Makes the sampler of a training's loader divide its samples. Collective.

        Raises:
            MisconfigurationException: The loader's samples cannot be divided, or their losses cannot be weighed.
        """
        if self._trainer.training and positioned_sampler(dataloader) is None:
            self._check_loader(dataloader)
            self._check_training()
            self._division = self._divide(dataloader.batch_sampler)
            self._divides(self._division)
        return dataloader

    @property
    def _asked(self) -> str:
        shares = self._policy.rank_shares
        return "keep_global_batch=True" if shares == "equal" else f"rank_shares={shares!r}"

    def _check_loader(self, dataloader: Any) -> None:
        """Raises if ranks might not draw the same order of samples. Collective."""
        batches = getattr(dataloader, "batch_sampler", None)
        sampler = getattr(batches, "sampler", None)
        own = sampler_within(sampler)
        # A subclass may draw what its rank has, whatever rank it is asked for.
        is_dealt = type(batches) is BatchSampler and (type(sampler) is DistributedSampler or own is not None)
        if not (is_dealt and knows_its_place(dataloader)):
            over = type(getattr(dataloader, "dataset", None)).__name__
            raise MisconfigurationException(
                f"{self._asked} needs a `DataLoader` with a map-style dataset, a `batch_size`, and Lightning's"
                f" distributed sampler. Here is a {type(dataloader).__name__} over {over}, with the batch sampler"
                f" {type(batches).__name__} and the sampler {type(sampler).__name__}. Give one without a"
                f" `batch_sampler`, or leave {self._asked} out."
            )
        generator = getattr(own, "generator", None)
        seed = generator.initial_seed() if isinstance(generator, torch.Generator) else -1 - self._ranks.rank
        # Ranks with unequal parts use up their global random numbers unequally.
        if own is not None and not all_have_same(seed, self._ranks.control):
            raise MisconfigurationException(
                f"{self._asked} needs the same order of samples on all ranks. Give {type(own).__name__} its own"
                " `generator`, with the same seed on all ranks: `torch.Generator().manual_seed(1)`."
            )

    def _check_training(self) -> None:
        shares, ranks = self._policy.rank_shares, self._ranks.data_ranks
        for is_wrong, why in (
            (not self._module.automatic_optimization, "needs `self.automatic_optimization = True`, to weigh losses"),
            (
                "dataloader_iter" in inspect.signature(self._module.training_step).parameters,
                "needs a `training_step` with `batch` and `batch_idx`, which does not draw from `dataloader_iter`",
            ),
            (
                any(isinstance(one, GradientAccumulationScheduler) for one in self._trainer.callbacks),
                "needs steps of equally many samples, so no GradientAccumulationScheduler",
            ),
            (
                not isinstance(shares, str) and len(shares) != ranks,
                f"has {len(shares)} numbers, and there are {ranks} ranks. Give one number for each rank",
            ),
        ):
            if is_wrong:
                raise MisconfigurationException(f"{self._asked} {why}. Or leave {self._asked} out.")

    def _divide(self, sampler: BatchSampler) -> Division:
        of_all, trainer = sampler.batch_size * self._ranks.data_ranks, self._trainer
        is_first, counted_by = self._users_accumulate is None, trainer.accumulate_grad_batches
        if self._users_accumulate is None:
            self._users_accumulate = counted_by
        unit, step = of_all, of_all * self._users_accumulate
        saved: Mapping[str, Any] = self._loaded_entries().get(GLOBAL_BATCHES, {})
        if saved and self._policy.keep_global_batch:
            step, unit = saved["step"], saved["unit"]
            trainer.accumulate_grad_batches = math.ceil(step / of_all)
        if self._changed and is_first:
            self._say(
                f"{self._changed}, so that a step has {step} samples, as in the checkpoint. What counts batches, such"
                " as val_check_interval, counts these."
            )
        elif trainer.accumulate_grad_batches != counted_by:
            raise MisconfigurationException(
                f"{self._changed}, and `trainer.estimated_stepping_batches` was read before the checkpoint was. Read it"
                " in `configure_optimizers`, without parameters on the meta device, or leave keep_global_batch out."
            )
        # A loader that replaces another one keeps the shares.
        cuts = self._division.cuts if self._division is not None and self._trains else self._first_cuts(saved)
        return Division(step, trainer.accumulate_grad_batches, unit, sampler.drop_last, self._ranks.data_rank, cuts)

    @property
    def _changed(self) -> str:
        """The change by keep_global_batch, as text. Empty if there is none."""
        before, now = self._users_accumulate, self._trainer.accumulate_grad_batches
        return "" if before == now else f"keep_global_batch=True changes accumulate_grad_batches from {before} to {now}"

    def _first_cuts(self, saved: Mapping[str, Any]) -> list[tuple[int, list[float]]]:
        """The shares of a training that begins, from which micro-batch of the epoch on."""
        self._cuts_made, self._waits, self._measured = 0, _NOT_MEASURED, []
        shares, ranks, cuts = self._policy.rank_shares, self._ranks.data_ranks, saved.get("cuts", ())
        if not isinstance(shares, str):
            return [(0, list(shares))]
        last = cuts[-1][1] if cuts else []
        if shares == "auto" and len(last) == ranks and max(last) <= self._most(round(sum(last))):
            self._cuts_made = saved["cuts_made"]
            return list(cuts)
        return [(0, [1.0] * ranks)]

    def _most(self, number: int) -> int:
        """The most samples that a rank may get of so many."""
        return math.ceil(self._policy.max_share * number / self._ranks.data_ranks)

    @override
    def on_train_start(self) -> None:
        """Logs the division."""
        self._trains = True
        for config in self._strategy.lr_scheduler_configs if self._changed else ():
            if config.interval == "step" and config.frequency != 1:
                raise MisconfigurationException(
                    f"{self._changed}, and Lightning counts a scheduler's frequency={config.frequency} in batches. Set"
                    " frequency=1, and let the scheduler count steps."
                )
        if len(iterators_in_training(self._trainer)) > 1:
            raise MisconfigurationException(
                f"{self._asked} divides the samples of one training loader, and there are several. Combine their"
                f" datasets into one. Or leave {self._asked} out."
            )
        if self._division is not None and self._ranks.data_ranks > 1:
            self._say(
                f"ranks have {_shown(self._division.parts)} samples of a micro-batch. Each loss counts by its samples,"
                " which is right for a mean over samples. If `training_step` returns a mean over tokens, return their"
                " number as `loss_weight`. A contrastive loss needs equal shares: leave out"
                f" {self._asked}."
            )

    @override
    def teardown(self) -> None:
        """Gives the Trainer its own `accumulate_grad_batches` again."""
        trainer = trainer_of(self._strategy.lightning_module)
        if trainer is not None and self._users_accumulate is not None:
            trainer.accumulate_grad_batches = self._users_accumulate
        self._users_accumulate, self._trains = None, False

    # A step.

    def training_step(self, run: Callable[[], Any]) -> tuple[Any, int | None]:
        """Runs a training step, and times it if ranks are measured. Collective then.

        Args:
            run: Runs it as Lightning's strategy does.

        Returns:
            What it returned, and the samples of this rank's micro-batch. These are None if there is no division.
        """
        if self._division is None:
            return run(), None
        samples = self._division.samples(self._trainer.fit_loop.epoch_loop.batch_idx)
        self._waits -= 1
        measures = self._policy.rank_shares == "auto" and self._cuts_made < _MOST_CUTS and self._ranks.data_ranks > 1
        if not measures or self._waits >= 0:
            return run(), samples
        output, seconds = self._timed(run)
        # Without samples of its own, it had one that counts nothing.
        self._measured.append((max(1, samples), seconds))
        if len(self._measured) % _MEASURED == 0:
            self._cut_again(self._division)
        return output, samples

    def _cut_again(self, division: Division) -> None:
        """Makes a new cut by what the ranks have measured. Collective."""
        own = (cost_of(self._measured), division.drawn)
        found: list[tuple[Cost, int]] = all_gather_object(own, self._ranks.control.group)
        # Ranks that share layers have one share.
        costs = [Cost(*found[rank][0]) for rank in self._ranks.grid.first_of_data]
        number = sum(division.parts)
        parts = fastest_cut(number, costs, self._most(number))
        # What is drawn already, on any rank, stays as it is.
        begin = max(drawn for _, drawn in found)
        division.cuts.append((begin, [float(part) for part in parts]))
        self._cuts_made, self._waits = self._cuts_made + 1, begin - division.drawn + _NOT_MEASURED
        self._say(
            f"rank_shares='auto': ranks get {_shown(parts)} samples of a micro-batch from now on. Equal shares take"
            f" {time_of_equal_shares(parts, costs):.2f} times as long to compute, as measured in forward."
        )


def _shown(parts: list[int]) -> str:
    return listed(list(map(str, parts)), " + ")
