"""What a program's arguments and files say, with where they say it."""

from pathlib import Path
from typing import Any

import pytest

from lightning_parstrat.cli.errors import UsageError
from lightning_parstrat.cli.program import read_program

FILE = """# a comment
seed_everything: 1
trainer:
  strategy: zero1_custom
  num_nodes: 4
  devices: [0, 1]
"""
NESTED = """fit:
  trainer: {num_nodes: 3, default_root_dir: all}
  ckpt_path: hpc
"""


@pytest.mark.parametrize(
    ("arguments", "nodes", "devices"),
    [
        ((), None, None),
        (("fit", "--trainer.num_nodes", "2", "--trainer.devices=3"), 2, 3),
        (("fit", "--trainer.devices=auto"), None, None),
        (("fit", "--trainer.devices=-1"), None, None),
        (("fit", "--trainer.devices", "-1"), None, None),
        (("fit", "--trainer.devices=0,1,2"), None, 3),
        (("fit", "--trainer.devices=[0, 3]"), None, 2),
        (("fit", "--config", "c.yaml"), 4, 2),
        (("fit", "-c", "c.yaml"), 4, 2),
        (("fit", "--config=c.yaml", "--trainer.num_nodes=2"), 2, 2),
        (("fit", "--trainer.num_nodes=2", "--config=c.yaml"), 4, 2),
        (("fit", "--config=c.yaml", "--config=nested.yaml"), 3, 2),
        (("test", "--config=nested.yaml"), None, None),
        (("fit", "--trainer", "group.yaml"), 5, None),
        (("fit", "--trainer={num_nodes: 6}"), 6, None),
        (("--num-nodes", "2", "--devices", "8"), 2, 8),
        (("--num_nodes=2",), 2, None),
    ],
)
def test_the_last_word_counts(tmp_path: Path, arguments: Any, nodes: int | None, devices: int | None) -> None:
    (tmp_path / "c.yaml").write_text(FILE)
    (tmp_path / "nested.yaml").write_text(NESTED)
    (tmp_path / "group.yaml").write_text("num_nodes: 5\n")
    program = read_program(("python", "train.py", *arguments), tmp_path)
    assert (program.count("num_nodes"), program.count("devices")) == (nodes, devices)


def test_a_setting_says_where_it_stands(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(FILE)
    program = read_program(("python", "train.py", "fit", "--config", "c.yaml", "--trainer.devices", "2"), tmp_path)
    assert program.settings["num_nodes"].source == 'c.yaml, line 5: "num_nodes: 4"'
    assert program.settings["devices"].source == 'the argument "--trainer.devices 2"'
    assert program.settings["strategy"].value == "zero1_custom"
    assert program.has_lightning_cli


@pytest.mark.parametrize(
    ("arguments", "has_cli"),
    [(("fit",), True), (("--config=c.yaml",), True), (("--trainer.devices=2",), True), (("--lr", "0.1"), False)],
)
def test_programs_with_lightning_cli_are_known_by_their_arguments(
    tmp_path: Path, arguments: Any, has_cli: bool
) -> None:
    (tmp_path / "c.yaml").write_text(FILE)
    assert read_program(("python", "train.py", *arguments), tmp_path).has_lightning_cli == has_cli


@pytest.mark.parametrize(("text", "message"), [(None, "cannot be read"), ("a: [", "is no YAML")])
def test_a_file_that_cannot_be_read(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(UsageError, match=message):
        read_program(("python", "train.py", "--config", "c.yaml"), tmp_path)
