"""What a rank says when it waits, from heartbeats."""

import re
import time

import pytest

from lightning_parstrat.distributed.comm.waiting_lines import Wait, line_of_wait
from lightning_parstrat.distributed.comm.whereabouts import Beat, Whereabouts

WAITING = Whereabouts("step 8", "backward", [], "`all_reduce`", {"default": 5}, "`f` (train.py, line 3)", 15.0)
LATE = WAITING._replace(hook="training_step", collective="", launched={"default": 4}, stack="`g` (train.py, line 9)")


def beat(where: Whereabouts, number: int = 9, ended: str = "", seconds_ago: float = 1.0) -> Beat:
    return Beat(number, time.time() - seconds_ago, ended, 0, 0, where)


def said(*others: Beat | None, before: list[Beat | None] | None = None, where: Whereabouts = WAITING) -> str:
    now = [beat(where), *others]
    known = [b and b._replace(number=b.number - 1) for b in now] if before is None else before
    return line_of_wait(Wait("ddp_tuned", 0, where, "Do this.", 5.0), known, now)


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([beat(LATE)], r"Not there: rank 1: in `training_step` of step 8, for 15 s, at `g` \(train.py, line 9\)\. Do"),
        ([beat(WAITING)], r"All ranks are there, and none goes on: .*\. Do"),
        ([beat(WAITING), beat(LATE)], r"Not there: rank 2: in `training_step` "),
        ([beat(LATE), beat(LATE._replace(still=14.0)), beat(WAITING)], r"Not there: ranks 1, 2: in `training_step` "),
        ([beat(LATE, ended="ended its training")], r"Not there: rank 1: ended its training\. Do"),
        ([None], r"Not there: rank 1: no sign of life since training was set up\. Do"),
        (
            [beat(WAITING._replace(collective="`broadcast`"))],
            r"Not there: rank 1: waiting in `broadcast`, in `backward` of step 8, for 15 s, at `f` ",
        ),
        # Another call of the same kind: by how many were launched.
        ([beat(WAITING._replace(launched={"default": 4}))], r"Not there: rank 1: waiting in `all_reduce`, "),
        ([beat(WAITING._replace(position="step 7"))], r"Not there: rank 1: .* of step 7, "),
        ([beat(LATE._replace(stack=str(n))) for n in range(6)], r"rank 4: [^;]*; 2 more are elsewhere\. Do"),
    ],
)
def test_the_line_names_who_is_not_there(others: list[Beat | None], expected: str) -> None:
    line = said(*others)
    assert line.startswith("ddp_tuned, rank 0: has waited 15 s, since "), line
    assert ", in `all_reduce`, in `backward` of step 8, at `f` (train.py, line 3). " in line
    assert re.search(expected, line), line


@pytest.mark.parametrize("where", [WAITING, LATE])
def test_a_rank_whose_beats_do_not_go_on_is_said_to_give_no_sign_of_life(where: Whereabouts) -> None:
    stopped = beat(where, seconds_ago=12.0)
    line = said(stopped, before=[beat(WAITING), stopped])
    assert re.search(r"rank 1: no sign of life for 12 s \(ended, stopped, .* at its last heartbeat ", line), line
    # Without an earlier one, by its age.
    assert "no sign of life" not in line_of_wait(Wait("", 0, WAITING, "", 5.0), None, [beat(WAITING), stopped])
    old = stopped._replace(at=stopped.at - 30)
    assert "no sign of life for 42 s" in line_of_wait(Wait("", 0, WAITING, "", 5.0), None, [beat(WAITING), old])


def test_whose_beats_have_ended_since_the_last_line_is_told_by_a_reading_since_then() -> None:
    ended = beat(WAITING, number=9, seconds_ago=40.0)
    goes_on = beat(WAITING, number=17)
    before_first_line = [beat(WAITING, 1), beat(WAITING, 1), beat(WAITING, 1)]
    assert "All ranks are there" in said(ended, goes_on, before=before_first_line)
    line = said(ended, goes_on, before=[beat(WAITING, 16), ended, beat(WAITING, 16)])
    assert "Not there: rank 1: no sign of life for 40 s" in line and "rank 2" not in line


def test_a_store_that_does_not_answer_is_named() -> None:
    for where, what in ((WAITING, "in `all_reduce`"), (WAITING._replace(collective=""), "for something unknown")):
        line = line_of_wait(Wait("ddp_tuned", 1, where, "", 5.0), None, None)
        assert f", {what}, in `backward` of step 8, " in line
        assert "has waited 15 s" in line and "the store does not answer, which rank 0's process" in line


def test_where_the_stack_shows_no_wait_it_is_one_if_others_have_launched_less() -> None:
    unseen = WAITING._replace(collective="")
    assert "for a collective that others have not launched, in `backward` of step 8" in said(beat(LATE), where=unseen)
    for launched in (5, 6):
        assert said(beat(LATE._replace(launched={"default": launched})), where=unseen) == ""


def test_a_beat_is_read_as_it_was_written() -> None:
    written = Beat(3, 1.5, "", 1, 2, WAITING._replace(calls=[["a save", 2]]))
    assert Beat.read(written.written()) == written
    assert written.where.phase == "a save, step 8"
    assert len(written.written()) < 1000
