"""Checkpoints that all ranks write: the same training state as a full one, at any world size, by any strategy."""

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_parstrat.cli.main import main
from lightning_parstrat.core.tensor_trees import in_storage_order, leaves
from lightning_parstrat.distributed.checkpoint import reading
from lightning_parstrat.distributed.checkpoint.index import IndexUnpickler
from lightning_parstrat.distributed.checkpoint.reading import ShardedCheckpoint
from lightning_parstrat.strategies.checkpoint.checkpoints import CHECKPOINT_KEY
from tests.comparing import assert_same
from tests.pool import RankPool
from tests.slow import slow_unless
from tests.strategies import zoo
from tests.strategies.checkpoint.test_checkpoints import GLOBAL_BATCH, MODULES, STRATEGIES, grouped, load, resume
from tests.strategies.parity import by_flag, make_trainer, train, zero1


def tuned(**arguments: Any) -> Any:
    from lightning_parstrat import TunedDDPStrategy

    return by_flag(TunedDDPStrategy, find_unused_parameters=True, **arguments)


SAVING: dict[str, Callable[[], Any]] = {
    "full": lambda: zero1(),
    "sharded": lambda: zero1(checkpoint_format="sharded"),
    "async": lambda: zero1(checkpoint_format="sharded", async_save=True),
    "sharded groups": lambda: grouped(checkpoint_format="sharded"),
    "tuned": lambda: tuned(checkpoint_format="sharded"),
}


def write(module: str, strategy: str, path: str) -> None:
    batch = GLOBAL_BATCH // dist.get_world_size()
    callback = ModelCheckpoint(dirpath=Path(path).parent, filename=Path(path).stem, save_top_k=-1)
    train(
        MODULES[module],
        SAVING[strategy](),
        samples_per_rank=4 * batch,
        batch_size=batch,
        callbacks=[callback],
        enable_checkpointing=True,
    )


def whole(path: Path) -> dict[str, Any]:
    checkpoint = ShardedCheckpoint(path, weights_only=True)
    filled: dict[str, Any] = checkpoint.filled(checkpoint.skeleton)
    return filled


def without_own(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint without what is not of the training's state: our own key, and the paths that callbacks note."""
    return {key: value for key, value in checkpoint.items() if key not in (CHECKPOINT_KEY, "callbacks")}


@pytest.mark.parametrize(
    ("strategy", "module"),
    slow_unless(
        lambda strategy, module: strategy == "sharded" or module == "gan",
        [(strategy, module) for strategy in ("sharded", "async") for module in MODULES],
    ),
)
def test_a_sharded_checkpoint_holds_what_a_full_one_does(
    pool: RankPool, tmp_path: Path, module: str, strategy: str
) -> None:
    for kind in ("full", strategy):
        pool.run(3, write, module, kind, str(tmp_path / f"{kind}.ckpt"))
    folder = tmp_path / f"{strategy}.ckpt"
    assert {path.name for path in folder.iterdir()} == {
        ".metadata", "checkpoint.pt", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp"
    }  # fmt: skip
    assert_same(without_own(whole(folder)), without_own(load(tmp_path / "full.ckpt")), as_stored=True)


ROUTES = {
    "to more ranks": (("sharded", 2), ("zero1", 3)),
    "to fewer ranks": (("sharded", 3), ("zero1", 2)),
    "to four": (("sharded", 3), ("zero1", 4)),
    "from four": (("async", 4), ("zero1", 3)),
    "to one": (("sharded", 2), ("zero1", 1)),
    "to ddp_tuned": (("async", 2), ("tuned", 2)),
    "from ddp_tuned": (("tuned", 2), ("zero1", 2)),
    "from groups": (("sharded groups", 4), ("zero1", 2)),
    "to groups": (("sharded", 2), ("grouped", 4)),
}
QUICK_ROUTES = [
    ("scheduled", "to more ranks"),
    ("adafactor", "to fewer ranks"),
    ("gan", "to one"),
    ("gan", "from four"),
    ("scheduled", "to ddp_tuned"),
    ("gan", "from ddp_tuned"),
    ("adafactor", "from groups"),
    ("scheduled", "to groups"),
]


@pytest.mark.parametrize(
    ("module", "route"),
    slow_unless(
        lambda *case: case in QUICK_ROUTES,
        [(module, route) for module in ("scheduled", "gan", "adafactor") for route in ROUTES],
    ),
)
def test_training_goes_on_at_another_world_size(pool: RankPool, tmp_path: Path, module: str, route: str) -> None:
    source, target = ROUTES[route]
    path = tmp_path / "a.ckpt"
    pool.run(source[1], write, module, source[0], str(path))
    full = tmp_path / "full.ckpt"
    torch.save(whole(path), full)
    expected, expected_step = pool.run(1, resume, module, "single", str(full))[0]
    for parameters, step in pool.run(target[1], resume, module, target[0], str(path)):
        assert step == expected_step
        for actual, reference in zip(parameters, expected, strict=True):
            torch.testing.assert_close(actual, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("module", "ranks"), [("convolutional", 2), ("tied", 3), ("gan", 4)])
def test_consolidated_it_is_the_full_one(pool: RankPool, tmp_path: Path, module: str, ranks: int) -> None:
    for kind in ("full", "sharded"):
        pool.run(ranks, write, module, kind, str(tmp_path / f"{kind}.ckpt"))
    folder, made = tmp_path / "sharded.ckpt", tmp_path / "made.ckpt"
    assert main(["consolidate", str(folder), str(made)]) == 0
    expected = load(tmp_path / "full.ckpt")
    assert_same(without_own(load(made)), without_own(expected), as_stored=True)
    # Each rank has its random numbers in its own file; here they are of all ranks.
    assert len(expected[CHECKPOINT_KEY]["rng"]["states"]) == ranks
    assert_same(load(made)[CHECKPOINT_KEY]["rng"], expected[CHECKPOINT_KEY]["rng"], as_stored=True)
    # Tied weights are written once.
    assert made.stat().st_size < 1.05 * (tmp_path / "full.ckpt").stat().st_size
    assert main(["consolidate", str(folder), str(made)]) == 2


class SavesAtOnce(Callback):
    """What was loaded is saved before anything is trained."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        trainer.save_checkpoint(self.path)
        trainer.should_stop = True


def resave(module: str, strategy: str, source: str, target: str) -> None:
    batch = GLOBAL_BATCH // dist.get_world_size()
    kinds = {**STRATEGIES, **SAVING}
    trainer = make_trainer(kinds[strategy](), max_epochs=2, min_epochs=0, callbacks=[SavesAtOnce(target)])
    data = zoo.loader(4 * GLOBAL_BATCH, batch, rank=dist.get_rank(), world_size=dist.get_world_size())
    trainer.fit(MODULES[module](), data, ckpt_path=source, weights_only=True)


JOURNEYS = {
    "full": [("full", 2), ("ddp", 2), ("full", 3), ("ddp", 4), ("full", 4), ("full", 1), ("single", 1), ("full", 2)],
    "sharded": [("sharded", 2), ("sharded", 4), ("full", 1), ("async", 3), ("tuned", 2), ("sharded", 3), ("full", 2)],
    "groups": [
        ("sharded groups", 4),
        ("sharded", 3),
        ("grouped", 4),
        ("full", 1),
        ("sharded groups", 6),
        ("grouped", 2),
    ],
}


@pytest.mark.parametrize(
    ("module", "journey"),
    slow_unless(
        lambda *case: case in [("gan", "full"), ("adafactor", "sharded"), ("scheduled", "groups")],
        [(module, journey) for module in ("scheduled", "gan", "adafactor", "tied") for journey in JOURNEYS],
    ),
)
def test_the_state_is_the_same_key_by_key_wherever_it_goes(
    pool: RankPool, tmp_path: Path, module: str, journey: str
) -> None:
    (first, ranks), *others = JOURNEYS[journey]
    source = tmp_path / "0.ckpt"
    pool.run(ranks, write, module, first, str(source))
    expected = read(source)
    for number, (strategy, ranks) in enumerate(others, 1):
        target = tmp_path / f"{number}.ckpt"
        pool.run(ranks, resave, module, strategy, str(source), str(target))
        found = read(target)
        for key in ("state_dict", "optimizer_states", "lr_schedulers"):
            assert_same({(strategy, ranks, key): found[key]}, {(strategy, ranks, key): expected[key]}, as_stored=True)
        source = target


def read(path: Path) -> dict[str, Any]:
    return whole(path) if path.is_dir() else load(path)


class Rising(zoo.MLP):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("rises", float(self.global_step))
        return super().training_step(batch, batch_idx)


def best_of_two(folder: str, strategy: str) -> list[bool]:
    """Two callbacks save under names that are the same but for the counter; whether the best of each is there."""
    often = {"every_n_train_steps": 1, "save_on_train_epoch_end": False, "save_top_k": 1}
    callbacks = [ModelCheckpoint(folder, monitor="rises", mode=mode, **often) for mode in ("min", "max")]
    trainer = make_trainer(SAVING[strategy](), callbacks=callbacks, enable_checkpointing=True)
    trainer.fit(Rising(), zoo.loader(24, 4))
    return [Path(callback.best_model_path).exists() for callback in callbacks]


@pytest.mark.parametrize("strategy", ["sharded", "async"])
def test_names_are_counted_up_for_what_is_still_being_written(pool: RankPool, tmp_path: Path, strategy: str) -> None:
    assert pool.run(2, best_of_two, str(tmp_path), strategy) == [[True, True]] * 2


def saved_over_a_folder(folder: str, strategy: str) -> str:
    trainer = make_trainer(SAVING[strategy](), max_steps=1)
    trainer.fit(zoo.MLP(), zoo.loader(8, 2))
    try:
        trainer.save_checkpoint(folder)
    except Exception as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("strategy", ["full", "sharded"])
def test_a_folder_of_other_things_is_not_replaced(pool: RankPool, tmp_path: Path, strategy: str) -> None:
    folder = tmp_path / "outputs"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    assert all("thesis.txt" in error for error in pool.run(2, saved_over_a_folder, str(folder), strategy))
    assert (folder / "thesis.txt").read_text() == "years of work"


class Changed(zoo.MLP):
    """Its hook copies what stands for the optimizers' tensors, on rank 0 alone."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.global_rank == 0:
            checkpoint["optimizer_states"] = copy.deepcopy(checkpoint["optimizer_states"])


def saved_with_copies(path: str, strategy: str) -> str:
    trainer = make_trainer(SAVING[strategy](), max_steps=1)
    trainer.fit(Changed(), zoo.loader(8, 2))
    try:
        trainer.save_checkpoint(path)
    except Exception as error:
        return str(error)
    return "no error"


def test_hooks_that_copy_placeholders_are_told(pool: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    assert all("has copied or changed" in error for error in pool.run(2, saved_with_copies, str(path), "sharded"))
    assert not list(tmp_path.iterdir())
    assert pool.run(2, saved_with_copies, str(path), "full") == ["no error"] * 2


def saved_at_home(home: str, path: str, strategy: str) -> bool:
    os.environ["HOME"] = home
    trainer = make_trainer(SAVING[strategy](), max_steps=1)
    trainer.fit(zoo.MLP(), zoo.loader(8, 2))
    trainer.save_checkpoint(path)
    again = make_trainer(SAVING[strategy](), max_steps=2, max_epochs=3)
    again.fit(zoo.MLP(), zoo.loader(8, 2), ckpt_path=path, weights_only=True)
    return again.global_step == 2


@pytest.mark.parametrize("strategy", ["full", "sharded"])
@pytest.mark.parametrize("path", ["~/a.ckpt", "file://{home}/a.ckpt"])
def test_paths_as_lightning_writes_them(pool: RankPool, tmp_path: Path, strategy: str, path: str) -> None:
    assert all(pool.run(2, saved_at_home, str(tmp_path), path.format(home=tmp_path), strategy))
    assert [one.name for one in tmp_path.iterdir()] == ["a.ckpt"]


class ForgetsOnOneRank(zoo.MLP):
    """Its hook leaves the optimizers out, on rank 0 alone."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.global_rank == 0:
            del checkpoint["optimizer_states"], checkpoint["loops"]


def saved_without_optimizers(path: str, strategy: str) -> None:
    trainer = make_trainer(SAVING[strategy](), max_steps=1)
    trainer.fit(ForgetsOnOneRank(), zoo.loader(8, 2))
    trainer.save_checkpoint(path)


@pytest.mark.parametrize("strategy", ["full", "sharded"])
def test_rank_0_says_what_a_checkpoint_holds(pool: RankPool, tmp_path: Path, strategy: str) -> None:
    path = tmp_path / "a.ckpt"
    pool.run(2, saved_without_optimizers, str(path), strategy)
    found = whole(path) if path.is_dir() else load(path)
    assert "optimizer_states" not in found and "state_dict" in found


class KeepsASet(zoo.MLP):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["kept"] = {torch.ones(3)}


def saved_with_a_set(path: str) -> None:
    trainer = make_trainer(SAVING["sharded"](), max_steps=1)
    trainer.fit(KeepsASet(), zoo.loader(8, 2))
    trainer.save_checkpoint(path)


def test_what_cannot_be_consolidated_is_refused(
    pool: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pool.run(2, saved_with_a_set, str(tmp_path / "a.ckpt"))
    assert main(["consolidate", "--trusted", str(tmp_path / "a.ckpt"), str(tmp_path / "b.ckpt")]) == 2
    assert "tensors in objects" in capsys.readouterr().err
    assert not (tmp_path / "b.ckpt").exists()


def elements_of(path: Path) -> dict[str, torch.Tensor]:
    """What the ranks' files hold, by the names of the tensors, 1-D."""
    checkpoint = ShardedCheckpoint(path, weights_only=True)
    filled = {leaf.path: leaf.tensor for leaf in leaves(checkpoint.filled(checkpoint.skeleton))}
    named = {checkpoint.name_of(leaf.tensor): leaf for leaf in leaves(checkpoint.skeleton)}
    return {name: in_storage_order(filled[leaf.path]) for name, leaf in named.items() if name is not None}


@pytest.mark.parametrize("strategy", ["sharded", "tuned"])
def test_torchs_own_reader_finds_tensors_by_their_names(pool: RankPool, tmp_path: Path, strategy: str) -> None:
    path = tmp_path / "a.ckpt"
    pool.run(3, write, "scheduled", strategy, str(path))
    known = torch_checkpoint.FileSystemReader(path).read_metadata().state_dict_metadata
    found = {name: torch.empty(stored.size, dtype=stored.properties.dtype) for name, stored in known.items()}
    torch_checkpoint.load(found, checkpoint_id=path)
    assert_same(found, elements_of(path))


def read_from_disk(path: str, strategy: str) -> tuple[int, int]:
    """Bytes of elements that this rank reads when a training goes on, and files whose sizes it asks for."""
    nbytes, sizes = [0], [0]
    read_part, size = reading._read_part, reading._size

    def count_read(file: Any, part: Any) -> None:
        nbytes[0] += part.target.nbytes
        read_part(file, part)

    def count_size(file: Path) -> Any:
        sizes[0] += 1
        return size(file)

    with mock.patch.object(reading, "_read_part", count_read), mock.patch.object(reading, "_size", count_size):
        trainer = make_trainer(SAVING[strategy](), max_epochs=2, min_epochs=0)
        trainer.fit(MODULES["scheduled"](), zoo.loader(16, 4), ckpt_path=path, weights_only=True)
    return nbytes[0], sizes[0]


@pytest.mark.parametrize("strategy", ["full", "tuned"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_ranks_together_read_a_checkpoint_once(pool: RankPool, tmp_path: Path, ranks: int, strategy: str) -> None:
    path = tmp_path / "a.ckpt"
    pool.run(3, write, "scheduled", "sharded", str(path))
    of_ranks = pool.run(ranks, read_from_disk, str(path), strategy)
    assert sum(nbytes for nbytes, _ in of_ranks) == sum(tensor.nbytes for tensor in elements_of(path).values())
    # Each looks at the size of its share of the files.
    assert [sizes for _, sizes in of_ranks] == [len(range(rank, 3, ranks)) for rank in range(ranks)]


def save_after_fit(path: str, arguments: dict[str, Any]) -> None:
    train(lambda: zoo.MLP(), zero1(checkpoint_format="sharded", **arguments)).trainer.save_checkpoint(path)


@pytest.mark.parametrize("arguments", [{}, {"partition": "parameter"}], ids=str)
def test_a_checkpoint_saved_after_training_in_groups_has_the_whole_state(
    pool: RankPool, tmp_path: Path, arguments: dict[str, Any]
) -> None:
    states = []
    for size in (4, 2, 1):
        path = tmp_path / f"{size}.ckpt"
        pool.run(4, save_after_fit, str(path), {"shard_group": size, **arguments})
        states.append(elements_of(path))
    for name, expected in states[0].items():
        for of_groups in states[1:]:
            torch.testing.assert_close(of_groups[name], expected, rtol=1e-4, atol=1e-5)
    assert any("exp_avg" in name and found.any() for name, found in states[1].items())


@pytest.mark.parametrize("module", ["scheduled", "adafactor"])
def test_groups_that_hold_the_same_share_it_out(pool: RankPool, tmp_path: Path, module: str) -> None:
    paths = {kind: tmp_path / f"{kind}.ckpt" for kind in ("sharded", "sharded groups")}
    for kind, path in paths.items():
        pool.run(4, write, module, kind, str(path))
    for path in paths.values():
        assert sorted(file.name for file in path.glob("*.distcp")) == [f"__{rank}_0.distcp" for rank in range(4)]
    nbytes = [sum(tensor.nbytes for tensor in elements_of(path).values()) for path in paths.values()]
    assert nbytes[0] == nbytes[1] > 0
    with open(paths["sharded groups"] / ".metadata", "rb") as file:
        index = IndexUnpickler(file).load()
    # Of what the two groups hold, each rank writes about a quarter; each element is there once.
    written = [sum(piece.numel for piece in index.of_rank(rank)) for rank in range(4)]
    assert sum(written) == sum(tensor.numel for tensor in index.tensors.values())
    assert max(written) < 0.4 * sum(written)
