"""``zero1_custom`` and ``zero2_custom``: the results of DDP, with the optimizer state sharded over the ranks."""

import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parstrat.core.policy import (
    BoundInFlight,
    BucketCap,
    CommDtype,
    ExposeGradients,
    MasterWeights,
    OuterDtype,
    OuterPolicy,
    PartitionChoice,
    ShardGroupChoice,
    ShardingPolicy,
    WrapPolicy,
)
from lightning_parstrat.distributed.comm.module_states import broadcast_module, check_same_module
from lightning_parstrat.distributed.engine.engine import ShardedDataParallel
from lightning_parstrat.strategies.base import ComposedStrategy
from lightning_parstrat.strategies.gradients.observers import (
    observers_between_micro_batches,
    observers_of_gradients,
)
from lightning_parstrat.strategies.lightning_compat import trained, unwrapped, window_is_open, wrapped
from lightning_parstrat.strategies.meetings import Meetings, check_meets
from lightning_parstrat.strategies.report import BF16_SAVES_NOTHING, held_elsewhere, named, not_sharded, sharded_by
from lightning_parstrat.strategies.wrapperless import ActivationCheckpoints, EqualRanks, WrapperlessDDPStrategy

log = logging.getLogger(__name__)


class ZeRO1Strategy(ComposedStrategy, WrapperlessDDPStrategy):
    """Trains with optimizer state and reduced gradients sharded over the ranks (ZeRO stage 1; 2 on request).

    Results are DDP's. With N ranks, each holds 1/N of the optimizer state and steps 1/N of the parameters. The ranks
    send as many bytes as under DDP. Unused parameters need no flag.

    Args:
        bucket_cap_mb: The largest size of a bucket in MiB. The ranks send a bucket of gradients as soon as it is ready.
            Smaller buckets overlap better with backward. Larger ones pay the latency of a collective less often, and
            that latency grows with the number of ranks. ``"auto"`` depends on the number of ranks, the device and the
            model. It is 8 MiB on a few CPUs, and from 64 to 512 MiB on GPUs.
        partition: How parameters are divided over the ranks. ``"element"`` cuts a parameter if the end of a shard lies
            in it. ``"parameter"`` leaves each uncut on one rank. Optimizers that use whole matrices need that, such as
            Muon, Adafactor and Shampoo. ``"auto"`` takes ``"element"`` for torch's element-wise optimizers, and
            ``"parameter"`` for every other.
        expose_gradients: Whether ``param.grad`` shows the same gradients after backward as under DDP. ``"auto"``
            exposes them if a hook, a callback or manual optimization may read them. That costs memory for all
            gradients and one more all-gather. ``False`` saves that, if your hooks do not read gradients.
            :meth:`full_gradients` then shows gradients on demand.
        master_weights: Whether each rank steps an fp32 copy of its shard of 16-bit parameters. Such parameters come
            with "bf16-true" and "16-true". The copy keeps updates that are too small for 16 bits. ``"auto"`` makes the
            copy if there are such parameters. ``False`` steps in 16 bits, as ``ddp`` does. ``True`` raises if there
            are no such parameters.
        overlap_param_gather: Whether ranks send stepped parameters while the next batch is loaded and the next forward
            begins. Code that reads a parameter waits for it. ``False`` waits for all parameters within the step. That
            is always done if ``torch.compile`` was given the whole module.
        max_inflight_buckets: How many buckets of gradients may be in flight before backward waits for the first of
            them. If the network is slower than backward, queued gradients grow up to the size of the model. A small
            number (2 to 4) bounds that, at the price of waiting. Every rank then sends all expected buckets, also
            those of layers that no rank has used in a step. ``"auto"`` is 4 on GPUs, and no bound on CPUs. ``None`` is
            no bound.
        comm_dtype: The dtype in which fp32 gradients are sent. ``"bf16"`` halves their bytes on the network: each
            gradient is rounded once, and the sum is taken in fp32. Off by default. Over Gloo, the sum of a node with
            several ranks is rounded before it is sent to other nodes.
        gather_dtype: The dtype in which fp32 parameters are sent. ``"bf16"`` halves their bytes on the network. It is
            for modules that compute in bf16 anyway ("bf16-mixed"). Each rank steps and keeps its shard in fp32. All
            ranks compute with rounded parameters. Off by default.
        shard_group: Which ranks share one copy of the optimizer state. ``"all"`` is all ranks, ``"node"`` the ranks of
            each node. A number is that many consecutive ranks, and must divide the number of ranks. Each group has the
            whole state, and each rank of a group of G holds 1/G of it. An all-reduce of each shard sums the groups'
            gradients. Groups pay from some 128 GPUs on: there, a ring of all ranks takes longer than computation can
            hide.
        shard_gradients: Whether gradients accumulated over micro-batches (``accumulate_grad_batches``) are sharded,
            too. This is ZeRO stage 2, and the flag ``zero2_custom`` sets it. Every micro-batch is reduce-scattered,
            and added up in each rank's shard. 16-bit gradients are added up in fp32. Between micro-batches that takes
            4/N bytes per parameter instead of 4. K micro-batches send gradients K times. Without accumulation the
            argument changes nothing. If your code may read gradients between micro-batches (see ``expose_gradients``),
            they are kept whole. The same holds in manual optimization.
        activation_checkpointing_policy: Classes whose modules compute their activations again in backward, or their
            names, such as ``["Block"]``. Each keeps its inputs alone: less memory, and a third more computation.
            Results stay the same.
        outer_every: After how many steps shard groups meet that train by themselves (DiLoCo). Between meetings nothing
            is sent between groups, so a slow network between them costs little. Results differ from DDP's. Groups meet
            by a step of SGD on the mean of how far each has moved. Buckets take turns, so each step sends about one
            ``outer_every``-th of the model. All groups also meet before a validation, a save and the end. A signal to
            end is answered when groups meet: ``outer_every`` steps must fit into the time that a job has left then.
            It takes 4/G bytes per parameter on each rank of a group of G, and as much again with momentum.
        outer_lr: The learning rate of that step. With 1 and no momentum, groups take the mean of their parameters.
        outer_momentum: Its Nesterov momentum. DiLoCo's values are 0.9 and a learning rate of 0.7. They go up to seven
            times as far as the mean, which pays with small learning rates and harms with others.
        outer_dtype: The dtype in which groups send how far they have moved. ``"int8"`` sends a fourth of the bytes of
            fp32, with a scale for 256 elements. ``"bf16"`` sends half.
        **kwargs: Arguments of the base class.

    Raises:
        ValueError: A value is not allowed. The message lists the allowed ones.
    """

    flag = "zero1_custom"
    _of_one_training = frozenset({"_engine"})

    def __init__(
        self,
        bucket_cap_mb: BucketCap = "auto",
        partition: PartitionChoice = "auto",
        expose_gradients: ExposeGradients = "auto",
        master_weights: MasterWeights = "auto",
        overlap_param_gather: bool = True,
        max_inflight_buckets: BoundInFlight = "auto",
        comm_dtype: CommDtype = None,
        gather_dtype: CommDtype = None,
        shard_group: ShardGroupChoice = "all",
        shard_gradients: bool = False,
        activation_checkpointing_policy: WrapPolicy = None,
        outer_every: int | None = None,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        outer_dtype: OuterDtype = None,
        **kwargs: Any,
    ) -> None:
        self._policy = ShardingPolicy(
            bucket_cap_mb=bucket_cap_mb,
            partition=partition,
            expose_gradients=expose_gradients,
            master_weights=master_weights,
            overlap_param_gather=overlap_param_gather,
            max_inflight_buckets=max_inflight_buckets,
            comm_dtype=comm_dtype,
            gather_dtype=gather_dtype,
            shard_group=shard_group,
            shard_gradients=shard_gradients,
            activation_checkpointing_policy=activation_checkpointing_policy,
        )
        outer = OuterPolicy(
            outer_every=outer_every,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            outer_dtype=outer_dtype,
            shard_group=shard_group,
        )
        if outer_every is not None:
            check_meets(kwargs)
            # A group trains as if it were alone.
            self._policy = replace(self._policy, shard_group="all")
        if shard_gradients:
            self.flag = "zero2_custom"
        self._kept_whole_for: list[str] = []
        self._engine: ShardedDataParallel | None = None
        self._sent_before = 0
        """The messages of earlier optimizers' engines."""
        self._in_training = False
        self._failed = False
        super().__init__(**kwargs)
        self._equal = EqualRanks(self, self._ranks, self._accumulation)
        self._parts += [self._equal, ActivationCheckpoints(self, self._policy.activation_checkpointing_policy)]
        self._meetings: Meetings | None = None
        if outer_every is not None:
            entries = partial(getattr, self._checkpoints, "loaded_entries")
            self._meetings = Meetings(self, self._ranks, outer, entries, self._fit_report.say)
            self._parts.append(self._meetings)

    @override
    def configure_ddp(self) -> None:
        """Gives all ranks the same module. There is no wrapper around it."""
        check_same_module(self.lightning_module, self._ranks.groups.control)
        broadcast_module(self.lightning_module, self._ranks.groups.parameters)

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        """Creates the optimizers, and shards them."""
        # The hooks of an earlier engine must be removed before new hooks are registered.
        self._close_engine()
        super().setup_optimizers(trainer)
        self._shard(self.optimizers)
        # Lightning's wrappers are older than the shards. New wrappers have the methods of sharded optimizers.
        self.optimizers = self.optimizers

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Prepares a loader of training or evaluation. Collective.

        Raises:
            MisconfigurationException: Some ranks have nothing to validate, and groups meet before a validation.
        """
        dataloader = super().process_dataloader(dataloader)
        if self._meetings is not None and self._equal.validated_by_some:
            raise MisconfigurationException(
                "outer_every needs a validation batch for each rank, and a rank has none. Give all ranks some samples."
            )
        return dataloader

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers in training. If new ones are set within the training, they are sharded. Collective then."""
        return self._optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        engine = self._engine
        if engine is not None and any(unwrapped(one) not in engine.optimizers for one in trained(optimizers)):
            if self._meetings is not None:
                raise MisconfigurationException(
                    f"{self.flag}: new optimizers were set in a training with outer_every, whose groups would not meet"
                    " with them. Set them before the training, or leave out outer_every."
                )
            if any(bucket.is_partial for bucket in engine.buckets):
                raise MisconfigurationException(
                    f"{self.flag}: new optimizers were set between the micro-batches of a step, whose gradients are in"
                    " the shards of the old ones. Set them after a step."
                )
            self._close_engine()
            self._shard(optimizers)
        self._optimizers = optimizers
        self._lightning_optimizers = [wrapped(o, self) for o in optimizers]

    def _shard(self, optimizers: list[Optimizer]) -> None:
        self._engine = ShardedDataParallel(
            self.lightning_module,
            trained(optimizers),
            self._policy,
            self._ranks.data_groups,
            self.node_rank,
            [name for bucket in self._checkpoints.loaded_entries.get("bucket_plan", ()) for name in bucket],
            self._ranks.messages,
        )
        if self._engine.policy.comm_dtype != self._policy.comm_dtype:
            rank_zero_warn(f"{self.flag}: {BF16_SAVES_NOTHING}")
        if self._meetings is not None:
            self._meetings.begin(self._engine)
        self._equal.begin()
        if self._in_training:
            self._prepare_for_users_of_gradients()

    @override
    def on_train_start(self) -> None:
        """Decides whether gradients are exposed, now that all callbacks and hooks exist. Logs what is sharded."""
        super().on_train_start()
        self._in_training = True
        self._prepare_for_users_of_gradients()
        if self._meetings is None:
            self._engine.follow_first_backward()

    @override
    def _bytes_sent(self) -> int | None:
        if self._engine is None:
            return None
        own = self._sent_before + self._engine.bytes_sent
        return own if self._meetings is None else own + self._meetings.bytes_sent

    @override
    def _end_step(self, signals: int) -> int:
        return signals if self._meetings is None else self._meetings.end_step(signals)

    @override
    def _synchronize_parameters(self) -> None:
        if self._meetings is not None:
            self._meetings.meet()

    def _prepare_for_users_of_gradients(self) -> None:
        self._engine.reducer.collects_unannounced = not self.lightning_module.automatic_optimization
        choice = self._policy.expose_gradients
        trainer = self.lightning_module.trainer
        observers = observers_of_gradients(
            self.lightning_module,
            trainer.callbacks,
            self._engine.optimizers,
            self.precision_plugin,
        )
        exposed = self._engine.expose_gradients(bool(observers) if choice == "auto" else choice)
        if self._policy.shard_gradients:
            self._decide_on_accumulation(observers if choice == "auto" and exposed else [])
        self._fit_report.say(sharded_by(self._engine, 1 if self._meetings is None else self._meetings.number))
        self._fit_report.say(not_sharded(self._engine), warns=True)
        self._fit_report.say(held_elsewhere(self._engine), warns=True)
        if choice == "auto" and exposed and self._engine.slots:
            readers = named(observers)
            self._fit_report.say(f"gathers gradients each step, as {readers} may read them (see expose_gradients)")

    def _decide_on_accumulation(self, observers: list[str]) -> None:
        """Lets micro-batches be reduced one by one, unless code may read accumulated gradients."""
        module = self.lightning_module
        between = [*observers, *observers_between_micro_batches(module, module.trainer.callbacks)]
        # A user who blocks the sending of gradients by hand expects that none is sent.
        between += [] if module.automatic_optimization else ["manual optimization"]
        sharded = self._engine.accumulate_in_shards(not between)
        # Without such code on this rank, `expose_gradients=True` or another rank's callback is the reason.
        unknown = "what expose_gradients=True is for" if self._policy.expose_gradients is True else "another rank"
        self._kept_whole_for = [] if sharded else list(dict.fromkeys(between)) or [unknown]

    @contextmanager
    def full_gradients(self) -> Generator[None, None, None]:
        """Within it ``param.grad`` holds the mean gradients over all ranks, to read or to change.

        Collective: all ranks must enter it, between backward and the optimizer's step. It takes one all-gather per
        bucket, and memory for all gradients until it ends. First, ranks wait for each other, by some five requests to
        the process group's store. If gradients are exposed anyway, it changes nothing.
        """
        if self._engine is None:
            raise MisconfigurationException("`full_gradients()` was called outside of `fit`: there are no gradients.")
        with self._engine.full_gradients():
            yield

    @override
    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Within it, gradients accumulate. They stay local, or are reduced into the shards (``shard_gradients``)."""
        with super().block_backward_sync():
            if self._engine is None:
                yield
                return
            if self._kept_whole_for:
                self._fit_report.say(
                    f"between micro-batches every rank keeps its whole gradients, as zero1_custom does:"
                    f" {named(self._kept_whole_for)} may read or change them."
                )
            with self._engine.reducer.no_sync():
                yield

    @override
    def on_validation_start(self) -> None:
        """Zeros the gradients in the shards if Lightning has zeroed those of the module."""
        super().on_validation_start()
        trainer = self.lightning_module.trainer
        forgotten = not is_overridden("on_validation_model_zero_grad", self.lightning_module)
        accumulates = trainer.sanity_checking or window_is_open(trainer)
        if self._engine is not None and forgotten and not accumulates:
            self._engine.reducer.zero(set(self._engine.slots.values()))

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Prepares parameters that were added since the last step, then runs the user's training step."""
        if self._engine is not None:
            self._engine.adopt_added_parameters()
            if self._meetings is not None:
                self._meetings.adopt_parameters()
        return super().training_step(*args, **kwargs)

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        """Prepares to send gradients while backward runs, or to record their order."""
        super().pre_backward(closure_loss)
        if self._engine is not None:
            self._engine.prepare_backward(closure_loss, self._accumulation.scale)
            if self._meetings is not None:
                self._meetings.adopt_parameters()

    @override
    def _end_backward(self, ends_window: bool, has_run: bool) -> None:
        if self._engine is not None:
            ends = self._engine.end_backward if has_run else self._engine.reduce_local_gradients
            ends(self._accumulation.scale)

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Notes that other ranks may never reach the teardown that this rank runs."""
        super().on_exception(exception)
        self._failed = True

    @override
    def teardown(self) -> None:
        """Gives the parameters ordinary storage again. After an exception it is not collective, and never hides it."""
        try:
            self._close_engine()
        except Exception:
            if not self._failed:
                raise
            log.exception(f"{self.flag}: after an error the training could not be ended as it should.")
        finally:
            self._in_training = self._failed = False
            super().teardown()

    @override
    def _timed(self, run: Callable[[], Any]) -> tuple[Any, float]:
        if self._engine is not None:
            self._engine.gatherer.finish()
        return super()._timed(run)

    @override
    def _entries(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """Adds the plan of the buckets: a resumed training sums gradients in the same order."""
        plan = {} if self._engine is None else {"bucket_plan": self._engine.plan}
        outer = {} if self._meetings is None else self._meetings.entry(checkpoint)
        return {**super()._entries(checkpoint), **plan, **outer}

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Gives each optimizer its state. If groups train alone, each group has its own."""
        own = checkpoint if self._meetings is None else self._meetings.with_own_states(checkpoint)
        super().load_optimizer_state_dict(own)

    def _close_engine(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            self._sent_before += engine.bytes_sent
            engine.close(self._failed)


class ZeRO2Strategy(ZeRO1Strategy):
    """:class:`ZeRO1Strategy` with ``shard_gradients=True`` (ZeRO stage 2).

    Args:
        **kwargs: Arguments of :class:`ZeRO1Strategy`, except ``shard_gradients``.
    """

    def __init__(self, **kwargs: Any) -> None:
        if "shard_gradients" in kwargs:
            raise TypeError(
                "ZeRO2Strategy always shards gradients. Leave out `shard_gradients`, or take ZeRO1Strategy."
            )
        super().__init__(shard_gradients=True, **kwargs)
