"""Within a Slurm job, torchrun's own process outlives the signal at which its ranks save.

The signal goes to all processes of a job. torchrun does not know it and would be ended by it, with its ranks left to
themselves in the middle of their save. So in that process it is handed on to the ranks, and otherwise ignored.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

_MODULES = ("torch.distributed.run", "torch.distributed.launch")


def is_torchrun(words: Sequence[str]) -> bool:
    """Whether the interpreter was started with these words to be torchrun.

    Args:
        words: As in ``sys.orig_argv``.
    """
    return any(word in _MODULES or Path(word).name == "torchrun" for word in words[1:4])


def outlive_requeue_signal() -> None:
    """Hands SIGUSR1 on to the ranks, where this process is torchrun in a Slurm job and nobody else handles it."""
    if (
        "SLURM_JOB_ID" in os.environ
        and is_torchrun(sys.orig_argv)
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    ):
        signal.signal(signal.SIGUSR1, _hand_on)


def _hand_on(signum: int, _: FrameType | None) -> None:
    for children in Path("/proc/self/task").glob("*/children"):
        # Threads and processes may end meanwhile.
        with contextlib.suppress(OSError):
            for pid in children.read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signum)
