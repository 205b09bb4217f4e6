"""One process plays rank 0 of many: what its host does in a step is real, what collectives bring is not.

They are those of ``benchmarks/scale/played_group.py``, a kernel each in the place of NCCL's.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from benchmarks.ranks import rank_environment
from benchmarks.scale.playing import playing
from benchmarks.scale.recorder import Kind, Recorder
from lightning_parstrat.distributed.comm.work import marked

RANKS_PER_NODE = 8


class QuietRecorder(Recorder):
    """Shows launches to torch's profiler alone, and takes as little of the host's time as it can."""

    def launch(self, group: int, kind: Kind, *_: object) -> None:
        # As torch names those of its own groups.
        with marked(f"c10d::{kind} of {self.groups[group]}, played"):
            pass


@contextmanager
def fake_world(ranks: int) -> Iterator[None]:
    """Within it, this process is rank 0 of a default process group of so many ranks."""
    environment = rank_environment(0, 0, ranks, 1, "127.0.0.1", 0)
    # A torchrun of as many nodes: Lightning would look for as many GPUs as a node has ranks.
    with (
        mock.patch.dict(os.environ, environment),
        playing(QuietRecorder(), 0, ranks, min(ranks, RANKS_PER_NODE)),
    ):
        yield
