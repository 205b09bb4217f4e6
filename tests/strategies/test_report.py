"""What is said at the end of a training is what happened in it."""

import logging
import re

import pytest
import torch

from lightning_parstrat.distributed.comm.collectives import Traffic
from lightning_parstrat.strategies.report import StepMeter
from tests.held_time import HeldTime
from tests.pool import RankPool
from tests.strategies import zoo
from tests.strategies.late import delayed
from tests.strategies.parity import train, zero1

LINE = re.compile(
    r"zero1_custom: ([\d.]+) ms per step \(median of (\d+)\), ([\d.]+) ms of it waiting for other ranks;"
    r" ([\d.]+) (bytes|kB|MB) sent per step and rank; peak memory ([\d.]+) (MB|GB) resident, everything included"
)


class Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def lines_of_a_training(slow: bool, accumulate: int) -> tuple[list[str], int]:
    listener, logger = Listener(), logging.getLogger("lightning.pytorch.utilities.rank_zero")
    level = logger.level
    logger.addHandler(listener)
    logger.setLevel(logging.INFO)
    sent: list[int] = []

    class Counted(zoo.ScheduledTransformer):
        def on_train_end(self) -> None:
            sent.append(sum(self.trainer.strategy._engine.step_traffic()[1:4:2]))

    try:
        train(Counted, delayed() if slow else zero1(), accumulate_grad_batches=accumulate)
    finally:
        logger.removeHandler(listener)
        logger.setLevel(level)
    return [line for line in listener.lines if "per step" in line], sent[0]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("slow", [False, True])
def test_a_line_at_the_end_says_what_a_step_took(pool: RankPool, slow: bool, accumulate: int) -> None:
    ((lines, sent), (others, _)) = pool.run(2, lines_of_a_training, slow, accumulate)
    assert len(lines) == 1 and others == []
    found = LINE.fullmatch(lines[0])
    assert found is not None, lines[0]
    # Ten batches; the first three steps settle.
    assert int(found[2]) == 10 // accumulate - 3
    assert float(found[4]) == pytest.approx(sent / 1000, abs=0.06) and found[5] == "kB"
    assert 0 < float(found[3]) < float(found[1])


def test_nothing_is_said_where_no_step_was_made() -> None:
    meter = StepMeter(torch.device("cpu"))
    assert meter.line() is None
    meter.note(0, Traffic())
    meter.note(0, Traffic())
    assert meter.line() is None


def test_medians_are_of_whole_steps_and_leave_out_the_first(held_time: HeldTime) -> None:
    meter = StepMeter(torch.device("cpu"))
    traffic = Traffic()
    for step, seconds in enumerate((0.1, 0.1, 0.1, 0.02, 0.03, 0.05)):
        for _ in range(2):
            # Two micro-batches for each step.
            meter.note(step, traffic)
        held_time.pass_by(seconds)
        traffic.reduce_scatter_bytes += 300
        traffic.all_gather_bytes += 200
        traffic.waited_seconds += 0.005
    meter.note(6, traffic)
    line = str(meter.line())
    found = LINE.fullmatch(line)
    assert found is not None, line
    assert found.groups()[:5] == ("30.0", "3", "5.0", "500", "bytes")
