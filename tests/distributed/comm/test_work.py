"""What is in flight, and who completes it."""

import threading

import pytest

from lightning_parstrat.distributed.comm.work import ExchangeThread, SeenThrough


class Completed:
    """Knows in which threads it was completed."""

    def __init__(self, error: RuntimeError | None = None) -> None:
        self.by: list[str] = []
        self._error = error

    def __call__(self) -> None:
        self.by.append(threading.current_thread().name)
        if self._error is not None:
            raise self._error


def seen_through(error: RuntimeError | None = None) -> tuple[SeenThrough, Completed]:
    completed = Completed(error)
    return SeenThrough(completed, ExchangeThread("sees through")), completed


def test_who_waits_completes_it() -> None:
    work, completed = seen_through()
    work.wait()
    assert work.is_completed()
    work.wait()
    assert completed.by == [threading.current_thread().name]


@pytest.mark.parametrize("asks", [True, False])
def test_a_thread_completes_what_nobody_waits_for(asks: bool) -> None:
    work, completed = seen_through()
    if asks:
        while not work.is_completed():
            pass
    else:
        work.hand_over()
    work.wait()
    assert completed.by == ["sees through"] and work.is_completed()


def test_who_waits_learns_of_the_failure_in_the_thread() -> None:
    work, _ = seen_through(RuntimeError("rank 1 is gone"))
    work.hand_over()
    with pytest.raises(RuntimeError, match="rank 1 is gone"):
        work.wait()
