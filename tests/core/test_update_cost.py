import pytest
import torch
from torch.optim._muon import _zeropower_via_newtonschulz
from torch.utils.flop_counter import FlopCounterMode

from lightning_parstrat.core.update_cost import newton_schulz


@pytest.mark.parametrize("steps", [1, 5, 10])
@pytest.mark.parametrize("shape", [(256, 256), (1000, 1000), (128, 4096), (4096, 128), (200, 300), (300, 200)], ids=str)
def test_newton_schulz_is_what_torchs_own_multiplies(shape: tuple[int, int], steps: int) -> None:
    # On the meta device nothing is computed, but counted all the same.
    with FlopCounterMode(display=False) as counter:
        _zeropower_via_newtonschulz(torch.empty(shape, device="meta"), (3.4445, -4.775, 2.0315), steps, 1e-7)
    # What is not a matrix product torch does not count.
    assert counter.get_total_flops() <= newton_schulz(shape, steps) <= 1.025 * counter.get_total_flops()


@pytest.mark.parametrize(
    ("shape", "same"),
    [
        pytest.param((300, 200), (200, 300), id="transposed"),
        pytest.param((64, 16, 3, 3), (64, 144), id="a convolution"),
        pytest.param((7,), (7, 1), id="a vector"),
        pytest.param((), (1, 1), id="0-d"),
    ],
)
def test_shapes_that_cost_the_same(shape: tuple[int, ...], same: tuple[int, ...]) -> None:
    assert newton_schulz(shape, 5) == newton_schulz(same, 5) > 0


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0)])
def test_an_empty_parameter_costs_nothing(shape: tuple[int, ...]) -> None:
    assert newton_schulz(shape, 5) == 0


def test_of_as_many_elements_the_square_matrix_costs_most() -> None:
    costs = [newton_schulz((side, 2**20 // side), 5) for side in (1, 16, 256, 1024, 4096, 2**20)]
    assert costs[3] == max(costs)
    assert costs[0] == costs[-1] == min(costs)
