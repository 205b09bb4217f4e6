"""torchrun's own process within a Slurm job, and the signal at which jobs save."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_parstrat._torchrun import is_torchrun
from tests.scripts import TIMEOUT, clean_environment

RANK = """
import os
import signal
import sys
import time
from pathlib import Path

parent = os.getppid()
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
Path("ready").touch()
while os.getppid() == parent:
    time.sleep(0.1)
"""


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"SLURM_JOB_ID": "7"}, 0),
        pytest.param({}, -signal.SIGUSR1, marks=pytest.mark.slow),
        pytest.param(
            {"SLURM_JOB_ID": "7", "LIGHTNING_PARSTRAT_AUTOLOAD": "0"}, -signal.SIGUSR1, marks=pytest.mark.slow
        ),
    ],
)
def test_it_hands_the_signal_on_in_slurm_alone(tmp_path: Path, variables: dict[str, str], expected: int) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    agent = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1", "rank.py"],
        cwd=tmp_path,
        env=clean_environment(**variables),
        start_new_session=True,
    )
    deadline = time.monotonic() + TIMEOUT
    while not (tmp_path / "ready").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    # To that process alone: its ranks have sessions of their own.
    agent.send_signal(signal.SIGUSR1)
    assert agent.wait(TIMEOUT) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("python", "/usr/bin/torchrun", "train.py"), True),
        (("python", "-m", "torch.distributed.run", "train.py"), True),
        (("python", "-u", "-m", "torch.distributed.run"), True),
        (("python", "train.py", "fit"), False),
        (("python", "-c", "import torch"), False),
        (("python", "train.py", "--launcher", "--of", "torchrun"), False),
        (("python",), False),
    ],
)
def test_it_is_known_by_its_command(words: tuple[str, ...], expected: bool) -> None:
    assert is_torchrun(words) == expected
