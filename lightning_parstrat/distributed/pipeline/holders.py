"""The blocks at which a module is cut, and which stages hold each of its parameters."""

from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parstrat.core.stages import Stages
from lightning_parstrat.distributed.comm.process_groups import subgroup
from lightning_parstrat.distributed.engine.activation_checkpointing import modules_of_classes
from lightning_parstrat.distributed.fsdp.units import outermost_blocks
from lightning_parstrat.distributed.torch_compat import FakeTensor, fake_mode, take_over_attributes


def find_blocks(module: nn.Module, auto_wrap_policy: Collection[str | type]) -> dict[str, nn.Module]:
    """The modules between which a pipeline is cut, by name, in the order of their registration. Not collective.

    Without ``auto_wrap_policy``, these are modules of one class in the same container.

    Args:
        module: The root, which is not among them.
        auto_wrap_policy: Classes or their names (bases count) to take instead.

    Raises:
        ValueError: No module is of a class in ``auto_wrap_policy``. Or a module within a block is.
    """
    if auto_wrap_policy:
        chosen = modules_of_classes(module, auto_wrap_policy, "auto_wrap_policy")
    else:
        chosen = set(outermost_blocks(module))
    blocks = {name: one for name, one in module.named_modules() if one in chosen}
    for name in blocks:
        for other in blocks:
            if other.startswith(f"{name}."):
                raise ValueError(
                    f"auto_wrap_policy names {name!r} and {other!r} within it. A pipeline is cut between blocks that"
                    " follow each other: name the class of the outer ones, or of the inner ones."
                )
    return blocks


def cost_of(module: nn.Module) -> int:
    """Elements that a module multiplies with: its parameters without tables of embeddings."""
    tables = {one.weight for one in module.modules() if isinstance(one, (nn.Embedding, nn.EmbeddingBag))}
    return sum(parameter.numel() for parameter in module.parameters() if parameter not in tables)


def outer_modules(module: nn.Module, blocks: Iterable[nn.Module]) -> tuple[list[nn.Module], list[nn.Module]]:
    """The modules outside of blocks that were registered before the first block, and those after the last one."""
    before, after, _ = _zones(module, list(blocks))
    return before, after


def _zones(module: nn.Module, blocks: list[nn.Module]) -> tuple[list[nn.Module], list[nn.Module], list[nn.Module]]:
    """Modules before the first block, after the last one, and all others: those that contain blocks, or lie between."""
    within = {part for block in blocks for part in block.modules()}
    around = {part for part in module.modules() if part not in within and not within.isdisjoint(part.modules())}
    before, after, others = list[nn.Module](), list[nn.Module](), list[nn.Module]()
    seen = 0
    for part in module.modules():
        seen += part in blocks
        if part in around:
            others.append(part)
        elif part not in within:
            (before if seen == 0 else after if seen == len(blocks) else others).append(part)
    return before, after, others


def stages_of_tensors(module: nn.Module, blocks: list[nn.Module], stages: Stages) -> dict[Tensor, frozenset[int]]:
    """The stages that hold each parameter and buffer. Not collective.

    A block's are held by its stage. Modules that were registered before the first block belong to the first stage, and
    those after the last block to the last one. All stages hold what is registered elsewhere. A tied parameter is held
    by the stages of all its modules.
    """
    before, after, others = _zones(module, blocks)
    of_module = {part: {0} for part in before} | {part: {stages.count - 1} for part in after}
    of_module |= {part: set(range(stages.count)) for part in others}
    for number, block in enumerate(blocks):
        of_module |= {part: {stages.stage_of(number)} for part in block.modules()}
    found: dict[Tensor, set[int]] = {}
    for part, own in of_module.items():
        for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
            found.setdefault(tensor, set()).update(own)
    return {tensor: frozenset(own) for tensor, own in found.items()}


def replace_parameter(module: nn.Module, old: Tensor, new: nn.Parameter) -> None:
    """Puts a parameter in the place of another one, wherever the module has it."""
    take_over_attributes(old, new)
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if parameter is old:
                setattr(part, name, new)


def without_memory(parameter: Tensor, device: torch.device) -> nn.Parameter:
    """A parameter of the same shape without memory. What is computed with it has a shape and no values, either."""
    with fake_mode():
        values = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device=device)
    return nn.Parameter(values, requires_grad=parameter.requires_grad)


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor has values."""
    return not (isinstance(tensor, FakeTensor) or tensor.is_meta)


@torch.no_grad()
def share_out(
    module: nn.Module, held: Collection[Tensor], group: dist.ProcessGroup, device: torch.device
) -> dict[Tensor, Tensor]:
    """Gives each rank rank 0's values of the parameters that it holds, and no memory for all others. Collective.

    Rank 0 has all values. Other ranks may have the module on the meta device. Each rank receives all values once.

    Args:
        module: The module.
        held: The parameters that this rank holds.
        group: The ranks of the pipeline.
        device: The device on which the module is to train.

    Returns:
        The module's new parameters, by the old ones.

    Raises:
        ValueError: A parameter on rank 0 has no values.
    """
    is_first = dist.get_rank(group) == 0
    new: dict[Tensor, Tensor] = {}
    for name, old in list(module.named_parameters()):
        if is_first and not has_memory(old):
            raise ValueError(f"{name!r} has no values on rank 0. Make the module on the host there, with its weights.")
        values = old.detach().to(device) if is_first else torch.empty(old.shape, dtype=old.dtype, device=device)
        values = values.contiguous()
        dist.broadcast(values, group=group, group_src=0)
        if old in held and has_memory(old):
            old.data = values
            new[old] = old
        else:
            held_anew = old in held
            made = nn.Parameter(values, old.requires_grad) if held_anew else without_memory(old, device)
            replace_parameter(module, old, made)
            new[old] = made
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            values = buffer.to(device) if is_first or has_memory(buffer) else torch.empty_like(buffer, device=device)
            values = values.contiguous()
            setattr(part, name, values)
            dist.broadcast(values, group=group, group_src=0)
    return new


class HeldParts:
    """What this rank holds of a module that is cut into stages.

    Args:
        module: The module, when parameters have been shared out.
        blocks: All its blocks by their names.
        stages: How blocks and ranks are divided.
        group: The ranks of the pipeline.
    """

    def __init__(
        self, module: nn.Module, blocks: dict[str, nn.Module], stages: Stages, group: dist.ProcessGroup
    ) -> None:
        self._group, self._rank = group, dist.get_rank(group)
        self.stages_of = stages_of_tensors(module, list(blocks.values()), stages)
        """The stages that hold each parameter and buffer."""
        self.ranks_of = {
            tensor: tuple(sorted({stages.rank_of(stage) for stage in own})) for tensor, own in self.stages_of.items()
        }
        """The ranks that hold each of them."""
        own = [stages.stage_of(number) in stages.of_rank(self._rank) for number in range(len(blocks))]
        self.own_blocks = {name: one for (name, one), is_own in zip(blocks.items(), own, strict=True) if is_own}
        self.shared = [
            (parameter, self.ranks_of[parameter])
            for parameter in module.parameters()
            if len(self.ranks_of[parameter]) > 1 and self._rank in self.ranks_of[parameter]
        ]
        """This rank's parameters that other ranks hold, too, with these ranks."""

    def counts(self, parameter: Tensor) -> bool:
        """Whether this rank counts a parameter: one of those that hold it does."""
        return self.ranks_of[parameter][0] == self._rank

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Sums the gradients of parameters that several ranks hold. Collective: the bytes of these gradients.

        A rank that has computed none adds zeros. If no rank has, there is none.
        """
        for ranks in sorted({ranks for _, ranks in self.shared}):
            alike = [parameter for parameter, own in self.shared if own == ranks]
            group = subgroup(self._group, ranks)
            used = torch.tensor([one.grad is not None for one in alike], dtype=torch.int32, device=alike[0].device)
            dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group)
            for parameter, is_used in zip(alike, used.tolist(), strict=True):
                if is_used:
                    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    dist.all_reduce(gradient, group=group)
                    parameter.grad = gradient
