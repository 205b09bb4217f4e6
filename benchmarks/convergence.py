"""Does training in fewer bits follow training in more? Loss curves of several ways, on the same data and seed.

    python -m benchmarks.convergence --output benchmarks/results/convergence_bf16.json
    python -m benchmarks.convergence --compare wire --output benchmarks/results/convergence_wire.json
    python -m benchmarks.convergence --compare outer --output benchmarks/results/convergence_outer.json

The byte-level GPT of examples/lm, on two local processes: "bf16-mixed" under `ddp` (parameters in fp32), "bf16-true"
under `ddp` (everything in bfloat16), and "bf16-true" under `zero1_custom` (parameters and gradients in bfloat16, steps
in sharded fp32 master weights). Or ("wire") "bf16-mixed" under `zero1_custom` with gradients, parameters, or both
rounded to bfloat16 on the wire. Or ("outer") two groups of one rank that meet every 30 steps. A picture lies beside the
result file afterwards.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

from benchmarks.machine import write_result
from benchmarks.quiet import QUIET

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "lm"))

from data import StdlibBytes
from model import ByteGPT

from lightning_parstrat import ZeRO1Strategy

MEAN_OF, EVERY = 50, 10
"""Steps that a point of a curve is the mean of, and steps between points."""


class Way(NamedTuple):
    strategy: str
    precision: Any
    color: str
    arguments: dict[str, Any] = {}  # noqa: RUF012 (nobody writes to it)


OUTER = {"shard_group": 1, "outer_every": 30}
COMPARISONS = {
    "precision": {
        "bf16-mixed, ddp": Way("ddp", "bf16-mixed", "black"),
        "bf16-true, ddp": Way("ddp", "bf16-true", "tab:red"),
        "bf16-true, zero1_custom": Way("zero1_custom", "bf16-true", "tab:blue"),
    },
    "wire": {
        "fp32 on the wire": Way("zero1_custom", "bf16-mixed", "black"),
        'comm_dtype="bf16"': Way("zero1_custom", "bf16-mixed", "tab:blue", {"comm_dtype": "bf16"}),
        'gather_dtype="bf16"': Way("zero1_custom", "bf16-mixed", "tab:orange", {"gather_dtype": "bf16"}),
        "both": Way("zero1_custom", "bf16-mixed", "tab:green", {"comm_dtype": "bf16", "gather_dtype": "bf16"}),
    },
    "outer": {
        "each step together": Way("zero1_custom", "32-true", "black"),
        "outer_every=30": Way("zero1_custom", "32-true", "tab:blue", OUTER),
        'outer_every=30, "int8"': Way("zero1_custom", "32-true", "tab:orange", {**OUTER, "outer_dtype": "int8"}),
        "outer_every=30, outer_lr=0.7, outer_momentum=0.9": Way(
            "zero1_custom", "32-true", "tab:red", {**OUTER, "outer_lr": 0.7, "outer_momentum": 0.9}
        ),
    },
}


class AdamDefaultsGPT(ByteGPT):
    """At torch's own defaults but for the learning rate, which stays as it is."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate)


class Losses(Callback):
    """The training loss of every step, averaged over the ranks, and the parameters' bytes."""

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, *_: Any) -> None:
        self.losses.append(trainer.strategy.reduce(outputs["loss"].detach().float().clone(), reduce_op="mean"))


def train(way: Way, arguments: argparse.Namespace) -> dict[str, Any]:
    """Loss per step and bits per byte on held-out files, under one way."""
    seed_everything(arguments.seed, verbose=False)
    module = AdamDefaultsGPT(width=arguments.width, depth=arguments.depth, learning_rate=arguments.learning_rate)
    losses = Losses()
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ZeRO1Strategy(**way.arguments) if way.arguments else way.strategy,
        precision=way.precision,
        max_steps=arguments.steps,
        limit_val_batches=16,
        val_check_interval=arguments.steps,
        num_sanity_val_steps=0,
        callbacks=[losses],
        **QUIET,
    )
    trainer.fit(module, datamodule=StdlibBytes(context=128, batch_size=arguments.batch_size))
    bits = float(trainer.callback_metrics["val_bits_per_byte"])
    smooth = smoothed([float(loss) for loss in losses.losses], MEAN_OF)
    return {"val_bits_per_byte": bits, "losses": [round(loss, 4) for loss in smooth[EVERY - 1 :: EVERY]]}


def smoothed(losses: list[float], window: int) -> list[float]:
    return [sum(losses[max(0, i - window + 1) : i + 1]) / min(window, i + 1) for i in range(len(losses))]


def plot(results: dict[str, Any], ways: dict[str, Way], target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2))
    for name, result in results.items():
        label = f"{name}: {result['val_bits_per_byte']:.3f} bits per byte held out"
        # What should lie on the other is drawn over it, thinner.
        width = 3.5 if ways[name].color == "black" else 1.4
        steps = range(EVERY, EVERY * len(result["losses"]) + 1, EVERY)
        axes.plot(steps, result["losses"], label=label, color=ways[name].color, linewidth=width)
    axes.set(xlabel="step", ylabel=f"training loss, mean of {MEAN_OF} steps", yscale="log")
    axes.legend()
    axes.grid(alpha=0.3, which="both")
    figure.tight_layout()
    figure.savefig(target, dpi=130)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", choices=list(COMPARISONS), default="precision")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--batch-size", type=int, default=8, help="windows of 128 bytes per rank")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--output", type=Path, help="where to write the result as JSON; the picture gets its name")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    ways = COMPARISONS[arguments.compare]
    results = {name: train(way, arguments) for name, way in ways.items()}
    if int(os.environ.get("LOCAL_RANK", "0")) != 0:
        return
    reference = next(iter(results.values()))
    for name, result in results.items():
        last = result["losses"][-1]
        gap = last - reference["losses"][-1]
        print(f"{name:26s} held out {result['val_bits_per_byte']:.3f} bits, last losses {last:.3f} ({gap:+.3f})")
    if arguments.output is not None:
        write_result({"results": results}, arguments.output)
        plot(results, ways, arguments.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
