"""Evaluations, predictions, checkpoints, whole weights and averages under ``zero3_custom`` are those of ``ddp``."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    WeightAveraging,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_parstrat.distributed.checkpoint.reading import ShardedCheckpoint
from tests.comparing import assert_same
from tests.pool import RankPool
from tests.slow import slow_unless
from tests.strategies import zoo
from tests.strategies.cases import plain_sgd
from tests.strategies.parity import ddp, make_trainer, train, whole, zero1, zero3

STRATEGIES: dict[str, Callable[[], Any]] = {
    "single": lambda: None,
    "ddp": ddp,
    "zero1": zero1,
    "zero3": zero3,
    "zero3 at once": lambda: zero3(min_num_params=10**9),
    "zero3 sharded": lambda: zero3(state_dict_type="sharded"),
    "zero3 async": lambda: zero3(state_dict_type="sharded", async_save=True),
}
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def own(length: int) -> Any:
    """A loader of this rank's samples."""
    return zoo.loader(length, 4, rank=dist.get_rank(), world_size=dist.get_world_size())


def weights_of(module: nn.Module) -> list[Tensor]:
    return [whole(parameter.detach()).clone() for parameter in module.parameters()]


# Whole weights, and modules in checkpoints.


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

    def forward(self, batch: Tensor) -> Tensor:
        self.calls += 1
        return self.last(torch.tanh(self.blocks(self.first(batch))))

    def generate(self, batch: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.softmax(self.blocks[1](batch) @ self.first.weight, 1)


def double(_: nn.Module, arguments: Any, output: Tensor) -> Tensor:
    return 2 * output


class Holds(zoo.Zoo):
    def __init__(self, net: nn.Module, loss: nn.Module, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.net, self.loss = net, loss

    def build(self) -> None:
        pass

    def compute_loss(self, batch: Tensor) -> Tensor:
        return self.loss(self.net(batch), batch.flip(1))


def train_with_modules_in_hyperparameters(folder: str) -> list[Tensor]:
    for name, form in {"a": "full", "b": "sharded"}.items():
        run = train(lambda: Holds(Net(), nn.MSELoss()), zero3(state_dict_type=form))
        run.trainer.save_checkpoint(f"{folder}/{name}.ckpt")
    return run.parameters[-1]


@pytest.mark.slow
def test_modules_in_hyperparameters_are_left_out_of_checkpoints(pool: RankPool, tmp_path: Path) -> None:
    saved, _ = pool.run(2, train_with_modules_in_hyperparameters, str(tmp_path))
    for held in (
        torch.load(tmp_path / "a.ckpt", weights_only=False)["hyper_parameters"],
        ShardedCheckpoint(tmp_path / "b.ckpt", weights_only=False).skeleton["hyper_parameters"],
    ):
        assert sorted(held) == ["loss", "width"] and type(held["loss"]) is nn.MSELoss
    loaded = Holds.load_from_checkpoint(tmp_path / "a.ckpt", net=Net(), weights_only=False)
    assert_same([parameter.detach() for parameter in loaded.parameters()], saved)


class Object(zoo.MLP):
    """Its hyperparameters hold an object, which only `weights_only=False` loads."""

    def __init__(self, held: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)


def load_objects(path: str) -> None:
    """Evaluates by a checkpoint with objects, of a new module and of one that was trained, and trains further."""
    run = train(lambda: Object(nn.Tanh()), zero3(), max_epochs=2)
    run.trainer.save_checkpoint(path)
    expected = weights_of(run.module)
    for one in (run.module, Object()):
        with torch.no_grad():
            for parameter in one.parameters():
                parameter.mul_(0.5)
        run.trainer.test(one, zoo.loader(8, 4), ckpt_path=path, weights_only=False, verbose=False)
        assert_same(weights_of(one), expected)
    run.trainer.fit_loop.max_epochs = 3
    run.trainer.fit(run.module, own(80), ckpt_path=path, weights_only=False)
    assert run.trainer.global_step == 30


def test_objects_in_a_checkpoint_are_loaded_where_the_user_says_so(pool: RankPool, tmp_path: Path) -> None:
    pool.run(2, load_objects, str(tmp_path / "a.ckpt"))


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
        self.ended = weights_of(self)
        self.load_state_dict(self.start)


def load_whole_weights(strategy: str) -> list[Any]:
    run = train(Targets, STRATEGIES[strategy]())
    module = run.module
    found = [module.ended, weights_of(module)]
    halved = {name: value * 0.5 for name, value in module.start.items()}
    module.load_state_dict(halved)
    found.append(weights_of(module))
    copied = copy.deepcopy(module)
    copied.load_state_dict(module.start)
    found.append(weights_of(copied))
    given = dict(halved)
    given["net.first.weight"] = torch.zeros(3, 3)
    given["more"] = given.pop("net.blocks.0.bias")
    with pytest.raises(RuntimeError) as raised:
        module.load_state_dict(given)
    return [*found, str(raised.value).splitlines(), module.load_state_dict(halved, strict=False)]


def test_whole_weights_are_loaded_as_under_ddp(pool: RankPool) -> None:
    expected = pool.run(2, load_whole_weights, "ddp")
    actual = pool.run(2, load_whole_weights, "zero3")
    for ours, theirs in zip(actual, expected, strict=True):
        assert_same(ours[:4], theirs[:4], **CLOSE)
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


def test_a_module_is_a_plain_one_within_full_parameters_when_a_training_has_ended(pool: RankPool) -> None:
    expected = pool.run(2, export, "ddp")
    for strategy in ("zero3", "zero3 at once"):
        assert_same(pool.run(2, export, strategy), expected, **CLOSE)


def fit_twice(strategy: str, manual: bool) -> Any:
    """Steps are set on the object, such as of a library's model. They outlast a validation and a training."""
    torch.manual_seed(0)
    module: Any = zoo.MLP(plain_sgd)
    module.automatic_optimization = not manual

    def step(batch: Tensor, batch_idx: int) -> Any:
        loss = module.compute_loss(2 * batch)
        if manual:
            module.optimizers().zero_grad()
            module.manual_backward(loss)
            module.optimizers().step()
        return loss

    module.training_step = step
    module.predict_step = lambda batch, *_: 3 * module.net(batch)
    make_trainer(STRATEGIES[strategy]()).validate(module, own(16), verbose=False)
    batch, found = torch.linspace(-1, 1, zoo.FEATURES).repeat(3, 1), []
    for _ in range(2):
        trainer = make_trainer(STRATEGIES[strategy](), max_epochs=1)
        trainer.fit(module, own(32))
        with shown(trainer, strategy):
            twin = copy.deepcopy(module)
            found.append(
                [one.detach().clone() for one in (module.predict_step(batch), twin.net(batch), *module.parameters())]
            )
    return found


@pytest.mark.parametrize("manual", [False, True])
def test_steps_that_are_set_on_the_object_stay(pool: RankPool, manual: bool) -> None:
    assert_same(pool.run(2, fit_twice, "zero3", manual), pool.run(2, fit_twice, "ddp", manual), **CLOSE)


class Writes(Callback):
    def __init__(self, strategy: str) -> None:
        self.strategy = strategy

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        with shown(trainer, self.strategy):
            net = pl_module.net
            with torch.no_grad():
                torch._foreach_mul_([net[0].weight], 0.9)
            net[0].bias.data = net[0].bias.data * 0.9
            if trainer.global_step == 4:
                net[2].load_state_dict({name: value * 0.5 for name, value in net[2].state_dict().items()})
            if trainer.global_step == 6:
                net[2].bias.requires_grad_(False)


def write(strategy: str) -> list[list[Tensor]]:
    return train(zoo.MLP, STRATEGIES[strategy](), callbacks=[Writes(strategy)]).parameters


def test_what_is_written_to_whole_parameters_stays(pool: RankPool) -> None:
    assert_same(pool.run(2, write, "zero3"), pool.run(2, write, "ddp"), **CLOSE)


class Looks(Callback):
    """Enters it where Lightning evaluates without gradients, and once more within it; there it saves, too."""

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        folder, strategy = trainer.default_root_dir, trainer.strategy
        trainer.save_checkpoint(f"{folder}/outside.ckpt")
        self.seen = weights_of(pl_module)
        with strategy.full_parameters(), strategy.full_parameters() as module:
            self.shown = [parameter.detach().clone() for parameter in module.parameters()]
            module(torch.ones(1, zoo.FEATURES))
            trainer.save_checkpoint(f"{folder}/inside.ckpt")


class Called(zoo.MLP):
    def forward(self, batch: Tensor) -> Tensor:
        return self.net(batch)


def look(kind: str, inference_mode: bool, folder: str) -> list[Any]:
    looks = Looks()
    strategy = zero3(param_dtype="bf16", state_dict_type=kind)
    arguments = {"callbacks": [looks], "inference_mode": inference_mode, "default_root_dir": folder}
    run = train(Called, strategy, validate=True, precision="bf16-mixed", **arguments)
    fresh, found = Called(), [looks.seen, looks.shown]
    for name in ("outside", "inside"):
        trainer = make_trainer(zero3(), max_epochs=1)
        trainer.validate(fresh, zoo.loader(8, 4), ckpt_path=f"{folder}/{name}.ckpt", verbose=False)
        found.append(weights_of(fresh))
    assert all(isinstance(parameter, DTensor) for parameter in run.module.parameters())
    return found


@pytest.mark.parametrize(
    ("kind", "inference_mode"), slow_unless(lambda kind, _: kind == "full", [("full", True), ("sharded", False)])
)
def test_it_shows_what_is_kept_in_an_evaluation_and_within_itself(
    pool: RankPool, tmp_path: Path, kind: str, inference_mode: bool
) -> None:
    for seen, *others in pool.run(2, look, kind, inference_mode, str(tmp_path)):
        assert seen[0].dtype == torch.float32
        assert_same(others, [seen] * 3)


# Averages of weights: those of one process, in validation, at the end, in checkpoints, and after a resume.


BATCH = 12


class Validated(Callback):
    """The losses of validations, each the mean over ranks."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["val_loss"]))


def average(
    route: int, strategy: str, folder: str = "", resumed: str | None = None
) -> tuple[list[float], list[Tensor]]:
    """Validation losses and the weights at the end, which are averages; every second of 8 steps is saved."""
    torch.manual_seed(0)
    make_module, make_average, *_ = ROUTES[route]
    ranks, validated, module = dist.get_world_size(), Validated(), make_module()
    callbacks = [make_average(), validated]
    if folder:
        callbacks.append(ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1))
    trainer = make_trainer(
        STRATEGIES[strategy](),
        max_epochs=2,
        callbacks=callbacks,
        enable_checkpointing=bool(folder),
        val_check_interval=2,
    )
    of_rank = {"rank": dist.get_rank(), "world_size": ranks}
    data = zoo.loader(4 * BATCH, BATCH // ranks, **of_rank)
    trainer.fit(module, data, zoo.loader(BATCH, BATCH // ranks, **of_rank), ckpt_path=resumed, weights_only=False)
    return validated.losses, weights_of(module)


# Of stock loaders a training goes on at an epoch's end.
ROUTES: list[tuple[type[zoo.Zoo], Callable[[], Callback], str, int, str, int]] = [
    (zoo.TiedLanguageModel, WeightAveraging, "zero3 sharded", 3, "zero3", 2),
    (zoo.BareParameters, lambda: EMAWeightAveraging(decay=0.8, use_buffers=False), "zero3", 2, "ddp", 2),
    (zoo.Convolutional, WeightAveraging, "zero3 async", 2, "zero1", 3),
]


@pytest.mark.parametrize("route", slow_unless(lambda route: route == 0, range(len(ROUTES))))
def test_averages_are_those_of_one_process_and_go_on_from_a_checkpoint(
    pool: RankPool, tmp_path: Path, route: int
) -> None:
    *_, source, source_ranks, target, target_ranks = ROUTES[route]
    (expected,) = pool.run(1, average, route, "single")
    for actual in pool.run(source_ranks, average, route, source, str(tmp_path)):
        assert_same(actual, expected, **CLOSE)
    path = str(tmp_path / ("step=4.ckpt" if target == "ddp" else "step=6.ckpt"))
    for losses, weights in pool.run(target_ranks, average, route, target, "", path):
        assert_same((losses, weights), (expected[0][-len(losses) :], expected[1]), **CLOSE)


def without_group() -> None:
    strategy = train(zoo.MLP, zero3(), max_steps=1).trainer.strategy
    dist.destroy_process_group()
    with pytest.raises(
        MisconfigurationException, match=r"`full_parameters\(\)` was called when the process group had been"
    ):
        with strategy.full_parameters():
            pass


def test_whole_parameters_are_refused_without_a_group(own_pool: RankPool) -> None:
    own_pool.run(1, without_group)
