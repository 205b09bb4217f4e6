"""What lies in the ranks' files of a sharded checkpoint, and who reads which part of it."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_checkpoint
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.comparing import assert_same
from tests.pool import RankPool
from tests.strategies.checkpoint.trainings import elements_of, write


def pieces_in(path: Path, rank: int) -> dict[str, tuple[int, int]]:
    """What a rank has written of which tensor, by torch's own index: the first element, and how many."""
    metadata = torch_checkpoint.FileSystemReader(path).read_metadata()
    chunks = {
        (name, chunk.offsets[0]): chunk.sizes[0]
        for name, stored in metadata.state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata)
        for chunk in stored.chunks
    }
    own = [one for one, place in metadata.storage_data.items() if place.relative_path == f"__{rank}_0.distcp"]
    return {one.fqn: (one.offset[0], chunks[one.fqn, one.offset[0]]) for one in own if one.offset is not None}


@pytest.mark.parametrize("module", ["scheduled", pytest.param("adafactor", marks=pytest.mark.slow)])
def test_groups_that_hold_the_same_share_it_out(pool: RankPool, tmp_path: Path, module: str) -> None:
    paths = [tmp_path / f"{strategy}.ckpt" for strategy in ("zero1", "grouped")]
    for path in paths:
        pool.run(4, write, module, path.stem, "sharded", str(path))
        assert sorted(file.name for file in path.glob("*.distcp")) == [f"__{rank}_0.distcp" for rank in range(4)]
    nbytes = [sum(tensor.nbytes for tensor in elements_of(path).values()) for path in paths]
    assert nbytes[0] == nbytes[1] > 0
    # Of what the two groups hold, each rank writes about a quarter; each element is there once.
    written = [sum(numel for _, numel in pieces_in(paths[1], rank).values()) for rank in range(4)]
    assert sum(written) == sum(tensor.numel() for tensor in elements_of(paths[1]).values())
    assert max(written) < 0.4 * sum(written)


@pytest.mark.parametrize("strategy", ["zero1", "tuned"])
def test_torchs_own_converter_finds_all_by_their_names(pool: RankPool, tmp_path: Path, strategy: str) -> None:
    path = tmp_path / "a.ckpt"
    pool.run(3, write, "scheduled", strategy, "sharded", str(path))
    dcp_to_torch_save(path, tmp_path / "a.pt")
    # Torch's keys are the parts of the names between slashes.
    found = torch.load(tmp_path / "a.pt", weights_only=True)
    elements = elements_of(path)
    assert_same({name: found[name] for name in elements}, elements)
    assert torch.load(path / "checkpoint.pt", weights_only=True)["global_step"] == 4
