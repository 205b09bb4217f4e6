"""Training under a strategy inside the pool's processes, and comparing two runs step by step."""

import inspect
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.distributed.tensor import DTensor

import lightning_parstrat
from tests import devices
from tests.comparing import worst
from tests.strategies.zoo import loader

ModuleFactory = Callable[[], LightningModule]


class PoolEnvironment(LightningEnvironment):
    """The ranks exist already and have joined a process group."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def world_size(self) -> int:
        return dist.get_world_size()

    def global_rank(self) -> int:
        return dist.get_rank()

    def local_rank(self) -> int:
        # On a GPU, which all ranks share, each is a node of its own.
        return dist.get_rank() if devices.kind() == "cpu" else 0

    def set_world_size(self, size: int) -> None: ...

    def set_global_rank(self, rank: int) -> None: ...

    def teardown(self) -> None: ...


class Run(NamedTuple):
    """What a training left behind: per step all parameters and the loss, and the trainer."""

    parameters: list[list[Tensor]]
    losses: list[Tensor]
    module: LightningModule
    trainer: Trainer


Class = TypeVar("Class", bound=type)


def looks_at_no_gradient(cls: Class) -> Class:
    """What only compares is no user: "auto" takes its hooks for Lightning's own, or the default would go untested."""
    for hook in filter(inspect.isfunction, vars(cls).values()):
        hook.__module__ = "lightning.pytorch.callbacks"
    return cls


@looks_at_no_gradient
class Recorder(Callback):
    def __init__(self) -> None:
        self.parameters: list[list[Tensor]] = []
        self.losses: list[Tensor] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        self.parameters.append([whole(parameter.detach()).clone() for parameter in pl_module.parameters()])
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        self.losses.append((torch.zeros(()) if loss is None else loss.detach().clone()).to(devices.device()))


class Looks(Callback):
    """Looks when a training ends, before its strategy is torn down."""

    def __init__(self, look: Callable[[Trainer], Any]) -> None:
        self.look, self.seen = look, None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen = self.look(trainer)


def whole(tensor: Tensor) -> Tensor:
    """Collective for what is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def make_trainer(strategy: Any, **arguments: Any) -> Trainer:
    """A quiet trainer on this rank and its device; ``strategy`` is a name, an instance, or None for one device."""
    ranks: dict[str, Any] = {"devices": 1, "plugins": []}
    if strategy is not None:
        size = dist.get_world_size()
        shape = {"devices": size} if devices.kind() == "cpu" else {"devices": 1, "num_nodes": size}
        ranks = {**shape, "strategy": strategy, "plugins": [PoolEnvironment()]}
    if arguments.pop("fp16", False):
        # On CPU the Trainer's flag would fall back to bfloat16.
        scaler = torch.amp.GradScaler(devices.kind(), init_scale=arguments.pop("init_scale", 128.0), growth_interval=3)
        ranks["plugins"].append(MixedPrecision("16-mixed", devices.kind(), scaler=scaler))
    if isinstance(arguments.get("precision"), Precision):
        ranks["plugins"].append(arguments.pop("precision"))
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(accelerator=devices.kind(), **{"max_epochs": 1, **quiet, **ranks, **arguments})


def train(
    make_module: ModuleFactory,
    strategy: Any,
    samples_per_rank: int = 40,
    batch_size: int = 4,
    whole_batch: bool = False,
    validate: bool = False,
    seed: int = 0,
    **arguments: Any,
) -> Run:
    """Trains; ``whole_batch`` puts the batches of all ranks into one, for the reference on a single device."""
    torch.manual_seed(seed)
    module = make_module()
    recorder = Recorder()
    world_size = dist.get_world_size()
    dtype = torch.float64 if arguments.get("precision") == "64-true" else torch.float32
    data = (
        loader(samples_per_rank * world_size, batch_size * world_size, dtype)
        if whole_batch
        else loader(samples_per_rank * world_size, batch_size, dtype, dist.get_rank(), world_size)
    )
    callbacks = [recorder, *arguments.pop("callbacks", [])]
    trainer = make_trainer(strategy, callbacks=callbacks, **arguments)
    trainer.fit(module, data, loader(4 * world_size, 4, dtype) if validate else None)
    return Run(recorder.parameters, recorder.losses, module, trainer)


class Reference(NamedTuple):
    """What an oracle's training left behind that is compared."""

    parameters: list[list[Tensor]]
    losses: list[Tensor]


_REFERENCES: dict[tuple[int, Hashable], Reference] = {}


def reference(key: Hashable, train_as_oracle: Callable[[], Run]) -> Reference:
    """The oracle's training of that name, done once by these ranks; all of them have done the same ones before."""
    found = _REFERENCES.get((dist.get_world_size(), key))
    if found is None:
        run = train_as_oracle()
        found = _REFERENCES[dist.get_world_size(), key] = Reference(run.parameters, run.losses)
    return found


def largest_difference(actual: Run, expected: Run | Reference) -> float:
    """Over all steps and parameters: the largest difference, relative to the largest element of the parameter."""
    assert len(actual.parameters) == len(expected.parameters) > 0
    found = []
    for ours, theirs in zip(actual.parameters, expected.parameters, strict=True):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert one.shape == other.shape and one.dtype == other.dtype
            if one.numel():
                found.append((one - other).abs().max() / other.abs().max().clamp(min=1e-3))
    return worst(found)


def largest_loss_difference(actual: Run, expected: Run | Reference) -> float:
    """Over all steps: the largest relative difference of the losses, each the mean over ranks."""
    ours, theirs = torch.stack(actual.losses).double(), torch.stack(expected.losses).double()
    for losses in (ours, theirs):
        dist.all_reduce(losses)
    return worst((ours - theirs).abs() / theirs.abs().clamp(min=1e-3))


def ddp() -> DDPStrategy:
    return DDPStrategy(find_unused_parameters=True)


def zero1(kind: type[Any] = lightning_parstrat.ZeRO1Strategy, **arguments: Any) -> Any:
    """With buckets so small that even the zoo's modules fill several.

    The tests' own callbacks do not look at gradients, though "auto" must assume that they might.
    """
    return by_flag(kind, **{"bucket_cap_mb": 0.001, "expose_gradients": False, **arguments})


def zero3(kind: type[Any] = lightning_parstrat.ZeRO3Strategy, **arguments: Any) -> Any:
    """With units so small that even the zoo's modules have several; short windows are divided as the oracle does."""
    return kind(**{"min_num_params": 0, "partial_window": "lightning", **arguments})


def by_flag(kind: type[Any] = lightning_parstrat.ZeRO1Strategy, **arguments: Any) -> Any:
    """What the flag ``zero1_custom`` gives; but the oracle divides short accumulation windows by their full length."""
    return kind(**{"partial_window": "lightning", **arguments})
