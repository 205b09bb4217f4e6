"""``zero1_custom`` and ``zero2_custom``: DDP's results with the optimizer state sharded over the ranks."""

import logging
import socket
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parstrat.core.policy import (
    BoundInFlight,
    BucketCap,
    ExposeGradients,
    MasterWeights,
    PartitionChoice,
    ShardGroupChoice,
    ShardingPolicy,
    WireDtype,
)
from lightning_parstrat.core.topology import Node
from lightning_parstrat.distributed.comm.module_states import broadcast_module, check_same_module
from lightning_parstrat.distributed.engine.engine import ShardedDataParallel
from lightning_parstrat.distributed.engine.gradient_order import GradientOrder
from lightning_parstrat.strategies.base import ComposedStrategy
from lightning_parstrat.strategies.gradients.observers import (
    observers_between_micro_batches,
    observers_of_gradients,
)
from lightning_parstrat.strategies.launch.ranks import WrapperlessDDPStrategy
from lightning_parstrat.strategies.lightning_compat import stands_for_none, unwrapped, window_is_open, wrapped
from lightning_parstrat.strategies.report import BF16_SAVES_NOTHING, StepMeter, describe, named
from lightning_parstrat.strategies.wrapperless import Buffers, EvenBatches

log = logging.getLogger(__name__)


class ZeRO1Strategy(ComposedStrategy, WrapperlessDDPStrategy):
    """Trains with optimizer state and reduced gradients sharded over the ranks (ZeRO stage 1; 2 on request).

    Results are DDP's; with N ranks each holds 1/N of the optimizer state and steps 1/N of the parameters. As many
    bytes travel as under DDP. Unused parameters need no flag.

    Args:
        bucket_cap_mb: The largest size of a bucket in MiB. Gradients travel as soon as a bucket of them is ready;
            smaller buckets overlap better, larger ones pay latency less often, which grows with the number of ranks.
            ``"auto"`` follows from both, and from the model: 8 MiB on a few CPUs, from 64 to 512 on GPUs.
        partition: ``"element"`` cuts parameters wherever a shard ends; ``"parameter"`` leaves each uncut on one rank,
            which optimizers that look at whole matrices (Muon, Adafactor, Shampoo) need; ``"auto"`` takes ``"element"``
            for torch's element-wise optimizers and ``"parameter"`` for every other.
        expose_gradients: Whether ``param.grad`` shows after backward what it would under DDP. ``"auto"`` does so where
            a hook, a callback or manual optimization may look; it costs memory for all gradients and one more
            all-gather. ``False`` saves that for those whose hooks do not look; :meth:`full_gradients` then shows
            gradients on demand.
        master_weights: Whether each rank keeps an fp32 copy of its shard of parameters in 16 bits ("bf16-true",
            "16-true") and steps that, so that updates too small for 16 bits are not lost. ``"auto"`` does so wherever
            there are such parameters; ``False`` steps in 16 bits as ``ddp`` does; ``True`` insists, and is an error
            where there is nothing to keep.
        overlap_param_gather: Whether stepped parameters travel while the next batch is loaded and the next forward
            begins; whoever reads one waits for it. ``False`` has all of them arrive within the step, as it is done
            anyway where ``torch.compile`` was given the whole module.
        max_inflight_buckets: How many buckets of gradients may be in flight before backward waits for the first of
            them. Where the wire is slower than backward, gradients queue up to the size of the model; a small number
            (2 to 4) bounds that, at the price of waiting. Every rank then sends all buckets it is expected to, also
            those of layers that no rank has used in a step. ``"auto"`` is 4 on GPUs, and no bound on CPUs; ``None`` is
            no bound.
        reduce_dtype: ``"bf16"`` halves what gradients in fp32 take on the wire: each is rounded once and summed in
            fp32. Off by default. Over Gloo, the sum of a node with several ranks is rounded on its way to other nodes.
        gather_dtype: ``"bf16"`` halves what parameters in fp32 take on the wire, for modules that compute in bf16
            anyway ("bf16-mixed"): each rank steps its shard in fp32 and keeps it, the others see it rounded. Off by
            default.
        shard_group: Which ranks share one copy of the optimizer state: ``"all"`` of them; ``"node"``, those of each
            node; a number, so many consecutive ones, which divides the number of ranks. Each group then has all of the
            state, and an all-reduce of each shard sums the groups' gradients. It pays from some 128 GPUs on, where a
            ring of all ranks takes longer than computation can hide; with G ranks in a group each holds 1/G of the
            state.
        shard_gradients: Whether gradients accumulated over micro-batches (``accumulate_grad_batches``) are sharded,
            too (ZeRO stage 2; the flag ``zero2_custom`` sets it): every micro-batch is reduce-scattered, and added up
            in each rank's shard, in fp32 where gradients have 16 bits. Between micro-batches that takes 4/N bytes per
            parameter instead of 4, and K micro-batches send gradients K times. Without accumulation it changes nothing.
            Where your code may look at gradients between micro-batches (see ``expose_gradients``) and in manual
            optimization, they are kept whole as without it. It is named for what it does, as ``shard_group`` is:
            ``ZeRO1Strategy(stage=2)`` would contradict itself.
        **kwargs: Arguments of the base class.

    Raises:
        ValueError: A value is not allowed; the message says which are.
    """

    flag = "zero1_custom"
    _of_one_training = frozenset({"_engine", "_meter", "_order"})

    def __init__(
        self,
        bucket_cap_mb: BucketCap = "auto",
        partition: PartitionChoice = "auto",
        expose_gradients: ExposeGradients = "auto",
        master_weights: MasterWeights = "auto",
        overlap_param_gather: bool = True,
        max_inflight_buckets: BoundInFlight = "auto",
        reduce_dtype: WireDtype = None,
        gather_dtype: WireDtype = None,
        shard_group: ShardGroupChoice = "all",
        shard_gradients: bool = False,
        **kwargs: Any,
    ) -> None:
        self._policy = ShardingPolicy(
            bucket_cap_mb=bucket_cap_mb,
            partition=partition,
            expose_gradients=expose_gradients,
            master_weights=master_weights,
            overlap_param_gather=overlap_param_gather,
            max_inflight_buckets=max_inflight_buckets,
            reduce_dtype=reduce_dtype,
            gather_dtype=gather_dtype,
            shard_group=shard_group,
            shard_gradients=shard_gradients,
        )
        if shard_gradients:
            self.flag = "zero2_custom"
        self._kept_whole_for: list[str] = []
        self._engine: ShardedDataParallel | None = None
        self._in_training = False
        self._failed = False
        self._meter: StepMeter | None = None
        self._announced = ""
        self._order: GradientOrder | None = None
        super().__init__(**kwargs)
        self._buffers = Buffers(self, self._ranks, self._accumulation)
        self._parts += [EvenBatches(self, self._ranks), self._buffers]

    @override
    def configure_ddp(self) -> None:
        """Gives all ranks the same module; there is no wrapper around it."""
        check_same_module(self._training_module, self._ranks.groups.control)
        broadcast_module(self._training_module, self._ranks.groups.parameters)

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        """Creates the optimizers, and shards them."""
        # Where there is one already, its hooks must be gone before there are others.
        self._close_engine()
        super().setup_optimizers(trainer)
        self._shard(self.optimizers)
        # Lightning's wrappers were made before: once more, with methods of sharded optimizers.
        self.optimizers = self.optimizers

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers in training. Others that are set in the middle of it are sharded in their turn; collective."""
        return self._optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        engine = self._engine
        if engine is not None and any(unwrapped(one) not in engine.optimizers for one in _trained(optimizers)):
            engine.give_back_accumulated()
            self._close_engine()
            self._shard(optimizers)
        self._optimizers = optimizers
        self._lightning_optimizers = [wrapped(o, self) for o in optimizers]

    def _shard(self, optimizers: list[Optimizer]) -> None:
        # Namespaces of one machine are different nodes of one name; containers on one node may have different names.
        node = Node(socket.gethostname(), self.node_rank)
        self._engine = ShardedDataParallel(
            self._training_module,
            _trained(optimizers),
            self._policy,
            self._ranks.groups,
            node,
            self._kept_plan(),
            self._ranks.messages,
        )
        if self._engine.policy.reduce_dtype != self._policy.reduce_dtype:
            rank_zero_warn(f"{self.flag}: {BF16_SAVES_NOTHING}")
        self._buffers.begin()
        if self._in_training:
            self._prepare_for_users_of_gradients()

    @override
    def on_train_start(self) -> None:
        """Decides whether gradients are exposed: by now all callbacks and hooks are in place. Says what is sharded."""
        super().on_train_start()
        self._in_training = True
        self._meter = StepMeter(self.flag, self.root_device)
        self._prepare_for_users_of_gradients()
        if self._engine is not None and self._engine.may_follow_order:
            self._order = GradientOrder(self._training_module, self._ranks.groups.control)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Reads the clock and the counters where a step has ended."""
        super().on_train_batch_start(batch, batch_idx)
        self._note_step()

    @override
    def on_train_end(self) -> None:
        """Says what a step took, unless something else was said in this training: two lines are enough."""
        super().on_train_end()
        self._note_step()
        line = None if self._meter is None else self._meter.line()
        if line is not None and not self._accumulation.said:
            rank_zero_info(line)

    def _note_step(self) -> None:
        module = self.lightning_module
        if self._engine is not None and self._meter is not None and module is not None:
            self._meter.note(module.trainer.global_step, self._engine.traffic)

    def _prepare_for_users_of_gradients(self) -> None:
        if self._engine is None:
            return
        self._engine.collect_unannounced_gradients(not self._training_module.automatic_optimization)
        choice = self._policy.expose_gradients
        trainer = self._training_module.trainer
        observers = observers_of_gradients(
            self._training_module,
            trainer.callbacks,
            self._engine.optimizers,
            self.precision_plugin,
        )
        exposed = self._engine.expose_gradients(bool(observers) if choice == "auto" else choice)
        if self._policy.shard_gradients:
            self._decide_on_accumulation(observers if choice == "auto" and exposed else [])
        summary = self._engine.summary()
        line = describe(self.flag, summary, observers if choice == "auto" and exposed else ())
        # A tuner trains a little before the training.
        if line and line != self._announced:
            self._announced = line
            (rank_zero_warn if summary.replicated else rank_zero_info)(line)

    def _decide_on_accumulation(self, observers: list[str]) -> None:
        """Lets micro-batches be reduced one by one, unless somebody may look at what has been accumulated."""
        if self._engine is None:
            return
        module = self._training_module
        between = [*observers, *observers_between_micro_batches(module, module.trainer.callbacks)]
        # Where users block the sending of gradients by themselves, nothing is to be sent.
        between += [] if module.automatic_optimization else ["manual optimization"]
        sharded = self._engine.accumulate_in_shards(not between)
        # Where nobody was found here: it was asked for, or it is another rank's callback.
        unknown = "whoever expose_gradients=True is for" if self._policy.expose_gradients is True else "another rank"
        self._kept_whole_for = [] if sharded else list(dict.fromkeys(between)) or [unknown]

    @contextmanager
    def full_gradients(self) -> Generator[None, None, None]:
        """Within it ``param.grad`` holds the mean gradients over all ranks, to read or to change.

        Collective: all ranks must enter it, between backward and the optimizer's step. One all-gather per bucket and
        memory for all gradients while it lasts. Ranks wait for each other first, by some four
        requests to the process group's store. Where gradients are exposed anyway, it changes nothing.
        """
        if self._engine is None:
            raise MisconfigurationException("`full_gradients()` was called outside of `fit`: there are no gradients.")
        with self._engine.full_gradients():
            yield

    @override
    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Within it, gradients accumulate: locally, and nothing is sent, or in the shards (``shard_gradients``)."""
        with super().block_backward_sync():
            if self._engine is None:
                yield
                return
            if self._kept_whole_for:
                self._accumulation.say_once(
                    rank_zero_info,
                    f"between micro-batches every rank keeps its whole gradients, as zero1_custom does:"
                    f" {named(self._kept_whole_for)} may read or change them.",
                )
            with self._engine.no_sync():
                yield

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Broadcasts buffers when DDP would, then runs the user's training step."""
        self._buffers.before_step()
        return super().training_step(*args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Broadcasts buffers when DDP would, then runs the user's validation step."""
        self._buffers.before_validation_step()
        return super().validation_step(*args, **kwargs)

    @override
    def on_validation_start(self) -> None:
        """Forgets gradients where Lightning has had the module forget them, which could not reach the shards."""
        super().on_validation_start()
        trainer = self._training_module.trainer
        forgotten = not is_overridden("on_validation_model_zero_grad", self._training_module)
        accumulates = trainer.sanity_checking or window_is_open(trainer)
        if self._engine is not None and forgotten and not accumulates:
            self._engine.zero_gradients()

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        """Gets ready to send gradients while backward runs, or to see in which order they come."""
        super().pre_backward(closure_loss)
        if self._engine is None:
            return
        if self._order is None:
            self._engine.prepare_backward(closure_loss, self._accumulation.scale)
        else:
            # The first backward's gradients stay local: buckets follow their order.
            self._engine.prepare_local_backward()
            self._order.listen()

    @override
    def _end_backward(self, ends_window: bool) -> None:
        order, self._order = self._order, None
        if order is not None and self._engine is not None:
            self._engine.follow_order(order.end())
            if self._engine.synchronizes:
                self._reduce_local_gradients()

    @override
    def _reduce_local_gradients(self) -> None:
        if self._engine is not None:
            self._engine.reduce_local_gradients(self._accumulation.scale)

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Remembers that other ranks may not get as far as this one's teardown."""
        super().on_exception(exception)
        self._failed = True

    @override
    def teardown(self) -> None:
        """Gives the parameters ordinary storage again. Not collective after an exception, which it never hides."""
        try:
            self._close_engine()
        except Exception:
            if not self._failed:
                raise
            log.exception(f"{self.flag}: after an error the training could not be ended as it should.")
        finally:
            self._in_training = self._failed = False
            self._announced = ""
            super().teardown()

    @override
    def _entries(self) -> dict[str, Any]:
        """With the plan of the buckets: a resumed training sums gradients in the same order."""
        plan = {} if self._engine is None else {"bucket_plan": self._engine.plan, "planned_for": self._planned_for()}
        return {**super()._entries(), **plan}

    def _planned_for(self) -> dict[str, Any]:
        policy = self._policy
        # Not named where it is the default: plans that were kept before there was a choice go on.
        grouped = {} if policy.shard_group == "all" else {"shard_group": policy.shard_group}
        return {
            "world_size": self.world_size,
            "bucket_cap_mb": policy.bucket_cap_mb,
            **grouped,
        }

    def _kept_plan(self) -> list[list[str]]:
        """The buckets of the checkpoint that was loaded.

        A plan made for another world size or other arguments is left: what is asked for now counts.
        """
        loaded = self._checkpoints.loaded_entries
        return loaded["bucket_plan"] if loaded.get("planned_for") == self._planned_for() else []

    def _close_engine(self) -> None:
        engine, self._engine = self._engine, None
        order, self._order = self._order, None
        if order is not None:
            order.close()
        if engine is not None:
            engine.close(self._failed)


def _trained(optimizers: list[Optimizer]) -> list[Optimizer]:
    return [one for one in map(unwrapped, optimizers) if not stands_for_none(one)]
