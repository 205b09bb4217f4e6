"""Tensor-parallel plans: the layers of a module that ranks share, and which layers cannot be cut.

A plan is a dictionary from names of layers to styles, as in Hugging Face's models: ``{"layers.*.up": "colwise",
"layers.*.down": "rowwise"}``. torch's styles carry it out. Nothing is guessed: without a plan nothing is cut.
"""

import fnmatch
import functools
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

from lightning_parstrat.core.wording import listed

STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": functools.partial(ColwiseParallel, output_layouts=Replicate()),
    "rowwise_split_input": functools.partial(RowwiseParallel, input_layouts=Replicate()),
    "embedding_colwise": functools.partial(ColwiseParallel, output_layouts=Replicate()),
    "embedding_rowwise": functools.partial(RowwiseParallel, input_layouts=Replicate()),
    "sequence_parallel": SequenceParallel,
    # Older names.
    "colwise_rep": functools.partial(ColwiseParallel, output_layouts=Replicate()),
    "rowwise_rep": functools.partial(RowwiseParallel, input_layouts=Replicate()),
}
"""torch's style for each name of Hugging Face's. Other names of theirs are of layers that torch has no style for."""

HEADS = ("num_heads", "num_attention_heads", "num_key_value_heads", "n_heads", "n_head", "n_kv_heads", "nhead")
"""Attributes of a module, or of its configuration, that count heads: each rank has an equal part of them."""


class TensorPlanError(ValueError):
    """A tensor-parallel plan is missing, or does not fit the module or its code."""


class PlannedLayer(NamedTuple):
    """A layer that is cut over ranks.

    Attributes:
        name: Its name in the module.
        layer: The layer.
        style: How it is cut.
    """

    name: str
    layer: nn.Module
    style: ParallelStyle

    @property
    def gives_shards(self) -> bool:
        """Whether each rank gets a part of the output's features."""
        return isinstance(self.style, ColwiseParallel) and not self.style.output_layouts[0].is_replicate()

    @property
    def takes_shards(self) -> bool:
        """Whether each rank gives a part of the input's features."""
        return isinstance(self.style, RowwiseParallel) and not self.style.input_layouts[0].is_replicate()

    @property
    def is_whole_outside(self) -> bool:
        """Whether a module that holds it takes and gives whole tensors, unless they come from other such layers."""
        if isinstance(self.style, ColwiseParallel):
            return self.style.input_layouts[0].is_replicate()
        return isinstance(self.style, RowwiseParallel) and self.style.output_layouts[0].is_replicate()


def find_plan(module: nn.Module, ranks: int, kept_whole: Collection[Tensor]) -> list[PlannedLayer]:
    """The layers that the plans of a module cut. The outermost module that has a plan decides about all below it.

    A layer that shares a parameter with another one is left whole. Not collective.

    Args:
        module: The LightningModule.
        ranks: How many ranks share a layer.
        kept_whole: Parameters that cannot be sharded.

    Raises:
        TensorPlanError: There is no plan. Or it names no layer, or a style that is not known, or what cannot be cut.
    """
    planned: dict[str, PlannedLayer] = {}
    named = dict(module.named_modules())
    owners = list[str]()
    for prefix, part in named.items():
        plan = _plan_of(part)
        if not plan or any(prefix.startswith(f"{owner}." if owner else "") for owner in owners):
            continue
        owners.append(prefix)
        for pattern, style in plan.items():
            full = f"{prefix}.{pattern}".lstrip(".")
            found = {name: named[name] for name in _matching(full, named)}
            if not found:
                raise TensorPlanError(
                    f"The tensor-parallel plan of {type(part).__name__} names {pattern!r}, and it has no such layer."
                    f" Its layers are {listed(_patterns(part))}."
                )
            planned |= {name: PlannedLayer(name, layer, _style(pattern, style)) for name, layer in found.items()}
    if not planned:
        names = _patterns(module)
        first, last = (names[0], names[-1]) if names else ("blocks.*.up", "blocks.*.down")
        raise TensorPlanError(
            f"tensor_parallel_size={ranks} needs a plan of the layers that ranks share, and {type(module).__name__} has"
            f" none. Set it in the module: `self.tp_plan = {{{first!r}: 'colwise', {last!r}: 'rowwise'}}`. A"
            " column-wise layer gives each rank a part of its output, and the row-wise layer after it sums the parts."
            f" The module's layers are {listed(names)}."
        )
    uses: Counter[Tensor] = Counter(parameter for _, parameter in module.named_parameters(remove_duplicate=False))
    free = [one for one in planned.values() if _is_free(one.layer, uses, kept_whole)]
    if not free:
        raise TensorPlanError(
            f"The tensor-parallel plan names {listed(list(planned))} alone, and each shares a parameter with another"
            " layer, or cannot be sharded. Name other layers, or leave tensor_parallel_size out."
        )
    for one in free:
        _check_sizes(one, named, ranks)
    _check_regions(list(planned.values()), free, named)
    return free


def region_of(planned: PlannedLayer, others: Sequence[PlannedLayer], named: Mapping[str, nn.Module]) -> str:
    """The name of the smallest module that holds a layer, and one that sums what it gives. Empty if there is none.

    Containers, which have no ``forward``, and the outermost module do not count.
    """
    for name in _holders(planned.name):
        sums = any(one.takes_shards and one.name.startswith(f"{name}.") for one in others)
        if sums and not isinstance(named[name], (nn.ModuleList, nn.ModuleDict)):
            return name
    return ""


def _check_regions(
    planned: Sequence[PlannedLayer], free: Sequence[PlannedLayer], named: Mapping[str, nn.Module]
) -> None:
    for one in planned:
        region = region_of(one, planned, named) if one.gives_shards else ""
        if one.gives_shards and one in free and not region:
            raise TensorPlanError(
                f"The tensor-parallel plan cuts the output of {one.name!r}, and no module below the LightningModule"
                " holds it and a row-wise layer that sums the parts. Write 'colwise_gather_output', or put both layers"
                " into one module."
            )
        inside = [other for other in planned if region and other.name.startswith(f"{region}.")]
        paired = [other for other in inside if other.gives_shards or other.takes_shards]
        whole = [other.name for other in paired if other not in free]
        if whole and len(whole) < len(paired):
            raise TensorPlanError(
                f"The tensor-parallel plan cuts layers of {region!r}, and {listed(whole)} of them stays whole, as it"
                " shares a parameter with another layer, or cannot be sharded. Leave all of them out of the plan."
            )


def _plan_of(part: nn.Module) -> Mapping[str, Any]:
    plan = getattr(part, "tp_plan", None) or getattr(part, "_tp_plan", None)
    if plan is None and getattr(part, "base_model", None) is part:
        plan = getattr(getattr(part, "config", None), "base_model_tp_plan", None)
    if not (plan is None or isinstance(plan, Mapping)):
        raise TensorPlanError(
            f"Invalid tp_plan of {type(part).__name__}: {plan!r}. Must be a dictionary from names of layers to styles,"
            ' such as {"layers.*.up": "colwise", "layers.*.down": "rowwise"}.'
        )
    return plan or {}


def _matching(pattern: str, names: Collection[str]) -> list[str]:
    # A star is one part of a name, as in torch's plans.
    parts = pattern.split(".")
    return [
        name
        for name in names
        if len(own := name.split(".")) == len(parts) and all(map(fnmatch.fnmatchcase, own, parts))
    ]


def _style(pattern: str, style: Any) -> ParallelStyle:
    if isinstance(style, ParallelStyle):
        return style
    if style not in STYLES:
        raise TensorPlanError(
            f"Invalid style of {pattern!r} in a tensor-parallel plan: {style!r}. Must be one of {', '.join(STYLES)}, or"
            " a style of torch.distributed.tensor.parallel. Leave the layer out, and each rank has it whole."
        )
    return STYLES[style]()


def _is_free(layer: nn.Module, uses: Mapping[Tensor, int], kept_whole: Collection[Tensor]) -> bool:
    own = Counter(parameter for _, parameter in layer.named_parameters(remove_duplicate=False))
    return all(uses[parameter] == count and parameter not in kept_whole for parameter, count in own.items())


def _check_sizes(planned: PlannedLayer, named: Mapping[str, nn.Module], ranks: int) -> None:
    name, layer, style = planned
    if isinstance(style, (ColwiseParallel, RowwiseParallel)):
        is_column = isinstance(style, ColwiseParallel)
        if isinstance(layer, nn.Linear):
            what, size = ("out_features", layer.out_features) if is_column else ("in_features", layer.in_features)
        elif isinstance(layer, nn.Embedding):
            what = "embedding_dim" if is_column else "num_embeddings"
            size = getattr(layer, what)
        else:
            raise TensorPlanError(
                f"The tensor-parallel plan cuts {name!r}, a {type(layer).__name__}. torch cuts nn.Linear and"
                " nn.Embedding. Leave the layer out, and each rank has it whole."
            )
        _check_divides(f"{what}={size} of {name!r}", size, ranks)
    for owner in map(named.__getitem__, _holders(name)) if planned.gives_shards else ():
        for holder in (owner, getattr(owner, "config", None)):
            for heads in HEADS:
                count = getattr(holder, heads, None)
                if isinstance(count, int):
                    _check_divides(f"{heads}={count} of {type(owner).__name__}", count, ranks)


def _check_divides(what: str, size: int, ranks: int) -> None:
    if size % ranks:
        raise TensorPlanError(
            f"tensor_parallel_size={ranks} does not divide {what}, and each rank has an equal part. Set a divisor, or"
            " leave the layer out of the plan."
        )


def _holders(name: str) -> Iterator[str]:
    """The names of the modules that hold a layer, but the outermost. The smallest comes first."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _patterns(module: nn.Module) -> list[str]:
    """The names of a module's layers, with a star for each number."""
    layers = (name for name, part in module.named_modules() if isinstance(part, (nn.Linear, nn.Embedding)))
    return list(dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in layers))
