"""How many files a rank may have open: every connection to another rank is one."""

from contextlib import suppress

try:
    import resource
except ImportError:  # pragma: no cover
    # Only Unix has it; elsewhere connections do not count as files.
    resource = None  # type: ignore[assignment]

_OF_THE_PROGRAM = 256
"""Libraries, data files, pipes of workers, checkpoints."""

_GROUPS_OF_GLOO = {True: 5, False: 2}
"""Lightning's own, gradients, parameters, control messages, checkpoints; of GPUs only the last two are Gloo's."""


def files_needed(world_size: int, on_cpu: bool) -> int:
    """The most files that a rank has open at once: 256 + N + g N, for N ranks and g groups of Gloo's.

    In each group a rank may be connected with all others, and listens. Rank 0 keeps a connection of each rank to the
    store besides. Up to 16 ranks that is what there is; of more, those are connected that exchange something: fewer in
    all groups but those of gradients and parameters between CPUs, and those that rank 0 gathers by.

    Args:
        world_size: N.
        on_cpu: Whether gradients and parameters travel over Gloo, so that g is 5; over NCCL it is 2.
    """
    return _OF_THE_PROGRAM + world_size + _GROUPS_OF_GLOO[on_cpu] * world_size


def most_open_files() -> int | None:
    """How many files this process may have open if it asks for as many as it may (``ulimit -Hn``); None for any."""
    if resource is None:
        return None
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if hard == resource.RLIM_INFINITY else hard


def allow_open_files(needed: int) -> None:
    """Raises the soft limit (``ulimit -n``) to the hard one where it is lower than ``needed``. Not collective.

    Programs get a low soft limit, often 1,024, since some of old cannot handle more; what a system really allows is the
    hard limit. Processes that this one starts inherit it. Where the hard limit is too low as well, ``lightning-parstrat
    doctor`` says so.
    """
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        # Some systems allow fewer than they say. It is no worse than before.
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
