"""What this process does together with others, for whoever says where it stands; nothing here reads it."""

from collections.abc import Iterator
from contextlib import contextmanager

from lightning_parstrat.distributed.comm.collectives import small_reductions_of
from lightning_parstrat.distributed.comm.process_groups import known_groups
from lightning_parstrat.distributed.torch_compat import collectives_launched

_CALLS: list[tuple[str, str]] = []


@contextmanager
def watching(what: str, advice: str = "") -> Iterator[None]:
    """Names a call in which all ranks must take part: a rank that waits in it for others says so by that name.

    Nothing is sent.

    Args:
        what: What the user has called.
        advice: What to do if some ranks have not.
    """
    _CALLS.append((what, advice))
    try:
        yield
    finally:
        _CALLS.remove((what, advice))


def current_call() -> tuple[str, str]:
    """The innermost named call and its advice, both empty outside of one. Any thread."""
    # One look: another thread may leave the call meanwhile.
    return (_CALLS[-1:] or [("", "")])[0]


def launched_by_group() -> dict[str, int]:
    """How many collectives this process has launched by each group, as far as all ranks count the same. Any thread.

    Gloo counts messages between two ranks, too, of which each rank has its own number. By the default group, where
    users' collectives run, and those of Lightning and DDP, such messages are rare.
    """
    launched = {}
    for name, group in known_groups().items():
        counts_messages = group.name() == "gloo" and name != "default"
        launched[name] = small_reductions_of(group)
        launched[name] += 0 if counts_messages else collectives_launched(group)
    return launched
