"""What is published: built, installed into an environment without the clone, and used from another folder."""

import shutil
import site
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

from lightning_parstrat import __version__
from tests.scripts import run_python, run_script

CLONE = Path(__file__).resolve().parent.parent


class Built(NamedTuple):
    wheel: Path
    sdist: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The wheel is built from what the source distribution holds, which therefore has to be complete."""
    folder = tmp_path_factory.mktemp("dist")
    build = ["-m", "build", "--no-isolation", "--outdir", folder, CLONE]
    result = run_python(build, folder)
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return Built(wheel, sdist)


@pytest.fixture(scope="module")
def python(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel in it, and this one's packages behind it.

    A path in a .pth file is searched, but its own .pth files, an editable installation's among them, are not read.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    install = ["-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet", built.wheel]
    result = run_python(install, folder)
    assert result.returncode == 0, result.stdout + result.stderr
    (packages,) = folder.glob("lib/python*/site-packages")
    dependencies = [path for path in sys.path if path in {*site.getsitepackages(), site.getusersitepackages()}]
    (packages / "dependencies.pth").write_text("\n".join(dependencies))
    return python


def test_the_wheel_holds_the_package_and_nothing_else(built: Built) -> None:
    assert built.wheel.name == f"lightning_parstrat-{__version__}-py3-none-any.whl"
    files = set(zipfile.ZipFile(built.wheel).namelist())
    package = {f"lightning_parstrat/{path}" for path in ("__init__.py", "_autoload.py", "_version.py", "py.typed")}
    assert package <= files
    assert {name.split("/")[0] for name in files} == {
        "lightning_parstrat",
        f"lightning_parstrat-{__version__}.dist-info",
    }
    sources = {path.relative_to(CLONE).as_posix() for path in (CLONE / "lightning_parstrat").rglob("*.py")}
    assert {name for name in files if name.endswith(".py")} == sources
    assert any(name.endswith("/LICENSE") for name in files)


def test_the_source_distribution_holds_what_git_would_give(built: Built) -> None:
    top = f"lightning_parstrat-{__version__}"
    with tarfile.open(built.sdist) as archive:
        files = {name.removeprefix(f"{top}/") for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "lightning_parstrat/py.typed", "tests/test_wheel.py"} <= files
    assert not [name for name in files if "__pycache__" in name or name.startswith((".venv", "runs"))]
    if shutil.which("git") and (CLONE / ".git").exists():
        list_files = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        git = subprocess.run(list_files, cwd=CLONE, capture_output=True, text=True, check=True)
        assert files - {"PKG-INFO"} <= set(git.stdout.splitlines())


@pytest.mark.slow
def test_an_installed_wheel_trains_by_flag_from_another_folder(python: Path, tmp_path: Path) -> None:
    script = """
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

if __name__ == "__main__":
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="zero1_custom", max_steps=2, limit_val_batches=0,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )
    trainer.fit(BoringModel())
    if trainer.is_global_zero:
        import sys
        print("file:", sys.modules["lightning_parstrat"].__file__)
        print("trained:", trainer.global_step, type(trainer.strategy).__name__, trainer.world_size)
"""
    printed = run_script(script, tmp_path, python=python).splitlines()
    (file,) = [Path(line.removeprefix("file: ")) for line in printed if line.startswith("file: ")]
    assert file.is_relative_to(python.parent.parent)
    assert "trained: 2 ZeRO1Strategy 2" in printed
