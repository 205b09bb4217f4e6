"""Which modules are gathered together: each repeated block by itself, and all others with the root."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor, nn

from lightning_parstrat.distributed.engine.activation_checkpointing import modules_of_classes
from lightning_parstrat.distributed.engine.shardability import sharing_memory
from lightning_parstrat.distributed.torch_compat import names_ignored_by_ddp

MIN_NUM_PARAMS = 100_000
"""Smaller blocks stay with the root. A separate collective for each would cost more than their memory."""

_VERY_LARGE = 2**26
"""Layers of so many elements are gathered by themselves: with the root they would be held for a whole step."""

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def find_units(
    module: nn.Module, auto_wrap_policy: Collection[str | type], min_num_params: int, each_child: bool
) -> list[nn.Module]:
    """The modules below ``module`` whose parameters are gathered, used and freed together. Inner ones come first.

    Without ``auto_wrap_policy``, these are blocks: modules of one class in the same container. Very large embeddings
    and linear layers are others. If a module has no ``forward``, or shares a parameter with a module outside (tied
    weights), it stays with its parent. Not collective.
    The result is the same on all ranks with the same module.

    Args:
        module: The root, which is not among them.
        auto_wrap_policy: Classes or their names (bases count) to take instead of blocks. If it is empty, blocks are
            taken.
        min_num_params: The smallest number of parameters of a block.
        each_child: Whether each of the root's remaining children is also a unit. Then only parameters of the root
            itself are left to the root.

    Raises:
        ValueError: No module is of a class in ``auto_wrap_policy``.
    """
    if auto_wrap_policy:
        chosen = modules_of_classes(module, auto_wrap_policy, "auto_wrap_policy")
    else:
        chosen = {m for m in outermost_blocks(module) if _numel(m) >= min_num_params}
        # Exact classes: `nn.MultiheadAttention` reads the weight of a subclass.
        layers = [m for m in module.modules() if type(m) in (nn.Embedding, nn.Linear)]
        chosen |= {m for m in layers if _numel(m) >= max(_VERY_LARGE, min_num_params)}
    if each_child:
        chosen |= set(_outermost(module, each_child=True))
    registrations = _registrations(module)
    # Backwards, modules come before the modules that hold them.
    return [m for m in list(module.modules())[:0:-1] if m in chosen and _holds_all_it_has(m, registrations)]


def whole_parameters(module: nn.Module, units: Sequence[nn.Module], roots_too: bool) -> set[Tensor]:
    """Parameters that FSDP2 cannot shard, or only after a change: they stay whole on every rank.

    There are four kinds. First, parameters without a dimension or an element, complex ones, and those that have no
    gradients. Second, parameters whose memory is shared, or not contiguous, or whose class is not
    ``nn.Parameter``. Third, names that DDP ignores. Fourth, in a unit of several dtypes, all parameters but those
    of the most common dtype. Not collective.

    Args:
        module: The root.
        units: The result of :func:`find_units`.
        roots_too: Whether all parameters outside of units stay whole, too.
    """
    ignored = names_ignored_by_ddp(module)
    whole: set[Tensor] = {p for name, p in module.named_parameters() if name in ignored or not can_be_sharded(p)}
    whole |= sharing_memory([*module.parameters(), *module.buffers()]) & set(module.parameters())
    taken: set[Tensor] = set()
    for unit in units if roots_too else (*units, module):
        own = [p for p in unit.parameters() if p not in taken and p not in whole]
        taken.update(own)
        sizes: Counter[object] = Counter()
        for parameter in own:
            sizes[parameter.dtype] += parameter.numel()
        common = sizes.most_common(1)
        whole |= {p for p in own if p.dtype != common[0][0]}
    return whole | (set(module.parameters()) - taken)


def rounded_by_autocast(module: nn.Module) -> set[Tensor]:
    """Parameters in fp32 that autocast rounds to 16 bits at each use: those of linear layers and the like.

    Layers count if their ``forward`` is torch's own. Parameters count if no other module has them. Not collective.
    """
    rounded: set[Tensor] = set()
    others: set[Tensor] = set()
    for part in module.modules():
        is_torchs = "forward" not in vars(part) and type(part).forward in _ROUNDED_BY_AUTOCAST
        for name, parameter in part.named_parameters(recurse=False):
            (rounded if is_torchs and name in _ROUNDED_NAMES else others).add(parameter)
    return {parameter for parameter in rounded - others if parameter.dtype == torch.float32}


_ROUNDED_NAMES = {"weight", "bias", "in_proj_weight", "in_proj_bias"}
"""Hooks make weights of parameters with other names, such as norms of weights."""

_ROUNDED_BY_AUTOCAST = {
    layer.forward
    for layer in (
        nn.Linear,
        nn.Conv1d,
        nn.Conv2d,
        nn.Conv3d,
        nn.ConvTranspose1d,
        nn.ConvTranspose2d,
        nn.ConvTranspose3d,
        nn.MultiheadAttention,
    )
}


def can_be_sharded(parameter: Tensor) -> bool:
    """Whether FSDP2 can shard a parameter. It replaces parameters by those of torch's class. Not collective."""
    has_elements = parameter.dim() > 0 and parameter.numel() > 0
    is_torchs = type(parameter).__torch_function__ is nn.Parameter.__torch_function__
    is_torchs = is_torchs and nn.Parameter not in type(parameter).__mro__[1:]
    return is_torchs and has_elements and parameter.is_floating_point() and parameter.is_contiguous()


def outermost_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules that have others of their class beside them, in a container."""
    return _outermost(module, each_child=False)


def _outermost(module: nn.Module, each_child: bool) -> Iterator[nn.Module]:
    """The outermost blocks below a module, or its outermost children that can be called."""
    children = list(module.children())
    kinds = Counter(map(type, children)) if isinstance(module, _CONTAINERS) else Counter()
    for child in children:
        # Lists and dictionaries of modules or parameters are not called.
        is_called = getattr(child.forward, "__func__", None) is not nn.Module.forward
        has_parameters = next(child.parameters(), None) is not None
        if is_called and has_parameters and (each_child or kinds[type(child)] > 1):
            yield child
        else:
            yield from _outermost(child, each_child)


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _registrations(module: nn.Module) -> Counter[Tensor]:
    return Counter(parameter for _, parameter in module.named_parameters(remove_duplicate=False))


def _holds_all_it_has(module: nn.Module, registrations: Counter[Tensor]) -> bool:
    inside = _registrations(module)
    return bool(inside) and all(registrations[parameter] == count for parameter, count in inside.items())
