"""The module of a LightningCLI configuration, created without memory for its parameters, to plan for."""

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from jsonargparse import ArgumentParser, Namespace
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parstrat._namespaces import PACKAGES
from lightning_parstrat.cli.errors import UsageError
from lightning_parstrat.cli.text import import_class
from lightning_parstrat.core.full_sharding import FullySharded, GatheredUnit
from lightning_parstrat.core.layout import ParameterSpec
from lightning_parstrat.core.policy import FullShardingPolicy
from lightning_parstrat.distributed.zero1.optimizer_sharding import ELEMENTWISE_OPTIMIZERS
from lightning_parstrat.distributed.zero1.summary import state_bytes_per_parameter_byte
from lightning_parstrat.distributed.zero3.units import MIN_NUM_PARAMS, find_units, rounded_by_autocast, whole_parameters

_ADAM_STATES = 2
# By name: importing both packages of Lightning's would take long, and only one may be installed.
_LIGHTNING_MODULES = {f"{package}.core.module.LightningModule" for package in PACKAGES}


class PlannedModule(NamedTuple):
    """The module to train, in fp32.

    Attributes:
        parameters: The trainable ones.
        frozen: Elements of the others.
        buffers: Elements of buffers, which every rank holds under every strategy.
        states: Optimizer state for each element, in elements.
        optimizer: What this is known from.
        cut_anywhere: Whether the optimizer moves each element by itself, as far as is known.
        root: What ``zero3_custom`` gathers from the beginning of a step to its end.
        units: What it gathers one by one, in the order of registration.
        whole: Elements that it cannot shard: trainable ones, and others.
    """

    parameters: list[ParameterSpec]
    frozen: int
    buffers: int
    states: float
    optimizer: str
    cut_anywhere: bool
    root: GatheredUnit
    units: list[GatheredUnit]
    whole: tuple[int, int]

    def fully_sharded(self, world_size: int) -> FullySharded:
        """Over so many ranks."""
        return FullySharded(self.root, self.units, world_size)


def read_module(path: Path, class_path: str | None) -> PlannedModule:
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
    frozen = sum(one.numel() for one in module.parameters() if not one.requires_grad)
    buffers = sum(one.numel() for one in module.buffers())
    optimizers = _configured_optimizer(config, [one for _, one in trainable]) or _optimizers(module)
    try:
        units = units_of(module, _full_sharding(config))
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error
    return PlannedModule(parameters, frozen, buffers, *_states(optimizers), *units)


def units_of(module: nn.Module, policy: FullShardingPolicy) -> tuple[GatheredUnit, list[GatheredUnit], tuple[int, int]]:
    """The root, the units, and how many elements stay whole, as ``zero3_custom`` would have them.

    Args:
        module: A LightningModule, on any device.
        policy: Which units the user wants.

    Returns:
        What :class:`PlannedModule` has in its attributes of these names.

    Raises:
        ValueError: No module is of a class that the policy names.
    """
    by_child = not getattr(module, "automatic_optimization", True)
    found = find_units(module, policy.wrap or (), policy.min_num_params, by_child)
    whole = whole_parameters(module, found)
    if by_child:
        # Those of the module itself: nothing would gather them.
        inside = {parameter for unit in found for parameter in unit.parameters()}
        whole |= {parameter for parameter in module.parameters() if parameter not in inside}
    taken, rounded = set(whole), rounded_by_autocast(module)
    root: list[Tensor] = []
    units: list[GatheredUnit] = []
    # Inner ones come first, and the last of its neighbours before the others.
    for unit in (*found, module):
        own = [parameter for parameter in unit.parameters() if parameter not in taken]
        taken.update(own)
        if unit is module or any(inner is not unit and inner in found for inner in unit.modules()):
            # It stays gathered while those within it come and go.
            root += own
        elif own:
            units.insert(0, _unit(own, rounded))
    sizes = [sum(one.numel() for one in whole if one.requires_grad is trains) for trains in (True, False)]
    return _unit(root, rounded), units, (sizes[0], sizes[1])


def _full_sharding(config: Any) -> FullShardingPolicy:
    """Of the configuration's own strategy, if it is ZeRO3Strategy with arguments."""
    for within in (config, *config.values()) if isinstance(config, Mapping) else ():
        trainer = within.get("trainer") if isinstance(within, Mapping) else None
        strategy = trainer.get("strategy") if isinstance(trainer, Mapping) else None
        if isinstance(strategy, Mapping) and str(strategy.get("class_path")).endswith("ZeRO3Strategy"):
            given = {"min_num_params": MIN_NUM_PARAMS, **(strategy.get("init_args") or {})}
            return FullShardingPolicy(wrap=given.get("wrap"), min_num_params=given["min_num_params"])
    return FullShardingPolicy(min_num_params=MIN_NUM_PARAMS)


def _unit(parameters: list[Tensor], rounded: set[Tensor]) -> GatheredUnit:
    shapes = [[tuple(one.shape) for one in parameters if one.requires_grad is trains] for trains in (True, False)]
    exact = [tuple(one.shape) for one in parameters if one not in rounded]
    return GatheredUnit(shapes[0], shapes[1], exact)


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
