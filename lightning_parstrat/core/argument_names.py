"""Wrong names of a strategy's arguments: the nearest right one, or the advice for another strategy's argument."""

import inspect
import re
import sys
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from typing import Any, NoReturn

_STANDS_FOR = {
    # Of one of our strategies alone.
    "wrap min_num_params reshard_after_forward": "It is an argument of ZeRO3Strategy.",
    "partition expose_gradients master_weights overlap_param_gather max_inflight_buckets shard_group": (
        "It is an argument of ZeRO1Strategy."
    ),
    "tune_steps tune_tolerance plan_cache comm_hook": "It is an argument of TunedDDPStrategy.",
    "shard_gradients reduce_dtype gather_dtype": "It is an argument of ZeRO1Strategy and of ZeRO3Strategy.",
    "bucket_cap_mb": "ZeRO3Strategy sends a unit's gradients together: `wrap` or `min_num_params` say what is a unit.",
    # Of DDP.
    "bucket_cap_mb_list": "`bucket_cap_mb` of ZeRO1Strategy is one number; TunedDDPStrategy takes a list.",
    "ddp_comm_hook ddp_comm_state ddp_comm_wrapper": (
        '`reduce_dtype="bf16"` halves what gradients take on the network; TunedDDPStrategy takes hooks.'
    ),
    "device_ids output_device device_id": "Set by the Trainer's `accelerator` and `devices`.",
    "process_group": "`process_group_backend` says of which kind it is.",
    "broadcast_buffers forward_sync_buffers init_sync sync_module_states": (
        "Rank 0's parameters and buffers are broadcast as under `ddp`."
    ),
    # Of FSDP, of ModelParallelStrategy and of DeepSpeed.
    "auto_wrap_policy": '`wrap=["Block"]` of ZeRO3Strategy names classes; `min_num_params` goes by size.',
    "sharding_strategy stage zero_optimization": (
        "The class says what is sharded: the optimizer state by ZeRO1Strategy, accumulated gradients as well by"
        " ZeRO1Strategy(shard_gradients=True), parameters as well by ZeRO3Strategy."
    ),
    "device_mesh mesh data_parallel_size": (
        'All ranks share one copy; ZeRO1Strategy(shard_group="node") keeps one on each node.'
    ),
    "tensor_parallel_size": "Tensors are not computed in parallel here: use Lightning's ModelParallelStrategy.",
    "mixed_precision mp_policy": (
        'Trainer(precision="bf16-mixed"); `gather_dtype` and `reduce_dtype` say in which dtype ranks send.'
    ),
    "activation_checkpointing activation_checkpointing_policy partition_activations": (
        "In your module, call `torch.utils.checkpoint.checkpoint(block, inputs, use_reentrant=False)`."
    ),
    "state_dict_type save_distributed_checkpoint": 'It is `checkpoint_format="full"` or "sharded".',
    "param_init_fn": "Rank 0's values count: under ZeRO3Strategy other ranks may make the module on the meta device.",
    "ignored_modules ignored_states ignored_params": "Put names into the module's `_ddp_params_and_buffers_to_ignore`.",
    "use_orig_params limit_all_gathers forward_prefetch backward_prefetch overlap_comm contiguous_gradients": (
        "It is not needed: leave it out."
    ),
    "cpu_offload offload_policy offload_optimizer offload_parameters": (
        "Nothing is moved to the host: train on more ranks, each then holds less."
    ),
    "allgather_bucket_size reduce_bucket_size": "`bucket_cap_mb` of ZeRO1Strategy is a bucket's size in MiB.",
    "config": "There is no file of its own: give arguments here and to the Trainer.",
}
"""Advice by names of arguments that other strategies have."""

STANDS_FOR = {name: line for names, line in _STANDS_FOR.items() for name in names.split()}

_REFUSED = re.compile(
    r"class_path '([\w.]+)':\s+(?:Validation failed: )?(?:Option|Key) '(\w+)' is not (?:accepted|expected)"
)


def arguments_of(classes: Iterable[type]) -> list[str]:
    """Names of the arguments that the first class takes, and passes on to the others.

    Args:
        classes: In the order in which they are created, up to one that refuses what is ``unknown``.
    """
    names: list[str] = []
    for cls in classes:
        parameters = inspect.signature(vars(cls)["__init__"]).parameters if "__init__" in vars(cls) else {}
        names += [name for name, one in parameters.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
        if "unknown" in parameters:
            break
    return [name for name in dict.fromkeys(names) if name not in ("self", "module")]


def advice(strategy: str, name: str, known: Collection[str]) -> str:
    """The message about an argument that a strategy does not have.

    Args:
        strategy: The class's name.
        name: The argument's name.
        known: The arguments that it has.
    """
    near = get_close_matches(name, known, n=1)
    meant = STANDS_FOR.get(name) or (f"Did you mean {near[0]!r}?" if near else "")
    return f"{strategy}() got an unexpected keyword argument {name!r}. {meant}".rstrip()


def refuse(strategy: type, names: Iterable[str], known: Collection[str]) -> NoReturn:
    """Refuses arguments that a strategy does not have.

    Raises:
        TypeError: The message contains the right name of each argument.
    """
    raise TypeError("\n".join(advice(strategy.__name__, name, known) for name in names))


def explain_errors(parser: Any) -> None:
    """Adds :func:`advice` to a command line's error about a strategy's wrong argument. A second call does nothing.

    Args:
        parser: A class derived from jsonargparse's.
    """
    if "error" in vars(parser):
        return
    error = parser.error

    def explained(self: Any, message: str, *args: Any, **kwargs: Any) -> Any:
        refused = _REFUSED.search(message)
        if refused is not None:
            package, _, name = refused[1].rpartition(".")
            known = getattr(getattr(sys.modules.get(package), name, None), "known_arguments", None)
            if known is not None:
                message += f"\n{advice(name, refused[2], known())}"
        return error(self, message, *args, **kwargs)

    parser.error = explained
