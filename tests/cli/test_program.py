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


CLI = {
    "fit": ("train.py", "fit"),
    "a configuration": ("train.py", "--config=c.yaml"),
    "an argument": ("train.py", "--trainer.devices=2"),
    "a module": ("python", "-m", "package.train", "fit"),
    "torchrun": ("torchrun", "--nproc-per-node", "2", "train.py", "fit"),
    "a container": ("apptainer", "exec", "-c", "image.sif", "python", "train.py", "fit"),
}
OTHER = {
    "its own arguments": ("train.py", "--lr", "0.1"),
    "a value like a subcommand": ("train.py", "--split", "test"),
    "a configuration of its own": ("train.py", "--config", "own.yaml"),
    "a configuration that is no YAML": ("train.py", "--config", "conf.ini"),
    "a configuration that is not there": ("train.py", "--config", "missing.yaml"),
    "a shell": ("bash", "-c", "python train.py fit"),
}


@pytest.mark.parametrize(("name", "has_cli"), [*((n, True) for n in CLI), *((n, False) for n in OTHER)])
def test_programs_with_lightning_cli_are_known_by_their_arguments(tmp_path: Path, name: str, has_cli: bool) -> None:
    (tmp_path / "c.yaml").write_text(FILE)
    (tmp_path / "own.yaml").write_text("lr: 1\n")
    (tmp_path / "conf.ini").write_text("[a\nb")
    assert read_program({**CLI, **OTHER}[name], tmp_path).has_lightning_cli == has_cli


@pytest.mark.parametrize(
    ("text", "message"), [(None, "cannot be read: No such file"), ("a: [", "must be YAML"), (b"\xff\xfe", "utf-8")]
)
def test_a_file_that_cannot_be_read(tmp_path: Path, text: str | bytes | None, message: str) -> None:
    if text is not None:
        (tmp_path / "c.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError, match=message):
        read_program(("train.py", "fit", "--config", "c.yaml"), tmp_path)
    assert read_program(("train.py", "fit", "--config", "c.yaml"), tmp_path, strict=False).settings == {}


@pytest.mark.parametrize(
    "text",
    [
        "base: &b {num_nodes: 2}\ntrainer:\n  <<: *b\n",
        "trainer:\n  num_nodes: 9\n  num_nodes: 2\n",
        "trainer: {num_nodes: 9}\nfit:\n  trainer: {num_nodes: 2}\n",
    ],
)
def test_what_yaml_makes_of_it_counts(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    program = read_program(("train.py", "fit", "-c", "c.yaml"), tmp_path)
    assert program.count("num_nodes") == 2 and "num_nodes: 2" in program.settings["num_nodes"].source


def test_yaml_on_the_command_line(tmp_path: Path) -> None:
    assert read_program(("train.py", "fit", "--config={trainer: {num_nodes: 3}}"), tmp_path).count("num_nodes") == 3
    with pytest.raises(UsageError, match="must be YAML"):
        read_program(("train.py", "fit", "--trainer={bad"), tmp_path)


@pytest.mark.parametrize("value", ["auto", "-1", "$DEV", "${oc.env:N}", "all", "null"])
def test_what_is_no_number_is_none(tmp_path: Path, value: str) -> None:
    assert read_program(("train.py", "fit", f"--trainer.devices={value}"), tmp_path).count("devices") is None
