"""What comparisons with ``ddp`` do not show of ``zero3_custom``: logs, graphs, errors beside trainings, generators.

What it trains, and what it cannot train, is in ``cases.py``.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_parstrat import ZeRO3Strategy
from lightning_parstrat.distributed.fsdp.sharding import module_sharding
from lightning_parstrat.distributed.fsdp.units import MIN_NUM_PARAMS, find_units
from lightning_parstrat.errors import DifferentModulesError
from tests.comparing import assert_same, distance
from tests.pool import RankPool
from tests.slow import slow_unless
from tests.strategies import odd, zoo
from tests.strategies.cases import FP32
from tests.strategies.checkpoint.trainings import tuned
from tests.strategies.for_shards import FEATURES, MadeAnew, Pretrained, Seeded, Skips
from tests.strategies.odd import Blocks
from tests.strategies.parity import Looks, by_flag, ddp, largest_difference, make_trainer, train, whole, zero3
from tests.torch_versions import needs_torch


class LogsWeights(Blocks):
    """What is logged as it is; and what is made a number by `full_tensor`."""

    def on_train_batch_end(self, *args: Any) -> None:
        weights = list(self.parameters())
        self.log("all", torch.stack([one.detach().norm() for one in weights]).norm())
        self.log("mean", weights[0].mean())
        self.log("number", float(whole(weights[0].detach().norm())))


def log_weights() -> tuple[list[float], list[float]]:
    ours, theirs = (train(LogsWeights, strategy).trainer.callback_metrics for strategy in (zero3(), ddp()))
    return [float(ours[name]) for name in theirs], [float(value) for value in theirs.values()]


@needs_torch("2.13", "a mean that is logged is the rank's own")
def test_norms_of_weights_are_logged_as_under_ddp(pool: RankPool) -> None:
    for ours, theirs in pool.run(2, log_weights):
        assert len(ours) == 3
        torch.testing.assert_close(ours, theirs)


def count_graphs() -> list[tuple[int, int]]:
    """Of modules whose blocks are compiled: graphs that were made, and where a graph had to be broken."""
    found, counters = [], torch._dynamo.utils.counters
    for module, wrap in ((odd.CompiledBlocks, None), (odd.WrappedBlocks, ["Block"])):
        torch._dynamo.reset()
        counters.clear()
        train(lambda module=module: module(zoo.adamw), zero3(auto_wrap_policy=wrap), validate=True)
        found.append((counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())))
    torch._dynamo.reset()
    return found


@pytest.mark.slow
def test_blocks_are_compiled_as_a_whole(pool: RankPool) -> None:
    for found in pool.run(2, count_graphs):
        assert all(graphs > 0 and breaks == 0 for graphs, breaks in found), found


class Routes(Skips):
    """Each rank evaluates by another block, of the same shape."""

    def compute_loss(self, batch: Tensor) -> Tensor:
        return self.blocks[0](batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.route(batch).mean(), sync_dist=True)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.route(batch)

    def route(self, batch: Tensor) -> Tensor:
        return self.blocks[dist.get_rank()](batch)


def evaluate_mixed(folder: str) -> list[tuple[str, list[str], dict[str, Any]]]:
    """The error of ranks that evaluate by different blocks; what was saved, and what was logged by then."""
    found = []
    for stage in ("fit", "validate", "predict"):
        saves = ModelCheckpoint(folder, monitor="val_loss")
        trainer = make_trainer(zero3(), enable_checkpointing=True, callbacks=[saves], num_sanity_val_steps=0)
        data = [zoo.loader(16, 4)] * (2 if stage == "fit" else 1)
        with pytest.raises(DifferentModulesError) as raised:
            getattr(trainer, stage)(Routes(), *data)
        saved = [file.name for file in Path(folder).glob("*")]
        found.append((str(raised.value), saved, dict(trainer.callback_metrics)))
    return found


def test_ranks_that_evaluate_by_different_modules_end_before_anything_is_logged(pool: RankPool, tmp_path: Path) -> None:
    for of_rank in pool.run(2, evaluate_mixed, str(tmp_path)):
        for message, saved, logged in of_rank:
            assert "evaluation" in message and "all ranks" in message
            assert not saved and not logged


class Ties(Blocks):
    def build(self) -> None:
        super().build()
        self.blocks[2].linear.weight = self.blocks[1].linear.weight


def narrow(module: Any) -> None:
    module.half()


def remove(module: Any) -> None:
    del module.blocks[0].linear.bias


def untie(module: Any) -> None:
    module.blocks[2].linear.weight = nn.Parameter(module.blocks[2].linear.weight.detach() + 1)


LOST = {narrow: "blocks.1.linear.bias", remove: "blocks.0.linear.bias got", untie: "blocks.2.linear.weight got"}


class OnOneRank(Blocks):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.global_rank == 0:
            checkpoint["mine"] = next(self.parameters())


def fail_after_training(folder: str) -> None:
    """What cannot be done to a module that has trained says so, and leaves the shards as they are."""
    run = train(Ties, zero3())
    module, trainer = run.module, run.trainer
    before = [whole(parameter.detach()).clone() for parameter in module.parameters()]
    for change, words in LOST.items():
        with pytest.raises(ValueError, match=rf"Within `full_parameters\(\)`.*{words}"):
            with trainer.strategy.full_parameters():
                change(module)
    with trainer.strategy.full_parameters():
        loss = module.compute_loss(torch.ones(1, FEATURES))  # type: ignore[operator]
    with pytest.raises(RuntimeError, match=r"'(blocks|head)\..*no optimizer would see"):
        loss.backward()
    weights = {name: torch.ones(parameter.shape) for name, parameter in module.named_parameters()}
    with pytest.raises(ValueError, match=r"'blocks.0.linear.weight'. Leave `assign=True` out"):
        module.load_state_dict(weights, assign=True, strict=False)
    assert all(isinstance(parameter, DTensor) for parameter in module.parameters())
    assert_same([whole(parameter.detach()) for parameter in module.parameters()], before)
    with pytest.raises(ValueError, match="on some ranks only"):
        train(OnOneRank, zero3()).trainer.save_checkpoint(f"{folder}/a.ckpt")
    for name, strategy in {"zero1_custom": by_flag, "ddp_tuned": tuned}.items():
        for use in (make_trainer(strategy()).validate, make_trainer(strategy()).fit):
            with pytest.raises(ValueError, match=rf"'blocks.0.linear.weight' is in shards.*{name} needs whole"):
                use(module, zoo.loader(8, 4))


def test_what_cannot_be_done_after_a_training_says_so(pool: RankPool, tmp_path: Path) -> None:
    pool.run(2, fail_after_training, str(tmp_path))
    # Shards that one rank alone saves: there is no file.
    assert not list(tmp_path.iterdir())


# The meta device.


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


def go_on(folder: str, state_dict_type: str) -> float:
    """Of a checkpoint nothing of the weights that rank 0 had before may be left, nor on one rank the checkpoint's."""
    found = []
    for make in (Pretrained, DrawsNothing):
        path, whole_path = f"{folder}/{make.__name__}-{state_dict_type}.ckpt", f"{folder}/{make.__name__}-whole.ckpt"
        run = train(make, zero3(state_dict_type=state_dict_type))
        run.trainer.save_checkpoint(path)
        train(make, ddp()).trainer.save_checkpoint(whole_path)
        validated = make()
        make_trainer(zero3(), max_epochs=1).validate(validated, zoo.loader(8, 4), ckpt_path=path, verbose=False)
        found.append(distance(*([whole(one.detach()) for one in two.parameters()] for two in (validated, run.module))))
        expected = resume(make(), ddp(), whole_path)
        found += [distance(resume(make(), zero3(), one), expected) for one in (path, whole_path)]
    return max(found)


def resume(module: zoo.Zoo, strategy: Any, path: str) -> list[Tensor]:
    trainer = make_trainer(strategy, max_epochs=2)
    data = zoo.loader(80, 4, torch.float32, dist.get_rank(), dist.get_world_size())
    trainer.fit(module, data, ckpt_path=path)
    assert trainer.global_step == 20
    return [whole(parameter.detach()).clone() for parameter in module.parameters()]


@pytest.mark.parametrize("state_dict_type", slow_unless(lambda one: one == "full", ["full", "sharded"]))
def test_a_checkpoint_is_loaded_on_all_ranks(pool: RankPool, tmp_path: Path, state_dict_type: str) -> None:
    assert max(pool.run(2, go_on, str(tmp_path), state_dict_type)) <= FP32


def train_in_other_groups(*sizes: Any) -> str:
    torch.manual_seed(0)
    module = zoo.MLP()
    try:
        for size in sizes:
            make_trainer(zero3(shard_group=size)).fit(module, zoo.loader(16, 4))
    except ValueError as error:
        return str(error)
    return ""


def test_groups_of_a_module_stay(pool: RankPool) -> None:
    assert set(pool.run(2, train_in_other_groups, 1, 1)) == {""}
    for error in pool.run(2, train_in_other_groups, 1, "all"):
        assert "already sharded over groups of 1 ranks" in error and "This training has groups of 2" in error


class OnTwoNodes(ZeRO3Strategy):
    @property
    def node_rank(self) -> int:
        return dist.get_rank() // 2


def train_on_two_nodes(group: Any) -> tuple[float, int]:
    expected = train(zoo.Attention, None, whole_batch=True, gradient_clip_val=0.05)
    copies = Looks(lambda trainer: module_sharding(trainer.lightning_module).place.copies)
    strategy = zero3(OnTwoNodes, shard_group=group)
    found = train(zoo.Attention, strategy, gradient_clip_val=0.05, callbacks=[copies])
    return largest_difference(found, expected), copies.seen


@pytest.mark.parametrize(("group", "copies"), [("node", 2), ("all", 1)])
def test_nodes_hold_a_copy_each(pool: RankPool, group: str, copies: int) -> None:
    for difference, seen in pool.run(4, train_on_two_nodes, group):
        assert difference <= FP32 and seen == copies


class Vocabulary(nn.Module):
    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        self.small, self.large = nn.Embedding(2**15, 2**10), nn.Embedding(2**16, 2**10)
        self.head = nn.Linear(2**10, 2**16, bias=False)
        if is_tied:
            self.head.weight = self.large.weight


def test_very_large_layers_are_units_unless_they_are_tied() -> None:
    with torch.device("meta"):
        apart, tied = Vocabulary(False), Vocabulary(True)
    assert find_units(apart, (), MIN_NUM_PARAMS, False) == [apart.head, apart.large]
    assert find_units(tied, (), MIN_NUM_PARAMS, False) == []
    assert find_units(apart, (), 2**27, False) == []
    # By name, with the module's name or without.
    for name in ("Linear", "torch.nn.modules.linear.Linear"):
        assert apart.head in find_units(apart, {name}, MIN_NUM_PARAMS, False)
