"""What only some ranks have logged is combined over all: ranks that had no batch to log it in add it without weight."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torchmetrics import Metric

from lightning_parstrat.distributed.comm.agreement import all_gather_object, all_have_same, key_of
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.comm.watch import watching

_Described = dict[str, Any]


def complete_logged(values: Any, module: LightningModule, control: Collectives, reduce: Callable[..., Any]) -> None:
    """Lets all ranks have the same values to combine over ranks, in the same order. Collective.

    One all-reduce of 16 bytes; where ranks have logged different values, their descriptions are gathered, pickled.
    Values that are not combined over ranks are left: those of a rank that has none are none.

    Args:
        values: What steps have logged, as Lightning keeps it. What a rank lacks is added: means with a weight of zero,
            others as what changes no result, metrics of torchmetrics without an update.
        module: Has the metrics, which on all ranks keep tensors of the same dtypes then.
        control: Compares.
        reduce: What ``self.log(..., sync_dist=True)`` combines values by.

    Raises:
        MisconfigurationException: What a rank lacks is combined over a group of ranks.
    """
    own = {key: _described(value) for key, value in values.valid_items() if _is_combined(value)}
    lists = _lists_of_metrics(module)
    with watching("the comparison of what ranks have logged"):
        if all_have_same(key_of(*own, *lists), control):
            return
        logged, kept = zip(*all_gather_object((own, lists), control.group), strict=True)
    merged: dict[str, _Described] = _merged(logged)
    _check_groups(merged, logged)
    _begin_lists(_merged(kept), module)
    for key, described in merged.items():
        if key not in own:
            _add(values, key, described, module, reduce)
        # Ranks combine what they have in the order in which they have it.
        values[key] = values.pop(key)


def _merged(of_ranks: Iterable[dict[Any, Any]]) -> dict[Any, Any]:
    """What any rank has, in the order of the first that has it."""
    merged: dict[Any, Any] = {}
    for of_rank in of_ranks:
        for key, value in of_rank.items():
            merged.setdefault(key, value)
    return merged


def _is_combined(value: Any) -> bool:
    meta = value.meta
    if not meta.on_epoch or meta.sync.rank_zero_only:
        return False
    return bool(meta.sync.should if value.is_tensor else value.value.sync_on_compute)


def _described(value: Any) -> _Described:
    """All that another rank needs to log such a value."""
    meta = value.meta
    is_of_loader = meta.add_dataloader_idx and meta.dataloader_idx is not None
    return {
        "arguments": {
            "fx": meta.fx.removesuffix(f".{meta.dataloader_idx}") if is_of_loader else meta.fx,
            "name": meta.name,
            "prog_bar": meta.prog_bar,
            "logger": meta.logger,
            "on_step": meta.on_step,
            "on_epoch": meta.on_epoch,
            "reduce_fx": meta.reduce_fx,
            "enable_graph": meta.enable_graph,
            "sync_dist": meta.sync.should,
            "add_dataloader_idx": meta.add_dataloader_idx,
            "metric_attribute": meta.metric_attribute,
        },
        "in_group": meta.sync.group is not None,
        "dtype": value.value.dtype if value.is_tensor else None,
    }


_Lists = dict[tuple[str, str], Tensor]


def _lists_of_metrics(module: LightningModule) -> _Lists:
    """Of each list of tensors that a metric keeps, one without rows: it has their dtype and shape."""
    return {
        (path, name): state[0].new_empty(0, *state[0].shape[1:], device="cpu")
        for path, metric in module.named_modules()
        if isinstance(metric, Metric)
        for name, state in metric.metric_state.items()
        if isinstance(state, list) and state
    }


def _begin_lists(lists: _Lists, module: LightningModule) -> None:
    """Gives lists that are empty a tensor without rows.

    What torchmetrics takes for an empty list has a dtype of its own, and would be combined with the others' byte by
    byte. Also where a metric is logged when the epoch ends, by all ranks.
    """
    for (path, name), no_rows in lists.items():
        metric: Any = module.get_submodule(path)
        if not getattr(metric, name):
            setattr(metric, name, [no_rows.to(metric.device)])


def _check_groups(merged: dict[str, _Described], of_ranks: Sequence[dict[str, _Described]]) -> None:
    for key, described in merged.items():
        if described["in_group"] and any(key not in of_rank for of_rank in of_ranks):
            raise MisconfigurationException(
                f"Only some ranks had a batch in which to log {described['arguments']['name']!r}, and it is combined"
                " over a group of ranks (`sync_dist_group`) that others do not know. Give every rank a batch of each"
                " data loader, or combine over all ranks."
            )


def _add(values: Any, key: str, described: _Described, module: LightningModule, reduce: Callable[..., Any]) -> None:
    arguments, dtype = described["arguments"], described["dtype"]
    value: Any
    if dtype is None:
        value = module.get_submodule(arguments["metric_attribute"])
    else:
        neutral = {"max": -torch.inf, "min": torch.inf}.get(arguments["reduce_fx"].__name__, 0.0)
        value = torch.tensor(neutral, dtype=dtype, device=module.device)
    values.log(value=value, batch_size=0, sync_dist_fn=reduce, **arguments)
    if dtype is not None:
        # The larger of two that are equal, by Python's own `max`, is what there was before, whatever its dtype.
        values[key].value = values[key].value.to(dtype)
