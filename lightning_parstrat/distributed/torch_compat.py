"""The private names of torch that the package uses: each behind a plain name, with its purpose.

All other files import them from here. So a change in another version of torch is a change of one file. Names are
dotted. An attribute that only objects have is listed under the class whose source assigns it, or under the module. All
names were seen in the versions of :data:`TORCH_SEEN`. ``tests/test_private_names.py`` reads the two lists. It compares
them with the installed version and with the package's sources.

Used through this file: what for | what happens without it.

    torch._C._current_graph_task_id
        Separates a gradient of the announced backward from that of a backward inside it | zero1_custom fails in the
        first backward.
    torch.Tensor._post_accumulate_grad_hooks
        Finds out whether a user's hook was registered after ours, or sees accumulated gradients. Access does not wait
        for a parameter | zero1_custom cannot be imported.
    torch.Tensor._backward_hooks
        Access does not wait for a parameter | zero1_custom cannot be imported.
    torch.nn.Module._forward_hooks
        Refuses hooks that would run on a copy | pipeline_custom does not begin if ranks divide its blocks.
    torch.nn.Module._forward_pre_hooks
        As `_forward_hooks` | As for `_forward_hooks`.
    torch.nn.Module._parameters
        Waits for a module's parameters. The public `parameters()` takes six times as long, before every module's call |
        zero1_custom fails in the second forward, ddp_tuned in the first backward. Use `parameters(recurse=False)`.
    torch.nn.Module._modules
        Checks in every backward whether a module has got or lost parameters. The public `children()` takes longer |
        ddp_tuned does not begin. Use `children()`.
    torch._C._storage_Use_Count
        Finds out whether a user's tensors lie in a buffer that a bucket will reuse | If a training changed parameters'
        data, zero1_custom fails.
    torch.UntypedStorage._cdata
        Identifies a storage to `_storage_Use_Count` | As for `_storage_Use_Count`.
    torch._dynamo.callback.callback_handler
        Keeps parameters from being in flight while torch.compile reads them | zero1_custom does not begin. Without the
        call, code compiled in training reads old parameters.
    torch._dynamo.eval_frame.OptimizedModule
        Recognizes a compiled module | Strategies do not begin.
    torch.nn.Module._compiled_call_impl
        Recognizes a module that was compiled in place, and waits for parameters before its code | Strategies do not
        begin.
    lightning.pytorch.core.module.LightningModule._compiler_ctx
        Recognizes a LightningModule that was compiled. It is here, as floor 1 uses it | Its parameters are gathered
        while it runs, and compiled code reads old ones.
    torch._subclasses
        Tensors without values, for what other stages compute | pipeline_custom does not begin.
    torch._subclasses.fake_tensor.FakeTensorMode._allow_unsafe_data_ptr_access
        Refuses kernels that torch does not know, and that would run on tensors without memory | pipeline_custom ends by
        a segmentation fault, or an illegal memory access.
    torch.autograd._profiler_enabled
        Names the parts of a step only during a trace | zero1_custom does not begin.
    torch._foreach_norm
        Norms of many tensors, in few kernels | A step of zero1_custom or of ddp_tuned that clips fails.
    torch._foreach_mul_
        Scales many tensors, in few kernels | A step of zero1_custom or of ddp_tuned that clips fails.
    torch._foreach_copy_
        Copies gradients into a bucket, in few kernels | zero1_custom fails in backward.
    torch.distributed.distributed_c10d._get_default_store
        A store in which ranks report when collectives do not work | No strategy begins.
    torch.distributed.distributed_c10d._world
        All groups of this process, to end those of a GPU | A rank whose peers have failed waits for its GPU until a
        timeout.
    torch.distributed.ProcessGroup._get_backend
        As `_world` | As `_world`.
    torch.distributed.ProcessGroup._get_sequence_number_for_group
        Whether a rank has launched the collective that another one waits for | On GPUs, and in DDP's backward, a rank
        waits without a message.
    torch.nn.parallel.distributed._ddp_params_and_buffers_to_ignore
        The names that a user makes DDP ignore. They are ignored here, too | They are broadcast and sharded like the
        others.
    torch.nn.parallel.distributed.DistributedDataParallel._use_python_reducer
        torch.compile sends gradients by itself | ddp_tuned does not begin.
    torch.nn.parallel.distributed.DistributedDataParallel._check_reducer_finalized
        Raises torch's own error if a reducer that is exchanged still waits for a gradient | ddp_tuned cannot change
        buckets.
    torch.nn.parallel.distributed.DistributedDataParallel._remove_autograd_hooks
        Removes an old reducer's hooks from the parameters, even if a reference keeps the reducer | ddp_tuned ends with
        an error.
    torch.optim.optimizer._global_optimizer_pre_hooks
        Runs the user's hooks of all optimizers once a step, on full parameters | Strategies cannot be imported.
    torch.optim.optimizer._global_optimizer_post_hooks
        As `_global_optimizer_pre_hooks` | Strategies cannot be imported.
    torch.optim.Optimizer._optimizer_step_pre_hooks
        Runs the user's hooks of an optimizer once, on full parameters and unsharded state | The user's hooks of an
        optimizer run twice in a step, or on a copy.
    torch.optim.Optimizer._optimizer_step_post_hooks
        As `_optimizer_step_pre_hooks` | As for `_optimizer_step_pre_hooks`.
    torch.optim.lr_scheduler._wrapped_by_lr_sched
        Separates a scheduler's wrapper of `step` from a user's, and marks the method that replaces it | An optimizer
        with a scheduler is stepped on all ranks, as under `ddp`.
    torch.optim.lr_scheduler._opt_called
        Tells schedulers that the optimizer has stepped | Schedulers warn of a wrong order of steps.
    torch.optim.Adam._step_supports_amp_scaling
        Recognizes optimizers that unscale gradients, and skip steps, by themselves (`fused=True`) | Their skipped steps
        in 16-mixed are not counted.
    torch.utils.data.dataloader._BaseDataLoaderIter._sampler_iter
        The source of a data loader's indices, which contains their order | Training does not begin. Give loaders a
        `state_dict`, or resume at the start of an epoch.
    torch.utils.data.dataloader._BaseDataLoaderIter._num_yielded
        How many batches a data loader has returned, without those that its workers have prefetched | A checkpoint
        within an epoch cannot be saved.
    torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._root_post_backward_final_callback
        Ends a step of modules that were called for several micro-batches, as torch's pipeline stages do |
        pipeline_custom with shard="parameters" fails in the first step.
    torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._fsdp_param_group
        Finds the object that gathers a sharded parameter | zero3_custom does not begin.
    torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._unsharded_param
        Finds writes to gathered parameters, and parameters that this rank has not used | zero3_custom does not begin.
    torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._to_sharded
        Keeps writes to gathered parameters before they are freed | Such writes are lost.
    torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._reshard_after_forward_event
        Makes the next gather of a GPU wait for writes | Such writes may be lost.
    torch.Tensor._base
        Finds the views that a block returns, which are copied | A step of zero3_custom fails.
    torch.Tensor._version
        Finds writes to shards within a step | zero3_custom does not begin.

Read or overridden on themselves by classes in ``strategies/``: what for | what happens without it.

    torch.amp.GradScaler._scale
        Whether a loss was scaled yet | Clipping in 16-mixed fails.
    torch.amp.GradScaler._per_optimizer_states
        Whether an unscaled optimizer is still to step | Clipping in 16-mixed fails.
    torch.amp.GradScaler._unscale_grads_
        Overridden: unscales gradients in shards | zero1_custom in 16-mixed steps scaled gradients.
    torch.amp.GradScaler._maybe_opt_step
        Overridden: skips a step on all ranks when any rank must | zero1_custom in 16-mixed may skip a step on some
        ranks only.
"""

import dataclasses
import functools
import operator
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
"""The versions of torch in which the names above were seen, and with which the tests have run. The last is pinned."""


# Backward.

current_graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward that runs in this thread. An alias, as every gradient calls it."""

GRADIENT_HOOKS: tuple[Any, ...] = (cast(Any, Tensor)._backward_hooks, cast(Any, Tensor)._post_accumulate_grad_hooks)
"""The attributes of a tensor that hold hooks for its gradient."""


accumulated_gradient_hooks: Callable[[Tensor], dict[int, Any] | None] = operator.attrgetter(
    "_post_accumulate_grad_hooks"
)
"""The hooks for a parameter's accumulated gradient, by their ids, in the order of registration."""


def is_view(tensor: Tensor) -> bool:
    """Whether autograd knows a tensor as a view of another one."""
    return tensor._base is not None


def has_hooks(parameter: Tensor) -> bool:
    """Whether hooks were registered for the parameter's gradient, before it is accumulated."""
    return bool(cast(Any, parameter)._backward_hooks)


def has_forward_hooks(module: nn.Module, before: bool = True) -> bool:
    """Whether hooks were registered that run after the module's forward, or, if wanted, ``before`` it."""
    return bool(module._forward_hooks or (before and module._forward_pre_hooks))


def lend_hooks(parameter: Tensor, leaf: Tensor) -> RemovableHandle:
    """Runs the hooks of ``parameter`` on the gradient of ``leaf``, which replaces it in graphs.

    The hooks are those that ``parameter`` has when the gradient arrives.
    """

    def run(gradient: Tensor) -> Tensor:
        for hook in list((cast(Any, parameter)._backward_hooks or {}).values()):
            result = hook(gradient)
            gradient = gradient if result is None else result
        return gradient

    return cast(RemovableHandle, cast(Any, leaf).register_hook(run))


def take_over_attributes(old: Tensor, new: Tensor) -> None:
    """Gives a replacing parameter the attributes and hooks that users have set on the replaced one."""
    vars(new).update(vars(old))
    trainable = new.requires_grad
    new.requires_grad_(True)
    for hook in (cast(Any, old)._backward_hooks or {}).values():
        cast(Any, new).register_hook(hook)
    for hook in (cast(Any, old)._post_accumulate_grad_hooks or {}).values():
        cast(Any, new).register_post_accumulate_grad_hook(hook)
    new.requires_grad_(trainable)


# Tensors without values.

FakeTensor = torch._subclasses.fake_tensor.FakeTensor
FakeTensorMode = torch._subclasses.fake_tensor.FakeTensorMode
NO_VALUES = (
    torch._subclasses.fake_tensor.DataDependentOutputException,
    torch._subclasses.fake_tensor.DynamicOutputShapeException,
)
"""The errors of code that reads the values of such a tensor."""


def refuse_addresses(mode: FakeTensorMode, refuses: bool) -> None:
    """Whether code that reads the address of a tensor without values gets an error. Otherwise it gets 0."""
    cast(Any, mode)._allow_unsafe_data_ptr_access = not refuses


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor has values."""
    return not (isinstance(tensor, FakeTensor) or tensor.is_meta)


# Modules.


own_parameters: Callable[[nn.Module], dict[str, Tensor | None]] = operator.attrgetter("_parameters")
"""The parameters that a module holds itself, by name."""


def held_by(modules: Iterable[nn.Module]) -> list[Collection[nn.Module | Tensor | None]]:
    """Views of what each of ``modules`` holds itself, now and later: modules and parameters. A free name holds None."""
    return [names.values() for module in modules for names in (module._modules, module._parameters)]


def names_ignored_by_ddp(module: nn.Module) -> set[str]:
    """Names of parameters and buffers that a user makes DDP ignore."""
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def is_compiled(module: nn.Module) -> bool:
    """Whether the module, or a part of it, has compiled code that depends on the class of parameters."""
    # The first optimizer imports it in any case. Before that, the import would only take time.
    from torch._dynamo.eval_frame import OptimizedModule

    return is_compiled_as_a_whole(module) or any(
        isinstance(child, OptimizedModule) or child._compiled_call_impl is not None for child in module.modules()
    )


def is_compiled_as_a_whole(module: nn.Module) -> bool:
    """Whether compiled code is called by none of the module's parts: as its training step, or by scripts."""
    if getattr(module, "_compiler_ctx", None) is not None:
        return True
    return any(isinstance(child, torch.jit.ScriptModule) for child in module.modules())


compiled_call: Callable[[nn.Module], Callable[..., Any] | None] = operator.attrgetter("_compiled_call_impl")
"""If the module was compiled in place, the function that calling the module calls."""


def set_compiled_call(module: nn.Module, call: Callable[..., Any]) -> None:
    """Replaces the function that a call of a module calls, if the module was compiled in place."""
    module._compiled_call_impl = call


def ignore_warnings_of_global_hooks(module: nn.Module) -> None:
    """Suppresses torch's warning about global hooks and a compiled part: ours do nothing a second time."""
    from torch._dynamo.eval_frame import OptimizedModule

    if any(isinstance(part, OptimizedModule) for part in module.modules()):
        warnings.filterwarnings("ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks")


profiler_is_enabled: Callable[[], bool] = cast(Any, torch.autograd)._profiler_enabled
"""Whether ``torch.profiler`` (or its predecessor) records this thread. An alias, as every mark calls it."""


def call_before_compiling(callback: Callable[..., Any]) -> Callable[[], None]:
    """Calls ``callback`` whenever torch.compile is about to read code. Returns a function that ends it."""
    from torch._dynamo.callback import callback_handler

    callback_handler.register_start_callback(callback)
    return functools.partial(callback_handler.remove_start_callback, callback)


def looks_at_code(occasion: Any) -> bool:
    """Whether code caused a call of :func:`call_before_compiling`, not a backward, nor the capture of a graph."""
    return bool(occasion.callback_trigger.name == "DYNAMO")


# DDP.


def sends_when_compiled(ddp: DistributedDataParallel) -> bool:
    """Whether torch.compile sends the wrapper's gradients, and its reducer does not."""
    return bool(cast(Any, ddp)._use_python_reducer)


check_reducer_finalized: Callable[[DistributedDataParallel], None] = operator.methodcaller("_check_reducer_finalized")
"""Raises torch's own error if the wrapper's reducer still waits for gradients of the last backward."""


def remove_hooks(ddp: DistributedDataParallel) -> None:
    """Removes the hooks of the wrapper's reducer, which then reduces nothing. Not collective.

    Otherwise another wrapper could not train the module while a reference, such as a traceback's, keeps this one.
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
    """The sharded parameters that a gathered module gathers itself, each with its gathered tensor."""
    return [(shard, fsdp_param._unsharded_param) for shard, fsdp_param in fsdp_params_of(module)]


def call_before_freeing(module: nn.Module, callback: Callable[[], None]) -> None:
    """Calls ``callback`` before a sharded module frees its gathered parameters. It replaces an earlier callback."""
    group = _fsdp_group(module)
    if group is None:
        return

    def free() -> None:
        try:
            if group.is_unsharded:
                callback()
                if group.device.type == "cuda":
                    gather_after_writes(module)
        finally:
            type(group)._to_sharded(group)

    group._to_sharded = free


def gather_after_writes(module: nn.Module) -> None:
    """Makes the next gather of a sharded module wait for all that the current stream of its GPU was given until now."""
    group = _fsdp_group(module)
    if group is not None:
        group._reshard_after_forward_event = torch.cuda.current_stream(group.device).record_event()


version_of: Callable[[Tensor], int] = operator.attrgetter("_version")
"""A count of the writes in place. It misses those through ``data``."""


def call_before_gathers(
    module: nn.Module, before_forward: Callable[[], Callable[[], None] | None], before_backward: Callable[[], None]
) -> None:
    """Calls back before a sharded module's forward gathers its parameters, and when a backward reaches its output.

    If ``before_forward`` returns a function, it is called when they are gathered. It replaces earlier callbacks.
    """
    group = _fsdp_group(module)

    def begin(name: str, callback: Callable[[], Callable[[], None] | None], *args: Any) -> Any:
        gathered = callback()
        result = getattr(type(group), name)(group, *args)
        if gathered is not None:
            gathered()
        return result

    if group is not None:
        group.pre_forward = functools.partial(begin, "pre_forward", before_forward)
        group.pre_backward = functools.partial(begin, "pre_backward", before_backward)


def reduce_unused_too(module: nn.Module, note: Callable[[Tensor], None]) -> None:
    """Makes a sharded module reduce zeros for its parameters that this rank has not used: other ranks may have.

    Args:
        module: The module.
        note: Called with each such parameter that had no gradient until then.
    """
    group = _fsdp_group(module)
    if group is not None:
        # FSDP2's own `set_reduce_scatter_unused_params` accepts no gradients that are wider than their parameters.
        group.post_backward = functools.partial(_reduce_with_zeros, group, note)


def _reduce_with_zeros(group: Any, note: Callable[[Tensor], None], *unused: Any) -> None:
    for fsdp_param in group.fsdp_params if group.reduce_grads else ():
        # Before the first gather, there is none.
        gathered: Any = getattr(fsdp_param, "_unsharded_param", None)
        if gathered is None or not gathered.requires_grad or fsdp_param.unsharded_accumulated_grad is not None:
            continue
        if gathered.grad is None:
            gathered.grad = torch.zeros_like(gathered, dtype=gathered.grad_dtype)
            if fsdp_param.sharded_param.grad is None:
                note(fsdp_param.sharded_param)
    type(group).post_backward(group, *unused)


def reduce_accumulated(module: nn.Module) -> None:
    """Makes a sharded module reduce what backwards have accumulated, and free its parameters. Collective.

    torch's pipeline stages do the same for modules that are sharded as a whole.
    """
    from torch.distributed.fsdp import fully_shard

    sharded = cast(Any, module)
    sharded.set_is_last_backward(True)
    sharded.set_reshard_after_backward(True)
    sharded.set_requires_gradient_sync(True)
    _fsdp_group(module).post_backward()
    cast(Any, fully_shard).state(module)._root_post_backward_final_callback()


def reduce_again(module: nn.Module) -> None:
    """Makes a sharded module reduce gradients that came when it had reduced already. Collective."""
    group = _fsdp_group(module)
    group.post_backward()
    group.finalize_backward()


def gather_in(fsdp_param: Any, dtype: torch.dtype | None) -> None:
    """Makes FSDP2 gather one parameter in a dtype from now on, or in the parameter's dtype. Nothing is gathered.

    The earlier gathered tensor is dropped: it may have had another dtype.
    """

    def set_dtypes(policy: Any) -> None:
        type(fsdp_param).init_dtype_attrs(fsdp_param, dataclasses.replace(policy, param_dtype=dtype))

    fsdp_param.init_dtype_attrs = set_dtypes
    fsdp_param.all_gather_outputs = []
    vars(fsdp_param).pop("_unsharded_param", None)


# Data loaders.


def present_pass(batches: Any) -> tuple[Any, int]:
    """The source of indices of a data loader's iterator, and how many batches it has returned in its present pass.

    None if the iterator is not torch's.
    """
    return (batches._sampler_iter, batches._num_yielded) if isinstance(batches, _BaseDataLoaderIter) else (None, 0)


# Many tensors at once. A loop over public functions would launch a kernel for each tensor.


norm_all: Callable[..., Sequence[Tensor]] = torch._foreach_norm
"""The norm of each of several tensors, at least one."""

multiply_all: Callable[[list[Tensor], Tensor | float], None] = cast(Any, torch)._foreach_mul_
"""Multiplies tensors in place, at least one."""

copy_all: Callable[[list[Tensor], list[Tensor]], None] = cast(Any, torch)._foreach_copy_
"""Copies tensors, at least one, to places of their shapes."""


# Memory and files.


def users_of_storage(tensor: Tensor) -> int:
    """How many tensors and handles share a tensor's memory. The handle that the count needs is included."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


# Processes.


default_store: Callable[[], Store] = _get_default_store
"""The store by which the ranks of the default process group have connected."""


def nccl_backends() -> list[Any]:
    """The NCCL backends of all groups of this process."""
    found = []
    for group in _world.pg_map:
        # A group without a GPU backend raises.
        with suppress(RuntimeError):
            found.append(cast(Any, group)._get_backend(torch.device("cuda")))
    return [backend for backend in found if backend.name() == "nccl"]


def collectives_launched(group: dist.ProcessGroup) -> int:
    """How many collectives this rank has launched by the group. If the backend does not count, 0. Any thread."""
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
    """Whether hooks can be registered with the optimizer: only if its class calls ``Optimizer.__init__``."""
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
    """Within it, ``step`` of the optimizer's own class runs no hooks: they have run, on the full groups."""
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


def is_step_replaced(optimizer: Optimizer) -> bool:
    """Whether a program has replaced ``step`` on the object. A wrapper of a learning rate scheduler does not count."""
    step, of_class = vars(optimizer).get("step"), type(optimizer).step
    if hasattr(step, "_wrapped_by_lr_sched"):
        # The one that was there before the scheduler.
        return getattr(step, "__wrapped__", of_class) is not of_class
    return step is not None


def mark_as_wrapped(step: Callable[..., Any]) -> None:
    """Makes schedulers take ``step`` for their wrapper, which they do not wrap again."""
    cast(Any, step)._wrapped_by_lr_sched = True


note_step_called: Callable[[Optimizer], None] = operator.methodcaller("__setattr__", "_opt_called", True)
"""Tells schedulers that the optimizer has stepped, as their wrapper would."""


def unscales_in_step(optimizer: Optimizer) -> bool:
    """Whether the optimizer takes scaled gradients, and decides on the device whether it steps."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))
