"""Accumulating over sequences of different lengths: stock Lightning and exact steps beside the full batch.

    python examples/accumulation/main.py                      # prints a table
    python examples/accumulation/main.py --output runs/out    # and writes out.json and out.png (needs matplotlib)

A small recurrent model learns to predict the next byte in lines of Python's standard library, which are of all
lengths. Two processes accumulate over `--accumulate` micro-batches of `--lines` lines; the number of micro-batches in
an epoch is no multiple of it, so the last window of every epoch is short. Four runs from the same start:

- the truth: one process, no Lightning, every step on all lines of all processes at once, mean over all bytes;
- `ddp`: a module as most are, returning the mean loss of its micro-batch;
- `ddp_tuned` and `zero1_custom`: the same module, also returning how many bytes that mean was over.
"""

import argparse
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.machine import describe_machine

RANKS = 2
CLIP = 0.6
PADDING = 0
COLORS = {"ddp": "tab:red", "ddp_tuned": "tab:green", "zero1_custom": "tab:blue"}


def lines_of_code(count: int) -> list[Tensor]:
    """Lines of the standard library as bytes, as they come: some have two bytes, some a hundred."""
    found: list[Tensor] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for line in path.read_bytes().splitlines():
            if len(line) > 1:
                found.append(torch.tensor(list(line[:200])))
                if len(found) == count:
                    return found
    raise RuntimeError(f"the standard library has fewer than {count} lines")


def padded(lines: list[Tensor]) -> Tensor:
    """(lines, longest) bytes; shorter lines end in zeros."""
    return nn.utils.rnn.pad_sequence(lines, batch_first=True, padding_value=PADDING)


class NextByte(nn.Module):
    """Logits (lines, bytes - 1, 256) for every byte but the first of each line."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.recurrent = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, lines: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embedding(lines[:, :-1]))[0])


def sum_of_losses(model: nn.Module, lines: Tensor) -> tuple[Tensor, Tensor]:
    """Of all bytes that are no padding: the sum of their losses, and their number."""
    targets = lines[:, 1:]
    losses = F.cross_entropy(model(lines).transpose(1, 2), targets, ignore_index=PADDING, reduction="sum")
    return losses, (targets != PADDING).sum()


def optimizer_of(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def initial_model() -> NextByte:
    torch.manual_seed(0)
    return NextByte()


class NextByteModule(LightningModule):
    """As it would be written for one device; ``loss_weight`` is all there is to exact accumulation."""

    def __init__(self, weighted: bool) -> None:
        super().__init__()
        self.model = initial_model()
        self.weighted = weighted

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        total, count = sum_of_losses(self.model, batch)
        loss = total / count.clamp(min=1)
        return {"loss": loss, "loss_weight": count} if self.weighted else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self.parameters())


class Steps(Callback):
    """After every step all parameters as one vector, and before it the gradient's norm."""

    def __init__(self) -> None:
        self.parameters: list[Tensor] = []
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        self.norms.append(float(nn.utils.get_total_norm([p.grad for p in module.parameters()])))

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        if len(self.norms) > len(self.parameters):
            self.parameters.append(nn.utils.parameters_to_vector(module.parameters()).detach())


def train(strategy: str, batches: list[Tensor], arguments: argparse.Namespace) -> Steps:
    """Under Lightning, on two processes."""
    steps = Steps()
    trainer = Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=strategy,
        accumulate_grad_batches=arguments.accumulate,
        gradient_clip_val=CLIP,
        max_epochs=arguments.epochs,
        callbacks=[steps],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    own = batches[trainer.global_rank :: RANKS]
    trainer.fit(NextByteModule(weighted=strategy != "ddp"), DataLoader(own, batch_size=None))
    return steps


def train_on_full_batches(batches: list[Tensor], arguments: argparse.Namespace) -> Steps:
    """The truth: every step on the whole window at once."""
    steps, model = Steps(), initial_model()
    optimizer = optimizer_of(model.parameters())
    size = RANKS * arguments.accumulate
    for _ in range(arguments.epochs):
        for start in range(0, len(batches), size):
            lines = padded([line[line != PADDING] for batch in batches[start : start + size] for line in batch])
            optimizer.zero_grad()
            total, count = sum_of_losses(model, lines)
            (total / count).backward()
            steps.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
            optimizer.step()
            steps.parameters.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    return steps


def deviations(steps: Steps, truth: Steps) -> dict[str, list[float]]:
    """Per step, relative to the truth: how far the norm is off, and how far the parameters are."""
    start = nn.utils.parameters_to_vector(initial_model().parameters()).detach()
    norms = [abs(ours / true - 1) for ours, true in zip(steps.norms, truth.norms, strict=True)]
    moved = [
        float((ours - true).norm() / (true - start).norm())
        for ours, true in zip(steps.parameters, truth.parameters, strict=True)
    ]
    return {"norm": norms, "parameters": moved}


def plot(results: dict[str, dict[str, list[float]]], truth: Steps, runs: dict[str, Steps], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    norms, distances = figure.subplots(1, 2)
    norms.plot(truth.norms, color="black", linewidth=4, alpha=0.3, label="full batch, one process")
    for (name, run), style in zip(runs.items(), ("-", "--", ":"), strict=True):
        norms.plot(run.norms, style, color=COLORS[name], label=name)
        distances.semilogy(results[name]["parameters"], style, color=COLORS[name], label=name)
    norms.axhline(CLIP, color="gray", linestyle=":", label="clipped from here on")
    norms.set(xlabel="step", ylabel="gradient norm before clipping")
    distances.set(xlabel="step", ylabel="distance from the full batch's parameters,\nrelative to the way they went")
    for axes in (norms, distances):
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accumulate", type=int, default=4, help="micro-batches per step and process")
    parser.add_argument("--micro-batches", type=int, default=10, help="per epoch and process")
    parser.add_argument("--lines", type=int, default=4, help="lines per micro-batch")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--output", type=Path, help="write OUTPUT.json and OUTPUT.png")
    arguments = parser.parse_args()

    lines = lines_of_code(RANKS * arguments.micro_batches * arguments.lines)
    batches = [padded(lines[i : i + arguments.lines]) for i in range(0, len(lines), arguments.lines)]
    runs = {name: train(name, batches, arguments) for name in COLORS}
    if torch.distributed.get_rank() != 0:
        return

    truth = train_on_full_batches(batches, arguments)
    results = {name: deviations(run, truth) for name, run in runs.items()}
    print(f"\n{len(truth.norms)} steps; against one process on the full batch:")
    print(f"{'strategy':>14}  {'norm off by, at most':>22}  {'parameters off by, at the end':>30}")
    for name, result in results.items():
        print(f"{name:>14}  {max(result['norm']):>22.2e}  {result['parameters'][-1]:>30.2e}")
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        found = {"machine": describe_machine(), "clip": CLIP, "truth_norms": truth.norms, "deviations": results}
        arguments.output.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
        plot(results, truth, runs, arguments.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
