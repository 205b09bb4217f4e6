"""``zero3_custom``: the results of DDP, with parameters, gradients and optimizer state sharded by torch's FSDP2."""

import functools
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from lightning.fabric.utilities.types import ReduceOp
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from typing_extensions import override

from lightning_parstrat.core.digests import digest
from lightning_parstrat.core.policy import FullShardingPolicy, WrapPolicy
from lightning_parstrat.core.shard_groups import ShardGroupChoice, ShardGroups
from lightning_parstrat.core.topology import Topology
from lightning_parstrat.core.wording import count_of, counted, listed
from lightning_parstrat.distributed.comm.agreement import (
    any_rank,
    any_rank_for_each,
    check_agreement,
    topology_of_ranks,
)
from lightning_parstrat.distributed.comm.backends import make_collectives
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.comm.liveness import met
from lightning_parstrat.distributed.comm.module_states import (
    broadcast_buffers,
    check_same_module,
    check_whole,
    refuse_captured_graphs,
)
from lightning_parstrat.distributed.comm.process_groups import is_initialized, watching
from lightning_parstrat.distributed.engine.cuts import local
from lightning_parstrat.distributed.engine.shardability import check_parameters
from lightning_parstrat.distributed.engine.state import grouped_parameters
from lightning_parstrat.distributed.fsdp.optimizers import prepare_optimizers
from lightning_parstrat.distributed.fsdp.refused_gradients import OF_A_SHARD
from lightning_parstrat.distributed.fsdp.sharded_module import ShardedModule
from lightning_parstrat.distributed.fsdp.sharding import module_sharding
from lightning_parstrat.distributed.fsdp.state import (
    gather_module_state,
    holds_shards,
    shard_copy,
)
from lightning_parstrat.distributed.fsdp.units import MIN_NUM_PARAMS
from lightning_parstrat.distributed.fsdp.whole import shown_whole
from lightning_parstrat.strategies.base import ComposedStrategy
from lightning_parstrat.strategies.checkpoint.fully_sharded_state import FullyShardedState
from lightning_parstrat.strategies.checkpoint.training_state import TrainingState
from lightning_parstrat.strategies.data.same_data import SameData
from lightning_parstrat.strategies.evaluation import StepsOfAllRanks
from lightning_parstrat.strategies.gradients.observers import observers_of_gradients, users_methods
from lightning_parstrat.strategies.lightning_compat import averaged_copies, returns_weights, trained
from lightning_parstrat.strategies.report import BF16_SAVES_NOTHING, line_of_training
from lightning_parstrat.strategies.wrapperless import ActivationCheckpoints, EqualRanks, WrapperlessDDPStrategy

_HOOKS_BEFORE_BACKWARD = {"backward", "on_before_backward", "on_before_zero_grad", "optimizer_zero_grad"}


class ZeRO3Strategy(ComposedStrategy, WrapperlessDDPStrategy):
    """Trains with parameters, gradients and optimizer state sharded over the ranks (ZeRO stage 3), by torch's FSDP2.

    Results are DDP's. With N ranks, each holds 1/N of all three between steps. A unit's parameters are gathered before
    its forward and its backward, and freed after them. So by default the ranks send 1.5 times as many bytes as under
    DDP. Unused parameters need no flag. Between steps, ``param`` and ``param.grad`` are
    :class:`~torch.distributed.tensor.DTensor`. To read one, call ``full_tensor()`` on all ranks.

    Args:
        auto_wrap_policy: Classes whose modules are a unit each, or their names, such as ``["Block"]``. By default units
            are found: modules of one class in the same container. All other parameters are gathered for
            the whole of ``training_step``, which may read them freely.
        min_num_params: The smallest number of parameters of a unit that is found. Smaller modules stay with the rest.
        reshard_after_forward: Whether units free their parameters between forward and backward. ``False`` gathers once
            in a step instead of twice, and holds all parameters from forward to backward.
        shard_gradients: Whether every micro-batch is reduce-scattered and accumulated in shards
            (``accumulate_grad_batches``). ``False`` sends gradients once in a step, and keeps them whole on every rank
            until then.
        shard_group: Which ranks share one copy of parameters, gradients and optimizer state. ``"all"`` is all ranks,
            ``"node"`` the ranks of each node, and a number so many consecutive ranks. Parameters are then gathered
            within a group, and gradients are summed over all. A rank of a group of G holds 1/G.
        tensor_parallel_size: How many consecutive ranks share each layer that the module's tensor-parallel plan names.
            They get the same batches, and each computes a part. With more than 1, ``shard_group`` counts groups of so
            many ranks as one. The plan is ``tp_plan`` of the module or of a submodule, such as
            ``{"layers.*.up": "colwise", "layers.*.down": "rowwise"}``. Many of Hugging Face's models have one.
        comm_dtype: The dtype in which gradients are sent. They are summed in fp32. ``"bf16"`` sends half the bytes of
            fp32 gradients. By default gradients are sent in their own dtype. ``"fp32"`` widens the gradients of
            "bf16-true" before they are sent.
        param_dtype: The dtype in which parameters are gathered and used. Each rank steps its shard in its own dtype.
            Under "bf16-mixed", ``"auto"`` gathers the weights of blocks' linear and convolution layers in bf16,
            because autocast rounds them anyway. ``"bf16"`` gathers all fp32 parameters in bf16, for modules that
            compute in bf16. None gathers each in its own dtype.
        activation_checkpointing_policy: Classes whose modules compute their activations again in backward, or their
            names, such as ``["Block"]``. Each keeps its inputs alone: less memory, and a third more computation.
            Results stay the same.
        **kwargs: Arguments of the base class.

    Raises:
        ValueError: A value is not allowed. The message lists the allowed ones.
    """

    flag = "zero3_custom"
    _takes_shards = _divides_module = True
    _of_one_training = frozenset({"_sharded"})

    def __init__(
        self,
        auto_wrap_policy: WrapPolicy = None,
        min_num_params: int = MIN_NUM_PARAMS,
        reshard_after_forward: bool = True,
        shard_gradients: bool = True,
        shard_group: ShardGroupChoice = "all",
        tensor_parallel_size: int = 1,
        comm_dtype: Literal["bf16", "fp32"] | torch.dtype | None = None,
        param_dtype: Literal["auto", "bf16"] | torch.dtype | None = "auto",
        activation_checkpointing_policy: WrapPolicy = None,
        **kwargs: Any,
    ) -> None:
        self._policy = FullShardingPolicy(
            auto_wrap_policy=auto_wrap_policy,
            min_num_params=min_num_params,
            reshard_after_forward=reshard_after_forward,
            shard_gradients=shard_gradients,
            shard_group=shard_group,
            tensor_parallel_size=tensor_parallel_size,
            comm_dtype=comm_dtype,
            param_dtype=param_dtype,
            activation_checkpointing_policy=activation_checkpointing_policy,
        )
        self._sharded: ShardedModule | None = None
        self._loads_after_setup: bool | None = None
        self._has_hooks_before_backward = self._has_observers = False
        super().__init__(**kwargs)
        if tensor_parallel_size > 1 and kwargs.get("state_dict_type", "full") != "full":
            raise ValueError(
                f"state_dict_type={kwargs['state_dict_type']!r} writes each rank's rows of a parameter, and ranks have"
                f" columns, too, with tensor_parallel_size={tensor_parallel_size}. Set state_dict_type='full'."
            )
        self._ranks.tensor_parallel_size = tensor_parallel_size
        self._same_data = SameData(self, self._ranks)
        self._equal = EqualRanks(self, self._ranks, self._accumulation)
        self._steps = StepsOfAllRanks(self, self._ranks, self._compare_evaluations)
        checkpoints = ActivationCheckpoints(self, self._policy.activation_checkpointing_policy)
        self._parts += [self._same_data, self._equal, self._steps, checkpoints]

    @override
    def _make_training_state(self) -> TrainingState:
        return FullyShardedState(self, self._ranks, self._check_writes)

    def _check_writes(self) -> None:
        if self._sharded is not None:
            self._sharded.check_writes()

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether weights are loaded after setup. Only the weights of a module on the meta device of any rank are.

        Lightning then asks for the checkpoint without the Trainer's `weights_only`. Collective when ranks have joined.
        """
        # Lightning asks before set-up and after it. After set-up no module is on the meta device.
        if self._loads_after_setup is None:
            tensors = (*self.lightning_module.parameters(), *self.lightning_module.buffers())
            self._loads_after_setup = any_rank(any(tensor.is_meta for tensor in tensors), self._ranks.control)
        return self._loads_after_setup

    @override
    def configure_ddp(self) -> None:
        """Shards the module in place. There is no wrapper around it. Collective."""
        module = self.lightning_module
        self._close()
        self._refuse_pruning(module.trainer)
        self._same_data.begin()
        if module_sharding(module) is not None:
            # As `ddp` does at every set-up. Sharding broadcasts those of a new module.
            broadcast_buffers(module, self._ranks.groups.gradients)
        else:
            check_whole(module, self.flag)
            check_same_module(module, self._ranks.groups.control)
        refuse_captured_graphs(module)
        check_parameters(module, [p for p in module.parameters() if not (p.is_meta or holds_shards(p))])
        self._equal.begin()
        self._sharded = ShardedModule(
            module,
            self._ranks.groups.gradients,
            self._make_collectives(),
            self.root_device,
            lambda: self._ranks.messages,
            self._policy,
            by_child=not module.automatic_optimization,
            autocasts=self.precision_plugin.precision == "bf16-mixed",
        )
        for copy in averaged_copies(module.trainer):
            shard_copy(copy, module, self._ranks.groups.gradients)

    def _refuse_pruning(self, trainer: Trainer) -> None:
        if trainer.state.fn == TrainerFn.FITTING and any(isinstance(one, ModelPruning) for one in trainer.callbacks):
            raise MisconfigurationException(
                f"{self.flag}: ModelPruning compares all elements of weights, of which each rank has a part. Train by"
                " `zero2_custom`."
            )

    def _make_collectives(self) -> Collectives:
        """Creates the collectives that send gradients. Collective."""
        nodes = topology_of_ranks(self.node_rank, self._ranks.control).nodes
        # Ranks that share layers are one.
        topology = Topology.of(nodes[:: self._policy.tensor_parallel_size])
        groups = ShardGroups.chosen(self._policy.shard_group, topology)
        collectives = make_collectives(self._same_data.data_group, self.root_device, topology, groups)
        if collectives.widens and self._policy.comm_dtype == "bf16":
            rank_zero_warn(f"{self.flag}: {BF16_SAVES_NOTHING}")
        return collectives

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        """Creates the optimizers. Collective.

        Raises:
            ValueError: An optimizer cannot step sharded parameters, or does not have the same ones on all ranks. Or it
                has one that was not sharded.
        """
        super().setup_optimizers(trainer)
        optimizers = trained(self.optimizers)
        stepped = [set(grouped_parameters(optimizer)) for optimizer in optimizers]
        # A shard that no optimizer of its rank has would stay as it is, while the others of its parameter move.
        parameters = self.lightning_module.named_parameters()
        stepped_by = [(name, [parameter in one for one in stepped]) for name, parameter in parameters]
        check_agreement(self._ranks.control, digest(stepped_by))
        prepare_optimizers(optimizers, self._ranks.control)
        self._check_optimizers()

    def _check_optimizers(self) -> None:
        for optimizer in trained(self.optimizers):
            for parameter in grouped_parameters(optimizer):
                if parameter not in self._sharded.parameters:
                    raise ValueError(
                        f"{self.flag}: a parameter of shape {tuple(parameter.shape)} is in {type(optimizer).__name__},"
                        " but was not in the module when it was sharded. Its gradients would not be averaged. Create"
                        " all layers in `__init__` or `configure_model`, and unfreeze them later by `requires_grad_()`."
                        " Or train by `zero1_custom`."
                    )

    @override
    def _watch(self, note: Callable[[Tensor], None]) -> Callable[[], None]:
        return self._sharded.watch(note)

    @override
    def _share_batch(self, batch: Any) -> Any:
        """Ranks that share tensor-parallel layers get the first one's batch."""
        return self._same_data.share(batch)

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: ReduceOp | str | None = "mean") -> Any:
        """Reduces a tensor over all ranks with different data. Collective.

        Raises:
            RuntimeError: The tensor is in shards.
        """
        if holds_shards(tensor):
            raise RuntimeError(f"What is reduced, such as by `self.log(..., sync_dist=True)`, {OF_A_SHARD}")
        if group is None and self._policy.tensor_parallel_size > 1:
            group = self._same_data.data_group
        return super().reduce(tensor, group, reduce_op)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Runs the user's training step on the current parameters."""
        self._sharded.reshard()
        with self._sharded.refusing_gradients():
            output = super().training_step(*args, **kwargs)
        if self._has_hooks_before_backward or not self.lightning_module.automatic_optimization:
            # Hooks see the parameters as optimizers do.
            self._sharded.reshard_before_backward()
        if any(map(holds_shards, output.values() if isinstance(output, Mapping) else (output,))):
            # A shard's operations may be collective, and other ranks may not take part. This rank would wait for them.
            raise RuntimeError(f"What `training_step` returned {OF_A_SHARD}")
        return output

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        """Begins a backward."""
        super().pre_backward(closure_loss)
        # Between micro-batches, what FSDP2 keeps unreduced is not in `param.grad`.
        keeps = self._accumulation.accumulates and not self._has_observers
        self._sharded.begin_backward(closure_loss, keeps)

    @override
    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Runs a backward. A program may catch its exception, zero gradients and continue. Collective."""
        try:
            # The module's `backward` may catch it, too.
            with self._sharded.refusing_gradients(functools.partial(self._sharded.abandon_backward, goes_on=True)):
                return super().backward(*args, **kwargs)
        except BaseException:
            self._sharded.abandon_backward()
            raise

    @override
    def _end_backward(self, ends_window: bool, has_run: bool) -> None:
        """Completes the gradients of a window, and turns their mean over ranks into the window's mean."""
        self._sharded.free_after_backward()
        if ends_window:
            self._sharded.end_backward(lambda: self._accumulation.factor_of_mean)

    @override
    def _before_step(self) -> None:
        self._sharded.complete()
        # A training step without a backward leaves parameters gathered. The optimizer steps the shards.
        self._sharded.reshard()
        # Parameters may be added by any way, at any time.
        self._check_optimizers()

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Runs the user's validation step, in which all ranks gather parameters."""
        with self._gathering():
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Runs the user's test step, in which all ranks gather parameters."""
        with self._gathering():
            return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Runs the user's predict step, in which all ranks gather parameters."""
        with self._gathering():
            return super().predict_step(*args, **kwargs)

    @contextmanager
    def _gathering(self) -> Generator[None, None, None]:
        within = self._sharded.evaluation_step(lambda: self._steps.check_all_have("gradients are computed in a step"))
        with within, self._sharded.refusing_gradients():
            yield
        for _ in range(self._steps.to_follow()):
            self._sharded.follow_evaluation_step()

    def _compare_evaluations(self) -> None:
        """Compares which modules ranks have called, before anything of the evaluation is logged. Collective."""
        with watching("the comparison of modules that were evaluated"):
            self._sharded.end_evaluation(self._ranks.control)

    @override
    def _timed(self, run: Callable[[], Any]) -> tuple[Any, float]:
        def time_gather() -> Callable[[], None]:
            gather = ExitStack()
            gather.enter_context(self._waiting())
            return gather.close

        self._sharded.clock = time_gather
        try:
            return super()._timed(run)
        finally:
            self._sharded.clock = None

    @override
    def _module_called(self) -> str:
        return "" if self._sharded is None else self._sharded.unit_called

    @contextmanager
    def full_parameters(self) -> Generator[LightningModule, None, None]:
        """Within it the module is a plain one with whole parameters on every rank: for export, `generate`, or a look.

        It also works after the training. All methods of the module can be called, and no rank sends anything within
        it. Changes to parameters stay. Write the same changes on all ranks, because each rank keeps its part.

        Collective: all ranks must enter it, between steps. It takes memory for all parameters until it ends. First,
        ranks wait for each other, by some four requests to the process group's store.

        Yields:
            The module.

        Raises:
            MisconfigurationException: The ranks are no longer connected.
            ValueError: At its end, a parameter is gone, or has another shape or dtype.
        """
        module = self.lightning_module
        if module is None:
            raise MisconfigurationException("`full_parameters()` was called before `fit`. Call it in a hook or later.")
        if module_sharding(module) is None:
            # Before the set-up, or after a training in other processes.
            yield module
            return
        if not is_initialized():
            raise MisconfigurationException(
                "`full_parameters()` was called when the process group had been destroyed: each rank has its shards"
                " alone. Call it before `torch.distributed.destroy_process_group()`, or load a checkpoint."
            )
        with ExitStack() as shown:
            with met("`strategy.full_parameters()`", self._ranks.groups.control, "Enter it on all ranks."):
                self._check_writes()
                shown.enter_context(shown_whole(module))
            yield module

    @override
    def on_train_start(self) -> None:
        """Logs what is sharded."""
        super().on_train_start()
        owners = (self.lightning_module, *self.lightning_module.trainer.callbacks)
        methods = {name for owner in owners for name in users_methods(owner)}
        module, callbacks = owners[0], owners[1:]
        observers = observers_of_gradients(module, callbacks, trained(self.optimizers), self.precision_plugin)
        # A callback may be on one rank alone, and what follows from it is collective.
        found = [not methods.isdisjoint(_HOOKS_BEFORE_BACKWARD), bool(observers)]
        self._has_hooks_before_backward, self._has_observers = any_rank_for_each(found, self._ranks.control)
        self._report_what_is_sharded(self._sharded)

    @override
    def on_train_end(self) -> None:
        """Checks a last time what hooks have done to parameters."""
        self._check_writes()
        super().on_train_end()

    def _report_what_is_sharded(self, sharded: ShardedModule) -> None:
        parameters, optimizers = list(self.lightning_module.parameters()), trained(self.optimizers)
        copies = module_sharding(self.lightning_module).place.copies
        # Between micro-batches, every rank may keep its whole gradients.
        accumulates = self.lightning_module.trainer.accumulate_grad_batches > 1
        is_sharded = self._policy.shard_gradients or self._has_observers or not accumulates
        own = {one: local(one).numel() for one in parameters}
        self._fit_report.say(
            line_of_training(parameters, optimizers, self.world_size, own.__getitem__, copies, is_sharded)
        )
        if sharded.unchecked:
            self._fit_report.say(
                f"layers of {listed(sharded.unchecked)} divide the sequence. So it is not checked that their code fits"
                " the tensor-parallel plan: it must not read the number of heads of all ranks",
                warns=True,
            )
        leaves = [(leaf.parameter.numel(), leaf) for leaf in sharded.leaves]
        kept_whole = sum(size for size, leaf in leaves if leaf.tensor is leaf.parameter)
        narrow = sum(size for size, leaf in leaves if leaf.tensor.dtype != leaf.parameter.dtype)
        said = [f"{count_of(narrow)} parameters in bf16"] if narrow else []
        said += [f"{count_of(kept_whole)} parameters stay whole, as FSDP2 cannot shard them"] if kept_whole else []
        if sharded.units:
            units = f"gathers {counted(len(sharded.units), 'unit')} in turn, and all else for the whole step"
            self._fit_report.say("; ".join([units, *said]))
        elif self.world_size > 1:
            alone = (
                f"no block is gathered by itself (min_num_params={self._policy.min_num_params:,}), so every rank holds"
                " all parameters and gradients within a step. Name the classes of your blocks, as in"
                ' `auto_wrap_policy=["Block"]`, or set a smaller `min_num_params`'
            )
            self._fit_report.say("; ".join([alone, *said]), warns=True)

    @override
    def teardown(self) -> None:
        """Takes the engine off the module, which stays sharded. Another training can continue with it.

        If another process has started the ranks and continues without them, it gets the whole weights.
        """
        module = self.lightning_module
        returns = self._sharded is not None and returns_weights(self) and not self._ranks.is_interrupted
        if module is not None and returns and module.trainer.state.fn == TrainerFn.FITTING:
            state = gather_module_state(module, self.local_rank == 0)
            vars(module)["state_dict"] = lambda *_, **__: state
        self._close()
        self._loads_after_setup = None
        # On the host, a GPU's ranks could gather nothing for a checkpoint or another training. And torch cannot move a
        # shard that a graph or a weak reference holds. So Lightning moves neither the module nor the optimizers' state.
        optimizers, self._optimizers = self._optimizers, []
        if module is not None:
            vars(module)["cpu"] = lambda: module
        try:
            super().teardown()
        finally:
            self._optimizers = optimizers
            if module is not None:
                del vars(module)["cpu"]

    def _close(self) -> None:
        if self._sharded is not None:
            self._sharded.close()
            self._sharded = None
