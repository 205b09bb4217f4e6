"""``zero3_custom`` beside FSDP2 written by hand: step time and memory, with the same units, under Lightning's Trainer.

    OMP_NUM_THREADS=1 python -m benchmarks.full_sharding --output benchmarks/results/full_sharding.json

By hand means: ``configure_model`` calls ``fully_shard`` on each layer and on the decoder, under Lightning's
ModelParallelStrategy. Step times are taken in turns (A B A B), as in step_time.py. Then each trains a few steps once
more while the bytes of the memory that tensors lie in are counted at every operator: no noise changes them.
"""

import argparse
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.distributed.fsdp import FSDPModule

from benchmarks.live_bytes import LiveBytes
from benchmarks.machine import write_result
from benchmarks.measuring import add_arguments, check_arguments, fit, make_decoder, measure_in_turns
from benchmarks.peers import FSDP2_BY_HAND
from benchmarks.ranks import become_ranks, global_rank
from benchmarks.step_time import summarize
from lightning_parstrat.core.footprint import Training, zero3

CONTENDERS = [FSDP2_BY_HAND, "zero3_custom"]
# The first step makes the optimizer's state.
SETTLING, COUNTED = 2, 3


class Held(Callback):
    """Bytes between steps and at most within each, after the first ones, and how many units there are.

    It has no hook in which a strategy would have to show gradients.
    """

    def __init__(self, live: LiveBytes) -> None:
        self.live = live
        self.steps = self.units = 0
        self.between: list[int] = []
        self.most: list[int] = []

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.steps > SETTLING:
            self.between.append(self.live.now)
            self.most.append(self.live.peak)
        self.steps += 1
        # All but the root, which is the module or its decoder.
        self.units = sum(isinstance(part, FSDPModule) for part in module.modules()) - 1
        self.live.forget_peak()


def count_bytes(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """What the rank that holds most holds under that strategy. On all ranks."""
    counted = argparse.Namespace(**{**vars(arguments), "warm_up": SETTLING, "steps": COUNTED + 1})
    counted.accumulate = 1
    with LiveBytes() as live:
        held = Held(live)
        fit(name, counted, [held])
    # The least of the steps: Gloo's threads may keep a copy of what was reduced for a moment longer.
    own = {"held": min(held.between), "peak": min(held.most), "units": held.units}
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    return {key: max(rank[key] for rank in ranks) for key in own}


def formula(decoder: nn.Module, ranks: int) -> dict[str, int]:
    """What core/footprint.py says."""
    units = [sum(parameter.numel() for parameter in layer.parameters()) for layer in decoder.blocks.layers]
    count = sum(parameter.numel() for parameter in decoder.parameters())
    found = zero3(Training(parameters=count, devices=ranks, root=count - sum(units), unit=max(units)))
    return {"held": round(found.held), "peak": round(found.peak)}


def summarize_bytes(counted: dict[str, dict[str, Any]], decoder: nn.Module, ranks: int) -> dict[str, Any]:
    """In all, per parameter, and to what was written by hand."""
    parameters = sum(parameter.numel() for parameter in decoder.parameters())
    by_hand = counted[FSDP2_BY_HAND]
    if len({found["units"] for found in counted.values()}) != 1:
        raise SystemExit(f"They have different units, and are not to be compared: {counted}.")
    return {
        name: {
            **found,
            **{f"{key}_bytes_per_parameter": found[key] / parameters for key in ("held", "peak")},
            **{f"{key}_ratio_to_{FSDP2_BY_HAND}": found[key] / by_hand[key] for key in ("held", "peak")},
        }
        for name, found in counted.items()
    } | {"parameters": parameters, "formula": formula(decoder, ranks)}


def show(result: dict[str, Any]) -> None:
    """Prints a line per strategy."""
    for name, times in result["step_time"].items():
        memory = result["memory"][name]
        line = f"{name:16s} {times['median']:.3f} s  ({times['min']:.3f} to {times['max']:.3f})"
        line += f"  {times[f'ratio_to_{FSDP2_BY_HAND}']:.3f} of {FSDP2_BY_HAND};"
        line += f"  {memory['held_bytes_per_parameter']:.2f} bytes per parameter held,"
        print(line + f" {memory['peak_bytes_per_parameter']:.2f} at most")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.set_defaults(pairs=5, steps=6, warm_up=2)
    arguments = parser.parse_args()
    check_arguments(parser, arguments)
    if arguments.emulate is not None:
        parser.error("what is emulated has no layers to shard")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    become_ranks(arguments.num_nodes, arguments.devices)
    measured, _ = measure_in_turns(CONTENDERS, arguments)
    counted = {name: count_bytes(name, arguments) for name in CONTENDERS}
    if global_rank() != 0:
        return
    ranks = arguments.num_nodes * arguments.devices
    result = {
        "label": arguments.label,
        "ranks": ranks,
        "step_time": summarize(measured),
        "memory": summarize_bytes(counted, make_decoder(arguments), ranks),
    }
    show(result)
    write_result(result, arguments.output)


if __name__ == "__main__":
    main()
