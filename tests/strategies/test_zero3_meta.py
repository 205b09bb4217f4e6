"""A module on the meta device: the values are rank 0's, wherever rank 0 has them from. Ranks are seeded differently."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.comparing import distance
from tests.pool import RankPool
from tests.slow import slow_unless
from tests.strategies import zoo
from tests.strategies.cases import FP32
from tests.strategies.parity import ddp, largest_difference, make_trainer, train, whole, zero3

FEATURES = zoo.FEATURES
# Which ranks make the module on the meta device.
ALONE, OTHERS, ALL, NONE = "rank 0", "other ranks", "all ranks", "no rank"


class Base(zoo.Zoo):
    on_meta = NONE

    def build(self) -> None:
        pass

    def make_net(self) -> nn.Module:
        raise NotImplementedError

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            rank = dist.get_rank()
            torch.manual_seed(10 + rank)
            meta = {OTHERS: rank > 0, ALONE: rank == 0, ALL: True, NONE: False}[self.on_meta]
            with torch.device("meta" if meta else "cpu"):
                self.net = self.make_net()

    def compute_loss(self, batch: Tensor) -> Tensor:
        return (self.net(batch) - 1).pow(2).mean()


class Block(nn.Module):
    """As those of other packages: nothing says how its values are made again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FEATURES, FEATURES))
        self.register_buffer("shift", torch.rand(FEATURES), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.tanh(inputs @ self.weight + self.shift)


class Pretrained(Base):
    """Has values on rank 0 alone."""

    on_meta = OTHERS

    def make_net(self) -> nn.Module:
        net = nn.Sequential(Block(), Block(), nn.Linear(FEATURES, 3), nn.Linear(3, 3))
        net.append(tied := nn.Linear(3, 3))
        tied.weight = net[3].weight
        return net


class SharesMemory(Pretrained):
    """What cannot be sharded shows on rank 0 alone: the meta device has no memory to share."""

    def make_net(self) -> nn.Module:
        net = super().make_net()
        if not net[0].weight.is_meta:
            net[1].weight.data = net[0].weight.data.t()
        return net


class Seeded(nn.Linear):
    """Draws by its own size and the rank's seed, in whatever order layers are made, and leaves the generator alone."""

    def reset_parameters(self) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(torch.initial_seed() + self.in_features)
            super().reset_parameters()


class MadeAnew(Base):
    """All parts say how they are made, and one draws numbers in training."""

    on_meta = ALL

    def make_net(self) -> nn.Module:
        return nn.Sequential(Seeded(FEATURES, 8), nn.Dropout(0.3), nn.BatchNorm1d(8), Seeded(8, 1))


class RootMakes(Base):
    """Has a parameter of its own."""

    on_meta = ALL

    def make_net(self) -> nn.Module:
        self.scale = nn.Parameter(torch.ones(8))
        return Seeded(FEATURES, 8)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)

    def compute_loss(self, batch: Tensor) -> Tensor:
        return (self.net(batch) * self.scale).pow(2).mean()


class OnMeta(RootMakes):
    """Its class does not say how it is made, nor does that of what follows."""

    reset_parameters = None  # type: ignore[assignment]


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(FEATURES))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.factor


class Within(Base):
    on_meta = ALL

    def make_net(self) -> nn.Module:
        self.scales = nn.ModuleList(Scale() for _ in range(2))
        return nn.Linear(FEATURES, 1)


def made_by(base: type[Base], on_meta: str) -> type[Base]:
    return type(base.__name__, (base,), {"on_meta": on_meta})


PAIRS: dict[str, tuple[type[Base], dict[str, Any]]] = {
    "rank 0 has values": (Pretrained, {}),
    "rank 0 has values, no units": (Pretrained, {"min_num_params": 10**9}),
    "made anew": (MadeAnew, {}),
    # The other way round: what rank 0 makes counts, not what another rank has.
    "made anew on rank 0": (made_by(MadeAnew, ALONE), {}),
    "made anew, the root too": (RootMakes, {}),
}


def compare() -> dict[str, float]:
    """With what ``ddp`` makes of the module that is made at once."""
    return {
        name: largest_difference(train(make, zero3(**arguments)), train(made_by(make, NONE), ddp()))
        for name, (make, arguments) in PAIRS.items()
    }


def test_trains_as_ddp_trains_what_rank_0_has_made_at_once(pool: RankPool) -> None:
    for found in pool.run(2, compare):
        assert all(difference <= FP32 for difference in found.values()), found


class Draws(MadeAnew):
    """Draws from the rank's own generator where it is made, as most layers do."""

    def configure_model(self) -> None:
        with torch.device("meta"):
            self.net = nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.3), nn.Linear(8, 8), nn.Linear(8, 2))


def state_of_generator() -> list[int]:
    train(Draws, zero3())
    return torch.get_rng_state().tolist()


def test_all_ranks_draw_as_many_numbers_as_rank_0(pool: RankPool) -> None:
    first, second = pool.run(2, state_of_generator)
    assert first == second


class DrawsNothing(MadeAnew):
    """A checkpoint of ``ddp`` has no state of random generators."""

    def make_net(self) -> nn.Module:
        return nn.Sequential(Seeded(FEATURES, 8), nn.BatchNorm1d(8), Seeded(8, 1))


def go_on(folder: str, checkpoint_format: str) -> float:
    """Of a checkpoint nothing of the weights that rank 0 had before may be left, nor on one rank the checkpoint's."""
    found = []
    for make in (Pretrained, DrawsNothing):
        eager = made_by(make, NONE)
        path, whole_path = f"{folder}/{make.__name__}-{checkpoint_format}.ckpt", f"{folder}/{make.__name__}-whole.ckpt"
        run = train(eager, zero3(checkpoint_format=checkpoint_format))
        run.trainer.save_checkpoint(path)
        train(eager, ddp()).trainer.save_checkpoint(whole_path)
        validated = make()
        make_trainer(zero3(), max_epochs=1).validate(validated, zoo.loader(8, 4), ckpt_path=path, verbose=False)
        found.append(distance(*([whole(one.detach()) for one in two.parameters()] for two in (validated, run.module))))
        expected = resume(eager(), ddp(), whole_path)
        found += [distance(resume(make(), zero3(), one), expected) for one in (path, whole_path)]
    return max(found)


def resume(module: Base, strategy: Any, path: str) -> list[Tensor]:
    trainer = make_trainer(strategy, max_epochs=2)
    data = zoo.loader(80, 4, torch.float32, dist.get_rank(), dist.get_world_size())
    trainer.fit(module, data, ckpt_path=path)
    assert trainer.global_step == 20
    return [whole(parameter.detach()).clone() for parameter in module.parameters()]


@pytest.mark.parametrize("checkpoint_format", slow_unless(lambda one: one == "full", ["full", "sharded"]))
def test_a_checkpoint_is_loaded_on_all_ranks(pool: RankPool, tmp_path: Path, checkpoint_format: str) -> None:
    assert max(pool.run(2, go_on, str(tmp_path), checkpoint_format)) <= FP32
