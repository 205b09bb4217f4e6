"""Runs scripts as a user would: in a fresh interpreter, from a folder that is not the clone."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import dedent

TIMEOUT = 300.0
PACKAGE_UNDER_TEST = "PARSTRAT_PACKAGE_UNDER_TEST"
"""Names a folder where another copy of the package is than the one that is installed; see tests/deliberate_faults."""

# What the shell that runs the tests may have set must not decide how they end.
_FOREIGN = (
    "LIGHTNING_",
    "TORCH_",
    "PL_",
    "PYTHON",
    "MASTER_",
    "WORLD_SIZE",
    "RANK",
    "LOCAL_RANK",
    "NODE_RANK",
    "SLURM_",
)


def clean_environment(**extra: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    copy = {"PYTHONPATH": os.environ[PACKAGE_UNDER_TEST]} if PACKAGE_UNDER_TEST in os.environ else {}
    return {**kept, **copy, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **extra}


def run_python(
    arguments: Sequence[str | Path],
    folder: Path,
    environment: Mapping[str, str] | None = None,
    python: str | Path = sys.executable,
    timeout: float = TIMEOUT,
) -> subprocess.CompletedProcess[str]:
    """Runs the interpreter in ``folder``; a hang becomes an error that shows what was printed."""
    return subprocess.run(
        [str(python), *map(str, arguments)],
        cwd=folder,
        env=clean_environment(**(environment or {})),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def run_script(
    source: str,
    folder: Path,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    python: str | Path = sys.executable,
) -> str:
    """Writes the script into ``folder``, runs it there, and returns what it printed; it must succeed."""
    script = folder / "script.py"
    script.write_text(dedent(source))
    result = run_python([script, *arguments], folder, environment, python)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result.stdout + result.stderr
