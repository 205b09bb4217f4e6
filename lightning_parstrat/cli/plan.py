"""``lightning-parstrat plan``: estimates what a training needs under each strategy, without a device."""

import contextlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import nn
from torch.optim import Optimizer

from lightning_parstrat._namespaces import PACKAGES
from lightning_parstrat.cli.errors import UsageError
from lightning_parstrat.cli.text import amount, import_class, table
from lightning_parstrat.core.cost_model import assumed_wire
from lightning_parstrat.core.estimate import Cluster, Estimate, estimate_ddp, estimate_zero1
from lightning_parstrat.core.layout import ParameterSpec
from lightning_parstrat.core.policy import ShardingPolicy
from lightning_parstrat.core.shard_groups import ShardGroupChoice, ShardGroups, advised_size
from lightning_parstrat.core.topology import Topology
from lightning_parstrat.core.wording import counted
from lightning_parstrat.distributed.zero1.optimizer_sharding import ELEMENTWISE_OPTIMIZERS
from lightning_parstrat.distributed.zero1.summary import state_bytes_per_parameter_byte

_DESCRIPTION = """
Creates the module of a LightningCLI configuration without memory for its parameters (on the meta device). For
ddp_tuned, zero1_custom, and zero1_custom in bf16 with fp32 master weights, shows what each rank holds and sends, and
whether it fits; then recommends one. With --accumulate, zero2_custom is among them, which shards the gradients that are
held between micro-batches. Activations are not counted: leave room for them.

  lightning-parstrat plan --config c.yaml --world-size 16 --devices-per-node 8 --memory 80GB --bandwidth 100Gbit
"""
_ADAM_STATES = 2
# By name: importing both packages of Lightning's would take long, and only one may be installed.
_LIGHTNING_MODULES = {f"{package}.core.module.LightningModule" for package in PACKAGES}
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


class _Module(NamedTuple):
    """The module to train: trainable parameters in fp32, states per element, and the optimizer this is known from."""

    parameters: list[ParameterSpec]
    fixed: int
    """Elements of frozen parameters and of buffers, which every rank holds."""
    states: float
    optimizer: str
    cut_anywhere: bool


def make_parser() -> ArgumentParser:
    """The command's arguments."""
    parser = ArgumentParser(description=_DESCRIPTION)
    add = parser.add_argument
    add("--config", type=str, required=True, metavar="FILE", help="LightningCLI configuration of the module")
    add("--model", type=str | None, metavar="CLASS", help="the module's class, where the file does not give it")
    add("--world-size", type=PositiveInt, required=True, help="number of ranks")
    add("--devices-per-node", type=PositiveInt | None, help="ranks of a node (default: all, on one node)")
    add("--memory", type=str | None, help="memory of a device, such as 80GB or 24GiB; shows what fits")
    add("--bandwidth", type=str | None, help="of a node's link, such as 100Gbit; shows how long sending takes")
    add("--calibration", type=str | None, metavar="FILE", help="output of `doctor --json`, instead of --bandwidth")
    add("--compute-seconds", type=PositiveFloat | None, help="time of one process's step alone, to predict step times")
    add("--shard-group", type=ShardGroupChoice, default="all", help="as in ZeRO1Strategy: all, node, or a number")
    add("--bucket-cap-mb", type=PositiveFloat | None, help="as in ZeRO1Strategy (default: by ranks and model)")
    add("--accumulate", type=PositiveInt, default=1, help="micro-batches of a step (accumulate_grad_batches)")
    add("--reserve", type=NonNegativeFloat, default=0.2, help="part of the memory left for activations")
    add("--json", action="store_true", help="print the result as JSON")
    return parser


def run(arguments: Namespace, program: list[str]) -> int:
    """Prints the estimates; the exit code is 1 where none fits.

    Raises:
        UsageError: The configuration does not name a module, or an argument cannot be read.
    """
    if program:
        raise UsageError("plan runs no program: leave out what follows `--`, and give its configuration by --config.")
    cluster = _cluster(arguments)
    memory = None if arguments.memory is None else _bytes(arguments.memory, "--memory")
    module = _read_module(Path(arguments.config), arguments.model)
    groups = _shard_groups(arguments.shard_group, cluster)
    policy = ShardingPolicy(bucket_cap_mb=arguments.bucket_cap_mb or "auto")
    model_bytes = sum(one.numel * one.itemsize for one in module.parameters)
    # Memory is planned for GPUs as a rule, and hardly depends on it.
    cap_bytes = policy.bucket_cap_bytes(model_bytes, assumed_wire(groups.size, "cuda", groups.copies), "cuda")
    estimates = _estimates(module, cluster, cap_bytes, groups.size, arguments.accumulate)
    room = None if memory is None else memory * (1 - arguments.reserve)
    choice, why = recommend(estimates, room, cluster, arguments.compute_seconds)
    if choice is not None and choice.strategy != "ddp_tuned":
        why += advice_on_groups(groups)
    if arguments.json:
        print(json.dumps(_as_json(estimates, room, choice, why, arguments.compute_seconds)))
    else:
        _print(estimates, module, cluster, room, arguments)
        print(f"\n{why}")
    return 1 if choice is None else 0


def recommend(
    estimates: Sequence[Estimate], room: float | None, cluster: Cluster, compute_seconds: float | None
) -> tuple[Estimate | None, str]:
    """Recommends a strategy.

    Args:
        estimates: Of ``ddp_tuned``, ``zero1_custom``, and ``zero1_custom`` in bf16; where gradients are accumulated, of
            ``zero2_custom`` in both precisions, too.
        room: Bytes that a rank may hold; None where that is not known.
        cluster: Where the training runs.
        compute_seconds: See :meth:`Estimate.step_seconds`.

    Returns:
        The recommended estimate and why; None and what to do instead where none fits.
    """
    ddp, zero1, zero1_bf16, *zero2s = estimates
    least = min(estimates, key=lambda one: one.peak_bytes)
    fitting = [one for one in estimates if room is None or one.peak_bytes <= room]
    if not fitting:
        return None, (
            f"It fits under no strategy: even {least.strategy} in bf16 holds {amount(least.peak_bytes)} per rank, as"
            " every rank holds all parameters. Shard these, too: by FSDP2 (Lightning's ModelParallelStrategy), with"
            " tensor or pipeline parallelism where a single layer is too large. Or take more ranks, if it is mostly"
            " optimizer state."
        )
    if cluster.world_size == 1:
        return fitting[0], "Recommended: no strategy. There is one rank: nothing to shard, nothing to send."
    if ddp in fitting and zero1 in fitting:
        saved = 1 - zero1.held_bytes / ddp.held_bytes
        times = _times(compute_seconds, ddp, zero1)
        # Closer than 2 % the model does not predict: then the memory decides.
        if times is not None and times[1] > 1.02 * times[0]:
            return ddp, f"Recommended: strategy=ddp_tuned. Both fit, and it is faster by {1 - times[0] / times[1]:.0%}."
        faster = "" if times is None or times[0] <= times[1] else f" and a step {1 - times[1] / times[0]:.0%} less time"
        return zero1, (
            f"Recommended: strategy=zero1_custom. Both fit; it holds {saved:.0%} less than DDP{faster}, with the same"
            " results. Where it matters, measure both: only one word differs."
        )
    if zero1 in fitting:
        return zero1, "Recommended: strategy=zero1_custom. DDP does not fit; the results are the same."
    if ddp in fitting:
        return ddp, "Recommended: strategy=ddp_tuned. It fits, and zero1_custom does not."
    if zero2s and zero2s[0] in fitting:
        return zero2s[0], (
            "Recommended: strategy=zero2_custom. Only with gradients sharded between micro-batches it fits; it sends"
            f" {zero2s[0].sent_bytes / max(zero1.sent_bytes, 1):.1f} times as much per step as zero1_custom, with the"
            " same results."
        )
    if zero1_bf16 not in fitting:
        return zero2s[1], (
            "Recommended: strategy=zero2_custom with precision=bf16-true. Only with gradients sharded between"
            " micro-batches it fits; the sharded fp32 master weights keep updates that bf16 would lose."
        )
    return zero1_bf16, (
        "Recommended: strategy=zero1_custom with precision=bf16-true. In fp32 it fits under neither; in bf16 the"
        " sharded fp32 master weights keep updates that bf16 would lose."
    )


def advice_on_groups(groups: ShardGroups) -> str:
    """What to say of shard groups where zero1_custom is recommended; empty where one group of all is as good."""
    size = advised_size(groups.world_size)
    if size is None or groups.size <= size:
        return ""
    return (
        f" On {groups.world_size} GPUs a ring of {groups.size} ranks takes longer than computation hides, by a model of"
        f" NCCL: shard_group={size} would not, and each rank would hold 1/{size} of the optimizer state (add"
        f" --shard-group {size} to see it)."
    )


def _shard_groups(choice: ShardGroupChoice, cluster: Cluster) -> ShardGroups:
    try:
        ShardingPolicy(shard_group=choice)
        nodes = tuple(rank // cluster.devices for rank in range(cluster.world_size))
        return ShardGroups.chosen(choice, Topology(nodes))
    except ValueError as error:
        raise UsageError(f"--shard-group: {error}") from error


def _times(compute_seconds: float | None, *estimates: Estimate) -> list[float] | None:
    if compute_seconds is None:
        return None
    times = [one.step_seconds(compute_seconds) for one in estimates]
    return None if None in times else times  # type: ignore[return-value]


def _estimates(
    module: _Module, cluster: Cluster, bucket_cap_bytes: int, shard_ranks: int, micro_batches: int
) -> list[Estimate]:
    narrow = [_in_bf16(one) for one in module.parameters]
    states = 4 * module.states
    of_zero = partial(
        estimate_zero1,
        state_per_element=states,
        cluster=cluster,
        bucket_cap_bytes=bucket_cap_bytes,
        partition="element" if module.cut_anywhere else "parameter",
        shard_ranks=shard_ranks,
        micro_batches=micro_batches,
    )
    estimates = [estimate_ddp(module.parameters, states, cluster, "32-true", micro_batches)]
    for shard_gradients in (False, True) if micro_batches > 1 else (False,):
        estimates += [
            of_zero(module.parameters, precision="32-true", shard_gradients=shard_gradients),
            of_zero(narrow, precision="bf16-true", has_master_weights=True, shard_gradients=shard_gradients),
        ]
    return [_with_fixed(one, (2 if one.precision == "bf16-true" else 4) * module.fixed) for one in estimates]


def _with_fixed(one: Estimate, nbytes: int) -> Estimate:
    """With what no strategy shards."""
    return one._replace(
        held_bytes=one.held_bytes + nbytes,
        peak_bytes=one.peak_bytes + nbytes,
        accumulating_bytes=one.accumulating_bytes + nbytes,
    )


def _in_bf16(spec: ParameterSpec) -> ParameterSpec:
    return ParameterSpec(name=spec.name, shape=spec.shape, dtype="torch.bfloat16", itemsize=2, group="torch.bfloat16")


def _cluster(arguments: Namespace) -> Cluster:
    devices = arguments.devices_per_node or arguments.world_size
    if arguments.world_size % devices:
        raise UsageError(
            f"--world-size {arguments.world_size} is not a multiple of --devices-per-node {devices}: all nodes must"
            " have equally many ranks."
        )
    if arguments.bandwidth is not None and arguments.calibration is not None:
        raise UsageError("--bandwidth and --calibration both give the speed of the link: use one of them.")
    rate = None
    if arguments.bandwidth is not None:
        rate = _bytes_per_second(arguments.bandwidth)
    elif arguments.calibration is not None:
        rate = _calibrated(Path(arguments.calibration))
    return Cluster(nodes=arguments.world_size // devices, devices=devices, bytes_per_second=rate)


def _bytes_per_second(text: str) -> float:
    """100Gbit, 100Gbit/s and 100G are bits; 12GB/s is bytes."""
    match = re.fullmatch(r"(.*?[\dKMGTi])\s*(bit|bits|bps|b|B)?(/s)?", text.strip())
    rate = _bytes(match[1] if match else text, "--bandwidth") / (1 if match and match[2] == "B" else 8)
    if rate <= 0:
        raise UsageError(f"--bandwidth {text!r}: must be more than 0.")
    return rate


def _calibrated(path: Path) -> float:
    try:
        return 1.0 / json.loads(path.read_text())["all_reduce"]["seconds_per_byte"]
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise UsageError(
            f"--calibration {path}: this is not the output of a `lightning-parstrat doctor --json` that could measure"
            f" ({error!r})."
        ) from error


def _bytes(text: str, option: str) -> float:
    match = re.fullmatch(r"\s*([\d.]+)\s*([KMGT]?I?)B?(?:/s)?\s*", text.upper().replace("/S", "/s"))
    try:
        return float(match[1]) * _UNITS[match[2]]  # type: ignore[index]
    except (TypeError, KeyError, ValueError):
        raise UsageError(f"{option} {text!r}: write a number and a unit, such as 80GB, 24GiB or 100Gbit.") from None


def _read_module(path: Path, class_path: str | None) -> _Module:
    """Creates the configuration's module on the meta device, and asks it for its optimizers.

    Raises:
        UsageError: The file cannot be read, or the module cannot be created; the message says what is missing.
    """
    try:
        config = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise UsageError(f"--config {path}: {error}") from error
    section = _model_section(config)
    # The paths that Python would search if the configuration's program had been started here.
    sys.path[:0] = [str(Path.cwd()), str(path.resolve().parent)]
    given, init_args, more = class_path, section, None
    if isinstance(section, str):
        given, init_args = section, {}
    elif "class_path" in section:
        given, init_args, more = section["class_path"], section.get("init_args"), section.get("dict_kwargs")
    if given is None:
        raise UsageError(
            f"{path} has the arguments of a module, but not its class. Add --model with the class that the program"
            " passes to LightningCLI, such as --model my_package.model.MyModule."
        )
    # Modules may print; standard output is for the result alone, which may be JSON.
    with contextlib.redirect_stdout(sys.stderr):
        module = _make(import_class(given), dict(init_args or {}), dict(more or {}), given)
    trainable = [(name, one) for name, one in module.named_parameters() if one.requires_grad]
    if not trainable:
        raise UsageError(f"{given} has no trainable parameters before training starts: there is nothing to plan.")
    parameters = [
        ParameterSpec(name=name, shape=tuple(one.shape), dtype="torch.float32", itemsize=4, group="torch.float32")
        for name, one in trainable
    ]
    fixed = sum(one.numel() for one in module.parameters() if not one.requires_grad)
    fixed += sum(one.numel() for one in module.buffers())
    optimizers = _configured_optimizer(config, [one for _, one in trainable]) or _optimizers(module)
    return _Module(parameters, fixed, *_states(optimizers))


def _model_section(config: Any) -> Any:
    for within in (config, *(config or {}).values()) if isinstance(config, Mapping) else ():
        if isinstance(within, Mapping) and isinstance(within.get("model"), (Mapping, str)):
            return within["model"]
    return {}


def _make(cls: type, init_args: dict[str, Any], more: dict[str, Any], name: str) -> nn.Module:
    if _LIGHTNING_MODULES.isdisjoint(f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__):
        raise UsageError(f"{name} is not a LightningModule.")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(cls, "model", instantiate=False)
    try:
        # Older versions of jsonargparse only have the second name.
        instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes
        found = instantiate(parser.parse_object({"model": init_args} if init_args else {})).get("model", {})
        arguments = {**(vars(found) if isinstance(found, Namespace) else found), **more}
    except Exception as error:
        raise UsageError(f"{name}: its arguments cannot be read: {error}") from error
    try:
        with torch.device("meta"):
            return cls(**arguments)
    except Exception as error:
        # It reads values of its tensors, which on the meta device have none.
        print(f"{name} is created with memory for its parameters: it needs their values ({error}).", file=sys.stderr)
    try:
        return cls(**arguments)
    except Exception as error:
        raise UsageError(f"{name} cannot be created: {error}") from error


def _configured_optimizer(config: Any, parameters: list[Any]) -> list[Optimizer] | None:
    """The optimizer of the configuration's own section, which LightningCLI uses instead of the module's."""
    within = [config, *(config or {}).values()] if isinstance(config, Mapping) else []
    section = next((one["optimizer"] for one in within if isinstance(one, Mapping) and "optimizer" in one), None)
    if not isinstance(section, Mapping) or "class_path" not in section:
        return None
    try:
        return [import_class(section["class_path"])(parameters, **(section.get("init_args") or {}))]
    except Exception as error:
        raise UsageError(f"The configuration's optimizer cannot be created: {error}") from error


def _optimizers(module: nn.Module) -> list[Optimizer] | None:
    try:
        with contextlib.redirect_stdout(sys.stderr):
            configured: Any = module.configure_optimizers()
    except Exception:
        # It needs the trainer or the data, neither of which exists here: AdamW is a fair guess.
        return None
    found: list[Optimizer] = []

    def collect(value: Any) -> None:
        if isinstance(value, Optimizer):
            found.append(value)
        elif isinstance(value, Mapping):
            collect(value.get("optimizer"))
        elif isinstance(value, (list, tuple)):
            for one in value:
                collect(one)

    collect(configured)
    return found or None


def _states(optimizers: list[Optimizer] | None) -> tuple[float, str, bool]:
    """States per element, the optimizer's name, and whether shards may be cut anywhere."""
    if optimizers is None:
        return _ADAM_STATES, "taken for AdamW: its own could not be created without a trainer", True
    names = " and ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers))
    ratios = [state_bytes_per_parameter_byte(optimizer) for optimizer in optimizers]
    sizes = [sum(p.numel() for group in one.param_groups for p in group["params"]) for one in optimizers]
    if None in ratios:
        return _ADAM_STATES, f"{names}, whose state is taken to be as large as AdamW's", False
    mean = sum(ratio * size for ratio, size in zip(ratios, sizes, strict=True)) / max(1, sum(sizes))  # type: ignore[operator]
    return mean, names, all(type(optimizer) in ELEMENTWISE_OPTIMIZERS for optimizer in optimizers)


def _as_json(
    estimates: Sequence[Estimate], room: float | None, choice: Estimate | None, why: str, seconds: float | None
) -> dict[str, Any]:
    rows = [
        {
            **one._asdict(),
            "fits": None if room is None else one.peak_bytes <= room,
            "step_seconds": None if seconds is None else one.step_seconds(seconds),
        }
        for one in estimates
    ]
    recommended = None if choice is None else {"strategy": choice.strategy, "precision": choice.precision}
    return {"estimates": rows, "recommended": recommended, "why": why}


def _print(
    estimates: Sequence[Estimate], module: _Module, cluster: Cluster, room: float | None, arguments: Namespace
) -> None:
    count = sum(one.numel for one in module.parameters)
    frozen = f" and {module.fixed / 1e6:,.1f} M elements that are not trained" if module.fixed else ""
    print(f"{count / 1e6:,.1f} M trainable parameters{frozen}; optimizer: {module.optimizer}")
    ranks, nodes = counted(cluster.world_size, "rank"), counted(cluster.nodes, "node")
    size = _shard_groups(arguments.shard_group, cluster).size
    grouped = f", in shard groups of {size}" if size < cluster.world_size else ""
    print(f"{ranks} on {nodes}{grouped}; per rank, without activations:\n")
    header = ["strategy", "precision", "between steps", "at most", "sent per step"]
    rows = [
        [one.strategy, one.precision, amount(one.held_bytes), amount(one.peak_bytes), amount(one.sent_bytes)]
        for one in estimates
    ]
    if arguments.accumulate > 1:
        header.insert(3, "between micro-batches")
        for row, one in zip(rows, estimates, strict=True):
            row.insert(3, amount(one.accumulating_bytes))
    if cluster.bytes_per_second is not None:
        header.append("on the wire")
        for row, one in zip(rows, estimates, strict=True):
            row.append(f"{one.wire_seconds:.3f} s")
        if arguments.compute_seconds is not None:
            header.append("step")
            for row, one in zip(rows, estimates, strict=True):
                row.append(f"{one.step_seconds(arguments.compute_seconds):.3f} s")
    if room is not None:
        header.append(f"fits in {amount(room)}")
        for row, one in zip(rows, estimates, strict=True):
            row.append("yes" if one.peak_bytes <= room else "no")
    print(table([header, *rows]))
