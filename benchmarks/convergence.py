"""Does training in 16 bits follow training in mixed precision? Loss curves of three ways, on the same data and seed.

    python benchmarks/convergence.py --output benchmarks/results/convergence_bf16.json

The byte-level GPT of examples/lm, on two local processes: "bf16-mixed" under `ddp` (parameters in fp32), "bf16-true"
under `ddp` (everything in bfloat16), and "bf16-true" under `zero1_custom` (parameters and gradients in bfloat16, steps
in sharded fp32 master weights). A picture lies beside the result file afterwards.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from machine import describe_machine

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "lm"))

from data import StdlibBytes
from model import ByteGPT


class Way(NamedTuple):
    strategy: str
    precision: Any
    color: str


WAYS = {
    "bf16-mixed, ddp": Way("ddp", "bf16-mixed", "black"),
    "bf16-true, ddp": Way("ddp", "bf16-true", "tab:red"),
    "bf16-true, zero1_custom": Way("zero1_custom", "bf16-true", "tab:blue"),
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
        strategy=way.strategy,
        precision=way.precision,
        max_steps=arguments.steps,
        limit_val_batches=16,
        val_check_interval=arguments.steps,
        num_sanity_val_steps=0,
        callbacks=[losses],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=StdlibBytes(context=128, batch_size=arguments.batch_size))
    bits = float(trainer.callback_metrics["val_bits_per_byte"])
    return {"val_bits_per_byte": bits, "losses": [round(float(loss), 4) for loss in losses.losses]}


def smoothed(losses: list[float], window: int) -> list[float]:
    return [sum(losses[max(0, i - window + 1) : i + 1]) / min(window, i + 1) for i in range(len(losses))]


def plot(results: dict[str, Any], target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2))
    for name, result in results.items():
        label = f"{name}: {result['val_bits_per_byte']:.3f} bits per byte held out"
        # What should lie on the other is drawn over it, thinner.
        width = 3.5 if WAYS[name].precision == "bf16-mixed" else 1.4
        axes.plot(smoothed(result["losses"], 25), label=label, color=WAYS[name].color, linewidth=width)
    axes.set(xlabel="step", ylabel="training loss, mean of 25 steps", yscale="log")
    axes.legend()
    axes.grid(alpha=0.3, which="both")
    figure.tight_layout()
    figure.savefig(target, dpi=130)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    results = {name: train(way, arguments) for name, way in WAYS.items()}
    if int(os.environ.get("LOCAL_RANK", "0")) != 0:
        return
    reference = results["bf16-mixed, ddp"]
    for name, result in results.items():
        last = smoothed(result["losses"], 50)[-1]
        gap = last - smoothed(reference["losses"], 50)[-1]
        print(f"{name:26s} held out {result['val_bits_per_byte']:.3f} bits, last losses {last:.3f} ({gap:+.3f})")
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps({"machine": describe_machine(), "results": results}) + "\n")
        plot(results, arguments.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
