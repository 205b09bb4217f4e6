"""``pipeline_custom``: the results of one process, with the module's blocks in stages on different ranks."""

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from lightning.fabric.utilities.types import ReduceOp
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parstrat.core.policy import (
    PipelinePolicy,
    PipelineSchedule,
    ShardingPolicy,
    StageSharding,
    WrapPolicy,
)
from lightning_parstrat.core.stages import Stages, balanced, bounds_of, sizes_of
from lightning_parstrat.core.wording import counted, listed
from lightning_parstrat.distributed.comm.agreement import broadcast_object
from lightning_parstrat.distributed.comm.backends import make_collectives
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.comm.module_states import check_same_module
from lightning_parstrat.distributed.comm.process_groups import subgroup
from lightning_parstrat.distributed.engine.cuts import local
from lightning_parstrat.distributed.engine.engine import ShardedDataParallel
from lightning_parstrat.distributed.engine.shardability import UNTRIED, reason_against_parts
from lightning_parstrat.distributed.engine.state import ELEMENTWISE_OPTIMIZERS, grouped_parameters
from lightning_parstrat.distributed.engine.stepping import forget_sharding, needs_closure
from lightning_parstrat.distributed.fsdp.optimizers import prepare_optimizers
from lightning_parstrat.distributed.gradients.clipping import StepGradients, is_counted, step_gradients
from lightning_parstrat.distributed.gradients.loss_weights import watch_gradients
from lightning_parstrat.distributed.pipeline.cut_module import CutModule
from lightning_parstrat.distributed.pipeline.holders import HeldParts, costs_of, find_blocks, in_state_dict
from lightning_parstrat.distributed.pipeline.schedule import Pipeline, takes_many, turns_back
from lightning_parstrat.distributed.torch_compat import FakeTensor, has_memory, multiply_all
from lightning_parstrat.strategies.base import ComposedStrategy
from lightning_parstrat.strategies.checkpoint.pipeline_state import PipelineState
from lightning_parstrat.strategies.checkpoint.training_state import TrainingState
from lightning_parstrat.strategies.data.same_data import SameData
from lightning_parstrat.strategies.gradients.observers import observers_of_gradients
from lightning_parstrat.strategies.gradients.pipeline_differences import BATCH_NORMS
from lightning_parstrat.strategies.gradients.pipeline_steps import PipelineSteps, replace_stepped
from lightning_parstrat.strategies.lightning_compat import minor, trained, unwrapped, wrapped
from lightning_parstrat.strategies.wrapperless import EqualRanks, WrapperlessDDPStrategy


class PipelineStrategy(ComposedStrategy, WrapperlessDDPStrategy):
    """Trains a module whose blocks are divided into stages, on different ranks, by torch's pipeline schedules.

    Results are those of one process that accumulates the same micro-batches. Each rank holds parameters, gradients and
    optimizer state of its stages alone. Ranks send the activations between two blocks, and their gradients. The ranks
    of a pipeline have the same batch. ``training_step`` runs on each of its micro-batches, on every rank up to the
    rank's own blocks. Several pipelines, and tensor parallelism within stages, make a grid of ranks.
    After the training, rank 0 has the whole module on the host.

    Args:
        stages: The number of blocks of each stage, such as ``[5, 3]``. ``"auto"`` divides them by what they multiply.
        microbatches: Into how many micro-batches each batch is cut. Ranks wait for less time with more of them.
        schedule: In which order stages run: ``"1f1b"``, ``"gpipe"``, or with several stages a rank ``"interleaved"``,
            ``"looped_bfs"``, ``"zero_bubble"``, ``"zbv"`` and ``"dualpipev"``. They are torch's.
        auto_wrap_policy: Classes of the blocks, or their names, such as ``["Block"]``. By default blocks are found:
            modules of one class in the same container.
        data_parallel_size: The number of pipelines. Each trains on other data, and the ranks of a stage divide its
            optimizer state, as under ``zero1_custom``. Ranks of one pipeline are as far from each other as can be:
            with 2 pipelines of 2 ranks, these are ranks 0 and 2, and 1 and 3. With ``"auto"`` and numbers in
            ``stages``, there are as many as the ranks allow. With ``"auto"`` for both there is one.
        tensor_parallel_size: How many consecutive ranks share each layer that the module's tensor-parallel plan names.
            See :class:`~lightning_parstrat.ZeRO3Strategy`. Layers outside of blocks stay whole.
        shard: What the ranks of a stage divide. ``"state"`` is the optimizer state. ``"parameters"`` is the blocks'
            parameters and gradients, too, by torch's FSDP2: they are gathered once for each batch. With a
            ``tensor_parallel_size`` above 1, it is always ``"parameters"``.
        **kwargs: Arguments of the base class.

    Raises:
        ValueError: A value is not allowed. The message lists the allowed ones.
    """

    flag = "pipeline_custom"
    _divides_module = True
    _of_one_training = frozenset({"_steps", "_held", "_cut", "_engine"})

    def __init__(
        self,
        stages: Literal["auto"] | list[int] = "auto",
        microbatches: int = 4,
        schedule: PipelineSchedule = "1f1b",
        auto_wrap_policy: WrapPolicy = None,
        data_parallel_size: Literal["auto"] | int = "auto",
        tensor_parallel_size: int = 1,
        shard: StageSharding = "state",
        **kwargs: Any,
    ) -> None:
        self._policy = PipelinePolicy(
            stages=stages,
            microbatches=microbatches,
            schedule=schedule,
            auto_wrap_policy=auto_wrap_policy,
            data_parallel_size=data_parallel_size,
            tensor_parallel_size=tensor_parallel_size,
            shard=shard,
        )
        self._steps: PipelineSteps | None = None
        self._batch_sizes: dict[bool, set[int]] = {True: set(), False: set()}
        self._held: HeldParts | None = None
        self._cut: CutModule | None = None
        self._engine: ShardedDataParallel | None = None
        super().__init__(**kwargs)
        for name, allowed in (("state_dict_type", "full"), ("rank_shares", "equal"), ("keep_global_batch", False)):
            if kwargs.get(name, allowed) != allowed:
                raise ValueError(
                    f"{name}={kwargs[name]!r} divides data or state among ranks, and the ranks of a pipeline have the"
                    f" same data, and a stage each. Set {name}={allowed!r}."
                )
        self._ranks.pipeline_size = self._size_of_pipeline
        self._ranks.tensor_parallel_size = tensor_parallel_size
        self._same_data = SameData(self, self._ranks)
        self._equal = EqualRanks(self, self._ranks, self._accumulation)
        self._parts += [self._same_data, self._equal]

    @override
    def _make_training_state(self) -> TrainingState:
        return PipelineState(self, self._ranks, self._held_parts)

    def _held_parts(self) -> HeldParts | None:
        return self._held

    @override
    def setup(self, trainer: Trainer) -> None:
        """Sets up the module. Collective."""
        plugin = self.precision_plugin
        if any(isinstance(one, FakeTensor) for one in self.lightning_module.parameters()):
            # After a training, ranks other than 0 have the right dtypes, and no values to convert.
            vars(plugin)["convert_module"] = lambda module: module
        try:
            super().setup(trainer)
        finally:
            vars(plugin).pop("convert_module", None)

    @override
    def configure_ddp(self) -> None:
        """Cuts the module in place. There is no wrapper around it. Collective.

        Raises:
            MisconfigurationException: It cannot be cut.
        """
        module, groups, grid = self.lightning_module, self._ranks.groups, self._ranks.grid
        self._close()
        self._same_data.begin()
        check_same_module(module, groups.control)
        missing = next((name for name, one in module.named_parameters() if not has_memory(one)), None)
        if (missing := broadcast_object(missing, groups.control)) is not None:
            raise MisconfigurationException(
                f"{missing!r} has no values on rank 0. Make the module on the host there, with its weights."
            )
        blocks = find_blocks(module, self._policy.auto_wrap_policy or ())
        self._refuse(blocks)
        stages = self._divide(module, blocks)
        group = subgroup(groups.gradients, grid.pipeline_of(self.global_rank))
        replicas = make_collectives(self._ranks.data_groups.control, torch.device("cpu"))
        everyone, divides = groups.gradients, self._divides_blocks
        held = HeldParts(module, blocks, stages, everyone, group, self.root_device, grid, divides)
        cut = CutModule(module, held.blocks, stages, held.sharded)
        pipeline = Pipeline(
            cut, stages, held, self._policy.schedule, self._policy.microbatches, group, self.root_device
        )
        self._held, self._cut, self._same_data.last_stage = held, cut, pipeline.last_rank * grid.tensor
        control, number = subgroup(groups.control, grid.pipeline_of(self.global_rank)), self._policy.microbatches
        self._steps = PipelineSteps(
            self, pipeline, held, control, self._same_data.group, replicas, self._of_stage(), number, self._batch_sizes
        )
        if grid.data > 1:
            # Stages have different buffers, and all ranks of a stage have the same.
            self._equal.begin()
        pipelines, each = (f"{counted(grid.data, 'pipeline')} of ", " each") if grid.data > 1 else ("", "")
        self._fit_report.say(
            f"{pipelines}{counted(stages.count, 'stage')} of {', '.join(map(str, sizes_of(stages.bounds)))} blocks on"
            f" {counted(grid.pipeline, 'rank')}{each};"
            f" {counted(self._policy.microbatches, 'micro-batch', 'micro-batches')} a batch by {self._policy.schedule}"
        )

    def _of_stage(self) -> Collectives:
        """The ranks that hold this one's stages. Messages are in host memory. Collective on first use."""
        ranks = self._ranks.grid.of_stage(self.global_rank)
        return make_collectives(subgroup(self._ranks.groups.control, ranks), torch.device("cpu"))

    def _refuse(self, blocks: dict[str, nn.Module]) -> None:
        """Raises an error for what no pipeline can train, and says what is computed by micro-batch."""
        if minor(torch.__version__) < (2, 13):
            raise MisconfigurationException(f"pipeline_custom needs torch 2.13, and this is torch {torch.__version__}.")
        module = self.lightning_module
        fits = module.trainer.state.fn == TrainerFn.FITTING
        if fits and not module.automatic_optimization:
            raise MisconfigurationException(
                "pipeline_custom runs forward and backward of micro-batches itself, and the module optimizes manually."
                " Set `automatic_optimization = True`, or train by zero1_custom."
            )
        if isinstance(self.precision_plugin, MixedPrecision) and self.precision_plugin.scaler is not None:
            raise MisconfigurationException(
                "pipeline_custom has no loss scale for precision='16-mixed'. Set precision='bf16-mixed' or '32-true'."
            )
        waits = [one for one in module.modules() if isinstance(one, nn.SyncBatchNorm) and one.process_group is None]
        if fits and waits and self.world_size > 1:
            raise MisconfigurationException(
                "SyncBatchNorm waits for all ranks, and each stage of a pipeline runs other layers. Set"
                " `sync_batchnorm=False`, or make the module with BatchNorm."
            )
        _refuse_renamed(module)
        for kind in (WeightAveraging, StochasticWeightAveraging, ModelPruning):
            self._refuse_callback(kind, fits, "Train by zero1_custom or zero2_custom.")
        self._refuse_callback(BaseFinetuning, fits, "Freeze and unfreeze by `requires_grad` in hooks of the module.")
        if self._divides_blocks:
            self._refuse_callback(LearningRateFinder, fits, "Set shard='state' and tensor_parallel_size=1.")
        kinds = Counter(type(one).__name__ for one in module.modules() if isinstance(one, BATCH_NORMS))
        if fits and kinds:
            self._fit_report.say(
                f"{' and '.join(kinds)} take their statistics from each micro-batch, not from the whole batch", True
            )

    def _refuse_callback(self, kind: type[Callback], fits: bool, advice: str) -> None:
        if fits and any(isinstance(one, kind) for one in self.lightning_module.trainer.callbacks):
            raise MisconfigurationException(
                f"{kind.__name__} reads and replaces parameters that this rank does not have as a whole. {advice}"
            )

    @property
    def _divides_blocks(self) -> bool:
        """Whether the ranks of a stage divide its blocks."""
        grid = self._ranks.grid
        return grid.tensor > 1 or (grid.data > 1 and self._policy.shard == "parameters")

    def _size_of_pipeline(self, ranks: int) -> int:
        """How many ranks a pipeline has. If no number fits, what is closest to the arguments."""
        stages, pipelines = self._policy.stages, self._policy.data_parallel_size
        ranks = max(1, ranks // self._policy.tensor_parallel_size)
        if isinstance(pipelines, str):
            asked = 0 if isinstance(stages, str) else len(stages)
            pipelines = next((n for n in range(1, ranks // 2 + 1) if asked and self._fits(asked, ranks, n)), 1)
        return ranks // pipelines if ranks % pipelines == 0 else ranks

    def _fits(self, stages: int, ranks: int, pipelines: int) -> bool:
        """Whether a schedule takes so many stages on the ranks of each of so many pipelines."""
        schedule, size = self._policy.schedule, ranks // pipelines
        is_right = stages > size if takes_many(schedule) else stages == size
        return ranks % pipelines == stages % size == 0 and is_right and (stages == 2 * size or not turns_back(schedule))

    def _divide(self, module: nn.Module, blocks: dict[str, nn.Module]) -> Stages:
        schedule, ranks, pipelines = self._policy.schedule, self._ranks.grid.pipeline, self._policy.data_parallel_size
        shared = self._policy.tensor_parallel_size
        if not isinstance(pipelines, str) and self.world_size % (pipelines * shared):
            raise MisconfigurationException(
                f"data_parallel_size={pipelines} and tensor_parallel_size={shared} need a multiple of"
                f" {pipelines * shared} ranks, and there are {self.world_size}. Start so many, or set divisors."
            )
        least = 2 if takes_many(schedule) else 1
        asked = self._policy.stages
        count = ranks * least if isinstance(asked, str) else len(asked)
        names = f"{counted(len(blocks), 'block')} ({', '.join(list(blocks)[:3])}{', ...' if len(blocks) > 3 else ''})"
        if not self._fits(count, ranks, 1):
            allowed = f"a multiple of {ranks} above it" if least > 1 else str(ranks)
            raise MisconfigurationException(
                f"stages={asked} are {count} for {counted(ranks, 'rank')}. schedule={schedule!r} needs"
                f" {2 * ranks if turns_back(schedule) else allowed}."
            )
        if len(blocks) < count:
            raise MisconfigurationException(
                f"The module has {names}, and {counted(count, 'stage')} need at least one each. Start fewer ranks, or"
                " name the classes of its blocks, as in `auto_wrap_policy=['Block']`."
            )
        if not isinstance(asked, str):
            if sum(asked) != len(blocks):
                raise MisconfigurationException(
                    f"stages={asked} are {sum(asked)} blocks, and the module has {names}. The numbers must add up."
                )
            return Stages(bounds_of(asked), ranks, turns_back(schedule))
        costs, before, after = costs_of(module, list(blocks.values()))
        return Stages(balanced(costs, count, before, after), ranks, turns_back(schedule))

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        """Creates the optimizers.

        Raises:
            MisconfigurationException: An optimizer evaluates the loss again, or combines parameters.
        """
        super().setup_optimizers(trainer)
        if self._held is not None and self._held.sharded is not None:
            prepare_optimizers(trained(self.optimizers), self._of_stage())
        for optimizer in trained(self.optimizers):
            if needs_closure(type(optimizer)):
                raise MisconfigurationException(
                    f"{type(optimizer).__name__} evaluates the loss again within its step, which pipeline_custom cannot"
                    " do. Take another optimizer, or zero1_custom."
                )
            self._refuse_combining(optimizer)

    def _refuse_combining(self, optimizer: Optimizer) -> None:
        """Raises an error for an optimizer whose step of a parameter depends on those of other stages."""
        known, name = type(optimizer) in ELEMENTWISE_OPTIMIZERS, type(optimizer).__name__
        reason = "" if known or self._ranks.grid.pipeline == 1 else reason_against_parts(optimizer)
        if reason.startswith(UNTRIED):
            self._fit_report.say(
                f"{name}: {reason}. If its step of a parameter depends on other parameters, the training is wrong", True
            )
        elif reason:
            raise MisconfigurationException(
                f"{name} cannot be used under pipeline_custom: {reason}, and each rank has the parameters of its stages"
                " alone. Take another optimizer, or zero1_custom."
            )

    # Steps.

    @override
    def _share_batch(self, batch: Any) -> Any:
        """All ranks of a pipeline get the first one's batch."""
        return self._same_data.share(batch)

    @override
    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Runs the user's training step on micro-batches, with their backwards. Collective."""
        steps = self._steps
        self._equal.before_step()
        if self._engine is not None and self._held is not None:
            self._engine.gatherer.finish()
            self._held.synchronize_shared()
        output: STEP_OUTPUT = steps.train(batch, *args, *kwargs.values())
        self._accumulation.note_output(output)
        if self._engine is None and steps.has_trained and self._shards_state:
            self._shard_state()
        return output

    @property
    def _shards_state(self) -> bool:
        """Whether optimizer state is divided by this package's engine."""
        return self._ranks.data_ranks > 1 and self._held is not None and self._held.sharded is None

    def _shard_state(self) -> None:
        """Divides the optimizer state of this rank's stages among the ranks that hold them. Collective among these.

        Not before the first step, which shows what a rank holds.
        """
        self._engine = ShardedDataParallel(
            self.lightning_module,
            trained(self.optimizers),
            # As with one pipeline, which has no engine.
            ShardingPolicy(master_weights=False),
            self._ranks.data_groups,
            self.node_rank,
        )
        self._engine.expose_gradients(bool(self._readers_of_gradients()))
        # Lightning's wrappers are older than the shards. New wrappers have the methods of sharded optimizers.
        self._lightning_optimizers = [wrapped(one, self) for one in self.optimizers]

    def _unshard_state(self) -> None:
        """Gives optimizers their own methods again. Their state is dropped."""
        if self._engine is not None:
            self._engine.close()
            for optimizer in self._engine.optimizers:
                forget_sharding(optimizer)
            self._engine = None

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers in training. If new ones are set, their state is divided. Collective then."""
        return self._optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        engine = self._engine
        are_new = engine is not None and any(unwrapped(one) not in engine.optimizers for one in trained(optimizers))
        if are_new:
            self._unshard_state()
        self._optimizers = optimizers
        self._lightning_optimizers = [wrapped(one, self) for one in optimizers]
        if are_new:
            self._shard_state()

    @override
    def validation_step(self, batch: Any, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Runs the user's validation step on micro-batches. Collective."""
        self._equal.before_validation_step()
        output: STEP_OUTPUT = self._steps.evaluate("validation_step", batch, *args, *kwargs.values())
        return output

    @override
    def test_step(self, batch: Any, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Runs the user's test step on micro-batches. Collective."""
        output: STEP_OUTPUT = self._steps.evaluate("test_step", batch, *args, *kwargs.values())
        return output

    @override
    def predict_step(self, batch: Any, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Runs the user's predict step on micro-batches. Collective."""
        output: STEP_OUTPUT = self._steps.evaluate("predict_step", batch, *args, *kwargs.values())
        return output

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: ReduceOp | str | None = "mean") -> Any:
        """Reduces a tensor over the pipelines. Collective. All ranks of a pipeline have the same one."""
        if self._ranks.data_ranks == 1:
            return tensor
        return super().reduce(tensor, self._same_data.data_group if group is None else group, reduce_op)

    def _readers_of_gradients(self) -> list[str]:
        callbacks = self.lightning_module.trainer.callbacks
        return observers_of_gradients(self.lightning_module, callbacks, trained(self.optimizers), self.precision_plugin)

    @override
    def on_train_start(self) -> None:
        """Warns of code that may read gradients, as each rank has those of its stages alone."""
        super().on_train_start()
        readers = self._readers_of_gradients()
        if readers and self.world_size > 1:
            self._fit_report.say(
                f"{listed(readers)} may read gradients, and each rank has those of its stages: a norm of all is wrong."
                " Clip by `gradient_clip_val` or `self.clip_gradients`, and log norms by GradNormMonitor: these count"
                " all stages",
                warns=True,
            )

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Prepares a loader of training or evaluation. Collective."""
        size = getattr(getattr(dataloader, "batch_sampler", None), "batch_size", None)
        # A hook may ask for the number of steps before the module is cut.
        self._batch_sizes[bool(self.lightning_module.trainer.training)].update([size] if isinstance(size, int) else [])
        return super().process_dataloader(dataloader)

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """Runs the rest of the closure, clips and steps. Or skips the step on all ranks."""
        if self._engine is None and self._shards_state:
            # The first step shards the optimizer, and so must end before `step` of the optimizer's class begins.
            loss = closure()
            return super().optimizer_step(optimizer, lambda: loss, *args, **kwargs)
        return super().optimizer_step(optimizer, closure, *args, **kwargs)

    @override
    def _watch(self, note: Callable[[Tensor], None]) -> Callable[[], None]:
        # A micro-batch without weight leaves no gradient at all.
        return watch_gradients((), note)

    @override
    def _end_backward(self, ends_window: bool, has_run: bool) -> None:
        if self._engine is not None:
            scale, ranks = self._accumulation.scale, self.world_size / self._ranks.data_ranks
            if ends_window:
                for slot in (slot for bucket in self._engine.reducer.buckets for slot in bucket.slots):
                    # A gradient may come from another stage, or from before the engine could notice.
                    slot.fresh = slot.parameter.grad is not None
                # It is counted over all ranks, and those of a pipeline have the same samples.
                self._engine.reduce_local_gradients(None if scale is None else lambda: scale() * ranks)
            return
        if ends_window and self._held is not None and self._ranks.data_ranks > 1:
            self._held.average_outer(self._same_data.data_group)
        factor = self._accumulation.factor_of_mean if ends_window else 1.0
        gradients = [local(one.grad) for one in self.lightning_module.parameters() if one.grad is not None]
        if gradients and factor != 1.0:
            multiply_all(gradients, factor)

    @override
    def _step_gradients(self, optimizers: Sequence[Optimizer]) -> StepGradients:
        found, held = step_gradients(optimizers), self._held
        if held is None or self.world_size == 1:
            return found
        is_hidden = self._engine is not None and not self._engine.reducer.exposes_gradients
        slots = self._engine.slots if self._engine is not None and is_hidden else {}
        grouped = dict.fromkeys(p for one in optimizers for group in one.param_groups for p in group["params"])
        own = [slots[p].shard for p in grouped if held.counts(p) and p in slots]
        first = self._ranks.grid.of_stage(self.global_rank)[0]
        own += [p for p in grouped if held.counts(p) and p not in slots and is_counted(p, first)]
        counted_here = [local(one.grad) for one in own if one is not None and one.grad is not None]
        collectives = make_collectives(self._ranks.groups.gradients, self.root_device)
        return found._replace(counted=counted_here, device=self.root_device, collectives=collectives)

    @override
    def teardown(self) -> None:
        """Gives the module its own blocks again, and rank 0 the whole module. After an exception not collective."""
        module, held = self.lightning_module, self._held
        if module is not None and held is not None and not self._ranks.is_interrupted:
            self._make_whole(module, held)
        self._close()
        self._batch_sizes = {True: set(), False: set()}
        if module is not None:
            # Lightning moves the module to the host, and torch cannot move parameters without memory.
            vars(module)["cpu"] = functools.partial(_to_host, module)
        try:
            super().teardown()
        finally:
            if module is not None:
                del vars(module)["cpu"]

    def _make_whole(self, module: LightningModule, held: HeldParts) -> None:
        """Gives rank 0 the whole module and the optimizers' whole state, for what a program does next. Collective."""
        fits = module.trainer.state.fn == TrainerFn.FITTING
        optimizers = trained(self.optimizers) if fits else []
        states = [self._checkpoints.optimizer_state(Optimizer.state_dict, optimizer) for optimizer in optimizers]
        self._unshard_state()
        with _state_by_name(module):
            weights = self._checkpoints.module_state(module.state_dict)
        if not self.is_global_zero:
            return
        replace_stepped(optimizers, held.make_whole(weights))
        for optimizer, state in zip(optimizers, states, strict=True):
            # Not by `load_state_dict`, which casts numbers to the dtype of a parameter.
            own = {one: state["state"].get(number) for number, one in enumerate(grouped_parameters(optimizer))}
            optimizer.state = defaultdict(dict, {one: entries for one, entries in own.items() if entries is not None})

    def _close(self) -> None:
        if self._cut is not None:
            self._cut.close()
        if self._held is not None and self._held.sharded is not None:
            self._held.sharded.close()
        if self._engine is not None:
            self._engine.close(failed=True)
        self._steps = self._held = self._cut = self._engine = None


def _refuse_renamed(module: LightningModule) -> None:
    """Raises an error if the module's ``state_dict`` has a parameter by a name that the parameter does not have."""
    named = {in_state_dict(name) for name, _ in module.named_parameters(remove_duplicate=False)}
    places = {one.data_ptr() for one in module.parameters() if has_memory(one) and one.numel()}
    unknown = {name: one for name, one in module.state_dict().items() if name not in named}
    renamed = [name for name, one in unknown.items() if isinstance(one, Tensor) and one.data_ptr() in places]
    if renamed:
        raise MisconfigurationException(
            f"`state_dict` gives parameters other names, such as {listed(renamed)}. Ranks find those of their stages by"
            " name. Rename them in `on_save_checkpoint`, which has the whole checkpoint on rank 0."
        )


@contextmanager
def _state_by_name(module: LightningModule) -> Iterator[None]:
    """Within it, ``state_dict`` has all tensors by their names. A program's own may leave some out."""
    attributes = vars(module)
    had = {name: attributes.pop(name) for name in ("state_dict",) if name in attributes}
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    attributes["state_dict"] = lambda: {in_state_dict(name): one.detach() for name, one in named}
    try:
        yield
    finally:
        del attributes["state_dict"]
        attributes.update(had)


@torch.no_grad()
def _to_host(module: LightningModule) -> LightningModule:
    for tensor in (*module.parameters(), *module.buffers()):
        if has_memory(tensor):
            tensor.data = tensor.data.cpu()
    return module
