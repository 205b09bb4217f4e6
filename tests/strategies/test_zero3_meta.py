"""A module on the meta device: the values are rank 0's, wherever rank 0 has them from."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn

from tests.pool import RankPool
from tests.strategies import zoo
from tests.strategies.cases import FP32
from tests.strategies.parity import ddp, largest_difference, make_trainer, train, whole, zero3


class Block(nn.Module):
    """As those of other packages: nothing says how its values are made again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(zoo.FEATURES, zoo.FEATURES))
        self.register_buffer("shift", torch.rand(zoo.FEATURES), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.tanh(inputs @ self.weight + self.shift)


class Pretrained(zoo.Zoo):
    """Has values on rank 0 alone; the other ranks' generators stand elsewhere."""

    on_meta = "other ranks"

    def build(self) -> None:
        pass

    def make_net(self) -> nn.Module:
        net = nn.Sequential(Block(), Block(), nn.Linear(zoo.FEATURES, 3), nn.Linear(3, 3))
        net.append(tied := nn.Linear(3, 3))
        tied.weight = net[3].weight
        return net

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            torch.manual_seed(dist.get_rank())
            rank = dist.get_rank()
            meta = {"other ranks": rank > 0, "rank 0": rank == 0, "all ranks": True, "no rank": False}[self.on_meta]
            with torch.device("meta" if meta else "cpu"):
                self.net = self.make_net()

    def compute_loss(self, batch: Tensor) -> Tensor:
        return (self.net(batch) - 1).pow(2).mean()


class Eager(Pretrained):
    on_meta = "no rank"


def apart_from_ddp(arguments: dict[str, Any]) -> float:
    return largest_difference(train(Pretrained, zero3(**arguments)), train(Eager, ddp()))


@pytest.mark.parametrize("arguments", [{}, {"min_num_params": 10**9}], ids=["units", "no units"])
def test_trains_as_ddp_trains_what_rank_0_has(pool: RankPool, arguments: dict[str, Any]) -> None:
    assert max(pool.run(2, apart_from_ddp, arguments)) <= FP32


class WithReset(Pretrained):
    """All parts say how they are made, and draw numbers in training, too."""

    on_meta = "all ranks"

    def make_net(self) -> nn.Module:
        drop = nn.Dropout(0.3)
        return nn.Sequential(nn.Linear(zoo.FEATURES, 8), drop, nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 2))


class OnRank1(WithReset):
    """The other way round: what rank 0 makes counts, not what another rank has."""

    on_meta = "rank 0"


class Given(WithReset):
    """Draws as many numbers when it is made, then has the values that rank 0 has made."""

    on_meta = "no rank"

    def __init__(self, values: list[Tensor]) -> None:
        super().__init__()
        self.values = values

    def configure_model(self) -> None:
        super().configure_model()
        for parameter, value in zip(self.parameters(), self.values, strict=True):
            parameter.data.copy_(value)


class Noted(Callback):
    """Weights before the first step."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.values = [whole(parameter.detach()).clone() for parameter in pl_module.parameters()]


def apart_from_ddp_with_those_values(make: type[WithReset]) -> tuple[float, float]:
    run = train(make, zero3(), callbacks=[noted := Noted()])
    return largest_difference(run, train(lambda: Given(noted.values), ddp())), float(noted.values[0].std())


@pytest.mark.parametrize("make", [WithReset, OnRank1])
def test_what_rank_0_makes_trains_as_under_ddp_dropout_and_all(pool: RankPool, make: type[WithReset]) -> None:
    for difference, spread in pool.run(2, apart_from_ddp_with_those_values, make):
        assert difference <= FP32
        # As of `nn.Linear`: 1 / sqrt(3 * 12).
        assert 0.1 < spread < 0.25


class SharesMemory(Pretrained):
    """What cannot be sharded shows on rank 0 alone: the meta device has no memory to share."""

    def make_net(self) -> nn.Module:
        net = super().make_net()
        if not net[0].weight.is_meta:
            net[1].weight.data = net[0].weight.data.t()
        return net


def refusal() -> str:
    with pytest.raises(ValueError) as raised:
        train(SharesMemory, zero3())
    return str(raised.value)


def test_what_rank_0_alone_cannot_shard_is_refused_on_all_ranks(pool: RankPool) -> None:
    for said in pool.run(2, refusal):
        assert "net.0.weight, net.1.weight: these cannot be sharded on some ranks" in said


def go_on(folder: str, checkpoint_format: str) -> float:
    """Of a checkpoint nothing of the weights that rank 0 had before may be left, nor on one rank the checkpoint's."""
    path = f"{folder}/{checkpoint_format}.ckpt"
    strategy = zero3(checkpoint_format=checkpoint_format)
    train(Eager, strategy).trainer.save_checkpoint(path)
    whole_path = f"{folder}/whole.ckpt"
    train(Eager, ddp()).trainer.save_checkpoint(whole_path)
    resumed = [
        resume(Pretrained(), zero3(), path),
        resume(Pretrained(), zero3(), whole_path),
        resume(Eager(), ddp(), whole_path),
    ]
    return max(
        float((one - other).abs().max())
        for weights in resumed[:2]
        for one, other in zip(weights, resumed[2], strict=True)
    )


def resume(module: Pretrained, strategy: Any, path: str) -> list[Tensor]:
    trainer = make_trainer(strategy, max_epochs=2)
    data = zoo.loader(80, 4, torch.float32, dist.get_rank(), dist.get_world_size())
    trainer.fit(module, data, ckpt_path=path)
    assert trainer.global_step == 20
    return [whole(parameter.detach()).clone() for parameter in module.parameters()]


@pytest.mark.parametrize("checkpoint_format", ["full", "sharded"])
def test_a_checkpoint_is_loaded_at_the_same_moment_on_all_ranks(
    pool: RankPool, tmp_path: Path, checkpoint_format: str
) -> None:
    assert max(pool.run(2, go_on, str(tmp_path), checkpoint_format)) <= FP32


def averages() -> float:
    kept = []

    class Keeps(EMAWeightAveraging):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            kept.append([whole(p.detach()).clone() for p in self._average_model.module.parameters()])
            super().on_train_end(trainer, pl_module)

    for make, strategy in ((Pretrained, zero3()), (Eager, ddp())):
        train(make, strategy, callbacks=[Keeps(decay=0.5)])
    return max(float((a - b).abs().max()) for a, b in zip(*kept, strict=True))


def test_its_averages_are_those_of_ddp(pool: RankPool) -> None:
    assert max(pool.run(2, averages)) <= FP32
