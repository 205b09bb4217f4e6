"""What needs a GPU, or may go wrong on one, at world size 1: compilers, captured graphs, saves in training."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_parstrat.distributed.checkpoint.reading import ShardedCheckpoint
from tests import devices
from tests.comparing import assert_same
from tests.gpu.trainings import Layers, fit
from tests.pool import RankPool
from tests.slow import slow_unless
from tests.strategies import zoo
from tests.strategies.late import delayed, late
from tests.strategies.parity import Run, by_flag, largest_difference, train

STRATEGIES: dict[str, Callable[..., Any]] = {"by flag": by_flag, "late": late, "delayed": delayed}
# Kernels that a compiler makes sum in another order.
TOLERANCE = 1e-4


class Block(nn.Sequential):
    """A class of its own: in place, torch's compiles nothing."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden)


class Blocks(zoo.Zoo):
    """A trunk of two blocks alike between two layers."""

    def build(self) -> None:
        self.first = nn.Linear(zoo.FEATURES, 16)
        self.blocks = nn.ModuleList(Block(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)) for _ in range(2))
        self.last = nn.Linear(16, 1)

    def run_block(self, block: nn.Module, hidden: Tensor) -> Tensor:
        return block(hidden)

    def compute_loss(self, batch: Tensor) -> Tensor:
        hidden = self.first(batch)
        for block in self.blocks:
            hidden = hidden + self.run_block(block, hidden)
        return (self.last(hidden) - batch.mean(1, keepdim=True)).square().mean()


class CompiledBlocks(Blocks):
    """As the documentation advises: a block at a time, in place."""

    def build(self) -> None:
        super().build()
        for block in self.blocks:
            block.compile(backend=compiler())


class CompiledAndCheckpointed(CompiledBlocks):
    def run_block(self, block: nn.Module, hidden: Tensor) -> Tensor:
        return checkpoint(block, hidden, use_reentrant=False)


class ReentrantCheckpoints(Blocks):
    def run_block(self, block: nn.Module, hidden: Tensor) -> Tensor:
        return checkpoint(block, hidden, use_reentrant=True)


class Checkpoints(Blocks):
    def run_block(self, block: nn.Module, hidden: Tensor) -> Tensor:
        return checkpoint(block, hidden, use_reentrant=False)


class Attends(Blocks):
    """By the kernels that torch chooses for the device, of which some exist for 16 bits alone."""

    def run_block(self, block: nn.Module, hidden: Tensor) -> Tensor:
        heads = hidden.view(-1, 4, 4).unsqueeze(0)
        return block(F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).reshape(hidden.shape))


def capturable(parameters: Any) -> torch.optim.Optimizer:
    """A rate that lies on the device, as it must where steps are captured."""
    rate = torch.tensor(1e-2, device=devices.device())
    return torch.optim.AdamW(parameters, lr=rate, eps=1e-4, capturable=devices.kind() == "cuda")


def compiler() -> str:
    return "inductor" if devices.kind() == "cuda" else "aot_eager"


def compiled_as_a_whole() -> Any:
    return torch.compile(Blocks(), backend=compiler())


MODULES: dict[str, Callable[[], Any]] = {
    "compiled blocks": CompiledBlocks,
    "compiled as a whole": compiled_as_a_whole,
    "compiled and checkpointed": CompiledAndCheckpointed,
    "reentrant checkpoints": ReentrantCheckpoints,
    "checkpoints": Checkpoints,
    "attention": Attends,
    "recurrent": zoo.Recurrent,
    "a rate on the device": lambda: zoo.Attention(capturable),
}


def train_compiled(name: str, strategy: Any, **arguments: Any) -> Run:
    """Trains one of :data:`MODULES`, and looks whether something was compiled if its name says so."""
    # Else it would find what was compiled before.
    torch.compiler.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    run = train(MODULES[name], strategy, gradient_clip_val=0.1, validate=True, **arguments)
    assert (counters["stats"]["unique_graphs"] > 0) == ("compiled" in name), counters
    torch.compiler.reset()
    return run


def compare(name: str, strategy: str, precision: str) -> float:
    expected = train_compiled(name, None, precision=precision)
    return largest_difference(train_compiled(name, STRATEGIES[strategy](), precision=precision), expected)


def compile_something() -> float:
    return float(torch.compile(lambda one: one.sin() + 1, backend=compiler())(torch.zeros((), device=devices.device())))


@pytest.fixture(scope="module")
def compiles(ranks: RankPool) -> str:
    """Why nothing can be compiled here; empty where it can."""
    try:
        ranks.run(1, compile_something)
    except AssertionError as error:
        return str(error)[-300:]
    return ""


# Compiling takes long, and waits for nothing that arrives by itself.
GRID = [
    (name, strategy) for name in MODULES for strategy in STRATEGIES if (name[:8], strategy) != ("compiled", "delayed")
]


@pytest.mark.parametrize(("name", "strategy"), slow_unless(lambda name, _: name == "checkpoints", GRID))
def test_trains_as_a_single_device_does(ranks: RankPool, compiles: str, name: str, strategy: str) -> None:
    if compiles and "compiled" in name:
        pytest.skip(f"torch.compile does not work here: {compiles}")
    (difference,) = ranks.run(1, compare, name, strategy, "32-true")
    assert difference <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", ["compiled blocks", "attention", "recurrent"])
def test_trains_as_a_single_device_does_in_mixed_precision(ranks: RankPool, compiles: str, name: str) -> None:
    if compiles and "compiled" in name:
        pytest.skip(f"torch.compile does not work here: {compiles}")
    (difference,) = ranks.run(1, compare, name, "late", "bf16-mixed")
    assert difference <= 2e-2


class Captured(Blocks):
    """Blocks as CUDA graphs, captured when training begins: by then parameters lie where they stay."""

    def capture(self) -> None:
        for block in self.blocks:
            sample = torch.randn(4, 16, device=devices.device(), requires_grad=True)
            torch.cuda.make_graphed_callables(block, (sample,))

    def on_train_start(self) -> None:
        self.capture()


def compare_captured(strategy: str, arguments: dict[str, Any]) -> float:
    policy = {"gradient_clip_val": 0.1, "validate": True, **arguments}
    expected = train(Captured, None, **policy)
    actual = train(Captured, STRATEGIES[strategy](), **policy)
    return largest_difference(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("arguments", [{}, {"accumulate_grad_batches": 2}], ids=["", "accumulated"])
def test_captured_blocks_replay_with_what_was_stepped(
    ranks: RankPool, cuda: str, strategy: str, arguments: dict[str, Any]
) -> None:
    assert ranks.run(1, compare_captured, strategy, arguments)[0] <= TOLERANCE


class CapturedBefore(Captured):
    def on_train_start(self) -> None:
        pass


def captured_before() -> tuple[str, float]:
    def make() -> CapturedBefore:
        module = CapturedBefore().to(devices.device())
        module.capture()
        return module

    expected = train(make, None)
    try:
        actual = train(make, late())
    except ValueError as error:
        return str(error), 0.0
    return "", largest_difference(actual, expected)


@pytest.mark.slow
def test_blocks_captured_before_the_training_are_refused_or_right(ranks: RankPool, cuda: str) -> None:
    ((refused, difference),) = ranks.run(1, captured_before)
    assert "make_graphed_callables" in refused or (refused == "" and difference <= TOLERANCE), (refused, difference)


class Keeps(Callback):
    """What a checkpoint of each step should hold."""

    def __init__(self) -> None:
        self.states: dict[int, Any] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        weights, optimizer = pl_module.state_dict(), trainer.optimizers[0].state_dict()["state"]
        self.states[trainer.global_step] = on_host({"weights": weights, "state": optimizer})


# It looks at no gradient.
Keeps.on_train_batch_end.__module__ = "lightning.pytorch.callbacks"


def on_host(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: on_host(one) for key, one in value.items()}
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else copy.copy(value)


def save_every_step(strategy: str, width: int, folder: str) -> int:
    keeps = Keeps()
    saves = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    fit(
        Layers(width, 8),
        STRATEGIES[strategy](checkpoint_format="sharded", async_save=True),
        6,
        callbacks=[keeps, saves],
        enable_checkpointing=True,
    )
    for step, expected in keeps.states.items():
        saved = ShardedCheckpoint(Path(folder) / f"step={step}.ckpt", weights_only=True)
        whole = saved.filled(saved.skeleton)
        found = {"weights": whole["state_dict"], "state": whole["optimizer_states"][0]["state"]}
        assert_same(on_host(found), expected)
    return len(keeps.states)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_written_while_training_goes_on_is_the_step_it_was_asked_for(
    ranks: RankPool, tmp_path: Path, strategy: str
) -> None:
    width = 1024 if ranks.device == "cuda" else 64
    assert ranks.run(1, save_every_step, strategy, width, str(tmp_path)) == [6]
