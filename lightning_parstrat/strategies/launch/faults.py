"""Strategies that say which ranks are missing when something went wrong that needed all of them."""

import logging
import uuid
from typing import Any

import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerStatus
from typing_extensions import override

from lightning_parstrat.distributed.comm.backends import make_collectives
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.comm.liveness import Liveness, is_of_a_collective, names_of, wait_for_all
from lightning_parstrat.distributed.comm.process_groups import control_group
from lightning_parstrat.strategies.launch.elastic import ElasticStrategy
from lightning_parstrat.strategies.launch.job_size import SizedStrategy
from lightning_parstrat.strategies.lightning_compat import trainer_of

log = logging.getLogger(__name__)


class FaultAwareStrategy(SizedStrategy, ElasticStrategy):
    """DDP that names missing ranks.

    Args:
        **kwargs: Arguments of the base class.
    """

    flag: str
    """The name it is registered under, which messages begin with."""

    def __init__(self, **kwargs: Any) -> None:
        self._known_liveness: Liveness | None = None
        super().__init__(**kwargs)

    @override
    def setup_distributed(self) -> None:
        """Joins the process group, and agrees on where ranks report when something goes wrong."""
        super().setup_distributed()
        self._known_liveness = Liveness(self.broadcast(uuid.uuid4().hex))

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Says which ranks are missing where that is what went wrong. Not collective."""
        super().on_exception(exception)
        if self.world_size > 1 and is_of_a_collective(exception):
            missing = self._liveness.missing("exception")
            if missing:
                message = f"{names_of(missing).capitalize()} did not answer: dead, or stuck elsewhere."
                log.error(f"{self.flag}, rank {self.global_rank}: {message}")
                if hasattr(exception, "add_note"):
                    exception.add_note(message)

    def _wait_for_all(self) -> None:
        if self.world_size > 1:
            wait_for_all(self._control.group, self._timeout or default_pg_timeout)

    @property
    def _is_interrupted(self) -> bool:
        trainer = trainer_of(self._training_module)
        return trainer is not None and trainer.state.status == TrainerStatus.INTERRUPTED

    @property
    def _has_ranks(self) -> bool:
        """Whether this process has joined others."""
        return self._known_liveness is not None

    @property
    def _liveness(self) -> Liveness:
        if self._known_liveness is None:
            raise AssertionError("ranks were asked for that have not been set up")
        return self._known_liveness

    @property
    def _training_module(self) -> LightningModule:
        if self.lightning_module is None:
            raise AssertionError("the strategy was used before a module was connected to it")
        return self.lightning_module

    @property
    def _control(self) -> Collectives:
        return make_collectives(control_group(self._timeout), torch.device("cpu"))
