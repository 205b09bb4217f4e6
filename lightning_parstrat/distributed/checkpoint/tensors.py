"""The tensors of a checkpoint that all ranks write together, and the run of elements of each that this rank writes.

In rank 0's checkpoint, a placeholder on the meta device replaces such a tensor. It has shape, strides and dtype but no
elements. It has the name under which they are written, which is the same on all ranks.
"""

import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_parstrat.core.tensor_trees import in_storage_order, leaves, replace_leaves, storage_strides
from lightning_parstrat.distributed.engine.cuts import Cut, Run, local
from lightning_parstrat.distributed.engine.state import MASTER_WEIGHTS, grouped_parameters
from lightning_parstrat.distributed.torch_compat import version_of


def placeholder(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, name: str) -> Tensor:
    """Replaces a tensor whose elements are written by the ranks that own them. It is pickled with its name."""
    made = torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype, device="meta")
    made.parstrat_name = name  # type: ignore[attr-defined]
    return made


def name_of(tensor: Tensor) -> str | None:
    """The name of a placeholder. For an ordinary tensor, None."""
    return getattr(tensor, "parstrat_name", None)


def refuse_changed(tree: Any, why: str, advice: str) -> None:
    """Raises an error for a placeholder that a hook has changed: it has no values that could change.

    Args:
        tree: What hooks have seen.
        why: Why there are placeholders.
        advice: What to do instead.

    Raises:
        ValueError: A placeholder was written in place (but not through ``data``), or replaced by another one.
    """
    for leaf in leaves(tree):
        is_meta = leaf.tensor.device.type == "meta" or isinstance(leaf.tensor, DTensor)
        if is_meta if name_of(leaf.tensor) is None else version_of(leaf.tensor):
            changed = "/".join(map(str, leaf.path))
            raise ValueError(f"{why} A hook has changed {changed}: leave it as it is, or {advice}.")


def name_of_state(optimizer: int, position: int, entry: Any) -> str:
    """The name of an entry of the state of a parameter, by the position of the parameter in its optimizer."""
    return f"optimizer_states/{optimizer}/state/{position}/{entry}"


class WrittenTensors:
    """The parameters of a training and the state of its optimizers, and how ranks divide them.

    A rank writes its part of cut tensors. All others are whole on every rank: parameters that no optimizer shards, and
    state that every rank keeps. Each of these is written by one rank.

    Args:
        parameters: Parameters by name. The names are the same on all ranks.
        optimizers: The optimizers, in the same order on all ranks.
        cuts: How tensors are cut, by the position of the optimizer whose state they are. The key None is for parameters
            themselves.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        optimizers: Sequence[Optimizer],
        cuts: Mapping[int | None, Mapping[Tensor, Cut]],
    ) -> None:
        self._held: dict[str, tuple[Tensor, Cut | None]] = {}
        # By memory, not by identity: a state dict holds detached views.
        self._names: dict[tuple[Any, ...], str] = {}
        for name, parameter in parameters.items():
            self._add(f"state_dict/{name}", parameter, cuts[None].get(parameter), parameter.shape)
        for number, optimizer in enumerate(optimizers):
            for position, parameter in enumerate(grouped_parameters(optimizer)):
                cut = cuts[number].get(parameter)
                key: Any = parameter if cut is None else cut.key
                entries = {} if key is parameter else {MASTER_WEIGHTS: key}
                for entry, value in {**entries, **optimizer.state.get(key, {})}.items():
                    # Counts of steps are not written by all ranks together. Beside a parameter without a dimension they
                    # are: all of its state has their shape.
                    is_cut = isinstance(key, Tensor) and cut is not None and not key.dim()
                    if isinstance(value, Tensor) and (value.dim() or is_cut):
                        self._add(name_of_state(number, position, entry), value, cut, parameter.shape)

    def _add(self, name: str, value: Tensor, cut: Cut | None, whole: torch.Size) -> None:
        self._held[name] = value.detach(), cut
        # Empty tensors have no memory by which to separate them.
        if value.shape == whole and value.numel():
            self._names.setdefault(_memory(value), name)

    def with_placeholders(self, tree: Any) -> Any:
        """A copy of a tree in which placeholders replace these tensors at every place."""

        @cache
        def made(name: str) -> Tensor:
            value, cut = self._held[name]
            return placeholder(value.shape, storage_strides(value) if cut is None else cut.strides, value.dtype, name)

        def replacement(tensor: Tensor) -> Tensor:
            name = self._names.get(_memory(tensor)) if tensor.layout == torch.strided else None
            return tensor if name is None else made(name)

        return replace_leaves(tree, replacement)

    def own_run(self, name: str) -> Run | None:
        """The elements of a tensor that this rank writes, as a view if possible. If it writes none, None."""
        if name not in self._held:
            return None
        value, cut = self._held[name]
        if cut is None:
            # A checksum spreads tensors over the ranks.
            writes = zlib.crc32(name.encode()) % dist.get_world_size() == dist.get_rank()
            return Run(0, in_storage_order(value)) if writes else None
        own, written, here = cut.own, cut.written, local(value)
        if written.start >= written.stop:
            return None
        # A parameter in a bucket is whole. State has the shape of this rank's part, which may be all.
        flat = in_storage_order(here, cut.strides)[own] if here.shape == cut.shape else here.reshape(-1)
        return Run(written.start, flat[written.start - own.start : written.stop - own.start])


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return local(tensor).data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device
