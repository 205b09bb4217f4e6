"""Blocks of a stage whose layers or parameters are divided among ranks: by a tensor-parallel plan, and by FSDP2.

Copies of the blocks are divided, and take the blocks' places in the module until the training ends. The blocks
themselves have no values meanwhile: they show shapes, and become whole again.
"""

import copy
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lightning_parstrat.core.grid import Grid
from lightning_parstrat.distributed.comm.agreement import any_rank_for_each
from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.comm.process_groups import subgroup
from lightning_parstrat.distributed.fsdp.sharding import mesh_of, refuse_uses
from lightning_parstrat.distributed.fsdp.tensor_layers import TensorLayers
from lightning_parstrat.distributed.fsdp.tensor_plan import find_plan
from lightning_parstrat.distributed.fsdp.units import can_be_sharded
from lightning_parstrat.distributed.pipeline.no_values import without_memory
from lightning_parstrat.distributed.torch_compat import (
    has_forward_hooks,
    has_hooks,
    reduce_accumulated,
    reduce_unused_too,
    take_over_attributes,
)


class ShardedBlocks:
    """A rank's blocks, divided over the ranks of its stage. The constructor is collective among these.

    :meth:`divide` follows for each block, and then :meth:`begin`.

    For each batch, parameters are gathered once, and gradients are reduced once. Otherwise a rank has its shards alone.

    Args:
        module: The module. Copies of blocks take the blocks' places in it.
        blocks: All blocks by their names.
        own: The names of this rank's blocks, which have values.
        grid: Where ranks lie.
        group: All ranks.
        device: The device on which the module trains.

    Raises:
        ValueError: A block has a parameter that is also used elsewhere. Or the tensor-parallel plan does not fit.
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: Mapping[str, nn.Module],
        own: Collection[str],
        grid: Grid,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._module, self._grid, self._device = module, grid, device
        _refuse(module, blocks, grid)
        rank = dist.get_rank(group)
        sharing, layers = (subgroup(group, one(rank)) for one in (grid.with_other_data, grid.sharing_layers))
        self._mesh = mesh_of(sharing, layers, device)
        self.originals = {name: block for name, block in blocks.items() if name in own}
        """The blocks by their names. They have no values."""
        self.copies: dict[str, nn.Module] = {}
        """The copies that take their places."""
        # Others of the plan stay whole, if their code does not notice.
        plan = find_plan(module, grid.tensor, ()) if grid.tensor > 1 else []
        self._planned = [one for one in plan if one.name.startswith(tuple(f"{name}." for name in own))]
        self._zeroed: set[Tensor] = set()
        self._sharded: list[FSDPModule] = []
        self._layers: TensorLayers | None = None

    def divide(self, name: str) -> None:
        """Divides a block of this rank, which has values. Not collective."""
        module, block = self._module, self.originals[name]
        # What lies outside is not copied, even if a block refers to it.
        outside: dict[int, Any] = {id(one): one for one in set(module.modules()) - set(block.modules())}
        self.copies[name] = made = copy.deepcopy(block, outside)
        for parameter, own_copy in zip(block.parameters(), made.parameters(), strict=True):
            take_over_attributes(parameter, own_copy)
        for part in block.modules():
            for own_name, parameter in list(part.named_parameters(recurse=False)):
                shown = without_memory(parameter, self._device)
                take_over_attributes(parameter, shown)
                setattr(part, own_name, shown)
                refuse_uses(parameter)
        module.set_submodule(name, made)
        for one in self._planned:
            if one.name.startswith(f"{name}."):
                one.cut(module.get_submodule(one.name), self._mesh["tensor"])
        if self._grid.data > 1:
            dtypes = {parameter.dtype for parameter in made.parameters()}
            summed_in = None if torch.float64 in dtypes else torch.float32
            precision = MixedPrecisionPolicy(reduce_dtype=summed_in, cast_forward_inputs=False)
            fully_shard(made, mesh=self._mesh["data"], reshard_after_forward=False, mp_policy=precision)
            reduce_unused_too(made, self._zeroed.add)
            self._sharded.append(cast(FSDPModule, made))

    def begin(self) -> None:
        """Call it when all blocks are divided. Collective among ranks with other data: the bytes of the blocks."""
        # So gathered tensors are never those of an inference, which no backward can use.
        self.gather()
        self.free()
        if self._planned:
            planned = [one._replace(layer=self._module.get_submodule(one.name)) for one in self._planned]
            self._layers = TensorLayers(self._module, planned, self._device)

    @property
    def are_sharded(self) -> bool:
        """Whether parameters are shards between steps."""
        return bool(self._sharded)

    def check(self) -> None:
        """Raises an error for hooks that would not run. Not collective.

        Raises:
            ValueError: A parameter has a hook.
        """
        for name, parameter in ((n, one) for block in self.copies.values() for n, one in block.named_parameters()):
            if has_hooks(parameter):
                raise ValueError(
                    f"A hook is registered on {name!r} of a block, and the ranks of a stage have parts of its gradient."
                    " Remove the hook, or set shard='state' and tensor_parallel_size=1."
                )

    def gather(self) -> None:
        """Gathers the blocks' parameters. Collective among ranks with other data: the bytes of the blocks."""
        for block in self._sharded:
            block.set_is_last_backward(False)
            block.set_reshard_after_backward(False)
            block.set_requires_gradient_sync(False)
            block.unshard()

    def free(self) -> None:
        """Frees gathered parameters. Not collective."""
        for block in self._sharded:
            block.reshard()

    def note_loss(self, loss: Tensor) -> None:
        """Adds a loss of the last stage to those that ranks with the same layers compare. Not collective.

        Raises:
            TensorPlanError: It takes a part of the features.
        """
        if self._layers is not None:
            self._layers.note_loss(loss)

    def reduce(self, replicas: Collectives, of_stage: Collectives) -> None:
        """Leaves the means of a step's gradients in the shards, and frees gathered parameters.

        Collective among the ranks of a stage. Those with other data send the bytes of the blocks.

        Args:
            replicas: The ranks with other data. Messages are in host memory.
            of_stage: The ranks of the stage. Messages are in host memory.

        Raises:
            TensorPlanError: Ranks that share layers have different losses, or different gradients of whole layers.
        """
        self._zeroed.clear()
        for block in self._sharded:
            reduce_accumulated(cast(nn.Module, block))
        parameters = [one for block in self._sharded for one in cast(nn.Module, block).parameters()]
        if parameters:
            used = any_rank_for_each([one not in self._zeroed for one in parameters], replicas)
            for parameter, is_used in zip(parameters, used, strict=True):
                parameter.grad = parameter.grad if is_used else None
        if self._layers is not None:
            every: list[Tensor] = [one for block in self.copies.values() for one in block.parameters()]
            for one in every:
                if isinstance(one, DTensor) and isinstance(one.grad, DTensor):
                    # Of a whole layer between cut ones, each rank has a part of the sum.
                    one.grad = one.grad.redistribute(placements=one.placements)
            own = {one for one in every if one.grad is not None}
            self._layers.compare_gradients(own, of_stage)

    @contextmanager
    def originals_in_place(self) -> Iterator[None]:
        """Within it, the module has its own blocks, without values. Not collective."""
        self._put_originals()
        try:
            yield
        finally:
            for name, block in self.copies.items():
                self._module.set_submodule(name, block)

    def close(self) -> None:
        """Gives the module its own blocks again. Not collective."""
        if self._layers is not None:
            self._layers.close()
        self._put_originals()
        for name, block in self.originals.items():
            for part, made in zip(block.modules(), self.copies[name].modules(), strict=True):
                # By name, as a forward may have made others.
                for own_name, own in made.named_buffers(recurse=False):
                    if hasattr(part, own_name):
                        setattr(part, own_name, own)
                    else:
                        part.register_buffer(own_name, own)

    def _put_originals(self) -> None:
        for name, block in self.originals.items():
            for part, made in zip(block.modules(), self.copies[name].modules(), strict=True):
                # What a program has set since: whether a block trains, and its own counts. Not what torch has added.
                for name_of, one in vars(made).items():
                    if isinstance(one, _SIMPLE) and (name_of in vars(part) or not name_of.startswith("_")):
                        vars(part)[name_of] = one
            for parameter, own_copy in zip(block.parameters(), self.copies[name].parameters(), strict=True):
                parameter.requires_grad_(own_copy.requires_grad)
            self._module.set_submodule(name, block)


_SIMPLE = (bool, int, float, str, Tensor, type(None))


def _refuse(module: nn.Module, blocks: Mapping[str, nn.Module], grid: Grid) -> None:
    """Raises an error for blocks that cannot be divided, the same on all ranks."""
    for name, block in blocks.items():
        if any(map(has_forward_hooks, block.modules())):
            raise ValueError(
                f"A forward hook is registered on {name!r} or a module in it, and the ranks of a stage divide copies of"
                " blocks. Register it in `on_fit_start`, or set shard='state' and tensor_parallel_size=1."
            )
        parameters = block.named_parameters() if grid.data > 1 else ()
        whole = next((own_name for own_name, one in parameters if not can_be_sharded(one)), None)
        if whole is not None:
            raise ValueError(
                f"The parameter '{name}.{whole}' of a block cannot be divided. FSDP2 needs a dimension, as in"
                " `torch.ones(1)`, elements, contiguous floating-point memory, and the class"
                " `nn.Parameter`. Change the parameter, or set shard='state'."
            )
    owners: dict[Tensor, set[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owner = next((one for one in blocks if name.startswith(f"{one}.")), "")
        owners.setdefault(parameter, set()).add(owner)
        if len(owners[parameter]) > 1:
            raise ValueError(
                f"{name!r} is a parameter of several blocks, or of a block and of what is in no block. Such blocks"
                " cannot be divided. Set shard='state' and tensor_parallel_size=1."
            )
