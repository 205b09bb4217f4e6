"""Trains a small GPT with sharded optimizer state on two local CPU processes, and shows what came of it.

    python examples/lm/demo.py

Everything it trains on is on the machine already: the source text of Python's standard library. It exits with an error
unless the model ends well below the unigram entropy of that text and its checkpoint loads back.
"""

import argparse
import csv
import logging
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import measure
from data import StdlibBytes
from lightning.pytorch import Trainer
from model import ByteGPT

HERE = Path(__file__).resolve().parent
PROCESSES = 2
# What training must gain over counting single bytes.
REQUIRED_GAIN_BITS = 0.5
# Training stops here on a slow machine; the best checkpoint so far is then what is judged.
TRAINING_LIMIT = "00:00:01:40"
PROMPT = "def read_file(path):\n"
BASELINE = "ddp"


def log(line: str = "") -> None:
    print(line, flush=True)


def run_program(name: str, *arguments: str | Path) -> None:
    """Runs a program that lies beside this one. Lightning starts its other process itself."""
    threads = max(1, len(os.sched_getaffinity(0)) // PROCESSES)
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
    command = [sys.executable, str(HERE / name), *map(str, arguments)]
    code = subprocess.run(command, env=environment, check=False).returncode
    if code:
        sys.exit(f"FAILED: {name} exited with status {code}")


def train(strategy: str, run_dir: Path) -> Path:
    """Trains under `strategy` and returns the checkpoint of the best validation."""
    run_program(
        "main.py",
        "fit",
        *("--config", HERE / "configs" / "zero1.yaml"),
        *("--trainer.strategy", strategy),
        *("--trainer.max_time", TRAINING_LIMIT),
        *("--trainer.default_root_dir", run_dir),
        *("--trainer.logger.init_args.save_dir", run_dir),
    )
    checkpoints = sorted(run_dir.rglob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    if not checkpoints:
        sys.exit(f"FAILED: training left no checkpoint under {run_dir}; did it end before the first validation?")
    return checkpoints[-1]


def best_logged_bits(run_dir: Path) -> float:
    """The best bits per byte that validation had during the training."""
    with next(run_dir.rglob("metrics.csv")).open() as metrics:
        values = [row["val_bits_per_byte"] for row in csv.DictReader(metrics)]
    return min(float(value) for value in values if value)


def validate(model: ByteGPT, data: StdlibBytes) -> tuple[float, float]:
    """Perplexity and bits per byte, from this one process."""
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    (metrics,) = trainer.validate(model, data, verbose=False)
    return metrics["val_perplexity"], metrics["val_bits_per_byte"]


def print_sample(model: ByteGPT) -> None:
    log("\nA sample from the loaded checkpoint:")
    for line in model.generate(PROMPT, 300).splitlines():
        log(f"    {line}")


def print_comparison(strategies: list[str], checkpoint: Path, run_dir: Path) -> None:
    """Measures the strategies in turns and prints them side by side."""
    result = run_dir / "measurements.json"
    run_program("measure.py", checkpoint, result, "--strategies", *strategies)
    log(f"{'':16}{'step time':>12}{'optimizer state':>20}")
    for strategy, measured in measure.read(result).items():
        milliseconds, megabytes = measured.median_seconds * 1e3, measured.state_bytes / 1e6
        log(f"{strategy:16}{milliseconds:>9.1f} ms{megabytes:>11.2f} MB a rank")
    log("(median over steady steps; the strategies took turns on this machine)")


def find_faults(bits: float, unigram_bits: float, logged_bits: float) -> list[str]:
    """What is wrong with the outcome, in words."""
    faults = []
    if bits > unigram_bits - REQUIRED_GAIN_BITS:
        faults.append(
            f"the model needs {bits:.3f} bits per byte; {REQUIRED_GAIN_BITS} below the unigram entropy of"
            f" {unigram_bits:.3f} was wanted"
        )
    if abs(bits - logged_bits) > 1e-3:
        faults.append(f"the loaded checkpoint needs {bits:.4f} bits per byte, but training logged {logged_bits:.4f}")
    return faults


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="zero1_custom", help="any strategy's name (default: zero1_custom)")
    default_dir = HERE / "runs" / time.strftime("demo-%Y%m%d-%H%M%S")
    parser.add_argument("--run-dir", type=Path, default=default_dir, help="where to write; must not exist yet")
    return parser.parse_args()


def quieten() -> None:
    """Keeps this process to its own output; the training it starts speaks for itself."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")


def main() -> None:
    args = parse_arguments()
    quieten()
    began = time.monotonic()
    args.run_dir.mkdir(parents=True)
    data = StdlibBytes()
    data.prepare_data()
    log(f"Text: {data.text_bytes() / 1e6:.1f} MB of Python source, {data.unigram_bits():.3f} bits per byte (unigram)")
    log(f"Training with strategy={args.strategy!r} on {PROCESSES} processes\n")
    checkpoint = train(args.strategy, args.run_dir)

    model = ByteGPT.load_from_checkpoint(checkpoint, map_location="cpu")
    data = StdlibBytes.load_from_checkpoint(checkpoint)
    perplexity, bits = validate(model, data)
    unigram_bits = data.unigram_bits()
    log(f"\nCheckpoint: {checkpoint}")
    log("Loaded back into one process without the strategy, on held-out files:")
    log(f"    validation perplexity {perplexity:8.3f}")
    log(f"    bits per byte         {bits:8.3f}")
    log(f"    unigram entropy       {unigram_bits:8.3f}  (what counting single bytes gives)")
    print_sample(model)
    log("\nMeasuring the strategies side by side ...")
    print_comparison([BASELINE, args.strategy], checkpoint, args.run_dir)

    faults = find_faults(bits, unigram_bits, best_logged_bits(args.run_dir))
    if faults:
        sys.exit("\nFAILED: " + "; ".join(faults))
    log(f"\nOK: {unigram_bits - bits:.2f} bits per byte below unigram, in {time.monotonic() - began:.0f} s altogether")


if __name__ == "__main__":
    main()
