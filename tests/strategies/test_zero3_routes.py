"""The ways to a training and from it: evaluations, predictions, checkpoints by name, precisions, compilers, the CLI."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BasePredictionWriter, ModelCheckpoint
from torch import Tensor, nn

from tests.comparing import assert_same
from tests.pool import RankError, RankPool
from tests.scripts import run_python
from tests.slow import slow_unless
from tests.strategies import test_compiled, zoo
from tests.strategies.cases import FP32, FP64
from tests.strategies.parity import ddp, largest_difference, make_trainer, train, whole, zero1, zero3

STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": ddp,
    "zero1": zero1,
    "zero3": zero3,
    "zero3 sharded": lambda: zero3(checkpoint_format="sharded"),
}


class Sized(zoo.MLP):
    """As large as its hyperparameter says; predicts what it computes."""

    def __init__(self, width: int = 33) -> None:
        self.width = width
        super().__init__()
        self.save_hyperparameters("width")

    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(zoo.FEATURES, self.width), nn.Tanh(), nn.Linear(self.width, 1))

    def forward(self, batch: Tensor) -> Tensor:
        return self.net(batch)

    def predict_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self(batch)


def own(length: int) -> Any:
    return zoo.loader(length, 4, rank=dist.get_rank(), world_size=dist.get_world_size())


def evaluate_all_the_way(strategy: str, folder: str, weights_only: bool) -> dict[str, Any]:
    """What one Trainer evaluates before, between and after two trainings."""
    torch.manual_seed(0)
    module = Sized(21)
    saving = ModelCheckpoint(folder, monitor="val_loss", save_weights_only=weights_only, save_top_k=2, save_last=True)
    trainer = make_trainer(STRATEGIES[strategy](), callbacks=[saving], enable_checkpointing=True, max_epochs=2)
    found: dict[str, Any] = {"before": trainer.validate(module, own(12), verbose=False)}
    trainer.fit(module, own(36), own(12))
    found["after"] = trainer.validate(module, own(12), verbose=False)
    found["best"] = trainer.test(dataloaders=own(12), ckpt_path="best", verbose=False)
    found["last"] = trainer.validate(dataloaders=own(12), ckpt_path="last", verbose=False)
    found["predicted"] = trainer.predict(module, own(12), ckpt_path="best")
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, own(36), own(12))
    found["again"] = trainer.validate(module, own(12), verbose=False)
    found["steps"] = trainer.global_step
    trainer.save_checkpoint(f"{folder}/end.ckpt", weights_only)
    found["parameters"] = [whole(parameter.detach()).clone() for parameter in module.parameters()]
    return found


@pytest.mark.parametrize(
    ("strategy", "weights_only", "ranks"),
    [
        ("zero3", True, 2),
        ("zero3 sharded", False, 2),
        pytest.param("zero3", False, 3, marks=pytest.mark.slow),
        pytest.param("zero3 sharded", True, 3, marks=pytest.mark.slow),
    ],
)
def test_one_trainer_evaluates_and_trains_again_as_ddps_does(
    pool: RankPool, tmp_path: Path, strategy: str, weights_only: bool, ranks: int
) -> None:
    expected = pool.run(ranks, evaluate_all_the_way, "ddp", str(tmp_path / "ddp"), weights_only)
    actual = pool.run(ranks, evaluate_all_the_way, strategy, str(tmp_path / "zero3"), weights_only)
    assert_same(actual, expected, rtol=1e-4, atol=1e-5)


def test_a_file_of_weights_is_a_module_in_a_single_process(pool: RankPool, tmp_path: Path) -> None:
    (expected, *_) = pool.run(2, evaluate_all_the_way, "zero3", str(tmp_path), True)
    loaded = Sized.load_from_checkpoint(tmp_path / "end.ckpt")
    assert loaded.width == 21 and type(loaded.net[0].weight) is nn.Parameter
    assert_same([parameter.detach() for parameter in loaded.parameters()], expected["parameters"])


class Writer(BasePredictionWriter):
    """Keeps what it is given to write."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.given: list[Any] = []

    def write_on_batch_end(self, trainer: Any, pl_module: Any, prediction: Any, *place: Any) -> None:
        indices, _, *numbers = place
        assert type(prediction) is Tensor
        self.given.append([prediction.clone(), indices, numbers])

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        self.given.append([predictions, batch_indices])


def predict(strategy: str) -> list[Any]:
    """What is returned and what is written of one loader and of some; ranks may have a batch less than others."""
    found: list[Any] = []
    several = [13, 11, 10]
    for lengths, returned in (([20], True), (several, True), (several, False)):
        torch.manual_seed(0)
        writer = Writer()
        loaders = [torch.utils.data.DataLoader(zoo.Samples(length), batch_size=2) for length in lengths]
        trainer = make_trainer(STRATEGIES[strategy](), callbacks=[writer])
        found += [trainer.predict(Sized(), loaders, return_predictions=returned), writer.given]
    return found


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_predictions_are_ddps_on_each_rank(pool: RankPool, world_size: int) -> None:
    expected = pool.run(world_size, predict, "ddp")
    assert_same(pool.run(world_size, predict, "zero3"), expected, rtol=1e-5, atol=1e-6)


class Intricate(Sized):
    """Units within units, and one that is called twice."""

    def build(self) -> None:
        inner = [nn.Sequential(nn.Linear(zoo.FEATURES, zoo.FEATURES), nn.Tanh()) for _ in range(2)]
        self.blocks = nn.ModuleList(nn.Sequential(one, nn.LayerNorm(zoo.FEATURES)) for one in inner)
        self.net = nn.Linear(zoo.FEATURES, 1)

    def forward(self, batch: Tensor) -> Tensor:
        for number in (0, 1, 0):
            batch = self.blocks[number](batch)
        return self.net(batch)

    def compute_loss(self, batch: Tensor) -> Tensor:
        return self(batch).pow(2).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.compute_loss(batch))


class ByHand(Intricate):
    def build(self) -> None:
        super().build()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.compute_loss(batch))
        optimizer.step()


def evaluate_unevenly(make: Callable[[], Any], policy: dict[str, Any] | None) -> list[Any]:
    """Of ranks with one, two and three batches: what each has itself, beside, between and after training."""
    torch.manual_seed(0)
    module, rank = make(), dist.get_rank()
    strategy = ddp() if policy is None else zero3(**policy)
    trainer = make_trainer(strategy, max_epochs=2, use_distributed_sampler=False, limit_predict_batches=rank + 1)
    found = [trainer.predict(module, [zoo.loader(4 * rank + 4, 4), zoo.loader(13, 2)])]
    trainer.fit(module, own(24), zoo.loader(4 * rank + 4, 4))
    found += [float(trainer.callback_metrics["val_loss"]), trainer.validate(module, zoo.loader(4 * rank + 4, 4))]
    return [*found, [whole(parameter.detach()).clone() for parameter in module.parameters()]]


POLICIES: dict[str, dict[str, Any]] = {
    "found": {},
    "nested": {"wrap": ["Linear", "Sequential"]},
    "kept": {"wrap": ["Linear", "Sequential"], "reshard_after_forward": False},
    "at once": {"min_num_params": 10**9},
}


@pytest.mark.parametrize(
    ("make", "policy", "world_size"),
    slow_unless(
        lambda *case: case in [(Intricate, "nested", 3), (Intricate, "kept", 2), (ByHand, "found", 2)],
        [(make, policy, size) for make in (Intricate, ByHand) for policy in POLICIES for size in (2, 3)],
    ),
)
def test_ranks_evaluate_different_numbers_of_batches(
    pool: RankPool, make: Callable[[], Any], policy: str, world_size: int
) -> None:
    expected = pool.run(world_size, evaluate_unevenly, make, None)
    actual = pool.run(world_size, evaluate_unevenly, make, POLICIES[policy])
    assert_same(actual, expected, rtol=1e-4, atol=1e-5)


class Sensitive(Intricate):
    """Evaluates how much its output depends on its input."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        with torch.enable_grad():
            batch = batch.clone().requires_grad_(True)
            (gradient,) = torch.autograd.grad(self(batch).sum(), batch)
        self.log("val_loss", gradient.norm(), sync_dist=True)


def evaluate_gradients(strategy: str, batches: tuple[int, int]) -> list[Any]:
    torch.manual_seed(0)
    chosen = ddp() if strategy == "ddp" else zero3(**POLICIES["nested"])
    trainer = make_trainer(chosen, max_epochs=2, use_distributed_sampler=False, inference_mode=False)
    module = Sensitive()
    trainer.fit(module, own(24), zoo.loader(4 * batches[dist.get_rank()], 4))
    return [float(trainer.callback_metrics["val_loss"]), [whole(p.detach()).clone() for p in module.parameters()]]


def test_an_evaluation_may_compute_gradients(pool: RankPool) -> None:
    expected = pool.run(2, evaluate_gradients, "ddp", (2, 2))
    assert_same(pool.run(2, evaluate_gradients, "zero3", (2, 2)), expected, rtol=1e-4, atol=1e-5)


def test_nobody_follows_gradients(pool: RankPool) -> None:
    with pytest.raises(RankError, match=r"val_dataloader.*gradients are computed"):
        pool.run(2, evaluate_gradients, "zero3", (1, 2))


def evaluate_exactly(strategy: str) -> list[Any]:
    torch.manual_seed(0)
    trainer = make_trainer(None if strategy == "single" else zero3(exact_evaluation=True))
    module, data = Sized(), torch.utils.data.DataLoader(zoo.Samples(13), batch_size=2)
    return [*trainer.validate(module, data, verbose=False), *trainer.test(module, data, verbose=False)]


def test_exact_evaluation_is_that_of_one_process(pool: RankPool) -> None:
    (expected,) = pool.run(1, evaluate_exactly, "single")
    for found in pool.run(2, evaluate_exactly, "zero3"):
        assert_same(found, expected, rtol=1e-4, atol=1e-5)


def train_by_turns(order: tuple[str, str]) -> list[Tensor]:
    """Of one module that two Trainers train, one after the other."""
    torch.manual_seed(0)
    module = Sized()
    for strategy in order:
        make_trainer(STRATEGIES[strategy]()).fit(module, own(24), own(8))
    return [whole(parameter.detach()).clone() for parameter in module.parameters()]


@pytest.mark.parametrize("first", ["ddp", "zero1"])
def test_another_strategys_module_is_trained_on(pool: RankPool, first: str) -> None:
    expected = pool.run(2, train_by_turns, ("ddp", "ddp"))
    assert_same(pool.run(2, train_by_turns, (first, "zero3")), expected, rtol=1e-4, atol=1e-5)


def compare_in(precision: Any) -> tuple[float, set[torch.dtype]]:
    runs = [train(zoo.MLP, strategy, precision=precision, validate=True) for strategy in (zero3(), ddp())]
    return largest_difference(*runs), {parameter.dtype for parameter in runs[0].module.parameters()}


# On CPUs Lightning makes "16-mixed" bf16, with a warning, under every strategy.
PRECISIONS = {
    "16-mixed": (torch.float32, FP32),
    "bf16-mixed": (torch.float32, FP32),
    "bf16-true": (torch.bfloat16, FP32),
    "64-true": (torch.float64, FP64),
}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_precision_is_ddps(pool: RankPool, precision: str) -> None:
    dtype, tolerance = PRECISIONS[precision]
    # Of two ranks a sum has but one order, so that nothing is rounded otherwise.
    for difference, dtypes in pool.run(2, compare_in, precision):
        assert difference <= tolerance and dtypes == {dtype}


class InPlace(test_compiled.Blocks):
    """By torch's own compiler: code for this machine."""

    def compile_blocks(self) -> None:
        for block in self.blocks:
            block.compile()


class Wrapped(test_compiled.Blocks):
    def compile_blocks(self) -> None:
        self.blocks = nn.ModuleList(map(torch.compile, self.blocks))


class InSetup(test_compiled.Blocks):
    def setup(self, stage: str) -> None:
        for number, block in enumerate(self.blocks):
            self.blocks[number] = torch.compile(block)


def compare_compiled(make: Callable[[], Any], policy: dict[str, Any]) -> tuple[float, int, int]:
    """How far from the same without a compiler; graphs that were made by one; and where a graph had to be broken."""
    expected = train(test_compiled.Blocks, ddp(), validate=True)
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    actual = train(make, zero3(**policy), validate=True)
    graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    torch._dynamo.reset()
    return largest_difference(actual, expected), graphs, breaks


@pytest.mark.slow
@pytest.mark.parametrize("policy", [{}, {"wrap": ["Block"]}], ids=["found", "named"])
@pytest.mark.parametrize("make", [InPlace, Wrapped, InSetup])
def test_blocks_are_compiled(pool: RankPool, make: Callable[[], Any], policy: dict[str, Any]) -> None:
    for difference, graphs, breaks in pool.run(2, compare_compiled, make, policy):
        assert difference <= FP32
        assert graphs > 0 and breaks == 0


MODULE = """
import torch
from torch import nn
from torch.utils.data import DataLoader
from lightning.pytorch import LightningDataModule, LightningModule


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, batch):
        return torch.tanh(self.linear(batch))


class Model(LightningModule):
    def __init__(self, lr: float = 0.01):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(*(Block() for _ in range(3)))

    def forward(self, batch):
        return self.net(batch)

    def training_step(self, batch, batch_idx):
        return (self(batch) - 0.3).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        self.log("loss", (self(batch) - 0.3).pow(2).mean(), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self(batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


class Data(LightningDataModule):
    def train_dataloader(self):
        return DataLoader(torch.linspace(-1, 1, 32 * 8).view(32, 8), batch_size=4, shuffle=True)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader
"""
MAIN = """
import json
import sys

from lightning.pytorch.cli import LightningCLI
from model import Data, Model

for words in json.loads(sys.argv[1]):
    saving = {"overwrite": True}
    cli = LightningCLI(Model, Data, args=words, seed_everything_default=1, save_config_kwargs=saving)
    metrics = {name: float(value) for name, value in cli.trainer.callback_metrics.items()}
    predictions = getattr(cli.trainer.predict_loop, "predictions", [])
    found = [words[0], cli.trainer.global_step, metrics, [one.tolist() for one in predictions]]
    with open(f"{sys.argv[2]}-{cli.trainer.global_rank}", "a") as file:
        print(json.dumps(found), file=file)
"""
STRATEGY_IN_YAML = {
    "ddp": "ddp",
    "flag": "zero3_custom",
    "class": "{class_path: lightning_parstrat.ZeRO3Strategy, init_args: {wrap: [Block]}}",
    "short": "{class_path: ZeRO3Strategy, init_args: {min_num_params: 0, checkpoint_format: sharded}}",
}
CONFIG = """
trainer:
  accelerator: cpu
  devices: 2
  strategy: {strategy}
  logger: false
  enable_progress_bar: false
  enable_model_summary: false
  default_root_dir: {folder}
  callbacks:
  - class_path: lightning.pytorch.callbacks.ModelCheckpoint
    init_args: {{dirpath: {folder}, save_last: true}}
  - class_path: lightning_parstrat.GradNormMonitor
"""


def by_command(folder: Path, name: str) -> list[Any]:
    """What each subcommand finds, on each rank."""
    (folder / "model.py").write_text(MODULE)
    (folder / "main.py").write_text(MAIN)
    saved = folder / name
    config = folder / f"{name}.yaml"
    callbacks = CONFIG if name != "ddp" else CONFIG.rpartition("  - ")[0]
    config.write_text(callbacks.format(strategy=STRATEGY_IN_YAML[name], folder=saved))
    fit, resumed = [["fit", f"--config={config}", f"--trainer.max_epochs={epochs}"] for epochs in (1, 2)]
    from_last = f"--ckpt_path={saved / 'last.ckpt'}"
    others = [[command, f"--config={config}", from_last] for command in ("validate", "test", "predict")]
    commands = [fit, *others, [*resumed, from_last]]
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "main.py")
    # Into files: what two ranks print at once is mixed.
    done = run_python((*torchrun, json.dumps(commands), f"found-{name}"), folder, python=sys.executable)
    assert done.returncode == 0, done.stdout + done.stderr
    of_ranks = [(folder / f"found-{name}-{rank}").read_text().splitlines() for rank in range(2)]
    return [json.loads(line) for lines in of_ranks for line in lines]


@pytest.fixture(scope="module")
def expected_by_command(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return by_command(tmp_path_factory.mktemp("ddp"), "ddp")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in STRATEGY_IN_YAML if name != "ddp"])
def test_all_commands_of_the_cli_find_what_they_do_under_ddp(
    tmp_path: Path, expected_by_command: list[Any], name: str
) -> None:
    expected, actual = expected_by_command, by_command(tmp_path, name)
    assert len(expected) == len(actual) == 10
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours[:2] == theirs[:2]
        for metric in theirs[2]:
            assert abs(ours[2][metric] - theirs[2][metric]) <= 1e-5, (ours, theirs)
        torch.testing.assert_close(ours[3], theirs[3])
    assert sum(bool(predictions) for *_, predictions in expected) == 2
