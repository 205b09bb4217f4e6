"""Plans are kept in one file for each kind of training."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_parstrat.distributed.ddp.plan_cache import Plan, PlanCache

KIND: dict[str, Any] = {"parameters": [("weight", (3, 4), "torch.float32", True)], "ranks": (2, 1), "comm_hook": None}
PLAN = Plan((2**20,))


def test_what_was_kept_is_found_again(tmp_path: Path) -> None:
    cache = PlanCache(tmp_path / "plans", KIND)
    assert cache.load() is None
    cache.save(PLAN)
    assert PlanCache(str(tmp_path / "plans"), dict(reversed(KIND.items()))).load() == PLAN
    cache.save(Plan(None))
    assert cache.load() == Plan(None)
    # And nothing else is left there.
    assert list((tmp_path / "plans").iterdir()) == [cache.path]


def test_another_kind_of_training_has_another_file(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [
        {"parameters": [("weight", (4, 3), "torch.float32", True)]},
        {"parameters": [("weight", (3, 4), "torch.float32", False)]},
        {"ranks": (4, 2)},
        {"comm_hook": "bf16"},
        {"one more": 1},
    ]
    PlanCache(tmp_path, KIND).save(PLAN)
    for change in changes:
        other = PlanCache(tmp_path, {**KIND, **change})
        assert other.load() is None
        other.save(Plan(None))
    assert PlanCache(tmp_path, KIND).load() == PLAN
    assert len(list(tmp_path.iterdir())) == 1 + len(changes)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "cut": lambda content: content[: len(content) // 2],
    "no text": lambda _: bytes(range(256)),
    "a list": lambda _: b"[1, 2]",
    "null": lambda _: b"null",
    "something else": lambda _: b'{"epoch": 3}',
    "another format": lambda content: json.dumps({**json.loads(content), "format": 99}).encode(),
    "no plan": lambda content: json.dumps({**json.loads(content), "caps": []}).encode(),
    "no sizes": lambda content: json.dumps({**json.loads(content), "caps": [1.5]}).encode(),
    "size 0": lambda content: json.dumps({**json.loads(content), "caps": [0]}).encode(),
}


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    cache = PlanCache(tmp_path, KIND)
    assert cache.path is not None
    for name, damage in DAMAGE.items():
        cache.save(PLAN)
        cache.path.write_bytes(damage(cache.path.read_bytes()))
        with pytest.raises(ValueError) as error:
            cache.load()
        assert str(error.value).startswith(f"{cache.path}: "), name
    cache.save(PLAN)
    assert cache.load() == PLAN


def test_without_a_folder_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cache = PlanCache(None, KIND)
    cache.save(PLAN)
    assert cache.path is None and cache.load() is None
    assert not list(tmp_path.iterdir())


def test_a_folder_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    PlanCache("~/plans", KIND).save(PLAN)
    assert PlanCache(tmp_path / "plans", KIND).load() == PLAN


def test_what_cannot_be_written_is_an_error_of_the_system(tmp_path: Path) -> None:
    (tmp_path / "plans").write_text("a file")
    with pytest.raises(OSError):
        PlanCache(tmp_path / "plans", KIND).save(PLAN)
