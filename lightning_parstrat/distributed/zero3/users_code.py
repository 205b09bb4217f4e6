"""What is said where users' code works on shards as if they were whole parameters."""

import re
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed.tensor
from torch.distributed.tensor import DTensor

from lightning_parstrat.core.wording import listed

_TORCHS_SHARDS = str(Path(torch.distributed.tensor.__file__).parent)
# Of errors from C++, such as a backward's, the text alone tells.
_SAID = re.compile(r"DTensor|tensor subclass|its data is not allocated yet")


def advice_on_shards(units: Sequence[str], automatic: bool) -> str:
    """Which parameters are in shards where users' code runs, and what to do instead of what that has done.

    Args:
        units: Names of the modules that are gathered by themselves.
        automatic: Whether the module is trained by automatic optimization.
    """
    if not automatic:
        where = "In manual optimization all parameters are in shards (DTensors) but within their modules' `forward`."
    elif units:
        where = f"Within `training_step` the parameters of {listed(units)} are in shards (DTensors), elsewhere all."
    else:
        where = "Outside of `training_step` all parameters are in shards (DTensors)."
    of_root = " or in `training_step` where `wrap`, or a larger `min_num_params`, has the block gathered with all else;"
    return (
        f"{where} For a penalty on weights take the optimizer's `weight_decay`. What else a loss needs of a block's"
        f" weights is computed within the block's own `forward`,{of_root if automatic else ''} or by"
        " `strategy='zero1_custom'`, where parameters are whole. To look at weights between steps, enter"
        " `trainer.strategy.full_parameters()` on all ranks, or call `full_tensor()` on all ranks, also of a sum or a"
        " norm; `GradNormMonitor` logs norms of gradients."
    )


def is_of_shards(error: BaseException) -> bool:
    """Whether torch has raised it while it worked on shards; these errors have no class of their own."""
    if not isinstance(error, Exception) or not error.args or not isinstance(error.args[0], str):
        return False
    is_raised_there = any(
        frame.f_code.co_filename.startswith(_TORCHS_SHARDS) for frame, _ in traceback.walk_tb(error.__traceback__)
    )
    return is_raised_there or _SAID.search(error.args[0]) is not None


def check_not_of_shards(output: Any, advice: str) -> None:
    """Refuses what a step returns where it was computed from a unit's shards. Not collective.

    Args:
        output: A tensor, or a dict of them; anything else is passed over.
        advice: Of :func:`advice_on_shards`.

    Raises:
        RuntimeError: Other ranks may not take part in what a shard needs of them, and would be waited for.
    """
    values = output.values() if isinstance(output, Mapping) else (output,)
    if any(isinstance(value, DTensor) for value in values):
        raise RuntimeError(f"What `training_step` returned was computed from a weight that is a shard there. {advice}")
