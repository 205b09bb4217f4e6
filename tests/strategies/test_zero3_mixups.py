"""What would train on other numbers than it should, without a word, is refused or ends with an error."""

import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_parstrat.distributed.comm.backends import make_collectives
from lightning_parstrat.distributed.comm.process_groups import process_groups
from lightning_parstrat.distributed.zero3.sharded_module import DifferentModulesError
from tests.pool import RankError, RankPool
from tests.strategies import zoo
from tests.strategies.cases import FP32
from tests.strategies.parity import ddp, largest_difference, make_trainer, train, zero3


class Drops(zoo.Zoo):
    """All ranks call all of three blocks alike; one of them makes nothing of what the second returns."""

    def build(self) -> None:
        self.blocks = nn.ModuleList(nn.Linear(zoo.FEATURES, zoo.FEATURES) for _ in range(3))

    def compute_loss(self, batch: Tensor) -> Tensor:
        hidden = batch
        for number, block in enumerate(self.blocks):
            returned = block(hidden)
            if number != 1 or dist.get_rank() != 1:
                hidden = hidden + returned
        return (hidden - 1).square().mean()


class Multiplies(Drops):
    """As the error says."""

    def compute_loss(self, batch: Tensor) -> Tensor:
        hidden = batch
        for number, block in enumerate(self.blocks):
            hidden = hidden + block(hidden) * float(number != 1 or dist.get_rank() != 1)
        return (hidden - 1).square().mean()


def compare(make: type[Drops], arguments: dict[str, Any]) -> float:
    expected = train(make, ddp(), **arguments)
    return largest_difference(train(make, zero3(), **arguments), expected)


@pytest.mark.parametrize("arguments", [{}, {"accumulate_grad_batches": 2}], ids=["", "accumulated"])
def test_ranks_whose_backwards_reach_other_units_get_an_error(pool: RankPool, arguments: dict[str, Any]) -> None:
    """Each would send another unit's gradients: of one size, they would be added up."""
    with pytest.raises(RankError, match="result multiplied by 0") as raised:
        pool.run(2, compare, Drops, arguments)
    assert str(raised.value).count("DifferentModulesError") >= 2


def test_what_the_error_says_trains_as_ddp_does(pool: RankPool) -> None:
    assert max(pool.run(2, compare, Multiplies, {})) <= FP32


class Routes(Drops):
    """Each rank evaluates by another block, of the same shape; or rank 1 by one more."""

    one_more = False

    def compute_loss(self, batch: Tensor) -> Tensor:
        return self.blocks[0](batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.route(batch).mean(), sync_dist=True)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.route(batch)

    def route(self, batch: Tensor) -> Tensor:
        called = self.blocks[: 1 + dist.get_rank()] if self.one_more else self.blocks[dist.get_rank() :][:1]
        for block in called:
            batch = block(batch)
        return batch


class OneMore(Routes):
    one_more = True


def evaluate_mixed(stage: str, folder: str) -> tuple[str, list[str], dict[str, Any]]:
    """What is said of ranks that evaluate by different blocks; what was saved, and what was logged by then."""
    saves = ModelCheckpoint(folder, monitor="val_loss")
    trainer = make_trainer(zero3(), enable_checkpointing=True, callbacks=[saves], num_sanity_val_steps=0)
    with pytest.raises(DifferentModulesError) as raised:
        if stage == "fit":
            trainer.fit(Routes(), zoo.loader(16, 4), zoo.loader(16, 4))
        else:
            getattr(trainer, stage)(Routes(), zoo.loader(16, 4))
    return str(raised.value), [file.name for file in Path(folder).glob("*")], dict(trainer.callback_metrics)


@pytest.mark.parametrize("stage", ["fit", "validate", "predict"])
def test_ranks_that_evaluate_by_different_modules_end_before_anything_is_logged(
    pool: RankPool, tmp_path: Path, stage: str
) -> None:
    for said, saved, logged in pool.run(2, evaluate_mixed, stage, str(tmp_path)):
        assert "evaluation" in said and "all ranks" in said
        assert not saved and not logged


def evaluate_by_one_more() -> None:
    strategy = zero3(timeout=timedelta(seconds=6), warn_after_seconds=0.5)
    make_trainer(strategy, limit_val_batches=1).validate(OneMore(), zoo.loader(16, 4))


@pytest.mark.slow
def test_a_rank_that_evaluates_by_one_module_more_is_named_with_it(pool: RankPool) -> None:
    with pytest.raises(RankError) as raised:
        pool.run(2, evaluate_by_one_more)
    said = str(raised.value)
    assert "rank 1" in said and "module blocks.1" in said and "has waited" in said


class CallsWithoutGradients(Drops):
    """A rank calls another block than the others without gradients, such as a teacher's, in a training step."""

    def compute_loss(self, batch: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.blocks[1 + dist.get_rank()](batch)
        return (self.blocks[0](batch) - target).square().mean()


def train_without_gradients() -> str:
    with pytest.raises(DifferentModulesError) as raised:
        train(CallsWithoutGradients, zero3())
    return str(raised.value)


def test_ranks_that_call_different_modules_without_gradients_are_told(pool: RankPool) -> None:
    assert all("different modules in a training step" in said for said in pool.run(2, train_without_gradients))


def captured(module: nn.Module) -> None:
    """Does to a module what ``torch.cuda.make_graphed_callables`` does, but for the graph."""
    forward = module.forward

    def graphed(*inputs: Tensor) -> Tensor:
        return forward(*inputs)

    graphed.__module__ = torch.cuda.graphs.make_graphed_callables.__module__
    module.forward = graphed


def train_captured() -> str:
    module = Drops()
    captured(module.blocks[1])
    with pytest.raises(ValueError) as refused:
        train(lambda: module, zero3())
    return str(refused.value)


def test_a_graph_that_was_captured_before_the_training_is_refused(pool: RankPool) -> None:
    for message in pool.run(2, train_captured):
        assert "make_graphed_callables" in message and "`ddp`" in message


def shard_on_a_gpu() -> str:
    groups = process_groups()
    with pytest.raises(ValueError) as refused:
        make_collectives(groups.gradients, torch.device("cuda", 0))
    return str(refused.value)


def test_a_group_that_sends_from_the_host_is_refused_on_a_gpu(pool: RankPool) -> None:
    for message in pool.run(2, shard_on_a_gpu):
        assert "process_group_backend='gloo'" in message and "`ddp`" in message


class ReturnsViews(Drops):
    """Of the blocks one returns a view, and so does the training step: torch warns of what happens in place to them."""

    def build(self) -> None:
        super().build()
        self.blocks[1].register_forward_hook(lambda block, inputs, output: output.view(-1, zoo.FEATURES))

    def compute_loss(self, batch: Tensor) -> Tensor:
        hidden = batch
        for block in self.blocks:
            hidden = block(hidden)
        self.returned = (hidden - 1).square().mean().reshape(1, 1)[0].squeeze(0)
        return self.returned

    def on_before_backward(self, loss: Tensor) -> None:
        loss.mul_(3.0)
        with torch.no_grad():
            self.returned.mul_(2.0)


def warned_of_views() -> tuple[float, set[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = train(ReturnsViews, zero3())
    said = {str(one.message).partition(" returned")[0] for one in caught if "view tensor" in str(one.message)}
    return largest_difference(run, train(ReturnsViews, ddp())), said


def test_torch_warns_of_views_that_blocks_return_and_not_of_the_loss(pool: RankPool) -> None:
    for difference, said in pool.run(2, warned_of_views):
        assert difference <= FP32
        assert said == {"FSDP2-wrapped module (FSDPLinear)"}
