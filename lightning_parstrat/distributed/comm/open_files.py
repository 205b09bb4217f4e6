"""How many files a rank may have open: every connection to another rank is one."""

import resource
from contextlib import suppress

_OF_THE_PROGRAM = 256
"""Libraries, data files, pipes of workers, checkpoints."""


def files_needed(world_size: int, on_cpu: bool) -> int:
    """The most files that a rank has open at once: 256 + N + g N, for N ranks and g groups of Gloo's.

    In each group, a rank may be connected with all others, and listens. Rank 0 also keeps a connection of each rank to
    the store. Up to 16 ranks, all these connections exist. With more ranks, only ranks that exchange something are
    connected. In most groups these are fewer. The exceptions are groups of gradients and parameters between CPUs, and
    those by which rank 0 gathers.

    Args:
        world_size: N.
        on_cpu: Whether Gloo sends gradients and parameters, so that g is 5: Lightning's own, gradients, parameters,
            control messages and checkpoints. With NCCL, only the last two use Gloo.
    """
    return _OF_THE_PROGRAM + world_size + (5 if on_cpu else 2) * world_size


def most_open_files() -> int | None:
    """The most files that this process may have open at its hard limit (``ulimit -Hn``). Without a limit, None."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if hard == resource.RLIM_INFINITY else hard


def allow_open_files(needed: int) -> None:
    """If the soft limit (``ulimit -n``) is lower than ``needed``, raises it to the hard limit. Not collective.

    Programs get a low soft limit, often 1,024, since some old ones cannot handle more. The system's real limit is the
    hard one. Processes that this one starts inherit the limit. If the hard limit is too low as well,
    ``lightning-parstrat doctor`` reports it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        # Some systems allow fewer than their limit. An error leaves the limit as it was.
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
