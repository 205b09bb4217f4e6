"""The errors that a training may raise, to be caught by their names.

Both ``lightning.pytorch`` and ``pytorch_lightning`` raise these same classes.
"""

from lightning_parstrat.distributed.checkpoint.folder import CheckpointDamagedError, CheckpointNotSavedError
from lightning_parstrat.distributed.comm.liveness import MissingRanksError
from lightning_parstrat.distributed.ddp.trained_parameters import DifferentParametersError
from lightning_parstrat.distributed.engine.stepping import ClosureEvaluatedAgainError
from lightning_parstrat.distributed.fsdp.sharded_module import DifferentModulesError, NestedBackwardError
from lightning_parstrat.distributed.fsdp.tensor_plan import TensorPlanError
from lightning_parstrat.distributed.fsdp.writes import RefusedWriteError
from lightning_parstrat.distributed.gradients.clipping import NonfiniteGradientError
from lightning_parstrat.distributed.gradients.loss_weights import InconsistentWeightsError
from lightning_parstrat.distributed.pipeline.cut_module import PipelineError

__all__ = [
    "CheckpointDamagedError",
    "CheckpointNotSavedError",
    "ClosureEvaluatedAgainError",
    "DifferentModulesError",
    "DifferentParametersError",
    "InconsistentWeightsError",
    "MissingRanksError",
    "NestedBackwardError",
    "NonfiniteGradientError",
    "PipelineError",
    "RefusedWriteError",
    "TensorPlanError",
]
