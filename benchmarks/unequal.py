"""How long a step takes on ranks of unequal speed, with equal shares of the samples and by `rank_shares`.

    OMP_NUM_THREADS=1 python -m benchmarks.unequal --output benchmarks/results/unequal.json

Two local processes train a small module by SGD with momentum. Each sample takes time in forward, and twice that in
backward; on rank 1 both are three times as long. These times are slept, so that two cores are enough. Equal shares and
measured ones take turns. With 12 and 4 of 16 samples, a step takes half the time of 8 and 8, at best.

Each training ends beside one process with batches of 16: the largest difference of a weight, and whether each step had
the same samples.
"""

import argparse
import logging
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks.machine import write_result
from benchmarks.measuring import StepTimes
from benchmarks.quiet import QUIET
from benchmarks.ranks import become_ranks, global_rank
from lightning_parstrat import TunedDDPStrategy, ZeRO1Strategy, ZeRO3Strategy

RANKS, BATCH_SIZE, WIDTH = 2, 8, 16
SEED = 7
STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "ddp_tuned": TunedDDPStrategy,
    "zero1_custom": ZeRO1Strategy,
    "zero3_custom": partial(ZeRO3Strategy, min_num_params=1),
}
SHARES = ("equal", "auto")
WARM_UP = 25
"""Steps before the clock starts. By then ranks are measured, and the second cut holds."""


class Slowly(torch.autograd.Function):
    """Takes some seconds in forward, and twice that in backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Regression(LightningModule):
    """Notes the samples of each step. A forward takes ``seconds`` for each sample."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 1))
        self.seconds = seconds
        self.samples: list[list[int]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        numbers, inputs, targets = batch
        self.samples.append(numbers.tolist())
        hidden = Slowly.apply(self.layers(inputs), self.seconds * len(numbers))
        return nn.functional.mse_loss(hidden, targets)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.005, momentum=0.9)


class Run(NamedTuple):
    """A training: the seconds of its steps, the samples of each step of all ranks, and the weights at its end."""

    seconds: list[float]
    samples: list[list[int]]
    own: list[int]
    weights: Tensor


def data(steps: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(steps * BATCH_SIZE * RANKS, WIDTH, generator=generator)
    return TensorDataset(torch.arange(len(inputs)), inputs, torch.sin(3 * inputs).sum(dim=1, keepdim=True))


def train(strategy: Strategy, seconds: float, loader: DataLoader[Any], devices: int) -> Run:
    seed_everything(SEED, verbose=False)
    module, times = Regression(seconds), StepTimes(WARM_UP)
    trainer = Trainer(accelerator="cpu", devices=devices, strategy=strategy, max_epochs=1, callbacks=[times], **QUIET)
    trainer.fit(module, loader)
    of_ranks: list[Any] = [module.samples]
    if devices > 1:
        of_ranks = [None] * devices
        dist.all_gather_object(of_ranks, module.samples)
    weights = [whole(parameter.detach()) for parameter in module.parameters()]
    return Run(
        seconds=times.kept(times.starts),
        samples=[sorted(chain.from_iterable(parts)) for parts in zip(*of_ranks, strict=True)],
        own=[len(part) for part in module.samples],
        weights=nn.utils.parameters_to_vector(weights),
    )


def whole(parameter: Tensor) -> Tensor:
    """A parameter, gathered if it is sharded."""
    full = getattr(parameter, "full_tensor", None)
    return parameter if full is None else full()


def compare(name: str, alone: Run, arguments: argparse.Namespace) -> dict[str, Any]:
    """Times of both kinds of shares in turns, their ratio, and how far they are from one process."""
    slower = 3 if global_rank() == RANKS - 1 else 1
    runs: dict[str, list[Run]] = {shares: [] for shares in SHARES}
    for _ in range(arguments.pairs):
        for shares in SHARES:
            strategy = STRATEGIES[name](rank_shares=shares)
            loader = DataLoader(data(arguments.steps), BATCH_SIZE, shuffle=True)
            runs[shares].append(train(strategy, arguments.seconds_per_sample * slower, loader, RANKS))
    found: dict[str, Any] = {}
    for shares, of_shares in runs.items():
        medians = [statistics.median(run.seconds) for run in of_shares]
        found[shares] = {"median": statistics.median(medians), "min": min(medians), "max": max(medians)}
    measured = runs["auto"]
    ratios = [
        statistics.median(ours.seconds) / statistics.median(base.seconds)
        for ours, base in zip(measured, runs["equal"], strict=True)
    ]
    found["auto"] |= {
        "ratio_to_equal": statistics.median(ratios),
        "ratios_of_pairs": ratios,
        "samples_of_rank_0_at_the_end": [run.own[-1] for run in measured],
        "to_single_process": max(float((run.weights - alone.weights).abs().max()) for run in measured),
        "same_samples_in_each_step": all(run.samples == alone.samples for run in measured),
    }
    return found


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5, help="how often equal and measured shares take turns")
    parser.add_argument("--steps", type=int, default=75, help=f"of a training; the clock starts after {WARM_UP}")
    parser.add_argument("--seconds-per-sample", type=float, default=0.001, help="of the fast rank's forward")
    parser.add_argument("--output", type=Path, help="where to write the result as JSON")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    become_ranks(1, RANKS)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    # The sampler is Lightning's, which takes the global seed.
    samples = data(arguments.steps)
    joint = DataLoader(samples, BATCH_SIZE * RANKS, sampler=DistributedSampler(samples, 1, 0, shuffle=True, seed=SEED))
    alone = train(SingleDeviceStrategy(device=torch.device("cpu")), 0.0, joint, 1)
    results = {name: compare(name, alone, arguments) for name in STRATEGIES}
    if global_rank() != 0:
        return
    for name, found in results.items():
        ours = found["auto"]
        print(
            f"{name:14s} {1000 * found['equal']['median']:6.1f} ms by equal shares, {1000 * ours['median']:6.1f} ms by"
            f" measured ones: {ours['ratio_to_equal']:.2f}; weights differ by {ours['to_single_process']:.1e} from one"
            f" process, samples of steps are {'the same' if ours['same_samples_in_each_step'] else 'OTHERS'}"
        )
    shape = {"ranks": RANKS, "batch_size": BATCH_SIZE, "rank_1_takes_times": 3, "steps": arguments.steps}
    write_result({**shape, "warm_up": WARM_UP, "pairs": arguments.pairs, "unequal": results}, arguments.output)


if __name__ == "__main__":
    main()
