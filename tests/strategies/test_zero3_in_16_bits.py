"""16 bits under ``zero3_custom``: what is gathered, sent and kept in them, and what is not."""

import contextlib
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lightning_parstrat.distributed.comm.collectives import Collectives
from lightning_parstrat.distributed.comm.exchange import PairwiseCollectives
from lightning_parstrat.distributed.comm.uneven import UnevenCollectives
from lightning_parstrat.distributed.zero1 import engine
from lightning_parstrat.strategies import zero3 as zero3_module
from tests.comparing import assert_same
from tests.pool import RankPool
from tests.strategies import zoo
from tests.strategies.cases import FP32
from tests.strategies.parity import by_flag, ddp, largest_difference, make_trainer, train, whole, zero3

MIXED = {"precision": "bf16-mixed"}
ROWS = 3


class Sums(LightningModule):
    """The gradient of each row is large on one rank, and 1 on the others: a sum in bf16 would drop the ones."""

    def __init__(self, large: float) -> None:
        super().__init__()
        self.large = large
        self.layer = nn.Linear(4, ROWS, bias=False)
        nn.init.zeros_(self.layer.weight)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        factors = torch.ones(ROWS, 1)
        factors[dist.get_rank()] = self.large
        return (self.layer.weight * factors.to(self.layer.weight.dtype)).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def stepped(strategy: Any, large: float, precision: str) -> list[float]:
    """The values of a parameter after one step."""
    run = train(lambda: Sums(large), strategy(), precision=precision, max_steps=1)
    return whole(run.module.layer.weight.detach()).unique().tolist()  # type: ignore[operator,union-attr]


class Strategy:
    """Makes one on each rank."""

    def __init__(self, make: Any, **arguments: Any) -> None:
        self.make, self.arguments = make, arguments

    def __call__(self) -> Any:
        return self.make(**self.arguments)


# 257 is rounded to 256 in bf16. 256 + 1 + 1 is 258 in fp32, and 256 in bf16 by most orders.
@pytest.mark.parametrize(
    ("strategy", "large", "precision", "mean"),
    [
        (Strategy(zero3), 257.0, "32-true", 259 / 3),
        (Strategy(zero3, reduce_dtype="bf16"), 257.0, "32-true", 258 / 3),
        (Strategy(by_flag, reduce_dtype="bf16"), 257.0, "32-true", 258 / 3),
        (Strategy(zero3), 256.0, "bf16-true", 258 / 3),
        (Strategy(zero3, reduce_dtype="fp32"), 256.0, "bf16-true", 258 / 3),
        (Strategy(zero3, shard_gradients=False), 256.0, "bf16-true", 258 / 3),
        (Strategy(by_flag), 256.0, "bf16-true", 258 / 3),
    ],
    ids=lambda value: f"{value.make.__name__} {value.arguments}" if isinstance(value, Strategy) else str(value),
)
def test_gradients_are_summed_in_fp32_whatever_they_travel_in(
    pool: RankPool, strategy: Any, large: float, precision: str, mean: float
) -> None:
    for values in pool.run(ROWS, stepped, strategy, large, precision):
        assert values == pytest.approx([-mean], rel=1e-6)


def compare(make: Any, arguments: dict[str, Any], precision: str) -> float:
    runs = [train(make, strategy, precision=precision) for strategy in (zero3(**arguments), ddp())]
    return largest_difference(*runs)


class Normalised(zoo.Zoo):
    """Layers that autocast rounds, and layers that it does not: an embedding and norms."""

    def build(self) -> None:
        self.position = nn.Embedding(4, zoo.FEATURES)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(zoo.FEATURES), nn.Linear(zoo.FEATURES, zoo.FEATURES)) for _ in range(2)
        )
        self.norm = nn.BatchNorm1d(zoo.FEATURES)
        self.unused = nn.Linear(zoo.FEATURES, 1)
        self.head = nn.Linear(zoo.FEATURES, 1)

    def compute_loss(self, batch: Tensor) -> Tensor:
        batch = batch + self.position(torch.arange(len(batch)) % 4)
        for block in self.blocks:
            batch = batch + block(batch)
        return self.head(self.norm(batch)).square().mean()


@pytest.mark.parametrize("arguments", [{}, {"shard_gradients": False}, {"gather_dtype": None}])
def test_bf16_mixed_is_that_of_ddp(pool: RankPool, arguments: dict[str, Any]) -> None:
    assert max(pool.run(2, compare, Normalised, arguments, "bf16-mixed")) <= FP32


def narrow(arguments: dict[str, Any], precision: str) -> tuple[set[torch.dtype], set[torch.dtype], float]:
    """The dtypes that parameters and gradients travel in, and how far they get from those of ``ddp``."""
    gathered, reduced = set(), set()
    # Its name since torch 2.13, and before.
    gather = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    all_gather, reduce_scatter = getattr(dist, gather), Collectives.reduce_scatter

    def note_gather(output: torch.Tensor, sent: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        gathered.add(sent.dtype)
        return all_gather(output, sent, *args, **kwargs)

    def note_reduction(self: Collectives, sent: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        reduced.add(sent.dtype)
        return reduce_scatter(self, sent, *args, **kwargs)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(dist, gather, note_gather)
        monkeypatch.setattr(Collectives, "reduce_scatter", note_reduction)
        actual = train(zoo.MLP, zero3(**arguments), precision=precision)
    return gathered, reduced, largest_difference(actual, train(zoo.MLP, ddp(), precision=precision))


WIDE, NARROW = {torch.float32}, {torch.bfloat16}


@pytest.mark.parametrize(
    ("arguments", "precision", "gathered", "reduced", "least", "most"),
    [
        ({}, "32-true", WIDE, WIDE, 0, FP32),
        # Autocast rounds the weights of linear layers, and their gradients, all the same.
        ({}, "bf16-mixed", NARROW, WIDE, 0, FP32),
        ({"gather_dtype": "bf16"}, "bf16-mixed", NARROW, WIDE, 0, FP32),
        ({"gather_dtype": None}, "bf16-mixed", WIDE, WIDE, 0, FP32),
        ({"reduce_dtype": "bf16"}, "bf16-mixed", NARROW, NARROW, 0, FP32),
        ({"reduce_dtype": "bf16"}, "32-true", WIDE, NARROW, 1e-6, 0.05),
        ({}, "bf16-true", NARROW, NARROW, 0, FP32),
        ({"reduce_dtype": "fp32"}, "bf16-true", NARROW, WIDE, 0, FP32),
    ],
)
def test_what_travels_in_16_bits_is_stepped_in_32(
    pool: RankPool,
    arguments: dict[str, Any],
    precision: str,
    gathered: set[torch.dtype],
    reduced: set[torch.dtype],
    least: float,
    most: float,
) -> None:
    for *travelled, difference in pool.run(2, narrow, arguments, precision):
        assert travelled == [gathered, reduced]
        assert least <= difference <= most


def train_and_evaluate_in_turns() -> tuple[list[float], list[float]]:
    found: list[list[float]] = []
    for strategy in (ddp, zero3):
        torch.manual_seed(0)
        module, losses = Normalised(), []
        for precision in ("bf16-mixed", "32-true", "bf16-mixed"):
            trainer = make_trainer(strategy(), precision=precision)
            trainer.fit(module, zoo.loader(16, 4))
            losses.append(trainer.validate(module, zoo.loader(16, 4), verbose=False)[0]["val_loss"])
        found.append(losses)
    return found[0], found[1]


def test_another_training_of_a_module_may_have_another_precision(pool: RankPool) -> None:
    for expected, losses in pool.run(2, train_and_evaluate_in_turns):
        assert losses == pytest.approx(expected, rel=1e-3)


class FailsOnce(zoo.MLP):
    """Fails in the third micro-batch of four."""

    fails = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if self.fails and batch_idx == 2:
            self.fails = False
            raise KeyError("once")
        return super().training_step(batch, batch_idx)


def train_after_a_failure(fails: bool) -> list[Tensor]:
    torch.manual_seed(0)
    module = FailsOnce()
    module.fails = fails
    for _ in range(2 if fails else 1):
        trainer = make_trainer(zero3(shard_gradients=False), precision="bf16-true", accumulate_grad_batches=4)
        with contextlib.suppress(KeyError):
            trainer.fit(module, zoo.loader(64, 4, torch.bfloat16))
    assert trainer.global_step > 0
    return [whole(parameter.detach()) for parameter in module.parameters()]


def test_what_a_failed_window_has_added_up_is_gone(pool: RankPool) -> None:
    assert_same(pool.run(2, train_after_a_failure, True), pool.run(2, train_after_a_failure, False))


class ShardsByHand(Normalised):
    """A user's own sharding, which gathers a layer in bf16."""

    def configure_model(self) -> None:
        fully_shard(self.blocks[0], mp_policy=MixedPrecisionPolicy(torch.bfloat16))
        self.dtypes: set[torch.dtype] = set()
        for layer in (self.blocks[0][0], self.head):
            layer.register_forward_pre_hook(lambda layer, _: self.dtypes.add(layer.weight.dtype))


def dtypes_by_hand() -> set[torch.dtype]:
    module: Any = train(ShardsByHand, zero3(min_num_params=10**9)).module
    return module.dtypes


def test_what_a_user_has_sharded_is_gathered_as_the_user_wants(pool: RankPool) -> None:
    assert pool.run(2, dtypes_by_hand) == [{torch.float32, torch.bfloat16}] * 2


class KeepsBytes(zoo.Zoo):
    """Notes how many bytes the graph keeps between forward and backward."""

    def build(self) -> None:
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
        self.kept: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        saved: list[Tensor] = []

        def keep(tensor: Tensor) -> Tensor:
            saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            hidden = batch.repeat(1, 6)[:1, :64]
            for block in self.blocks:
                hidden = torch.tanh(block(hidden))
        self.kept.append(sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in saved)}.values()))
        return hidden.square().mean()


def bytes_kept(arguments: dict[str, Any], trainer_arguments: dict[str, Any]) -> float:
    module: Any = train(KeepsBytes, zero3(**arguments), **trainer_arguments).module
    return max(module.kept) / sum(parameter.numel() for parameter in module.parameters())


def test_no_copy_of_all_weights_is_kept_for_backward(pool: RankPool) -> None:
    in_fp32, by_default, in_own = (
        max(pool.run(2, bytes_kept, *case)) for case in (({}, {}), ({}, MIXED), ({"gather_dtype": None}, MIXED))
    )
    # Activations of one sample remain. The first layer's weight is not needed: its input has no gradient.
    assert 0 < in_fp32 < 0.2 and 0 < by_default < 0.2
    assert 1.7 < in_own < 2.0


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def said_at_the_start(arguments: dict[str, Any], precision: str) -> str:
    lines = Lines()
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(lines)
    try:
        train(zoo.MLP, zero3(**arguments), precision=precision)
    finally:
        logger.removeHandler(lines)
    return " ".join(lines.said)


@pytest.mark.parametrize(
    ("arguments", "precision", "expected"),
    [
        ({}, "bf16-mixed", "1025 elements are gathered in bf16 (gather_dtype='auto')"),
        ({"gather_dtype": None}, "bf16-mixed", "autocast keeps 1025 elements in 16 bits from forward to backward"),
        ({}, "32-true", ""),
    ],
)
def test_the_first_line_says_what_is_in_16_bits(
    pool: RankPool, arguments: dict[str, Any], precision: str, expected: str
) -> None:
    said = pool.run(2, said_at_the_start, arguments, precision)[0]
    assert expected in said and "zero3_custom" in said
    assert expected or "16 bits" not in said


class Widening(UnevenCollectives):
    """Says of itself what NCCL's collectives say between nodes where a ring of fp32 is faster."""

    widens = True


def train_between_nodes(strategy: Any, kind: str) -> tuple[list[str], list[float]]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        for module in (engine, zero3_module):
            monkeypatch.setattr(module, "make_collectives", lambda group, *_: Widening(PairwiseCollectives(group)))
        with pytest.warns() as warned:
            values = stepped(strategy, 257.0, "32-true")
    return [str(one.message) for one in warned if "reduce_dtype" in str(one.message)], values


@pytest.mark.parametrize("kind", ["zero1_custom", "zero3_custom"])
def test_bf16_that_would_save_nothing_is_left_out_with_a_warning(pool: RankPool, kind: str) -> None:
    strategy = Strategy({"zero1_custom": by_flag, "zero3_custom": zero3}[kind], reduce_dtype="bf16")
    results = pool.run(ROWS, train_between_nodes, strategy, kind)
    assert any(f"{kind}: reduce_dtype='bf16' is left out" in said for said in results[0][0])
    # Nothing is rounded.
    assert all(values == pytest.approx([-259 / 3], rel=1e-6) for _, values in results)
