"""Within a Slurm job, torchrun's own process survives the signal at which its ranks save.

Slurm sends the signal to all processes of a job. torchrun has no handler for it, so it would end, and abandon its
ranks in the middle of their save. So torchrun's process passes it on to the ranks, and ignores it otherwise.
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
    # Only the first words: options of Python may come before, and what comes later are arguments of the training.
    return any(word in _MODULES or Path(word).name == "torchrun" for word in words[1:4])


def outlive_requeue_signal() -> None:
    """Passes SIGUSR1 on to the ranks if this process is torchrun in a Slurm job and nothing else handles the signal."""
    if (
        "SLURM_JOB_ID" in os.environ
        and is_torchrun(sys.orig_argv)
        # Python sets handlers in the main thread only.
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    ):
        signal.signal(signal.SIGUSR1, _hand_on)


def _hand_on(signum: int, _: FrameType | None) -> None:
    # By way of /proc: torchrun's list of its ranks is out of reach, and the kernel keeps children by the thread that
    # started them.
    for children in Path("/proc/self/task").glob("*/children"):
        # Threads and processes may end while this loop runs.
        with contextlib.suppress(OSError):
            for pid in children.read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signum)
