"""The blocks at which a module is cut, and which ranks hold each of its parameters."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parstrat.core.grid import Grid
from lightning_parstrat.core.stages import Stages, balanced
from lightning_parstrat.core.tensor_trees import are_same
from lightning_parstrat.core.wording import listed
from lightning_parstrat.distributed.comm.agreement import all_gather_object, any_rank_for_each
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.comm.process_groups import subgroup
from lightning_parstrat.distributed.engine.activation_checkpointing import modules_of_classes
from lightning_parstrat.distributed.fsdp.sharding import refuse_uses
from lightning_parstrat.distributed.fsdp.units import outermost_blocks
from lightning_parstrat.distributed.pipeline.no_values import without_memory
from lightning_parstrat.distributed.pipeline.sharded_blocks import ShardedBlocks
from lightning_parstrat.distributed.torch_compat import has_memory, take_over_attributes

_SHARED = "shared"
"""The name of groups of ranks that hold a parameter."""


def find_blocks(module: nn.Module, auto_wrap_policy: Collection[str | type]) -> dict[str, nn.Module]:
    """The modules between which a pipeline is cut, by name, in the order of their registration. Not collective.

    Without ``auto_wrap_policy``, these are modules of one class in the same container. If some of them have layers
    within, those that have none are left out, as in a small ``nn.Sequential`` beside a transformer's blocks.

    Args:
        module: The root, which is not among them.
        auto_wrap_policy: Classes or their names (bases count) to take instead.

    Raises:
        ValueError: No module is of a class in ``auto_wrap_policy``. Or a module within a block is.
    """
    if auto_wrap_policy:
        chosen = modules_of_classes(module, auto_wrap_policy, "auto_wrap_policy")
    else:
        found = set(outermost_blocks(module))
        chosen = {one for one in found if any(one.children())} or found
    blocks = {name: one for name, one in module.named_modules() if one in chosen}
    for name in blocks:
        for other in blocks:
            if other.startswith(f"{name}."):
                raise ValueError(
                    f"auto_wrap_policy names {name!r} and {other!r} within it. A pipeline is cut between blocks that"
                    " follow each other: name the class of the outer ones, or of the inner ones."
                )
    return blocks


def costs_of(module: nn.Module, blocks: Collection[nn.Module]) -> tuple[list[float], float, float]:
    """The elements that each block multiplies with, and those that are registered before the first and after the last.

    Tables of embeddings cost nothing, as nothing is multiplied with them.
    """
    within = {part for block in blocks for part in block.modules()}
    before = after = seen = 0
    for part in module.modules():
        seen += part in blocks
        if part not in within and not isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
            size = sum(parameter.numel() for parameter in part.parameters(recurse=False) if parameter.dim() > 1)
            before, after = (before, after + size) if seen == len(blocks) else (before + size, after)
    return [float(sum(p.numel() for p in block.parameters())) for block in blocks], float(before), float(after)


def largest_stage(module: nn.Module, ranks: int) -> int:
    """Trained elements of the largest of so many balanced stages. 0 if the module has fewer blocks. Not collective.

    What is in no block counts for the first or the last stage, by the order of registration.
    """
    blocks = list(find_blocks(module, ()).values())
    if len(blocks) < ranks:
        return 0
    costs, before, after = costs_of(module, blocks)
    bounds = balanced(costs, ranks, before, after)
    stages = [blocks[begin:end] for begin, end in pairwise(bounds)]
    held: list[set[Tensor]] = [{one for block in stage for one in block.parameters()} for stage in stages]
    within, seen = {part for block in blocks for part in block.modules()}, 0
    for part in module.modules():
        seen += part in blocks
        if part not in within:
            held[-1 if seen == len(blocks) else 0].update(part.parameters(recurse=False))
    return max(sum(one.numel() for one in stage if one.requires_grad) for stage in held)


def _ranks_of(module: nn.Module, blocks: Sequence[nn.Module], stages: Stages) -> dict[Tensor, tuple[int, ...]]:
    """The ranks that hold each parameter. All ranks hold what is in no block."""
    of_block: dict[nn.Module, set[int]] = {}
    for number, block in enumerate(blocks):
        # Blocks may share a layer.
        for part in block.modules():
            of_block.setdefault(part, set()).add(stages.rank_of(stages.stage_of(number)))
    found: dict[Tensor, set[int]] = {}
    for part in module.modules():
        ranks = of_block.get(part, set(range(stages.ranks)))
        for tensor in part.parameters(recurse=False):
            found.setdefault(tensor, set()).update(ranks)
    return {tensor: tuple(sorted(ranks)) for tensor, ranks in found.items()}


def _by_block(module: nn.Module, blocks: Mapping[str, nn.Module]) -> dict[str, list[Tensor]]:
    """A module's parameters by their block. At first those that are in none."""
    of_block = {parameter: name for name, block in blocks.items() for parameter in block.parameters()}
    found: dict[str, list[Tensor]] = {"": [], **{name: [] for name in blocks}}
    for parameter in module.parameters():
        found[of_block.get(parameter, "")].append(parameter)
    return found


def in_state_dict(name: str) -> str:
    """The name that a parameter or buffer has in a state dict. Torch's ``checkpoint_wrapper`` hides its own part."""
    return name.replace("_checkpoint_wrapped_module.", "")


def _replace(module: nn.Module, old: Tensor, new: nn.Parameter) -> None:
    """Puts a parameter in the place of another one, wherever the module has it."""
    take_over_attributes(old, new)
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if parameter is old:
                setattr(part, name, new)


@torch.no_grad()
def _share_out(
    module: nn.Module,
    parameters: Iterable[Tensor],
    held: Collection[Tensor],
    group: dist.ProcessGroup,
    device: torch.device,
) -> None:
    """Gives each rank rank 0's values of those parameters that it holds, and no memory for others. Collective.

    Rank 0 has all values. Other ranks may have the module on the meta device. Each rank receives all values once.
    """
    is_first = dist.get_rank(group) == 0
    for old in parameters:
        values = old.detach().to(device) if is_first else torch.empty(old.shape, dtype=old.dtype, device=device)
        values = values.contiguous()
        dist.broadcast(values, group=group, group_src=0)
        if old not in held:
            _replace(module, old, without_memory(old, device))
            refuse_uses(old)
        elif has_memory(old):
            old.data = values
        else:
            _replace(module, old, nn.Parameter(values, requires_grad=old.requires_grad))


@torch.no_grad()
def _share_buffers(module: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
    """Gives each rank rank 0's values of all buffers. Collective."""
    is_first = dist.get_rank(group) == 0
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            values = buffer.to(device) if is_first or has_memory(buffer) else torch.empty_like(buffer, device=device)
            setattr(part, name, values.contiguous())
            dist.broadcast(getattr(part, name), group=group, group_src=0)


class HeldParts:
    """The parts of a module in stages that each rank holds: its blocks, and parts that are in no block.

    At first all ranks hold what is in no block, such as embeddings and the head. The first step shows which ranks use
    it, and :meth:`settle` leaves it to them. Collective.

    Args:
        module: The module. Its parameters are shared out.
        blocks: All its blocks by their names.
        stages: How blocks and ranks are divided.
        everyone: All ranks. They get the values of the first one.
        group: The ranks of this pipeline, one of those that have different data.
        device: The device on which the module is to train.
        grid: Where ranks lie.
        shards: Whether the ranks of a stage divide its blocks.

    Raises:
        ValueError: Blocks cannot be divided.
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: dict[str, nn.Module],
        stages: Stages,
        everyone: dist.ProcessGroup,
        group: dist.ProcessGroup,
        device: torch.device,
        grid: Grid,
        shards: bool,
    ) -> None:
        self._module, self._group, self._device = module, group, device
        self._stages = stages
        self._rank = rank = dist.get_rank(group)
        own = {one for number, one in enumerate(blocks) if stages.rank_of(stages.stage_of(number)) == rank}
        self.sharded = ShardedBlocks(module, blocks, own, grid, everyone, device) if shards else None
        """This rank's blocks, if the ranks of a stage divide them."""
        before = _ranks_of(module, list(blocks.values()), stages)
        held = {tensor for tensor, ranks in before.items() if rank in ranks}
        _share_buffers(module, everyone, device)
        # Block by block, so that a block is divided before this rank gets the next one.
        for block, parameters in _by_block(module, blocks).items():
            _share_out(module, parameters, held, everyone, device)
            if self.sharded is not None and block in own:
                self.sharded.divide(block)
        if self.sharded is not None:
            self.sharded.begin()
        self.blocks = blocks if self.sharded is None else {**blocks, **self.sharded.copies}
        """All blocks by their names, as they are in the module now."""
        self._blocks = list(self.blocks.values())
        self.ranks_of = _ranks_of(module, self._blocks, stages)
        """The ranks that hold each parameter."""
        self._buffers_began = {name: buffer.clone() for name, buffer in self._outer_buffers()}
        self.own_blocks = {name: one for name, one in self.blocks.items() if name in own}

    @property
    def _shared(self) -> list[nn.Parameter]:
        """The parameters that several ranks hold, in the same order on all."""
        return [one for one in self._module.parameters() if len(self.ranks_of[one]) > 1]

    def _outer_buffers(self) -> Iterator[tuple[str, Tensor]]:
        within = {part for block in self._blocks for part in block.modules()}
        for prefix, part in self._module.named_modules():
            if part not in within:
                for name, buffer in part.named_buffers(recurse=False):
                    yield in_state_dict(f"{prefix}.{name}".lstrip(".")), buffer

    def holders_of_buffers(self, control: dist.ProcessGroup) -> dict[str, int]:
        """The rank whose value of each buffer counts. Collective.

        A buffer in a block counts on the block's rank, and any other on the first rank that has changed it.

        Args:
            control: The ranks of the pipeline. Messages are in host memory.
        """
        began = self._buffers_began
        # Layers of statistics change them without a new version.
        changed = {n for n, now in self._outer_buffers() if n not in began or not are_same(now, began[n])}
        by_rank: list[set[str]] = all_gather_object(changed, control)
        holders = {name: rank for rank in reversed(range(len(by_rank))) for name in by_rank[rank]}
        names = {part: name for name, part in self._module.named_modules()}
        for number, block in enumerate(self._blocks):
            rank = self._stages.rank_of(self._stages.stage_of(number))
            holders.update((in_state_dict(f"{names[block]}.{name}"), rank) for name, _ in block.named_buffers())
        return holders

    def of_stage(self, stage: int) -> list[nn.Parameter]:
        """The parameters with which a stage of this rank computes."""
        blocks = [self._blocks[number] for number in self._stages.blocks(stage)]
        own = dict.fromkeys(one for block in blocks for one in block.parameters())
        return [*own, *self._outer]

    @property
    def _outer(self) -> list[nn.Parameter]:
        """The parameters of this rank that are in no block."""
        within = {one for block in self._blocks for one in block.parameters()}
        outer = (one for one in self._module.parameters() if one not in within)
        return [one for one in outer if self._rank in self.ranks_of[one]]

    def counts(self, parameter: Tensor) -> bool:
        """Whether this rank counts a parameter: one of those that hold it does."""
        return self.ranks_of[parameter][0] == self._rank

    def check(self) -> None:
        """Raises an error if the module has got new parameters. Not collective.

        Raises:
            ValueError: It has.
        """
        if new := [name for name, one in self._module.named_parameters() if one not in self.ranks_of]:
            raise ValueError(
                f"The module has got {listed(new)} since it was divided into stages. Make all layers in `__init__` or"
                " in `configure_model`, and set `requires_grad` of those that are trained later."
            )

    def settle(self, control: dist.ProcessGroup, replicas: Collectives) -> dict[Tensor, nn.Parameter]:
        """Leaves each parameter that all ranks hold to the ranks that have used it in a step. Collective.

        A parameter without any gradient stays on all ranks: none of them changes it.

        Args:
            control: The ranks of the pipeline. Messages are in host memory.
            replicas: Of the ranks that hold the same stages. What one of them has used, all hold.

        Returns:
            The module's new parameters without memory, by those that this rank does not hold any longer.
        """
        if not self._shared:
            return {}
        own = any_rank_for_each([one.grad is not None for one in self._shared], replicas)
        flags = all_gather_object(own, control)
        dropped: dict[Tensor, nn.Parameter] = {}
        for parameter, by_rank in zip(self._shared, zip(*flags, strict=True), strict=True):
            used = tuple(rank for rank in self.ranks_of[parameter] if by_rank[rank])
            if not used:
                continue
            self.ranks_of[parameter] = used
            if self._rank not in used:
                new = dropped[parameter] = without_memory(parameter, self._device)
                _replace(self._module, parameter, new)
                refuse_uses(parameter)
                self.ranks_of[new] = self.ranks_of.pop(parameter)
        return dropped

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Sums the gradients of parameters that several ranks hold. Collective: the bytes of these gradients.

        A rank that has computed none adds zeros. If no rank has, there is none.
        """
        for ranks in sorted({self.ranks_of[one] for one in self._shared}):
            others = [one for one in range(self._stages.ranks) if one not in ranks]
            # The others make a group, too: torch numbers groups, and NCCL makes them of all ranks together. By a name,
            # as the others alone may have a group of the same members.
            group = subgroup(self._group, ranks if self._rank in ranks else others, _SHARED)
            if self._rank in ranks:
                self._sum([one for one in self._shared if self.ranks_of[one] == ranks], group)

    @torch.no_grad()
    def average_outer(self, group: dist.ProcessGroup) -> None:
        """Takes the mean of gradients of what is in no block. Collective: the bytes of these gradients.

        Args:
            group: The ranks that hold the same stages.
        """
        self._sum(self._outer, group)
        for parameter in self._outer:
            if parameter.grad is not None:
                parameter.grad /= dist.get_world_size(group)

    def _sum(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        used = torch.tensor([one.grad is not None for one in parameters], dtype=torch.int32, device=self._device)
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group)
        for parameter, is_used in zip(parameters, used.tolist(), strict=True):
            if is_used:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
                dist.all_reduce(gradient, group=group)
                parameter.grad = gradient

    @torch.no_grad()
    def synchronize_shared(self) -> None:
        """Gives a pipeline's ranks that hold a trained parameter the first one's values. Collective: their bytes.

        Replicas of two stages may add up the gradients of a tied parameter in another order.
        """
        for parameter in self._shared:
            ranks = self.ranks_of[parameter]
            if self._rank in ranks and parameter.requires_grad:
                dist.broadcast(parameter.data, group=subgroup(self._group, ranks, _SHARED), group_src=0)

    @torch.no_grad()
    def make_whole(self, state: dict[str, Any]) -> dict[Tensor, nn.Parameter]:
        """Gives rank 0 the whole module again, on the host. Not collective.

        Args:
            state: All its parameters and buffers by their names.

        Returns:
            The new parameters, by those that had no memory.
        """
        if self.sharded is not None:
            self.sharded.close()
        made: dict[Tensor, nn.Parameter] = {}
        for name, parameter in list(self._module.named_parameters()):
            if not has_memory(parameter):
                values = state[in_state_dict(name)]
                made[parameter] = nn.Parameter(values, requires_grad=parameter.requires_grad)
                _replace(self._module, parameter, made[parameter])
        for name, buffer in list(self._module.named_buffers()):
            value = state.get(in_state_dict(name), buffer)
            if value.shape == buffer.shape:
                buffer.copy_(value)
            else:
                # A block's forward has made another one.
                owner, _, own_name = name.rpartition(".")
                setattr(self._module.get_submodule(owner), own_name, value.to(buffer.device))
        return made
