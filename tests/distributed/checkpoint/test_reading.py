"""Weights that all ranks need are read in blocks: of a small model by many ranks, of a large one 64 MiB at a time."""

import pytest
import torch

from lightning_parstrat.distributed.checkpoint.reading import Run, _blocks

KIB, MIB = 2**10, 2**20


@pytest.mark.parametrize(
    ("sizes", "blocks"),
    [
        ([100], 1),
        ([32 * KIB], 1),
        ([16 * KIB] * 60, 30),
        ([16 * KIB + 4] * 60, 31),
        ([MIB], 32),
        ([3 * MIB, 0, 5 * MIB], 32),
        ([3 * 64 * MIB], 32),
        ([3000 * MIB], 47),
    ],
)
def test_blocks_of_weights(sizes: list[int], blocks: int) -> None:
    # Of one element, expanded: no memory is needed for what is not read.
    targets = {str(n): torch.zeros(1, dtype=torch.int32).expand(size // 4) for n, size in enumerate(sizes)}
    found = list(_blocks({name: Run(target, 7) for name, target in targets.items()}))
    assert len(found) == blocks
    read = {name: 7 for name in targets}
    for block in found:
        end = 0
        for one in block:
            # One after the other, each run where the last one of its tensor has ended.
            assert end <= one.place and one.start == read[one.name]
            end, read[one.name] = one.place + one.target.nbytes, one.start + one.target.numel()
        assert 0 < end <= 64 * MIB
    assert read == {name: 7 + target.numel() for name, target in targets.items()}
