"""Ranks of unequal speed get unequal parts of each micro-batch, and steps keep their samples under any number of ranks.

All ranks draw the order of samples that one process would see, and cut it into steps, micro-batches and their parts.
Each rank takes its own part, and its loss counts by its samples.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import BatchSampler, DistributedSampler
from typing_extensions import override

from lightning_parstrat.core.global_batch import Cost, GlobalBatches, cost_of, cut, fastest_cut, time_of_equal_shares
from lightning_parstrat.core.policy import DivisionPolicy
from lightning_parstrat.distributed.comm.agreement import all_gather_object, all_have_same
from lightning_parstrat.strategies.data.global_batches import Division
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
        self._trains = False
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
            self._division = self._divide(dataloader.batch_sampler.batch_size)
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
        is_seeded = isinstance(generator, torch.Generator)
        seed = generator.initial_seed() if isinstance(generator, torch.Generator) else 0
        # Ranks with unequal parts use up their global random numbers unequally.
        if own is not None and not (all_have_same(seed, self._ranks.control) and is_seeded):
            raise MisconfigurationException(
                f"{self._asked} needs the same order of samples on all ranks. Give {type(own).__name__} its own"
                " `generator`, with the same seed on all ranks: `torch.Generator().manual_seed(1)`."
            )

    def _check_training(self) -> None:
        shares, ranks, asked = self._policy.rank_shares, self._ranks.data_ranks, self._asked
        if not self._module.automatic_optimization:
            raise MisconfigurationException(
                f"{asked} weighs losses by their samples, which needs automatic optimization. Set"
                f" `self.automatic_optimization = True`, or leave {asked} out."
            )
        if "dataloader_iter" in inspect.signature(self._module.training_step).parameters:
            raise MisconfigurationException(
                f"{asked} needs to know which micro-batch a step has, and a `training_step` with `dataloader_iter`"
                f" draws it itself. Take `batch` and `batch_idx`, or leave {asked} out."
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

    def _divide(self, size: int) -> Division:
        ranks, trainer = self._ranks.data_ranks, self._trainer
        is_first, counted_by = self._users_accumulate is None, trainer.accumulate_grad_batches
        if self._users_accumulate is None:
            self._users_accumulate = counted_by
        # A loader that replaces another one keeps the shares.
        before = self._division if self._trains else None
        if before is None:
            self._begin()
        unit = size * ranks
        step = unit * self._users_accumulate
        saved: Mapping[str, Any] = self._loaded_entries().get(GLOBAL_BATCHES, {})
        if saved and self._policy.keep_global_batch:
            step, unit = saved["step"], saved["unit"]
            trainer.accumulate_grad_batches = math.ceil(step / (size * ranks))
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
        batches = GlobalBatches(step=step, unit=unit, micro_batches=trainer.accumulate_grad_batches)
        return Division(batches, self._ranks.data_rank, self._cuts(saved) if before is None else before.cuts)

    @property
    def _changed(self) -> str:
        """What keep_global_batch has changed. Empty if nothing."""
        before, now = self._users_accumulate, self._trainer.accumulate_grad_batches
        return "" if before == now else f"keep_global_batch=True changes accumulate_grad_batches from {before} to {now}"

    def _cuts(self, saved: Mapping[str, Any]) -> list[tuple[int, list[float]]]:
        """The shares, from which micro-batch of the epoch on."""
        shares, ranks = self._policy.rank_shares, self._ranks.data_ranks
        if not isinstance(shares, str):
            return [(0, [float(share) for share in shares])]
        cuts = [(int(begin), [float(one) for one in parts]) for begin, parts in saved.get("cuts", ())]
        is_bounded = bool(cuts) and max(cuts[-1][1]) <= self._most(round(sum(cuts[-1][1])))
        if shares == "auto" and is_bounded and len(cuts[-1][1]) == ranks:
            self._cuts_made = int(saved["cuts_made"])
            return cuts
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
                "rank_shares and keep_global_batch divide the samples of one training loader, and there are several."
                " Combine their datasets into one, or leave these arguments out."
            )
        if self._division is not None and self._ranks.data_ranks > 1:
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
        self._users_accumulate, self._trains = None, False

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
        measures = self._policy.rank_shares != "equal" and self._cuts_made < most_cuts and self._ranks.data_ranks > 1
        if not measures or measured < 0:
            return run(*args, **kwargs), samples
        gathering = self._timing.begin()
        # Otherwise a rank that has come early would wait for the others in the step.
        self._ranks.wait_for_all()
        began = self._timing.now()
        output = run(*args, **kwargs)
        seconds = self._timing.now() - began - gathering()
        # Without samples of its own, it had one that counts nothing.
        self._measured.append((max(1, samples), seconds))
        if measured == _MEASURED - 1:
            self._compare(self._division)
        return output, samples

    def _compare(self, division: Division) -> None:
        """Makes a new cut by what the ranks have measured. Collective."""
        own = (cost_of(self._measured), division.drawn)
        found: list[tuple[Cost, int]] = all_gather_object(own, self._ranks.control.group)
        # Ranks that share layers have one share.
        found = [found[rank] for rank in self._ranks.grid.first_of_data]
        self._costs = [Cost(*cost) for cost, _ in found]
        self._cuts_made += 1
        if self._policy.rank_shares != "auto":
            return
        number = division.batches.step // division.batches.micro_batches
        parts = fastest_cut(number, self._costs, self._most(number))
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
