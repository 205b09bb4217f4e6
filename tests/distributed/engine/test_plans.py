"""Plans of the buckets: made once, in the reverse order of registration, or taken up from an earlier training."""

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parstrat.core.policy import ShardingPolicy
from lightning_parstrat.distributed.comm.process_groups import process_groups
from lightning_parstrat.distributed.engine.engine import ShardedDataParallel
from tests.comparing import distance
from tests.distributed.engines import backward, make_engine
from tests.pool import RankPool
from tests.strategies import zoo
from tests.strategies.for_shards import captured

STEPS = 4
CAP = 3e-4


class Shuffled(nn.Module):
    """Registered in another order than it is used in; one layer is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.third = nn.Linear(9, 4)
        self.unused = nn.Linear(3, 3)
        self.first = nn.Linear(7, 33)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.second = nn.Linear(33, 9, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(inputs))))) * self.scale


def adamw(module: nn.Module) -> list[Optimizer]:
    return [torch.optim.AdamW(module.parameters(), lr=0.03, weight_decay=0.1)]


def muon(module: nn.Module) -> list[Optimizer]:
    matrices = [p for p in module.parameters() if p.ndim == 2]
    others = [p for p in module.parameters() if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.02)]


MAKERS = {maker.__name__: maker for maker in (adamw, muon)}


def train(maker: str, cap: float, order: list[str]) -> tuple[list[Tensor], list[list[str]], list[list[str]]]:
    """The parameters, and the plans before and after."""
    torch.manual_seed(0)
    module = Shuffled()
    optimizers = MAKERS[maker](module)
    policy = ShardingPolicy(bucket_cap_mb=cap)
    engine = ShardedDataParallel(module, optimizers, policy, process_groups(), order=order)
    before, addresses = engine.plan, [parameter.data_ptr() for parameter in module.parameters()]
    for step in range(STEPS):
        inputs = torch.randn(5, 7, generator=torch.Generator().manual_seed(step))
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward(engine, module(inputs).square().mean())
        for optimizer in optimizers:
            optimizer.step()
    engine.gatherer.finish()
    assert [parameter.data_ptr() for parameter in module.parameters()] == addresses
    after = engine.plan
    engine.close()
    return [parameter.detach().clone() for parameter in module.parameters()], before, after


def test_buckets_are_in_the_reverse_order_of_registration_and_stay(pool: RankPool) -> None:
    """Also where buckets of matrices that stay uncut and of all else leave in one order."""
    names = [name for name, _ in Shuffled().named_parameters()]
    for maker in MAKERS:
        for _, before, after in pool.run(2, train, maker, 1e-6, []):
            assert before == after == [[name] for name in reversed(names)]


def test_a_known_order_of_gradients_is_followed(pool: RankPool) -> None:
    (expected, own, _), *_ = pool.run(2, train, "adamw", CAP, [])
    names = [name for bucket in own for name in bucket]
    assert len(own) > 1
    # An order of another module's parameters says nothing, and one of some of them comes first.
    for order, followed in (
        (names[::-1], names[::-1]),
        (["0.weight"], names),
        (names[-2:], [*names[-2:], *names[:-2]]),
    ):
        for parameters, before, after in pool.run(2, train, "adamw", CAP, order):
            assert [name for bucket in before for name in bucket] == followed and len(before) > 1
            assert before == after and distance(parameters, expected) <= 1e-6


def a_cut_parameter_is_added_to_an_optimizer_of_matrices() -> None:
    module = Shuffled()
    optimizers = torch.optim.AdamW(module.first.parameters()), torch.optim.Adafactor(module.third.parameters())
    engine = make_engine(module, *optimizers)
    optimizers[1].param_groups[0]["params"].append(module.first.weight)
    with pytest.raises(ValueError, match=r"shape \(33, 7\) was added to Adafactor, which steps whole parameters"):
        engine.prepare_backward(module(torch.ones(5, 7)).sum())


def test_an_optimizer_of_matrices_gets_none_that_is_cut(pool: RankPool) -> None:
    pool.run(2, a_cut_parameter_is_added_to_an_optimizer_of_matrices)


def a_captured_graph() -> None:
    module = captured(zoo.adamw)
    with pytest.raises(ValueError, match="on_train_start"):
        make_engine(module, zoo.adamw(module.parameters()))


def test_a_captured_graph_is_refused_whose_parameters_would_move(pool: RankPool) -> None:
    pool.run(1, a_captured_graph)
