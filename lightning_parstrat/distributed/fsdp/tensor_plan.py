"""Tensor-parallel plans: the layers of a module that ranks share, and which layers cannot be cut.

A plan is a dictionary from names of layers to styles, as in Hugging Face's models: ``{"layers.*.up": "colwise",
"layers.*.down": "rowwise"}``. torch's styles carry it out. Nothing is guessed: without a plan nothing is cut.
"""

import functools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.utils.parametrize import is_parametrized

from lightning_parstrat.core.wording import listed

STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": functools.partial(ColwiseParallel, output_layouts=Replicate()),
    "rowwise_split_input": functools.partial(RowwiseParallel, input_layouts=Replicate()),
    "embedding_colwise": functools.partial(ColwiseParallel, output_layouts=Replicate()),
    "embedding_rowwise": functools.partial(RowwiseParallel, input_layouts=Replicate()),
    "sequence_parallel": SequenceParallel,
    # For a norm of each head: ranks have its weight whole, and sum its gradients. Any dimension but the last will do.
    "replicated_with_grad_allreduce": functools.partial(SequenceParallel, sequence_dim=0, use_local_output=True),
}
"""torch's style for each name of Hugging Face's. Other names of theirs are of layers that torch has no style for."""

_CUT_BY_TORCH = (nn.Linear, nn.Embedding)

_HEADS = ("num_heads", "num_attention_heads", "num_key_value_heads", "n_heads", "n_head", "n_kv_heads", "nhead")
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

    def cut(self, layer: nn.Module, mesh: DeviceMesh) -> None:
        """Divides the parameters of the layer, or of its copy, over ranks. Not collective."""
        trainable = {name: parameter.requires_grad for name, parameter in layer.named_parameters()}
        parallelize_module(layer, mesh, self.style, src_data_rank=None)
        for name, parameter in layer.named_parameters():
            # torch's style for norms would train frozen ones.
            parameter.requires_grad_(trainable[name])


def find_plan(module: nn.Module, ranks: int, kept_whole: Collection[Tensor]) -> list[PlannedLayer]:
    """The layers that the plans of a module cut. The outermost module that has a plan decides about all below it.

    A layer that shares a parameter with another one is left whole, unless others depend on its cut. Not collective.

    Args:
        module: The LightningModule.
        ranks: How many ranks share a layer.
        kept_whole: Parameters that cannot be sharded.

    Raises:
        TensorPlanError: There is no plan. Or it names no layer, or a style that is not known, or what cannot be cut.
    """
    named, found, owners = dict(module.named_modules()), dict[str, PlannedLayer](), tuple[str, ...]()
    for prefix, part in named.items():
        plan: Mapping[str, Any] = getattr(part, "tp_plan", None) or getattr(part, "_tp_plan", None) or {}
        if not plan or prefix.startswith(owners):
            continue
        begin = f"{prefix}." if prefix else ""
        owners += (begin,)
        for pattern, style in ((pattern, _style(pattern, given)) for pattern, given in plan.items()):
            # A star is one part of a name, as in torch's plans.
            full = re.compile(re.escape(begin + pattern).replace(r"\*", "[^.]*"))
            kinds = _CUT_BY_TORCH if isinstance(style, (ColwiseParallel, RowwiseParallel)) else nn.Module
            names = [name for name, layer in named.items() if full.fullmatch(name) and isinstance(layer, kinds)]
            if not names:
                raise TensorPlanError(
                    f"The tensor-parallel plan of {type(part).__name__} names {pattern!r}, and it has no such layer."
                    f" Its layers are {listed(_patterns(part))}."
                )
            found |= {name: PlannedLayer(name, named[name], style) for name in names}
    uses: Counter[Tensor] = Counter(parameter for _, parameter in module.named_parameters(remove_duplicate=False))
    planned = [one for one in found.values() if _is_cut(one, uses, kept_whole)]
    if not planned:
        free = [one for one in module.modules() if isinstance(one, nn.Linear) and uses[one.weight] == 1]
        within = defaultdict[str, list[str]](list)
        for name in _patterns(module, free):
            within[name.rpartition(".")[0]].append(name)
        # Such as the two layers of an MLP. One module is to hold both.
        pairs = [names for holder, names in within.items() if holder and len(names) > 1]
        first, *_, last = min(pairs, key=len, default=["blocks.*.up", "blocks.*.down"])
        raise TensorPlanError(
            f"tensor_parallel_size={ranks} needs a plan of the layers that ranks share, and {type(module).__name__} has"
            f" none. Set it in the module: `self.tp_plan = {{{first!r}: 'colwise', {last!r}: 'rowwise'}}`. A"
            " column-wise layer gives each rank a part of its output, and the row-wise layer after it sums the parts."
            f" The module's layers are {listed(_patterns(module))}. A layer that is tied to another one does not count."
        )
    for one in planned:
        _check_sizes(one, named, ranks)
    for one in planned:
        if one.gives_shards and not region_of(one, planned, named):
            raise TensorPlanError(
                f"The tensor-parallel plan cuts the output of {one.name!r}, and no module below the LightningModule"
                " holds it and a row-wise layer that sums the parts. Write 'colwise_gather_output', or put both layers"
                " into one module."
            )
    return planned


def region_of(one: PlannedLayer, planned: Collection[PlannedLayer], named: Mapping[str, nn.Module]) -> str:
    """The name of the smallest module that holds a layer, and one that sums what it gives. Empty if there is none.

    Containers, which have no ``forward``, and the outermost module do not count.
    """
    for name in _holders(one.name):
        sums = any(other.takes_shards and other.name.startswith(f"{name}.") for other in planned)
        if sums and not isinstance(named[name], (nn.ModuleList, nn.ModuleDict)):
            return name
    return ""


def _style(pattern: str, style: Any) -> ParallelStyle:
    if isinstance(style, ParallelStyle):
        return style
    if style not in STYLES:
        raise TensorPlanError(
            f"Invalid style of {pattern!r} in a tensor-parallel plan: {style!r}. Must be one of {', '.join(STYLES)}, or"
            " a style of torch.distributed.tensor.parallel. Leave the layer out, and each rank has it whole."
        )
    return STYLES[style]()


def _is_cut(one: PlannedLayer, uses: Mapping[Tensor, int], kept_whole: Collection[Tensor]) -> bool:
    own = Counter(parameter for _, parameter in one.layer.named_parameters(remove_duplicate=False))
    # Older functions than torch's parametrizations, such as `torch.nn.utils.weight_norm`, replace the weight, too.
    computes = isinstance(one.layer, _CUT_BY_TORCH) and not isinstance(one.layer.weight, nn.Parameter)
    is_free = not (is_parametrized(one.layer) or computes) and all(
        uses[parameter] == count and parameter not in kept_whole for parameter, count in own.items()
    )
    if not is_free and (one.gives_shards or one.takes_shards):
        raise TensorPlanError(
            f"The tensor-parallel plan cuts {one.name!r}, which shares a parameter with another layer, is"
            " parametrized, or cannot be sharded. Leave it out of the plan, and the layers that it is paired with."
        )
    return is_free


def _check_sizes(one: PlannedLayer, named: Mapping[str, nn.Module], ranks: int) -> None:
    if isinstance(one.layer, nn.Embedding) and one.layer.max_norm is not None:
        raise TensorPlanError(
            f"{one.name!r} has max_norm, which torch cannot apply to a part. Leave it out of the plan."
        )
    sizes: list[tuple[str, Any]] = []
    if isinstance(one.layer, _CUT_BY_TORCH) and isinstance(one.style, (ColwiseParallel, RowwiseParallel)):
        by_rows = isinstance(one.style, ColwiseParallel) == isinstance(one.layer, nn.Linear)
        rows, columns = one.layer.weight.shape
        sizes.append((f"rows of {one.name!r}", rows) if by_rows else (f"columns of {one.name!r}", columns))
    for owner in map(named.__getitem__, _holders(one.name)) if one.gives_shards else ():
        for holder in (owner, getattr(owner, "config", None)):
            sizes += [(f"{heads} of {type(owner).__name__}", getattr(holder, heads, None)) for heads in _HEADS]
    for what, size in sizes:
        if isinstance(size, int) and size % ranks:
            raise TensorPlanError(
                f"tensor_parallel_size={ranks} does not divide the {size} {what}, and each rank has an equal part. Set"
                " a divisor, or leave the layer out of the plan."
            )


def _holders(name: str) -> Iterator[str]:
    """The names of the modules that hold a layer, but the outermost. The smallest comes first."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _patterns(module: nn.Module, among: Collection[nn.Module] | None = None) -> list[str]:
    """The names of a module's layers, or of some of them, with a star for each number."""
    found = ((name, part) for name, part in module.named_modules() if isinstance(part, _CUT_BY_TORCH))
    layers = (name for name, part in found if among is None or part in among)
    return list(dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in layers))
