"""Whole weights under ``zero3_custom``: loaded in hooks and after training, shown on demand."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_parstrat.distributed.checkpoint.reading import ShardedCheckpoint
from tests.comparing import assert_same
from tests.pool import RankPool
from tests.scripts import run_script
from tests.strategies import zoo
from tests.strategies.cases import FP32
from tests.strategies.parity import ddp, largest_difference, make_trainer, train, whole, zero3

STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": ddp,
    "zero3": zero3,
    "zero3 at once": lambda: zero3(min_num_params=10**9),
    "zero3 sharded": lambda: zero3(checkpoint_format="sharded"),
}


class Net(nn.Module):
    """With tied weights, a buffer, a hook of the user's and methods that do not go by ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(zoo.FEATURES, zoo.FEATURES) for _ in range(2)))
        self.first = nn.Linear(zoo.FEATURES, zoo.FEATURES, bias=False)
        self.last = nn.Linear(zoo.FEATURES, zoo.FEATURES, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("calls", torch.zeros(()))
        self.blocks[0].register_forward_hook(double)
        self.kept_in_a_list = [self.first.weight]

    def forward(self, batch: Tensor) -> Tensor:
        self.calls += 1
        return self.last(torch.tanh(self.blocks(self.first(batch))))

    def generate(self, batch: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.softmax(self.blocks[1](batch) @ self.first.weight, 1)


def double(_: nn.Module, arguments: Any, output: Tensor) -> Tensor:
    return 2 * output


class Holder:
    """What hyperparameters may hold beside modules."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module


class Holds(zoo.Zoo):
    def __init__(self, net: nn.Module, loss: nn.Module, holder: Holder | None = None, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.net, self.loss = net, loss

    def build(self) -> None:
        pass

    def compute_loss(self, batch: Tensor) -> Tensor:
        return self.loss(self.net(batch), batch.flip(1))


def train_with_modules_in_hyperparameters(folder: str) -> tuple[list[Tensor], list[str], str]:
    """The weights that were saved, what was warned of, and what is said of a module within an object."""
    with pytest.warns() as warned:
        run = train(lambda: Holds(Net(), nn.MSELoss()), zero3())
    run.trainer.save_checkpoint(f"{folder}/a.ckpt")
    train(lambda: Holds(Net(), nn.MSELoss()), zero3(checkpoint_format="sharded")).trainer.save_checkpoint(
        f"{folder}/b.ckpt"
    )
    net = Net()
    within = train(lambda: Holds(net, nn.MSELoss(), Holder(net.blocks)), zero3())
    with pytest.raises(Exception) as raised:
        within.trainer.save_checkpoint(f"{folder}/never.ckpt")
    return run.parameters[-1], [str(one.message) for one in warned], str(raised.value)


def test_modules_in_hyperparameters_are_left_out_of_checkpoints(pool: RankPool, tmp_path: Path) -> None:
    ((saved, warned, within), _) = pool.run(2, train_with_modules_in_hyperparameters, str(tmp_path))
    assert any("leave out the hyperparameters net" in message for message in warned)
    assert "FSDP" in within and not (tmp_path / "never.ckpt").exists()
    for held in (
        torch.load(tmp_path / "a.ckpt", weights_only=False)["hyper_parameters"],
        ShardedCheckpoint(tmp_path / "b.ckpt", weights_only=False).skeleton["hyper_parameters"],
    ):
        assert sorted(held) == ["holder", "loss", "width"] and type(held["loss"]) is nn.MSELoss
    loaded = Holds.load_from_checkpoint(tmp_path / "a.ckpt", net=Net(), weights_only=False)
    assert_same([parameter.detach() for parameter in loaded.parameters()], saved)


class Object(zoo.MLP):
    """Its hyperparameters hold an object, which only `weights_only=False` loads."""

    def __init__(self, holder: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)


def load_objects(strategy: str, folder: str) -> list[float]:
    """What is evaluated of a checkpoint with objects by a new module, by one that was trained, and trained further."""
    torch.manual_seed(0)
    module = Object(Holder(nn.Tanh()))
    trainer = make_trainer(STRATEGIES[strategy](), max_epochs=2, default_root_dir=folder)
    trainer.fit(module, zoo.loader(40, 4))
    path = f"{folder}/a.ckpt"
    trainer.save_checkpoint(path)
    expected = [whole(parameter.detach()).clone() for parameter in module.parameters()]
    found = []
    for one in (module, Object()):
        with torch.no_grad():
            for parameter in one.parameters():
                parameter.mul_(0.5)
        for evaluate in (trainer.test, trainer.validate):
            evaluate(one, zoo.loader(8, 4), ckpt_path=path, weights_only=False, verbose=False)
        trainer.predict(one, zoo.loader(8, 4), ckpt_path=path, weights_only=False)
        found.append([whole(parameter.detach()).clone() for parameter in one.parameters()])
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, zoo.loader(40, 4), ckpt_path=path, weights_only=False)
    assert trainer.global_step == 30
    assert_same(found, [expected, expected])
    return [float(whole(parameter.detach()).double().sum()) for parameter in module.parameters()]


@pytest.mark.parametrize("strategy", ["zero3", "zero3 sharded"])
def test_objects_in_a_checkpoint_are_loaded_where_the_user_says_so(
    pool: RankPool, tmp_path: Path, strategy: str
) -> None:
    for folder in ("ddp", "ours"):
        (tmp_path / folder).mkdir()
    expected = pool.run(2, load_objects, "ddp", str(tmp_path / "ddp"))
    assert_same(pool.run(2, load_objects, strategy, str(tmp_path / "ours")), expected, rtol=1e-3, atol=1e-4)


class Targets(zoo.Zoo):
    """Loads whole weights, of the whole module and of parts, in hooks."""

    def build(self) -> None:
        self.net = Net()
        self.target = copy.deepcopy(self.net).requires_grad_(False)
        self.start = copy.deepcopy(self.state_dict())

    def compute_loss(self, batch: Tensor) -> Tensor:
        return (self.net(batch) - self.target(batch)).pow(2).mean() + self.net(batch).pow(2).mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 3 == 0:
            self.target.load_state_dict(self.net.state_dict())
        if batch_idx == 4:
            ours = {name.removeprefix("net."): value for name, value in self.start.items() if name.startswith("net.")}
            self.net.load_state_dict({name: value.double() * 0.9 for name, value in ours.items()})
            self.net.blocks[0].load_state_dict({"bias": torch.full((zoo.FEATURES,), 0.1)}, strict=False)

    def on_train_end(self) -> None:
        self.ended = [whole(parameter.detach()).clone() for parameter in self.parameters()]
        self.load_state_dict(self.start)


def load_whole_weights(strategy: str) -> list[Any]:
    run = train(Targets, STRATEGIES[strategy]())
    module = run.module
    found = [module.ended, [whole(parameter.detach()).clone() for parameter in module.parameters()]]
    halved = {name: value * 0.5 for name, value in module.start.items()}
    module.load_state_dict(halved)
    found.append([whole(parameter.detach()).clone() for parameter in module.parameters()])
    copied = copy.deepcopy(module)
    copied.load_state_dict(module.start)
    found.append([whole(parameter.detach()).clone() for parameter in copied.parameters()])
    given = dict(halved)
    given["net.first.weight"] = torch.zeros(3, 3)
    given["more"] = given.pop("net.blocks.0.bias")
    with pytest.raises(RuntimeError) as raised:
        module.load_state_dict(given)
    return [*found, str(raised.value).splitlines(), module.load_state_dict(halved, strict=False)]


@pytest.mark.parametrize("strategy", ["zero3", "zero3 at once"])
def test_whole_weights_are_loaded_as_under_ddp(pool: RankPool, strategy: str) -> None:
    expected = pool.run(2, load_whole_weights, "ddp")
    actual = pool.run(2, load_whole_weights, strategy)
    for ours, theirs in zip(actual, expected, strict=True):
        assert_same(ours[:4], theirs[:4], rtol=1e-4, atol=1e-5)
        assert [line.replace("FSDP", "") for line in ours[4]] == theirs[4] and len(theirs[4]) >= 4
        assert ours[5] == theirs[5]


def export(strategy: str) -> list[Any]:
    """What programs do when a training has ended, and when a test has: weights, methods, pickles, copies, gradients."""
    found = []
    run = train(Targets, STRATEGIES[strategy]())
    module, trainer, batch = run.module, run.trainer, torch.linspace(-1, 1, zoo.FEATURES).repeat(3, 1)
    shards, had = list(module.parameters()), names_and_hooks(module)
    for _ in range(2):
        with shown(trainer, strategy):
            assert not any(isinstance(parameter, DTensor) for parameter in module.parameters())
            state = module.state_dict()
            assert all(value.data_ptr() for value in state.values()) and type(module) is Targets
            net = pickle.loads(pickle.dumps(module.net))
            assert net.last.weight is net.first.weight
            if dist.get_rank() == 0:
                # Nothing is sent.
                module.net.generate(batch)
            dist.barrier()
            loss = module.training_step(batch, 0) + module.net.blocks(batch).sum()
            gradients = torch.autograd.grad(loss, list(module.net.parameters()))
            found.append([{name: value.clone() for name, value in state.items() if name != "net.calls"}, gradients])
            outputs = module.net.generate(batch), net(batch), copy.deepcopy(module.net)(batch)
            found.append([output.detach() for output in outputs])
        trainer.test(module, zoo.loader(8, 4), verbose=False)
    if strategy != "ddp":
        assert all(one is other for one, other in zip(module.parameters(), shards, strict=True))
        assert names_and_hooks(module) == had
    return found


def names_and_hooks(module: nn.Module) -> list[dict[str, Any]]:
    """What each part has, and of its hooks which, in their order."""
    own = [vars(part).items() for part in module.modules()]
    return [{name: list(value) if "hook" in name and value else None for name, value in of_part} for of_part in own]


def shown(trainer: Any, strategy: str) -> Any:
    return torch.enable_grad() if strategy == "ddp" else trainer.strategy.full_parameters()


@pytest.mark.parametrize("strategy", ["zero3", "zero3 at once"])
def test_a_module_is_a_plain_one_within_full_parameters_when_a_training_has_ended(
    pool: RankPool, strategy: str
) -> None:
    expected = pool.run(2, export, "ddp")
    assert_same(pool.run(2, export, strategy), expected, rtol=1e-4, atol=1e-5)


def in_place(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.mul_(0.9)


def by_data(weight: nn.Parameter) -> None:
    weight.data = weight.data * 0.9


def within_data(weight: nn.Parameter) -> None:
    weight.data.mul_(0.9)


def of_many(weight: nn.Parameter) -> None:
    with torch.no_grad():
        torch._foreach_mul_([weight], 0.9)


WRITES = {one.__name__: one for one in (in_place, by_data, within_data, of_many)}


class Writes(Callback):
    def __init__(self, way: str, strategy: str) -> None:
        self.way, self.strategy = way, strategy

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        with shown(trainer, self.strategy):
            net = pl_module.net
            WRITES[self.way](net[0].weight)
            if trainer.global_step == 4:
                net[2].load_state_dict({name: value * 0.5 for name, value in net[2].state_dict().items()})
            if trainer.global_step == 6:
                net[2].bias.requires_grad_(False)


def write() -> dict[str, float]:
    found = {}
    for way in WRITES:
        runs = [train(zoo.MLP, STRATEGIES[name](), callbacks=[Writes(way, name)]) for name in ("zero3", "ddp")]
        found[way] = largest_difference(*runs)
    return found


def test_what_is_written_to_whole_parameters_stays(pool: RankPool) -> None:
    for found in pool.run(2, write):
        assert all(difference <= FP32 for difference in found.values()), found


class Looks(Callback):
    """Enters it where Lightning evaluates without gradients, and once more within it; there it saves, too."""

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        folder, strategy = trainer.default_root_dir, trainer.strategy
        trainer.save_checkpoint(f"{folder}/outside.ckpt")
        self.seen = [whole(parameter.detach()).clone() for parameter in pl_module.parameters()]
        with strategy.full_parameters(), strategy.full_parameters() as module:
            self.shown = [parameter.detach().clone() for parameter in module.parameters()]
            module(torch.ones(1, zoo.FEATURES))
            trainer.save_checkpoint(f"{folder}/inside.ckpt")


class Called(zoo.MLP):
    def forward(self, batch: Tensor) -> Tensor:
        return self.net(batch)


def look(kind: str, inference_mode: bool, folder: str) -> list[Any]:
    looks = Looks()
    strategy = zero3(gather_dtype="bf16", checkpoint_format=kind)
    arguments = {"callbacks": [looks], "inference_mode": inference_mode, "default_root_dir": folder}
    run = train(Called, strategy, validate=True, precision="bf16-mixed", **arguments)
    fresh, found = Called(), [looks.seen, looks.shown]
    for name in ("outside", "inside"):
        trainer = make_trainer(zero3(), max_epochs=1)
        trainer.validate(fresh, zoo.loader(8, 4), ckpt_path=f"{folder}/{name}.ckpt", verbose=False)
        found.append([whole(parameter.detach()).clone() for parameter in fresh.parameters()])
    assert all(isinstance(parameter, DTensor) for parameter in run.module.parameters())
    return found


@pytest.mark.parametrize(("kind", "inference_mode"), [("full", True), ("sharded", False)])
def test_it_shows_what_is_kept_in_an_evaluation_and_within_itself(
    pool: RankPool, tmp_path: Path, kind: str, inference_mode: bool
) -> None:
    for seen, *others in pool.run(2, look, kind, inference_mode, str(tmp_path)):
        assert seen[0].dtype == torch.float32
        assert_same(others, [seen] * 3)


SPAWNED = """
import json, torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_parstrat import ZeRO3Strategy

class Counts(BoringModel):
    def on_fit_end(self):
        with self.trainer.strategy.full_parameters():
            torch.save(self.layer.weight.detach(), f"{self.trainer.global_rank}.pt")

if __name__ == "__main__":
    module = Counts()
    strategy = ZeRO3Strategy(min_num_params=0, start_method="spawn")
    trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, max_steps=2, logger=False,
                      enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(module)
    with trainer.strategy.full_parameters() as shown:
        ranks = [torch.load(f"{rank}.pt") for rank in range(2)]
        print(all(torch.equal(one, shown.layer.weight) for one in ranks), type(shown.layer.weight).__name__)
"""


@pytest.mark.slow
def test_where_ranks_were_spawned_the_module_is_whole_when_they_have_ended(tmp_path: Path) -> None:
    assert "True Parameter" in run_script(SPAWNED, tmp_path).splitlines()


DISCONNECTED = """
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

trainer = Trainer(accelerator="cpu", devices=1, strategy="zero3_custom", max_steps=1, logger=False,
                  enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(BoringModel())
torch.distributed.destroy_process_group()
try:
    with trainer.strategy.full_parameters():
        pass
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.slow
def test_ranks_that_are_no_longer_connected_are_told_so(tmp_path: Path) -> None:
    said = run_script(DISCONNECTED, tmp_path)
    assert "MisconfigurationException `full_parameters()` was called when the process group had been destroyed" in said
