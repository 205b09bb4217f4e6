"""Groups of ranks that train alone, and meet every so many steps: when they meet, and what a checkpoint has of it."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from typing_extensions import override

from lightning_parstrat.core.digests import digest
from lightning_parstrat.core.policy import OuterPolicy
from lightning_parstrat.core.shard_groups import ShardGroups
from lightning_parstrat.core.wording import counted
from lightning_parstrat.distributed.comm.agreement import (
    all_have_same,
    any_rank_for_each,
    check_agreement,
    gather_object,
    topology_of_ranks,
)
from lightning_parstrat.distributed.comm.backends import make_collectives
from lightning_parstrat.distributed.comm.liveness import is_of_a_collective, names_of
from lightning_parstrat.distributed.comm.module_states import broadcast_buffers, broadcast_tensors
from lightning_parstrat.distributed.comm.process_groups import subgroup, watching
from lightning_parstrat.distributed.engine.engine import ShardedDataParallel
from lightning_parstrat.distributed.engine.outer_steps import OuterSteps
from lightning_parstrat.distributed.torch_compat import names_ignored_by_ddp
from lightning_parstrat.strategies.launch.ranks import Ranks
from lightning_parstrat.strategies.parts import Part

OUTER = "outer"
"""The key of the outer optimizer among this package's entries in a checkpoint."""

_FARTHEST = 10
"""If a group moves so many times as far as the median of all, a line names it."""

_SIGNAL_BITS = 8

log = logging.getLogger(__name__)


class Meetings(Part):
    """Lets groups of ranks train alone, and meet. Between meetings, nothing is sent between groups.

    All groups also meet before a validation, a save and the end. So every rank evaluates and saves the same parameters.

    Args:
        strategy: The strategy that it is a part of.
        ranks: The strategy's ranks.
        policy: Which ranks are a group, and how groups meet.
        loaded_entries: Returns this package's entries in the checkpoint that was loaded.
        say: Logs a line once. The flag makes it a warning.
    """

    _of_one_training = frozenset({"_engine", "_outer"})

    def __init__(
        self,
        strategy: DDPStrategy,
        ranks: Ranks,
        policy: OuterPolicy,
        loaded_entries: Callable[[], Mapping[str, Any]],
        say: Callable[[str, bool], None],
    ) -> None:
        super().__init__(strategy)
        self._ranks, self._policy, self._loaded_entries, self._say = ranks, policy, loaded_entries, say
        self._groups = ShardGroups.of_all(1)
        self._engine: ShardedDataParallel | None = None
        self._outer: OuterSteps | None = None
        self._step = 0
        self._apart: set[int] = set()
        """Buckets, by position, with which groups have not met since their last step."""
        self._others = torch.zeros(0)

    @override
    def setup_optimizers(self) -> None:
        """Finds this rank's group. Collective.

        Raises:
            ValueError: The ranks cannot be divided into such groups.
        """
        topology = topology_of_ranks(self._strategy.node_rank, self._ranks.control)
        self._groups = ShardGroups.chosen(self._policy.shard_group, topology)
        self._ranks.group = self._groups.mates(self._ranks.rank)
        self._ranks.steps_of_group = partial(getattr, self, "steps")

    def begin(self, engine: ShardedDataParallel) -> None:
        """Prepares for optimizers that were sharded. Collective.

        Raises:
            ValueError: Groups cannot meet with such optimizers or parameters.
        """
        _check_all_sharded(engine)
        if any(bucket.stepped.dtype.itemsize < 4 for bucket in engine.buckets):
            # Groups meet in fp32, and a checkpoint would not have that.
            raise ValueError("outer_every needs master weights for 16-bit parameters: leave out master_weights=False.")
        check_agreement(self._ranks.control, digest(engine.plan))
        self._engine, self._outer = engine, None

    @override
    def on_train_start(self) -> None:
        """Begins a training with the parameters as they are now. Collective.

        Not earlier: a callback may search for a learning rate, and restore the parameters.

        Raises:
            MisconfigurationException: A callback or a layer is for ranks that train each step together. Or an earlier
                training of these processes has left groups apart.
        """
        module, engine, device = self._module, self._engine, self._strategy.root_device
        if engine is None:
            return
        _check_averages(self._trainer, module)
        saved, holders = self._loaded_entries().get(OUTER, {}), self._groups.holders(self._ranks.rank)
        sums, gathers = (make_collectives(subgroup(one, holders), device) for one in self._ranks.groups[:2])
        self._outer = OuterSteps(self._policy, sums, gathers, engine.gatherer, _names(module), saved.get("momenta", {}))
        # After the same step, all messages have arrived. After different ones, some would be taken for new ones.
        if not all_have_same(self._outer.left_open, self._ranks.control):
            raise MisconfigurationException(
                "An earlier training of these processes has ended while groups were meeting (outer_every), after"
                " different steps. Start new processes, and resume from the last checkpoint."
            )
        sums.connect(device)
        gathers.connect(device, reduces=False)
        self._step, self._apart = saved.get("step", 0), set()
        self.adopt_parameters()
        self._others = self._fingerprint()
        number, every, policy = self._groups.copies, self._policy.outer_every, self._policy
        often = "after each step" if every == 1 else f"every {every} steps"
        self._say(
            f"{counted(number, 'group')} of {counted(self._groups.size, 'rank')} train alone, and meet {often}"
            f" (outer_lr={policy.outer_lr}, outer_momentum={policy.outer_momentum}): results differ from those of"
            " `ddp`.",
            False,
        )

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        """Returns the loader.

        Raises:
            MisconfigurationException: A training loader does not know its length, so that groups could take different
                numbers of steps.
        """
        if self._trainer.training and sized_len(dataloader) is None:
            raise MisconfigurationException(
                "outer_every needs training loaders that know their lengths: groups must take equally many steps. Give"
                " the dataset a `__len__`, or leave out outer_every."
            )
        return dataloader

    @property
    def number(self) -> int:
        """The number of groups."""
        return self._groups.copies

    @property
    def bytes_sent(self) -> int:
        """The messages of this rank to other groups."""
        return 0 if self._outer is None else self._outer.sums.bytes_sent + self._outer.gathers.bytes_sent

    def adopt_parameters(self) -> None:
        """Copies the parameters that are about to be trained for the first time. Call it before each forward."""
        engine, outer = self._engine, self._outer
        if engine is not None and outer is not None and len(engine.buckets) != len(outer.buckets):
            _check_all_sharded(engine)
            if known := outer.buckets:
                # Groups may have made them by other random numbers.
                added = [slot.parameter.data for one in engine.buckets if one not in known for slot in one.slots]
                broadcast_tensors(added, self._ranks.groups.gradients)
            outer.adopt(engine.buckets, _names(self._module))

    def end_step(self, signals: int) -> int:
        """Lets groups meet if it is time. Collective, within the group or over all ranks.

        Args:
            signals: Signals that came to ranks of this group.

        Returns:
            Signals that came to any rank, if groups have agreed on them in this step. Otherwise none.

        Raises:
            RuntimeError: Parameters were stepped that groups cannot meet with.
        """
        engine, outer, every = self._engine, self._outer, self._policy.outer_every or 1
        if engine is None or outer is None:
            return signals
        number = len(outer.buckets)
        if len(engine.buckets) != number:
            raise RuntimeError(
                "outer_every: a parameter was added to an optimizer and stepped after a plain `loss.backward()`. Call"
                " `self.manual_backward(loss)`, or add it before the training."
            )
        self._step += 1
        self._apart = set(range(number))
        with self._meeting():
            outer.finish()
        self._launch(outer, self._policy.due(self._step, number))
        if every == 1:
            with self._meeting():
                outer.finish()
        if self._step % every == 0:
            return self._agree(outer, signals)
        if signals:
            left = counted(every - self._step % every, "more step")
            self._say(f"a signal to end came. The training is saved when groups meet, after {left}.", False)
        return 0

    def meet(self) -> None:
        """Lets groups meet now, with all that they have stepped or written since. Collective."""
        # After an exception, a training that has ended may still be saved.
        if self._engine is None or self._outer is None:
            return
        with self._meeting():
            self._outer.finish()
            # A program may write to parameters after a step, such as one that clamps them.
            written = any_rank_for_each(self._outer.are_apart(), self._ranks.control)
        self._launch(self._outer, sorted(self._apart.union(one for one, is_apart in enumerate(written) if is_apart)))
        with self._meeting():
            self._outer.finish()
        self._agree(self._outer, 0)

    def _launch(self, outer: OuterSteps, which: Sequence[int]) -> None:
        buckets = outer.buckets
        with self._meeting():
            outer.launch([buckets[one] for one in which])
        self._apart -= set(which)

    @property
    def steps(self) -> int:
        """The number of this group's steps."""
        return self._step

    @override
    def teardown(self) -> None:
        """Ends the training. What a checkpoint has of it can still be saved."""
        if self._outer is not None:
            self._outer.abandon(self._step)
        self._engine, self._ranks.group = None, ()

    def entry(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """The entry in a checkpoint: the momentum, and the other groups' optimizers. Collective; rank 0 gets it.

        Args:
            checkpoint: Lightning's entries, with the optimizers of this rank's group on the group's first rank.
        """
        if "optimizer_states" not in checkpoint:
            # Of weights alone.
            return {}
        rank = self._ranks.rank
        holders = subgroup(self._ranks.groups.control, self._groups.holders(rank))
        place, saved, others = self._groups.place(rank), dict(self._loaded_entries().get(OUTER, {})), []
        if self._outer is not None:
            momenta = self._outer.momenta(keeps=rank == 0) if place.copy == 0 else {}
            saved = {"step": self._step, "momenta": momenta}
        if place.shard == 0:
            # In 16-mixed, each group has its loss scale.
            own = {"optimizer_states": checkpoint["optimizer_states"], "scale": self._plugin.state_dict()}
            others = gather_object(own, holders)[1:]
        return {OUTER: {**saved, "groups": others}}

    def with_own_states(self, checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
        """A loaded checkpoint with the optimizers of this group, whose loss scale is set.

        With another number of groups, both are those of the first.
        """
        others: Sequence[Any] = self._loaded_entries().get(OUTER, {}).get("groups", [])
        number = self._groups.place(self._ranks.rank).copy
        if number == 0 or len(others) + 1 != self._groups.copies:
            return checkpoint
        own = others[number - 1]
        if own["scale"]:
            self._plugin.load_state_dict(own["scale"])
        return {**checkpoint, "optimizer_states": own["optimizer_states"]}

    @property
    def _plugin(self) -> Any:
        return self._strategy.precision_plugin

    @contextmanager
    def _meeting(self) -> Iterator[None]:
        advice = "To continue without a group, start the ranks of the others from the last checkpoint."
        try:
            with watching(f"the meeting of groups after step {self._step}", advice):
                yield
        except RuntimeError as error:
            if is_of_a_collective(error):
                log.error(f"{self._ranks.flag}: groups could not meet after step {self._step}. {advice}")
            raise

    def _agree(self, outer: OuterSteps, signals: int) -> int:
        """Logs how far each group has moved, and collects signals. All ranks get rank 0's buffers. Collective.

        Raises:
            RuntimeError: Parameters of a group are not finite.
        """
        number, others = self._groups.copies, self._fingerprint()
        message = torch.zeros(number + _SIGNAL_BITS + 1, dtype=torch.float64)
        message[self._groups.place(self._ranks.rank).copy] = outer.moved
        message[number:-1] = torch.tensor([float(signals >> bit & 1) for bit in range(_SIGNAL_BITS)])
        message[-1] = not torch.equal(others, self._others)
        with self._meeting():
            self._ranks.control.all_reduce(message).wait()
            broadcast_buffers(self._module, self._ranks.groups.gradients)
            if message[-1]:
                # Such as those of a teacher that follows the student.
                broadcast_tensors(self._not_stepped(), self._ranks.groups.gradients)
                others = self._fingerprint()
        self._others = others
        self._log_norms(message[:number].sqrt())
        outer.moved.zero_()
        return sum(1 << bit for bit in range(_SIGNAL_BITS) if message[number + bit])

    def _not_stepped(self) -> list[Tensor]:
        """The parameters that no optimizer has."""
        slots = {} if self._engine is None else self._engine.slots
        ignored = names_ignored_by_ddp(self._module)
        return [one for name, one in self._module.named_parameters() if one not in slots and name not in ignored]

    def _fingerprint(self) -> Tensor:
        """A number for each of them, which shows a change. Writes through ``data`` change no version."""
        sums = [one.detach().sum(dtype=torch.float64) for one in self._not_stepped() if not one.is_complex()]
        return torch.stack(sums).cpu() if sums else torch.zeros(0)

    def _log_norms(self, norms: Tensor) -> None:
        if not norms.any():
            # Nothing has moved since the last meeting.
            return
        found = {f"outer_norm/group_{group}": norm for group, norm in enumerate(norms.tolist())}
        for logger in self._trainer.loggers:
            logger.log_metrics(found, step=self._trainer.global_step)
        for group, norm in enumerate(norms):
            name = f"group {group} ({names_of(list(self._groups.groups[group]))})"
            if not norm.isfinite():
                raise RuntimeError(
                    f"{self._ranks.flag}: {name} has parameters that are not finite after step {self._step}. Set a"
                    " smaller learning rate, or nonfinite_grads='skip', and resume from the last checkpoint."
                )
            if norm > _FARTHEST * norms.median():
                self._say(
                    f"{name} moves more than {_FARTHEST} times as far as others between two meetings"
                    f" (outer_norm/group_{group}). It may diverge.",
                    True,
                )


def _names(module: LightningModule) -> dict[Tensor, str]:
    return {parameter: name for name, parameter in module.named_parameters()}


def _check_averages(trainer: Trainer, module: LightningModule) -> None:
    """Checks for callbacks and layers whose averages groups would each make for themselves.

    Raises:
        MisconfigurationException: There is one.
    """
    averaging = (StochasticWeightAveraging, WeightAveraging)
    found = [type(one).__name__ for one in trainer.callbacks if isinstance(one, averaging)]
    found += [type(one).__name__ for one in module.modules() if isinstance(one, nn.SyncBatchNorm)]
    if found:
        raise MisconfigurationException(
            f"outer_every does not work with {found[0]}, whose averages need all ranks in each step. Leave out one of"
            " the two."
        )


def check_meets(arguments: Mapping[str, Any]) -> None:
    """Checks that groups which train alone can take a strategy's other arguments.

    Raises:
        ValueError: They cannot.
    """
    refused = {
        "state_dict_type": ("full", "each group has an optimizer state, and rank 0 writes all of them"),
        "rank_shares": ("equal", "groups take their steps at different times"),
        "keep_global_batch": (False, "groups take their steps at different times"),
    }
    for name, (allowed, reason) in refused.items():
        if arguments.get(name, allowed) != allowed:
            raise ValueError(f"outer_every needs {name}={allowed!r}, and it is {arguments[name]!r}: {reason}.")


def _check_all_sharded(engine: ShardedDataParallel) -> None:
    """Checks that each parameter of an optimizer is in a bucket, and real.

    Raises:
        ValueError: One is not, so that groups would not meet with it.
    """
    slots = engine.slots
    for optimizer in engine.optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter not in slots or parameter.is_complex():
                    raise ValueError(
                        f"outer_every needs optimizers whose state is sharded, and real parameters: a parameter of"
                        f" shape {tuple(parameter.shape)} ({parameter.dtype}) of {type(optimizer).__name__} is not."
                        " Leave out outer_every, or take an optimizer such as torch.optim.AdamW."
                    )
