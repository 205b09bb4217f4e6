"""Master weights are trained as ``ddp`` trains fp32 parameters whose rounded copies forwards see."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parstrat.distributed.engine.state import MASTER_WEIGHTS
from tests.comparing import assert_same
from tests.pool import RankPool
from tests.strategies import zoo
from tests.strategies.cases import CLIP, adafactor, sgd
from tests.strategies.parity import Looks, ddp, make_trainer, train, zero1

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PRECISIONS = {BF16: "bf16-true", FP16: "16-true", FP32: "32-true"}


class Narrow(zoo.MLP):
    """Its parameters are those that forwards see, or master weights of these: gradients come in 16 bits."""

    def __init__(self, row: "Row") -> None:
        super().__init__(row.optimizer)
        self.row = row
        for parameter in self.parameters():
            parameter.data = self.seen(parameter.data)

    def seen(self, master: Tensor) -> Tensor:
        return master.to(BF16 if self.row.dtype == FP32 else self.row.dtype).to(master.dtype)

    def compute_loss(self, batch: Tensor) -> Tensor:
        batch = batch.to(self.row.dtype)
        weights = {name: self.seen(one).to(self.row.dtype) for name, one in self.net.named_parameters()}
        outputs = torch.func.functional_call(self.net, weights, (batch,))
        return (outputs.float() - batch.float().mean(1, keepdim=True)).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == 4:
            self.row.change(self)


def nothing(module: Narrow) -> None: ...


def copy_into(module: Narrow) -> None:
    with torch.no_grad():
        module.net[2].bias[1:3].copy_(torch.tensor([0.25, -3.0]))


def replace(module: Narrow) -> None:
    module.net[2].weight.data = module.seen(module.net[2].weight.data).flip(0) * 2


def zero(module: Narrow) -> None:
    """Negative zeros where weights were negative."""
    for parameter in module.parameters():
        parameter.data.mul_(0)


class Row(NamedTuple):
    """A training, which a program may change between two steps."""

    optimizer: Any = zoo.adamw
    dtype: torch.dtype = BF16
    strategy: dict[str, Any] = {}  # noqa: RUF012  (never changed)
    trainer: dict[str, Any] = {}  # noqa: RUF012
    ranks: int = 2
    change: Callable[[Narrow], None] = nothing


WHOLE, HOME = {"partition": "parameter"}, {"gather_dtype": "bf16"}
# Thirds of gradients in fp16 are rounded.
ROWS = {
    "bf16": Row(ranks=3),
    "bf16, alone": Row(ranks=1),
    "fp16, whole parameters": Row(zoo.adamw, FP16, WHOLE),
    "whole parameters, clipped": Row(zoo.adamw, BF16, WHOLE, CLIP, 3),
    "one bucket, asked for": Row(sgd, BF16, {"bucket_cap_mb": 25, "master_weights": True}),
    "a matrix at a time": Row(adafactor, FP16),
    "narrow both ways": Row(zoo.adamw, FP32, {**HOME, "comm_dtype": "bf16"}),
    "elements are set": Row(zoo.adamw, change=copy_into),
    "data is replaced, whole parameters": Row(zoo.adamw, BF16, WHOLE, {}, 3, replace),
    "all are zero, narrow on the way home": Row(sgd, FP32, HOME, {}, 2, zero),
}


def states(trainer: Any) -> tuple[dict[int, Tensor], dict[int, Any]]:
    saved = trainer.optimizers[0].state_dict()
    return saved[MASTER_WEIGHTS], saved["state"]


def compare(name: str, path: str) -> None:
    """Trains an epoch, and another one in other objects."""
    row, looks = ROWS[name], Looks(states)
    own = {"limit_train_batches": 3, **row.trainer}
    more: dict[str, Any] = {"precision": PRECISIONS[row.dtype], **own}
    train(partial(Narrow, row), zero1(**row.strategy), **more).trainer.save_checkpoint(path)
    ranks, module = dist.get_world_size(), Narrow(row)
    trainer = make_trainer(zero1(**row.strategy), max_epochs=2, callbacks=[looks], **more)
    trainer.fit(module, zoo.loader(40 * ranks, 4, FP32, dist.get_rank(), ranks), ckpt_path=path)
    expected = train(partial(Narrow, row), ddp(), max_epochs=2, **own)
    masters, state = dict(sorted(looks.seen[0].items())), looks.seen[1]
    assert_same(list(masters.values()), list(expected.module.parameters()), rtol=2e-5, atol=1e-6)
    assert_same(state, expected.trainer.optimizers[0].state_dict()["state"], rtol=1e-4, atol=1e-6)
    # What forwards see is what the masters round to.
    assert_same(list(module.parameters()), [module.seen(one).to(row.dtype) for one in masters.values()])
    assert not any(torch.equal(one, module.seen(one.to(row.dtype)).float()) for one in masters.values())


@pytest.mark.parametrize("name", ROWS)
def test_masters_are_trained_as_ddp_trains_parameters(pool: RankPool, tmp_path: Path, name: str) -> None:
    pool.run(ROWS[name].ranks, compare, name, str(tmp_path / "a.ckpt"))
