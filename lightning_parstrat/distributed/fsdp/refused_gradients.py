"""Errors for what code cannot compute with shards: they say what to do."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_parstrat.core.tensor_trees import leaves
from lightning_parstrat.core.wording import counted
from lightning_parstrat.distributed.torch_compat import current_graph_task_id

OF_A_SHARD = (
    "was computed from a weight of a block, which is a shard there. For a penalty on weights take the optimizer's"
    " `weight_decay`. Or compute it within the block's own `forward`, or have the block gathered with all else: by"
    " `auto_wrap_policy`, or a larger `min_num_params`. In manual optimization, each child of the module is a block. A"
    " layer of a tensor-parallel plan is a shard everywhere: leave it out of the plan."
)
"""How an error continues that begins with what was computed."""


@contextmanager
def no_gradients_of(shards: Collection[Tensor], failed: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Within it, autograd raises an error if it is to compute gradients of shards from what is none. Not collective.

    Errors of torch for parameters that are not gathered say what to do.

    Gathered tensors are in a graph, and their shards are not. So `torch.autograd.grad(allow_unused=True)` would return
    None for a shard, and `backward(inputs=...)` would do nothing.

    Args:
        shards: Parameters.
        failed: Called if a backward raises that is not within another one. The program may catch that, and continue.
    """
    own_grad, own_backward = torch.autograd.grad, torch.autograd.backward

    def check(results: Any, inputs: Any) -> None:
        wanted = [leaf.tensor for leaf in leaves(inputs) if leaf.tensor in shards]
        if wanted and not any(isinstance(leaf.tensor, DTensor) for leaf in leaves(results)):
            raise RuntimeError(
                f"Gradients of {counted(len(wanted), 'parameter')} in shards were asked for, by `torch.autograd.grad`"
                " or by `backward(inputs=...)`. Blocks compute with gathered parameters, so there are none. To train"
                " some parameters alone, set `requires_grad_(False)` of the others. Or leave the block to the root, by"
                " `auto_wrap_policy` or a larger `min_num_params`. Or train by `zero2_custom`."
            )

    def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = tuple(inputs) if isinstance(inputs, Iterator) else inputs
        check(outputs, inputs)
        return own_grad(outputs, inputs, *args, **kwargs)

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        inputs = kwargs.get("inputs")
        kwargs |= {"inputs": tuple(inputs)} if isinstance(inputs, Iterator) else {}
        check(tensors, kwargs.get("inputs"))
        try:
            own_backward(tensors, *args, **kwargs)
        except BaseException:
            if current_graph_task_id() == -1:
                failed()
            raise

    torch.autograd.grad, torch.autograd.backward = grad, backward
    try:
        with _explained_errors():
            yield
    finally:
        torch.autograd.grad, torch.autograd.backward = own_grad, own_backward


@contextmanager
def _explained_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" in str(error) and OF_A_SHARD not in str(error):
            raise RuntimeError(f"A value {OF_A_SHARD} ({error})") from error
        if "storage of size 0" not in str(error):
            raise
        raise RuntimeError(
            "A step has used a block of `zero3_custom` whose parameters were not gathered. A backward gathers them when"
            " it comes to a tensor that the block has returned, alone or in dictionaries, lists, tuples or"
            " dataclasses. A backward through gradients in `training_step` cannot gather them. Set"
            " `reshard_after_forward=False`, or leave the block to the root."
        ) from error
