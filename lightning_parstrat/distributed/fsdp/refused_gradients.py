"""Gradients of shards, which autograd cannot compute, as an error instead of nothing."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_parstrat.core.tensor_trees import leaves
from lightning_parstrat.core.wording import counted
from lightning_parstrat.distributed.fsdp.outputs import explained_errors
from lightning_parstrat.distributed.torch_compat import current_graph_task_id


@contextmanager
def no_gradients_of(shards: Collection[Tensor], failed: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Within it, autograd raises an error if it is to compute gradients of shards from what is none. Not collective.

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
        with explained_errors():
            return own_grad(outputs, inputs, *args, **kwargs)

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        inputs = kwargs.get("inputs")
        kwargs |= {"inputs": tuple(inputs)} if isinstance(inputs, Iterator) else {}
        check(tensors, kwargs.get("inputs"))
        try:
            with explained_errors():
                own_backward(tensors, *args, **kwargs)
        except BaseException:
            if current_graph_task_id() == -1:
                failed()
            raise

    torch.autograd.grad, torch.autograd.backward = grad, backward
    try:
        with explained_errors():
            yield
    finally:
        torch.autograd.grad, torch.autograd.backward = own_grad, own_backward
