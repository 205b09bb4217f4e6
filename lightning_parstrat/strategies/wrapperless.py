"""For strategies without DDP's wrapper: its arguments, the same buffers on all ranks, and equally many batches."""

from abc import abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar, Literal

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.types import STEP_OUTPUT
from typing_extensions import override

from lightning_parstrat.core.policy import WrapPolicy
from lightning_parstrat.distributed.comm.agreement import any_rank, extremes_over_ranks
from lightning_parstrat.distributed.comm.module_states import broadcast_buffers
from lightning_parstrat.distributed.engine.activation_checkpointing import checkpoint_activations
from lightning_parstrat.strategies.data.even import make_even, users_own
from lightning_parstrat.strategies.gradients.accumulation import Accumulation
from lightning_parstrat.strategies.launch.ranks import Ranks
from lightning_parstrat.strategies.lightning_compat import follow_device, replace_loaders, trainer_of
from lightning_parstrat.strategies.parts import Part


class WrapperlessDDPStrategy(DDPStrategy):
    """DDP's processes, samplers and devices, without torch's DDP wrapper.

    Arguments of the wrapper that change no result are accepted, and an info line says that they have no effect. So a
    program can replace ``DDPStrategy`` by it. Arguments that would change results are refused.

    Args:
        find_unused_parameters: Not needed: parameters without a gradient are found in every backward.
        static_graph: Not needed: the graph may change in any step, and a static graph saves nothing.
        gradient_as_bucket_view: Not needed: exposed gradients are views into the buckets anyway.
        accelerator: The accelerator. The Trainer sets it.
        parallel_devices: The devices of this node. The Trainer sets them.
        cluster_environment: How ranks find each other. By default it is detected.
        checkpoint_io: How checkpoint files are written.
        precision_plugin: The precision plugin. The Trainer's ``precision`` sets it.
        process_group_backend: Backend of the process group, such as ``"nccl"`` or ``"gloo"``. The default is the
            backend that suits the device.
        timeout: How long a collective may take before the run ends with an error.
        start_method: How the processes are launched.
    """

    _equal: "EqualRanks"
    _ranks: Ranks
    _divides_module: ClassVar[bool] = False
    """Whether ranks have parts of the module: then it is divided, and moves to the device, in ``configure_ddp``."""

    @property
    @abstractmethod
    def flag(self) -> str:
        """The name that the strategy is registered under. Messages begin with it."""

    def __init__(
        self,
        find_unused_parameters: bool | None = None,
        static_graph: bool | None = None,
        gradient_as_bucket_view: bool | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        needless = {
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "gradient_as_bucket_view": gradient_as_bucket_view,
        }
        given = {name: value for name, value in needless.items() if value is not None}
        if given:
            shown = ", ".join(f"{name}={value!r}" for name, value in given.items())
            rank_zero_info(f"{self.flag}: {shown} is not needed and has no effect: there is no DDP wrapper.")
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
            # Programs may read the arguments that the strategy was given.
            **given,
        )

    @override
    def setup(self, trainer: Trainer) -> None:
        """Sets up the module. A module that ranks divide is divided for evaluations, too. Collective."""
        if trainer.state.fn == TrainerFn.FITTING or not self._divides_module:
            super().setup(trainer)
            return
        # The same as Lightning's `setup`, without its broadcast of whole parameters.
        self.accelerator.setup(trainer)
        self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        self.configure_ddp()
        self.setup_precision_plugin()

    @override
    def model_to_device(self) -> None:
        """Moves the module to the device. Of one that ranks divide, each part moves when it is made."""
        if self._divides_module:
            follow_device(self.lightning_module, self.root_device)
        else:
            super().model_to_device()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Broadcasts buffers when DDP would, then runs the user's training step."""
        self._equal.before_step()
        return super().training_step(*args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Broadcasts buffers when DDP would, then runs the user's validation step."""
        self._equal.before_validation_step()
        return super().validation_step(*args, **kwargs)

    @override
    def on_validation_end(self) -> None:
        """Takes part in the broadcast of a validation that this rank had no batch for."""
        super().on_validation_end()
        self._equal.before_validation_step()

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks, or any rank, have decided so. Collective."""
        # A ModelCheckpoint asks before its second save, too.
        if self._ranks.decides_alone:
            return decision
        # Lightning counts them by `reduce`, which may be for ranks with different data alone.
        control = self._ranks.control
        return not any_rank(not decision, control) if all else any_rank(decision, control)


class ActivationCheckpoints(Part):
    """Makes modules of a training compute their activations again in backward.

    Args:
        strategy: The strategy that it is a part of.
        policy: The classes of the modules, or their names. None for no modules.
    """

    _of_one_training = frozenset({"_undo"})

    def __init__(self, strategy: DDPStrategy, policy: WrapPolicy) -> None:
        super().__init__(strategy)
        self._policy = policy
        self._undo: Callable[[], None] | None = None

    @override
    def begin_fit(self) -> None:
        """Finds the modules.

        Raises:
            ValueError: There is no module of one of the classes.
        """
        if self._policy:
            self._undo = checkpoint_activations(self._module, self._policy)

    @override
    def teardown(self) -> None:
        """Gives the modules their own forward again."""
        if self._undo is not None:
            self._undo()
            self._undo = None


class EqualRanks(Part):
    """Gives all ranks equally many training batches, and rank 0's buffers whenever DDP would broadcast them.

    So no rank waits for one that has ended.

    Args:
        strategy: The strategy that it is a part of.
        ranks: The strategy's ranks.
        accumulation: Knows whether a backward sends gradients.
    """

    def __init__(self, strategy: DDPStrategy, ranks: Ranks, accumulation: Accumulation) -> None:
        super().__init__(strategy)
        self._ranks, self._accumulation = ranks, accumulation
        self._are_due = True
        self._exist = False
        # Lightning skips the validation on ranks without a batch. They would miss the broadcasts of the other ranks.
        self.validated_by_some = False

    def begin(self) -> None:
        """Resets the state, as DDP does when it wraps a module."""
        self._are_due = True
        # If a module has no buffers when training begins, DDP never broadcasts any.
        self._exist = next(self._module.buffers(), None) is not None

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        """Returns the stand-in for a training loader. Compares how many batches are evaluated, if some have none."""
        if self._ranks.data_ranks == 1:
            return dataloader
        sources, length = (self._module, self._trainer.datamodule), sized_len(dataloader)
        allows_empty = any(getattr(one, "allow_zero_length_dataloader_with_multiple_devices", False) for one in sources)
        if self._trainer.training:
            return make_even(dataloader, self._ranks.control, allows_empty)
        if allows_empty and length is not None:
            most, least = extremes_over_ranks(length, self._ranks.control)
            self.validated_by_some |= least == 0 < most
        return dataloader

    def before_validation_step(self) -> None:
        """Broadcasts the buffers if they are due, unless some ranks have no batch."""
        if not self.validated_by_some:
            self.before_step()

    def before_step(self) -> None:
        """Broadcasts the buffers if they are due.

        They are due before the first forward, and before each forward after one that has sent its gradients. DDP takes
        every training and validation step for a forward. Under manual optimization, DDP takes no forward for one that
        has sent its gradients.
        """
        if not self._exist:
            return
        if self._are_due:
            # Not by the parameters' group: the broadcast would queue behind parameters in flight.
            broadcast_buffers(self._module, self._ranks.data_groups.gradients)
        sends = torch.is_grad_enabled() and not self._accumulation.accumulates
        self._are_due = sends and self._module.automatic_optimization

    @override
    def teardown(self) -> None:
        """Broadcasts nothing until the next training, and gives the user's `CombinedLoader` its own loaders again."""
        self._exist = self.validated_by_some = False
        trainer = trainer_of(self._strategy.lightning_module)
        if trainer is not None:
            replace_loaders(trainer, users_own)
