"""The module of a LightningCLI configuration, for a plan. It is created without memory for its parameters."""

import contextlib
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn
from torch.optim import Optimizer

from lightning_parstrat._namespaces import PACKAGES
from lightning_parstrat.cli.text import UsageError, import_class
from lightning_parstrat.core.footprint import PRECISIONS, Training
from lightning_parstrat.core.policy import FullShardingPolicy
from lightning_parstrat.distributed.engine.state import state_bytes_per_parameter_byte
from lightning_parstrat.distributed.fsdp.tensor_plan import find_plan
from lightning_parstrat.distributed.fsdp.units import MIN_NUM_PARAMS, find_units
from lightning_parstrat.distributed.pipeline.holders import largest_stage

_ADAM_STATES = 2.0
# By name, because an import of both packages of Lightning would be slow, and only one may be installed.
_LIGHTNING_MODULES = {f"{package}.core.module.LightningModule" for package in PACKAGES}
_PRECISIONS = {"32": "32-true", "64": "64-true", "16": "16-mixed", "bf16": "bf16-mixed"}
"""Lightning's short names of precisions."""


def read_module(path: Path, class_path: str | None, tensor_ranks: int | None, ranks: int) -> tuple[Training, str]:
    """Creates the configuration's module on the meta device, and calls its ``configure_optimizers``.

    Args:
        path: The path of the configuration.
        class_path: The module's class, if the file does not give it.
        tensor_ranks: Ranks that share layers, instead of the number that the file has.
        ranks: Number of ranks, for the stages of a pipeline.

    Returns:
        The training of one rank, and the name of its optimizer.

    Raises:
        UsageError: The file cannot be read, or the module cannot be created. The message says what is missing.
    """
    try:
        config = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"--config {path}: {error}") from error
    section = _model(config, path, class_path)
    given = section["class_path"]
    # Python would search these paths if the configuration's program had been started here.
    sys.path[:0] = [str(Path.cwd()), str(path.resolve().parent)]
    trainer = _section(config, "trainer")
    # Modules may print. Standard output is for the result alone, which may be JSON.
    with contextlib.redirect_stdout(sys.stderr):
        module = _make(import_class(given), section)
        trained = [one for one in module.parameters() if one.requires_grad]
        if not trained:
            raise UsageError(f"{given} has no trainable parameters before training starts: there is nothing to plan.")
        optimizers = _configured_optimizer(_section(config, "optimizer"), trained) or _optimizers(module)
    try:
        policy = _full_sharding(trainer.get("strategy"))
        root, unit = units_of(module, policy)
        tensor_ranks = tensor_ranks or policy.tensor_parallel_size
        layers = find_plan(module, tensor_ranks, ()) if tensor_ranks > 1 else []
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error
    precision = str(trainer.get("precision") or "32")
    precision = _PRECISIONS.get(precision, precision)
    if precision not in PRECISIONS:
        raise UsageError(f"{path}: precision {precision!r} is not known here. Use one of {', '.join(PRECISIONS)}.")
    count = sum(one.numel() for one in trained)
    every = sum(one.numel() for one in module.parameters())
    buffers = sum(one.numel() for one in module.buffers())
    values, optimizer = _values(optimizers)
    training = Training(
        parameters=count,
        values=values,
        precision=precision,
        frozen=every - count,
        buffers=buffers,
        root=root,
        unit=unit,
        tensor_ranks=tensor_ranks,
        stages={size: largest_stage(module, size) for size in range(1, ranks + 1) if ranks % size == 0},
        cut=sum(one.numel() for planned in layers for one in planned.layer.parameters()),
    )
    return training, optimizer


def values_of(optimizer: str) -> tuple[float, str]:
    """Values of state per parameter, of an optimizer by its name, and the name of its class.

    Args:
        optimizer: A class of torch.optim in any case, the path of another class, or the number itself.

    Raises:
        UsageError: There is no such class, or its state is not known.
    """
    with contextlib.suppress(ValueError):
        number = float(optimizer)
        if not 0 <= number < math.inf:
            raise UsageError(f"--optimizer {optimizer}: write a class, or how many values it keeps of each parameter.")
        return number, f"{number:g} values of state per parameter"
    cls: Any = _optimizer_class(optimizer)
    try:
        ratio = state_bytes_per_parameter_byte(cls([nn.Parameter(torch.zeros(2, 2))]))
    except Exception:
        ratio = None
    if ratio is None:
        raise UsageError(
            f"--optimizer {optimizer}: its state is not known. Write how many values it keeps of each parameter, such"
            " as --optimizer 1 for one average."
        )
    return ratio, cls.__name__


def _optimizer_class(name: str) -> type:
    by_name = {one.lower(): getattr(torch.optim, one) for one in dir(torch.optim) if one[0].isupper()}
    return by_name.get(str(name).lower()) or import_class(name)


def units_of(module: nn.Module, policy: FullShardingPolicy) -> tuple[int, int]:
    """Elements that ``zero3_custom`` gathers for a whole step, and those of the largest unit that it gathers alone.

    Raises:
        ValueError: No module is of a class that the policy names.
    """
    by_child = not getattr(module, "automatic_optimization", True)
    found = find_units(module, policy.auto_wrap_policy or (), policy.min_num_params, by_child)
    taken: set[nn.Parameter] = set()
    sizes = [0]
    # Inner units come first. A unit that holds others stays gathered while inner units are gathered and freed.
    for unit in found:
        own = set(unit.parameters()) - taken
        taken |= own
        if not any(inner is not unit and inner in found for inner in unit.modules()):
            sizes.append(sum(one.numel() for one in own))
    return sum(one.numel() for one in module.parameters()) - sum(sizes), max(sizes)


def _full_sharding(strategy: Any) -> FullShardingPolicy:
    """The policy of the configuration's own strategy, if that is ZeRO3Strategy with arguments. Else the default."""
    given: Any = {}
    if isinstance(strategy, Mapping) and str(strategy.get("class_path")).endswith("ZeRO3Strategy"):
        given = strategy.get("init_args") or {}
    given = given if isinstance(given, Mapping) else {}
    return FullShardingPolicy(
        auto_wrap_policy=given.get("auto_wrap_policy"),
        min_num_params=given.get("min_num_params", MIN_NUM_PARAMS),
        tensor_parallel_size=given.get("tensor_parallel_size", 1),
    )


def _model(config: Any, path: Path, class_path: str | None) -> Mapping[str, Any]:
    """The module's class and arguments."""
    section = _section(config, "model")
    if isinstance(section, str):
        section = {"class_path": section}
    elif "class_path" not in section:
        section = {"class_path": class_path, "init_args": section}
    if section["class_path"] is None:
        raise UsageError(
            f"{path} does not give the module's class. Add --model with the class that the program passes to"
            " LightningCLI, such as --model my_package.model.MyModule."
        )
    return section


def _section(config: Any, name: str) -> Any:
    """A section of the configuration, or of its subcommand's part. Empty if there is none."""
    for within in (config, *config.values()) if isinstance(config, Mapping) else ():
        if isinstance(within, Mapping) and isinstance(within.get(name), (Mapping, str)):
            return within[name]
    return {}


def _make(cls: type, section: Mapping[str, Any]) -> nn.Module:
    name = section["class_path"]
    if _LIGHTNING_MODULES.isdisjoint(f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__):
        raise UsageError(f"{name} is not a LightningModule.")
    given = {key: value for key, value in section.items() if value is not None}
    # On the meta device, tensors have no values. If a module reads values, it is created with memory.
    for device in ("meta", "cpu"):
        try:
            # A LightningCLI needs it, too. No other command does.
            from jsonargparse import ArgumentParser

            parser = ArgumentParser(exit_on_error=False)
            parser.add_argument("--model", type=cls)
            # Older versions of jsonargparse only have the second name.
            instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes
            with torch.device(device):
                module: nn.Module = instantiate(parser.parse_object({"model": given})).model
            return module
        except (Exception, SystemExit) as error:
            failure = error
    raise UsageError(f"{name} cannot be created: {failure}") from failure


def _configured_optimizer(section: Any, parameters: list[nn.Parameter]) -> list[Optimizer]:
    """The optimizer in the configuration's own section. LightningCLI uses it instead of the module's."""
    if isinstance(section, str):
        section = {"class_path": section}
    if "class_path" not in section:
        return []
    try:
        return [_optimizer_class(section["class_path"])(parameters, **(section.get("init_args") or {}))]
    except Exception as error:
        raise UsageError(f"The configuration's optimizer cannot be created: {error}") from error


def _optimizers(module: nn.Module) -> list[Optimizer]:
    try:
        return list(_optimizers_in(module.configure_optimizers()))
    except Exception:
        # The method needs the trainer or the data, and neither exists here. AdamW is a fair guess.
        return []


def _optimizers_in(value: Any) -> Iterator[Optimizer]:
    if isinstance(value, Optimizer):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for one in [value.get("optimizer")] if isinstance(value, Mapping) else value:
            yield from _optimizers_in(one)


def _values(optimizers: list[Optimizer]) -> tuple[float, str]:
    """Values of state per parameter, and the optimizer's name."""
    if not optimizers:
        return _ADAM_STATES, "taken for AdamW: its own could not be created without a trainer"
    names = " and ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers))
    ratios = [state_bytes_per_parameter_byte(optimizer) for optimizer in optimizers]
    sizes = [sum(p.numel() for group in one.param_groups for p in group["params"]) for one in optimizers]
    if None in ratios:
        return _ADAM_STATES, f"{names}, whose state is taken to be as large as AdamW's"
    return sum(ratio * size for ratio, size in zip(ratios, sizes, strict=True)) / max(1, sum(sizes)), names
