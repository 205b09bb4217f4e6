"""What DDP's wrapper does for a module beside its gradients, and what uneven data needs: for strategies without one."""

from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.types import STEP_OUTPUT
from typing_extensions import override

from lightning_parstrat.distributed.comm.agreement import extremes_over_ranks
from lightning_parstrat.distributed.comm.backends import make_collectives
from lightning_parstrat.distributed.comm.module_states import broadcast_buffers
from lightning_parstrat.distributed.comm.process_groups import ProcessGroups, process_groups
from lightning_parstrat.strategies.data.even import make_even, users_own
from lightning_parstrat.strategies.evaluation import EvaluatingStrategy
from lightning_parstrat.strategies.gradients.accumulation import AccumulationAwareStrategy
from lightning_parstrat.strategies.launch.ranks import WrapperlessDDPStrategy
from lightning_parstrat.strategies.lightning_compat import replace_loaders, trainer_of


class StepsTogetherStrategy(EvaluatingStrategy, AccumulationAwareStrategy, WrapperlessDDPStrategy):
    """Ranks draw equally many training batches, and have rank 0's buffers whenever DDP would give them."""

    _not_copied = EvaluatingStrategy._not_copied | AccumulationAwareStrategy._not_copied

    def __init__(self, **kwargs: Any) -> None:
        self._broadcast_buffers_next = True
        self._has_buffers = False
        # Lightning leaves out the validation on ranks without a batch: they would miss what others send in it.
        self._validated_by_some = False
        super().__init__(**kwargs)

    @property
    def _is_set_up(self) -> bool:
        """Whether a training's parameters and optimizers are in place."""
        raise NotImplementedError

    @property
    def _synchronizes(self) -> bool:
        """Whether the next backward sends gradients."""
        raise NotImplementedError

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Lets all ranks draw equally many training batches, so that none waits for one that has ended. Collective."""
        # It may be what stands for a loader of the epoch before: modules may give the same loaders again.
        dataloader = super().process_dataloader(users_own(dataloader))
        trainer = self._training_module.trainer
        if self.world_size == 1:
            return dataloader
        sources = (self._training_module, trainer.datamodule)
        allow_empty = any(getattr(s, "allow_zero_length_dataloader_with_multiple_devices", False) for s in sources)
        if not trainer.training:
            length = sized_len(dataloader)
            if allow_empty and length is not None:
                most, least = extremes_over_ranks(length, self._control)
                self._validated_by_some |= least == 0 < most
            return dataloader
        return make_even(dataloader, make_collectives(self._groups.control, torch.device("cpu")), allow_empty)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Broadcasts buffers when DDP would, then runs the user's validation step."""
        if not self._validated_by_some:
            self._broadcast_buffers()
        return super().validation_step(*args, **kwargs)

    @override
    def on_validation_end(self) -> None:
        """Takes part in the broadcast that this rank has missed if it had no batch to validate."""
        super().on_validation_end()
        if not self._validated_by_some:
            self._broadcast_buffers()

    @override
    def teardown(self) -> None:
        """Gives the Trainer the user's own data loaders back: it puts them into a `CombinedLoader` of the user's."""
        trainer = trainer_of(self.lightning_module)
        if trainer is not None:
            replace_loaders(trainer, users_own)
        self._validated_by_some = False
        super().teardown()

    @property
    def _groups(self) -> ProcessGroups:
        return process_groups(self._timeout)

    def _begin_to_broadcast_buffers(self) -> None:
        self._broadcast_buffers_next = True
        # Of a module that has none when training begins, DDP never broadcasts any.
        self._has_buffers = next(self._training_module.buffers(), None) is not None

    def _broadcast_buffers(self) -> None:
        """Follows DDP: before the first forward, and before one whose predecessor synchronised its gradients.

        DDP takes every training and validation step for a forward, and under manual optimization never synchronises in
        its sense.
        """
        if not self._is_set_up or not self._has_buffers:
            return
        if self._broadcast_buffers_next:
            # Not by the parameters' group, where it would queue behind those that are in flight.
            broadcast_buffers(self._training_module, self._groups.gradients)
        synchronized = torch.is_grad_enabled() and self._synchronizes
        self._broadcast_buffers_next = synchronized and self._training_module.automatic_optimization
