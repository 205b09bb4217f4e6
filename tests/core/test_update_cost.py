"""What an update costs, beside what torch's own Muon multiplies."""

import torch
from torch.optim._muon import _zeropower_via_newtonschulz
from torch.utils.flop_counter import FlopCounterMode

from lightning_parstrat.core.update_cost import newton_schulz


def test_newton_schulz_is_what_torchs_own_multiplies() -> None:
    for shape in ((256, 256), (1000, 1000), (128, 4096), (4096, 128), (200, 300), (300, 200)):
        for steps in (1, 5, 10):
            # On the meta device nothing is computed, but counted all the same.
            with FlopCounterMode(display=False) as counter:
                _zeropower_via_newtonschulz(torch.empty(shape, device="meta"), (3.4445, -4.775, 2.0315), steps, 1e-7)
            # What is not a matrix product torch does not count.
            counted = counter.get_total_flops()
            assert counted <= newton_schulz(shape, steps) <= 1.025 * counted, (shape, steps)
    same = {(300, 200): (200, 300), (64, 16, 3, 3): (64, 144), (7,): (7, 1), (): (1, 1)}
    for shape, other in same.items():
        assert newton_schulz(shape, 5) == newton_schulz(other, 5) > 0, shape
    assert [newton_schulz(shape, 5) for shape in ((0,), (0, 5), (5, 0))] == [0, 0, 0]
