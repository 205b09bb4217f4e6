"""What lies in a checkpoint's files, what is loaded from it, what hooks and plugins are given, and what is refused."""

import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_checkpoint
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.plugins.io.torch_plugin import TorchCheckpointIO
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import lightning_parstrat
from lightning_parstrat.core.tensor_trees import replace_leaves
from lightning_parstrat.distributed.engine.cuts import local
from lightning_parstrat.strategies.checkpoint.checkpoint_io import CHECKPOINT_KEY, DurableCheckpointIO
from tests.comparing import assert_same
from tests.pool import RankPool
from tests.strategies import odd, zoo
from tests.strategies.checkpoint.trainings import elements_of, load, make, write
from tests.strategies.parity import make_trainer, train, zero1
from tests.strategies.test_report import listening


def save_after_fit(path: str) -> None:
    run = train(lambda: zoo.MLP(), zero1())
    run.trainer.save_checkpoint(path)


def save_replaced_state(path: str, strategy: str) -> None:
    train(odd.ChangesState, make(strategy), max_epochs=2).trainer.save_checkpoint(path)


def test_state_that_a_program_has_replaced_is_saved(pool: RankPool, tmp_path: Path) -> None:
    saved = []
    for strategy in ("tuned", "zero1"):
        pool.run(2, save_replaced_state, str(tmp_path / strategy), strategy)
        saved.append(load(tmp_path / strategy)["optimizer_states"])
    assert_same(saved[1], saved[0], 1e-4, 1e-6)


def resume_without_states(path: str, strategy: str) -> tuple[list[str], int]:
    """Warnings, and the step from which training went on."""
    trainer = make_trainer(make(strategy), max_epochs=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(zoo.MLP(), zoo.loader(8, 4), ckpt_path=path)
    return [str(warning.message) for warning in caught], trainer.global_step


@pytest.mark.parametrize("strategy", ["zero1", "tuned"])
def test_weights_without_the_state_of_optimizers_are_loaded(pool: RankPool, tmp_path: Path, strategy: str) -> None:
    path = tmp_path / "saved.ckpt"
    pool.run(1, save_after_fit, str(path))
    torch.save({**load(path), "optimizer_states": []}, path)
    ((messages, step),) = pool.run(1, resume_without_states, str(path), strategy)
    assert any("optimizers begin without state" in message for message in messages)
    assert step == load(path)["global_step"] + 2


@pytest.mark.parametrize("strategy", [lightning_parstrat.ZeRO1Strategy, lightning_parstrat.TunedDDPStrategy])
def test_wrappers_within_wrappers_are_given_an_innermost_one(tmp_path: Path, strategy: Any) -> None:
    for inner in (None, TorchCheckpointIO()):
        io = strategy(checkpoint_io=AsyncCheckpointIO(AsyncCheckpointIO(inner))).checkpoint_io
        innermost = io.checkpoint_io.checkpoint_io
        assert innermost is inner or (inner is None and isinstance(innermost, DurableCheckpointIO))
        io.save_checkpoint({"one": 1}, tmp_path / f"{inner}.ckpt")
        io.teardown()
        io.checkpoint_io.teardown()
        assert load(tmp_path / f"{inner}.ckpt") == {"one": 1}


def test_a_file_that_is_replaced_while_it_is_loaded_is_read_from_one_save(tmp_path: Path) -> None:
    path, io = tmp_path / "last.ckpt", DurableCheckpointIO()

    def save(number: int) -> None:
        io.save_checkpoint({"number": number, "state_dict": {"weight": torch.full((100,), number)}}, path)

    save(0)
    with ThreadPoolExecutor(1) as another_job:
        saves = [another_job.submit(save, number) for number in range(300)]
        while not saves[-1].done():
            loaded = io.load_checkpoint(path)
            assert_same(loaded["state_dict"]["weight"], torch.full((100,), loaded["number"]))
    for one in saves:
        one.result()

    def replacing(storage: Any, _: str) -> Any:
        save(1)
        return storage

    with pytest.raises(MisconfigurationException, match=r"last\.ckpt was replaced each time it was read: probably"):
        io.load_checkpoint(path, map_location=replacing)


class CountsLoads(zoo.MLP):
    loads = 0

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loads += 1
        # What stock strategies would give, and nothing else.
        assert CHECKPOINT_KEY not in checkpoint and checkpoint["loops"]


def count_loads(path: str, form: str) -> list[int]:
    """How often a checkpoint is loaded: into a module as it was made, in a second training of it, in an evaluation."""
    train(zoo.MLP, make("zero3", form)).trainer.save_checkpoint(path)
    module, counted = CountsLoads(), []
    for _ in range(2):
        make_trainer(make("zero3", form), max_epochs=2).fit(module, zoo.loader(40, 4), ckpt_path=path)
        counted.append(module.loads)
    make_trainer(make("zero3", form)).validate(module, zoo.loader(8, 4), ckpt_path=path, verbose=False)
    return [*counted, module.loads]


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_it_is_loaded_once(pool: RankPool, tmp_path: Path, form: str) -> None:
    assert pool.run(2, count_loads, str(tmp_path / "a.ckpt"), form) == [[1, 2, 3]] * 2


class ForgetsState(zoo.ScheduledTransformer):
    """It sets the state of its optimizer to zero, or halves it."""

    in_place = True

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        change = Tensor.zero_ if self.in_place else (lambda one: one / 2)
        states = checkpoint["optimizer_states"]
        states[0]["state"] = replace_leaves(states[0]["state"], lambda one: change(one) if one.dim() else one)


class HalvesState(ForgetsState):
    in_place = False


def resume_with_other_state(path: str, strategy: str, form: str, module: type[ForgetsState]) -> tuple[float, str]:
    """The sum of the state that is loaded, or an error."""
    train(zoo.ScheduledTransformer, make(strategy, form)).trainer.save_checkpoint(path)
    sums: list[float] = []

    def add(trainer: Trainer, _: Any) -> None:
        state = trainer.optimizers[0].state.values()
        tensors = [local(one) for values in state for one in values.values() if isinstance(one, Tensor) and one.dim()]
        sums.append(sum(float(one.double().sum()) for one in tensors))

    trainer = make_trainer(make(strategy, form), max_epochs=2, callbacks=[LambdaCallback(on_train_start=add)])
    try:
        trainer.fit(module(), zoo.loader(40, 4), ckpt_path=path)
    except ValueError as error:
        return float("nan"), str(error)
    return sums[0], ""


@pytest.mark.parametrize("module", [ForgetsState, HalvesState])
@pytest.mark.parametrize("strategy", ["zero1", pytest.param("zero3", marks=pytest.mark.slow), "tuned"])
def test_state_that_a_hook_changes(pool: RankPool, tmp_path: Path, strategy: str, module: type[ForgetsState]) -> None:
    whole, sharded = (
        pool.run(2, resume_with_other_state, str(tmp_path / form), strategy, form, module)
        for form in ("full", "sharded")
    )
    assert all((total == 0) == module.in_place and not error for total, error in whole), whole
    for _, error in sharded:
        assert "A hook has changed state/" in error and "lightning-parstrat consolidate" in error, error


def resume_without_masters(path: str) -> list[bool]:
    """Whether a resume with master weights, and one without, says that they are lost."""
    train(zoo.MLP, zero1(gather_dtype="bf16")).trainer.save_checkpoint(path)
    said = []
    for arguments in ({"gather_dtype": "bf16"}, {}):
        with listening() as lines:
            trainer = make_trainer(zero1(**arguments), max_epochs=2)
            trainer.fit(zoo.MLP(), zoo.loader(40, 4), ckpt_path=path)
        said.append(any("the checkpoint has master weights, and this training has none" in line for line in lines))
    return said


def test_master_weights_that_are_not_taken_over_are_named(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(2, resume_without_masters, str(tmp_path / "a.ckpt"))[0] == [False, True]


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
