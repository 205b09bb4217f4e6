"""What a sharded block returns has its own memory.

FSDP2 frees a block's parameters after its forward, so a view of one would point to freed memory. And a backward gathers
them by hooks on the block's outputs. An operation that changes a view in place drops these hooks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_parstrat.core.tensor_trees import replace_leaves
from lightning_parstrat.distributed.engine.cuts import local
from lightning_parstrat.distributed.torch_compat import gathered_by_fsdp, is_view


def copy_views(block: nn.Module) -> RemovableHandle:
    """Makes a block return copies of views, and of its parameters. Not collective. A copy takes its tensor's bytes.

    Args:
        block: Sharded by FSDP2. Tensors alone, and those in dictionaries, lists and tuples are copied.
    """
    gathered = [tensor for _, tensor in gathered_by_fsdp(block)]

    # FSDP2's hooks are not compiled, either.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def copy(_: nn.Module, __: Any, output: Any) -> Any:
        freed = set(map(_address, gathered)) - {0}

        def with_own_memory(tensor: Tensor) -> Tensor:
            return tensor.clone() if is_view(tensor) or _address(tensor) in freed else tensor

        return replace_leaves(output, with_own_memory)

    # Before FSDP2's own hook.
    return block.register_forward_hook(copy, prepend=True)


def _address(tensor: Tensor) -> int:
    return local(tensor).untyped_storage().data_ptr() if tensor.layout == torch.strided else 0


@contextmanager
def explained_errors() -> Iterator[None]:
    """Within it, torch's error for parameters that a backward did not gather says what to do. Not collective."""
    try:
        yield
    except RuntimeError as error:
        if "storage of size 0" not in str(error):
            raise
        raise RuntimeError(
            "A backward has come to a block of `zero3_custom` whose parameters were not gathered. It gathers them when"
            " it comes to a tensor that the block has returned, alone or in dictionaries, lists, tuples or"
            " dataclasses. Return it so, not in an attribute or in another object. Or set"
            " `reshard_after_forward=False`. A backward through gradients in `training_step` cannot gather them."
        ) from error
