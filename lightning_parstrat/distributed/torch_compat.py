"""What of torch is private, and used all the same: behind plain names, each with what it is for.

The rest of the package asks here, so that what another version of torch has changed is one file's work. Names are
dotted; what only objects have stands under the class, or else the module, whose source assigns it. All were seen in the
versions of :data:`TORCH_SEEN`.
``tests/test_private_names.py`` reads the two lists, and holds them against what is installed and against the package's
sources.

Used through this file: what for | what happens without it.

    torch._C._current_graph_task_id
        tells a gradient of the backward that was announced from one of a backward inside it | zero1_custom fails in the
        first backward
    torch.autograd.Variable._execution_engine
        runs the flush of gradients when backward ends, as DDP does | zero1_custom fails in the first backward
    torch.Tensor._post_accumulate_grad_hooks
        finds out whether a user's hook was registered after ours, or sees what has accumulated; is no reason to wait
        for a parameter | zero1_custom cannot be imported
    torch.Tensor._backward_hooks
        is no reason to wait for a parameter | zero1_custom cannot be imported
    torch.nn.Module._parameters
        waits for what a module holds; the public `parameters()` takes six times as long, before every module's call |
        zero1_custom fails in the second forward, ddp_tuned in the first backward; use `parameters(recurse=False)`
    torch.nn.Module._modules
        looks in every backward whether a module has got or lost parameters; the public `children()` takes longer |
        ddp_tuned does not begin; use `children()`
    torch._C._storage_Use_Count
        finds out whether tensors of the user's lie in a buffer that a bucket is about to reuse | zero1_custom fails
        where a training changed parameters' data
    torch.UntypedStorage._cdata
        names a storage to `_storage_Use_Count` | as above
    torch._dynamo.callback.callback_handler
        keeps parameters from being in flight while torch.compile looks at them | zero1_custom does not begin; without
        the call, code compiled in training reads old parameters
    torch._dynamo.eval_frame.OptimizedModule
        knows a compiled module | strategies do not begin
    torch.nn.Module._compiled_call_impl
        knows a module that was compiled in place, and waits for parameters before its code | strategies do not begin
    lightning.pytorch.core.module.LightningModule._compiler_ctx
        knows a LightningModule that was compiled; here, as floor 1 asks | its parameters are gathered while it runs,
        and compiled code reads old ones
    torch.autograd._profiler_enabled
        names what a step does only where somebody traces it | zero1_custom does not begin
    torch._foreach_norm
        norms of many tensors, in few kernels | a step of zero1_custom or of ddp_tuned that clips fails
    torch._foreach_mul_
        scales many tensors, in few kernels | a step of zero1_custom or of ddp_tuned that clips fails
    torch._foreach_copy_
        copies gradients into a bucket, in few kernels | zero1_custom fails in backward
    torch.distributed.distributed_c10d._get_default_store
        a place where ranks report when collectives do not work | no strategy begins
    torch.distributed.distributed_c10d._world
        all groups of this process, of which those of a GPU are to end | a rank whose peers have failed waits for its
        GPU until a timeout
    torch.distributed.ProcessGroup._get_backend
        as `_world` | as `_world`
    torch.distributed.ProcessGroup._get_sequence_number_for_group
        whether a rank has launched what another one waits for | on GPUs, and in DDP's backward, a rank waits in silence
    torch.nn.parallel.distributed._ddp_params_and_buffers_to_ignore
        the names that a user has told DDP to ignore, which are ignored here, too | they are broadcast and sharded like
        the others
    torch.nn.parallel.distributed.DistributedDataParallel._use_python_reducer
        torch.compile sends gradients by itself | ddp_tuned does not begin
    torch.nn.parallel.distributed.DistributedDataParallel._check_reducer_finalized
        raises torch's own error where a reducer that is exchanged still waits for a gradient | ddp_tuned cannot change
        buckets
    torch.nn.parallel.distributed.DistributedDataParallel._remove_autograd_hooks
        takes an old reducer off the parameters, whoever still holds it | ddp_tuned ends with an error
    torch.optim.optimizer._global_optimizer_pre_hooks
        runs the user's hooks of all optimizers once a step, on full parameters | strategies cannot be imported
    torch.optim.optimizer._global_optimizer_post_hooks
        as `_global_optimizer_pre_hooks` | strategies cannot be imported
    torch.optim.Optimizer._optimizer_step_pre_hooks
        runs the user's hooks of an optimizer once, on full parameters and unsharded state | the user's hooks of an
        optimizer run twice in a step, or on a copy
    torch.optim.Optimizer._optimizer_step_post_hooks
        runs the user's hooks of an optimizer once, on full parameters and unsharded state | the user's hooks of an
        optimizer run twice in a step, or on a copy
    torch.optim.Optimizer._optimizer_state_dict_pre_hooks
        runs the user's hooks of an optimizer once, on full parameters and unsharded state | the user's hooks of an
        optimizer run twice in a step, or on a copy
    torch.optim.Optimizer._optimizer_state_dict_post_hooks
        runs the user's hooks of an optimizer once, on full parameters and unsharded state | the user's hooks of an
        optimizer run twice in a step, or on a copy
    torch.optim.lr_scheduler._wrapped_by_lr_sched
        tells a scheduler's wrapper of `step` from a user's, and marks the one that stands in for it | an optimizer with
        a scheduler is stepped on all ranks, as under `ddp`
    torch.optim.lr_scheduler._opt_called
        tells schedulers that the optimizer has stepped | schedulers warn of a wrong order of steps
    torch.optim.Adam._step_supports_amp_scaling
        knows optimizers that unscale gradients, and leave steps out, by themselves (`fused=True`) | their skipped steps
        in 16-mixed are not counted
    torch.utils.data.dataloader._BaseDataLoaderIter._sampler_iter
        what a data loader draws indices from, which knows its order | training does not begin; give loaders a
        `state_dict`, or resume at the begin of an epoch
    torch.utils.data.dataloader._BaseDataLoaderIter._num_yielded
        how many batches a data loader has handed out, whatever its workers have prefetched | a checkpoint within an
        epoch cannot be saved
    torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._fsdp_param_group
        finds what gathers a sharded parameter | zero3_custom does not begin
    torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._unsharded_param
        finds what was written to gathered parameters, and those that this rank has not used | zero3_custom does not
        begin
    torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._to_sharded
        keeps what was written to gathered parameters before they are freed | such writes are lost
    torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._reshard_after_forward_event
        has the next gather of a GPU wait for what was written | such writes may come one gather late

Read or overridden on themselves by classes in ``strategies/``: what for | what happens without it.

    torch.amp.GradScaler._scale
        knows whether a loss was scaled yet | clipping in 16-mixed fails
    torch.amp.GradScaler._per_optimizer_states
        knows whether an unscaled optimizer is still to step | clipping in 16-mixed fails
    torch.amp.GradScaler._unscale_grads_
        is overridden: unscales gradients in shards | zero1_custom in 16-mixed steps scaled gradients
    torch.amp.GradScaler._maybe_opt_step
        is overridden: skips a step on all ranks when any rank must | zero1_custom in 16-mixed may skip a step on some
        ranks only
"""

import dataclasses
import functools
import operator
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import Store, _get_default_store, _world
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.hooks import RemovableHandle

TORCH_SEEN = ("2.11.0", "2.13.0")
"""The versions of torch that the names above were seen in, and the tests have run with; the last is the pinned one."""


def is_newer(version: str, seen: Collection[str]) -> bool:
    """Whether a version is of a later minor release than all that were seen; one that has no numbers is not."""
    minors = [tuple(map(int, re.findall(r"\d+", one)[:2])) for one in (version, *seen)]
    return minors[0] > max(minors[1:])


# Backward.

current_graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward that runs in this thread. An alias, as it is asked for every gradient."""

GRADIENT_HOOKS: tuple[Any, ...] = (cast(Any, Tensor)._backward_hooks, cast(Any, Tensor)._post_accumulate_grad_hooks)
"""The attributes of a tensor that hold hooks for its gradient."""


call_after_backward: Callable[[Callable[[], None]], None] = cast(
    Any, torch.autograd.Variable
)._execution_engine.queue_callback
"""Has its argument called when the backward that is running ends."""


accumulated_gradient_hooks: Callable[[Tensor], dict[int, Any] | None] = operator.attrgetter(
    "_post_accumulate_grad_hooks"
)
"""The hooks for a parameter's accumulated gradient, by their ids, in the order in which they were registered."""


def gradient_hooks(parameters: Iterable[Tensor]) -> list[Callable[..., Any]]:
    """All hooks for the parameters' accumulated gradients."""
    hooks: list[dict[int, Any] | None] = [cast(Any, parameter)._post_accumulate_grad_hooks for parameter in parameters]
    return [hook for of_one in hooks if of_one for hook in of_one.values()]


def has_hooks(parameter: Tensor) -> bool:
    """Whether hooks were registered for the parameter's gradient, before it is accumulated."""
    return bool(cast(Any, parameter)._backward_hooks)


def lend_hooks(parameter: Tensor, leaf: Tensor) -> RemovableHandle:
    """Has the hooks that ``parameter`` has by then run on the gradient of ``leaf``, which stands for it in graphs."""

    def run(gradient: Tensor) -> Tensor:
        for hook in list((cast(Any, parameter)._backward_hooks or {}).values()):
            result = hook(gradient)
            gradient = gradient if result is None else result
        return gradient

    return cast(RemovableHandle, cast(Any, leaf).register_hook(run))


def take_over_attributes(old: Tensor, new: Tensor) -> None:
    """Gives a parameter that takes another's place what users have set on that one: attributes, and hooks."""
    vars(new).update(vars(old))
    trainable = new.requires_grad
    new.requires_grad_(True)
    for hook in (cast(Any, old)._backward_hooks or {}).values():
        cast(Any, new).register_hook(hook)
    for hook in (cast(Any, old)._post_accumulate_grad_hooks or {}).values():
        cast(Any, new).register_post_accumulate_grad_hook(hook)
    new.requires_grad_(trainable)


# Modules.


own_parameters: Callable[[nn.Module], dict[str, Tensor | None]] = operator.attrgetter("_parameters")
"""The parameters that a module holds itself, by name."""


def held_by(modules: Iterable[nn.Module]) -> list[Collection[nn.Module | Tensor | None]]:
    """Views of what each of ``modules`` holds itself, now and later: modules, parameters, None where a name is free."""
    return [names.values() for module in modules for names in (module._modules, module._parameters)]


def names_ignored_by_ddp(module: nn.Module) -> set[str]:
    """Names of parameters and buffers that a user has told DDP to leave alone."""
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def is_compiled(module: nn.Module) -> bool:
    """Whether code was made of the module, or of a part of it, that depends on the class of parameters."""
    # Imported with the first optimizer, in any case; before that it would only take time.
    from torch._dynamo.eval_frame import OptimizedModule

    if getattr(module, "_compiler_ctx", None) is not None:
        return True
    return any(
        isinstance(child, (OptimizedModule, torch.jit.ScriptModule)) or child._compiled_call_impl is not None
        for child in module.modules()
    )


def is_compiled_as_a_whole(module: nn.Module) -> bool:
    """Whether compiled code is called by none of the module's parts: as its training step, or by scripts."""
    if getattr(module, "_compiler_ctx", None) is not None:
        return True
    return any(isinstance(child, torch.jit.ScriptModule) for child in module.modules())


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """What calling the module calls, where it was compiled in place."""
    return module._compiled_call_impl


def set_compiled_call(module: nn.Module, call: Callable[..., Any]) -> None:
    """Has a call of the module, which was compiled in place, call something else."""
    module._compiled_call_impl = call


def ignore_warnings_of_global_hooks(module: nn.Module) -> None:
    """Leaves out what torch says where hooks of all modules meet a compiled part: ours do nothing a second time."""
    from torch._dynamo.eval_frame import OptimizedModule

    if any(isinstance(part, OptimizedModule) for part in module.modules()):
        warnings.filterwarnings("ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks")


def replays_captured_graphs(module: nn.Module) -> bool:
    """Whether any part of the module was given to ``torch.cuda.make_graphed_callables``."""
    # That sets `forward` on the instance; a function knows where it was defined.
    forwards = (vars(child).get("forward") for child in module.modules())
    return any(getattr(forward, "__module__", None) == "torch.cuda.graphs" for forward in forwards)


profiler_is_enabled: Callable[[], bool] = cast(Any, torch.autograd)._profiler_enabled
"""Whether ``torch.profiler`` (or its predecessor) records what this thread does. An alias, as every mark asks."""


def call_before_compiling(callback: Callable[..., Any]) -> None:
    """Has ``callback`` called whenever torch.compile is about to look at code."""
    from torch._dynamo.callback import callback_handler

    callback_handler.register_start_callback(callback)


def looks_at_code(occasion: Any) -> bool:
    """Whether :func:`call_before_compiling` has called for that, rather than for a backward, or to capture a graph."""
    return bool(occasion.callback_trigger.name == "DYNAMO")


def stop_calling_before_compiling(callback: Callable[..., Any]) -> None:
    """Undoes :func:`call_before_compiling`."""
    from torch._dynamo.callback import callback_handler

    callback_handler.remove_start_callback(callback)


# DDP.


def sends_when_compiled(ddp: DistributedDataParallel) -> bool:
    """Whether torch.compile sends the wrapper's gradients, and its reducer does not."""
    return bool(cast(Any, ddp)._use_python_reducer)


def check_reducer_finalized(ddp: DistributedDataParallel) -> None:
    """Raises torch's own error if the wrapper's reducer still waits for gradients of the last backward."""
    cast(Any, ddp)._check_reducer_finalized()


def remove_hooks(ddp: DistributedDataParallel) -> None:
    """Takes the wrapper's reducer off the parameters, after which it reduces nothing. Not collective.

    Else the module cannot be trained by another wrapper while somebody, such as a traceback, still holds this one.
    """
    cast(Any, ddp).reducer._remove_autograd_hooks()


# FSDP2.


def fsdp_params_of(module: nn.Module) -> Iterator[tuple[Tensor, Any]]:
    """The parameters that a sharded module gathers itself, each with FSDP2's object that gathers it."""
    group = _fsdp_group(module)
    return ((fsdp_param.sharded_param, fsdp_param) for fsdp_param in (() if group is None else group.fsdp_params))


def _fsdp_group(module: nn.Module) -> Any:
    # Here, as it takes long to import.
    from torch.distributed.fsdp import fully_shard

    return cast(Any, fully_shard).state(module)._fsdp_param_group


def gathered_by_fsdp(module: nn.Module) -> list[tuple[Any, Tensor]]:
    """The sharded parameters that a module gathers itself, each with what it is gathered into. It is gathered now."""
    return [(shard, fsdp_param._unsharded_param) for shard, fsdp_param in fsdp_params_of(module)]


def call_before_freeing(module: nn.Module, callback: Callable[[], None]) -> None:
    """Has ``callback`` called before a sharded module frees what it has gathered; takes the place of an earlier one."""
    group = _fsdp_group(module)
    if group is None:
        return

    def free() -> None:
        try:
            if group.is_unsharded:
                callback()
                if group.device.type == "cuda":
                    # The next gather reads shards on a stream of its own: not before they are written.
                    group._reshard_after_forward_event = torch.cuda.current_stream(group.device).record_event()
        finally:
            type(group)._to_sharded(group)

    group._to_sharded = free


def reduce_unused_too(module: nn.Module) -> None:
    """Has a sharded module reduce zeros for those of its parameters that this rank has not used: others may have."""
    group = _fsdp_group(module)
    if group is not None:
        # FSDP2's own `set_reduce_scatter_unused_params` takes no gradients that are wider than their parameters.
        group.post_backward = functools.partial(_reduce_with_zeros, group)


def _reduce_with_zeros(group: Any, *unused: Any) -> None:
    for fsdp_param in group.fsdp_params if group.reduce_grads else ():
        # Before it is gathered for the first time, there is none.
        gathered: Any = getattr(fsdp_param, "_unsharded_param", None)
        if gathered is None or not gathered.requires_grad or fsdp_param.unsharded_accumulated_grad is not None:
            continue
        if gathered.grad is None:
            gathered.grad = torch.zeros_like(gathered, dtype=gathered.grad_dtype)
    type(group).post_backward(group, *unused)


def gather_in(fsdp_param: Any, dtype: torch.dtype | None) -> None:
    """Has FSDP2 gather one parameter in a dtype from now on, or in its own. Nothing is gathered.

    What it was gathered into before is forgotten: it may have had another dtype.
    """

    def set_dtypes(policy: Any) -> None:
        type(fsdp_param).init_dtype_attrs(fsdp_param, dataclasses.replace(policy, param_dtype=dtype))

    fsdp_param.init_dtype_attrs = set_dtypes
    fsdp_param.all_gather_outputs = []
    vars(fsdp_param).pop("_unsharded_param", None)


def is_gathered_in_a_chosen_dtype(fsdp_param: Any) -> bool:
    """Whether :func:`gather_in` was called for a parameter. Not of those that a user has sharded."""
    return "init_dtype_attrs" in vars(fsdp_param)


# Data loaders.


def index_iterator(batches: Any) -> Any:
    """What a data loader's iterator draws indices from; None where it is none of torch's."""
    return batches._sampler_iter if isinstance(batches, _BaseDataLoaderIter) else None


def batches_handed_out(batches: Any) -> int:
    """How many batches a data loader's iterator has handed out in its present pass."""
    number: int = batches._num_yielded
    return number


# Many tensors at once. A loop over public functions would launch a kernel for each tensor.


norm_all: Callable[..., Sequence[Tensor]] = torch._foreach_norm
"""The norm of each of several tensors; at least one."""

multiply_all: Callable[[list[Tensor], Tensor | float], None] = cast(Any, torch)._foreach_mul_
"""Multiplies tensors, of which there is at least one, in place."""

copy_all: Callable[[list[Tensor], list[Tensor]], None] = cast(Any, torch)._foreach_copy_
"""Copies, to places of their shapes, tensors of which there is at least one."""


# Memory and files.


def users_of_storage(tensor: Tensor) -> int:
    """How many tensors and handles share a tensor's memory; the handle that is made to ask counts."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


# Processes.


def default_store() -> Store:
    """The store over which the default process group has found together."""
    return _get_default_store()


def nccl_backends() -> list[Any]:
    """What sends by NCCL, of all groups of this process."""
    found = []
    for group in _world.pg_map:
        # Of a GPU it sends nothing.
        with suppress(RuntimeError):
            found.append(cast(Any, group)._get_backend(torch.device("cuda")))
    return [backend for backend in found if backend.name() == "nccl"]


def collectives_launched(group: dist.ProcessGroup) -> int:
    """How many collectives this rank has launched by the group; 0 where its backend does not count. Any thread."""
    try:
        return int(cast(Any, group)._get_sequence_number_for_group())
    except RuntimeError:
        return 0


# Optimizers.

_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


@functools.cache
def _hooks() -> set[str]:
    return {name for name in vars(Optimizer([torch.zeros(1)], {})) if "hook" in name}


def takes_hooks(optimizer: Optimizer) -> bool:
    """Whether hooks can be registered with the optimizer: not if its class has left out ``Optimizer.__init__``."""
    return _hooks() <= vars(optimizer).keys()


def has_step_hooks(optimizer: Optimizer, besides: Callable[..., Any]) -> bool:
    """Whether anything but ``besides`` was registered to run before or after the optimizer's steps."""
    registered = (getattr(optimizer, name, None) or {} for name in _STEP_HOOKS)
    return any(hook is not besides for hooks in registered for hook in hooks.values())


def has_global_step_hooks() -> bool:
    """Whether anything was registered to run before or after all optimizers' steps."""
    return bool(_global_optimizer_pre_hooks or _global_optimizer_post_hooks)


def attributes_without_hooks(optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's attributes, with no hook registered."""
    return {name: OrderedDict() if name in _hooks() else value for name, value in vars(optimizer).items()}


@contextmanager
def without_step_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Within it ``step`` of the optimizer's own class runs no hooks: they have been run, on the full groups."""
    own = vars(optimizer)
    kept = {name: own[name] for name in _STEP_HOOKS if name in own}
    of_all_optimizers: list[OrderedDict[int, Any]] = [_global_optimizer_pre_hooks, _global_optimizer_post_hooks]  # type: ignore[list-item]
    kept_globally = [(hooks, hooks.copy()) for hooks in of_all_optimizers]
    own.update({name: OrderedDict() for name in kept})
    for hooks, _ in kept_globally:
        hooks.clear()
    try:
        yield
    finally:
        own.update(kept)
        for hooks, before in kept_globally:
            hooks.update(before)


def run_hooks_before_state_dict(optimizer: Optimizer) -> None:
    """Runs what was registered to run before the optimizer's state is asked for."""
    for hook in optimizer._optimizer_state_dict_pre_hooks.values():
        hook(optimizer)


def run_hooks_after_state_dict(optimizer: Optimizer, state_dict: dict[Any, Any]) -> dict[Any, Any]:
    """Runs what was registered to change the optimizer's state dict; returns what comes of it."""
    for hook in optimizer._optimizer_state_dict_post_hooks.values():
        state_dict = hook(optimizer, state_dict) or state_dict
    return state_dict


def is_wrapped_by_scheduler(step: Callable[..., Any]) -> bool:
    """Whether an optimizer's ``step`` is a learning rate scheduler's wrapper."""
    return hasattr(step, "_wrapped_by_lr_sched")


def mark_as_wrapped(step: Callable[..., Any]) -> None:
    """Has schedulers take ``step`` for a wrapper of theirs, which they do not wrap again."""
    cast(Any, step)._wrapped_by_lr_sched = True


note_step_called: Callable[[Optimizer], None] = operator.methodcaller("__setattr__", "_opt_called", True)
"""Tells schedulers that the optimizer has stepped, as their wrapper would."""


def unscales_in_step(optimizer: Optimizer) -> bool:
    """Whether the optimizer takes scaled gradients, and decides on the device whether it steps."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))
