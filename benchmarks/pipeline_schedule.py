"""When each stage of a pipeline runs which micro-batch: one step, measured.

    OMP_NUM_THREADS=1 python -m benchmarks.pipeline_schedule --output benchmarks/results/pipeline_schedule.json

A small GPT trains in stages on local processes, whose clocks are the machine's.
"""

import argparse
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed.pipelining import PipelineStage
from torch.utils.data import DataLoader

from benchmarks.gpt import Decoder, RandomTokens
from benchmarks.machine import write_result
from benchmarks.peers import GPT
from benchmarks.quiet import QUIET
from benchmarks.ranks import become_ranks, global_rank
from lightning_parstrat import PipelineStrategy

RANKS, MICRO_BATCHES, BATCH, STEPS = 2, 4, 8, 8

Span = tuple[str, int, float, float]
"""What a stage did, for which micro-batch, and when it began and ended."""


def noted(kind: str, run: Callable[..., Any], spans: list[Span]) -> Callable[..., Any]:
    """A stage's method, which notes when it ran."""

    @functools.wraps(run)
    def noting(stage: PipelineStage, number: int, *args: Any, **kwargs: Any) -> Any:
        began = time.monotonic()
        result = run(stage, number, *args, **kwargs)
        spans.append((kind, number, began, time.monotonic()))
        return result

    return noting


class LastStep(Callback):
    """Forgets what was noted before the last step, which all ranks begin together."""

    def __init__(self, spans: list[Span]) -> None:
        self.spans, self.collected = spans, list[Any]()

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.spans.clear()
        dist.barrier()

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.collected = [None] * RANKS
        dist.all_gather_object(self.collected, self.spans)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    become_ranks(1, RANKS)
    torch.manual_seed(0)
    spans: list[Span] = []
    last = LastStep(spans)
    strategy = PipelineStrategy(microbatches=MICRO_BATCHES)
    trainer = Trainer(accelerator="cpu", devices=RANKS, strategy=strategy, max_steps=STEPS, callbacks=[last], **QUIET)
    data = DataLoader(RandomTokens(BATCH * STEPS), batch_size=BATCH)
    forward = noted("forward", PipelineStage.forward_one_chunk, spans)
    backward = noted("backward", PipelineStage.backward_one_chunk, spans)
    with (
        mock.patch.object(PipelineStage, "forward_one_chunk", forward),
        mock.patch.object(PipelineStage, "backward_one_chunk", backward),
    ):
        trainer.fit(GPT(Decoder(width=256)), data)
    if global_rank() == 0:
        start = min(began for rank in last.collected for _, _, began, _ in rank)
        shown = [[(kind, n, began - start, end - start) for kind, n, began, end in rank] for rank in last.collected]
        write_result({"micro_batches": MICRO_BATCHES, "spans": shown}, arguments.output)


if __name__ == "__main__":
    main()
