"""``lightning-parstrat plan``: the memory and traffic of a training under each strategy, computed without a device."""

import json
import math
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_parstrat.cli.planned_module import read_module, values_of
from lightning_parstrat.cli.text import UsageError, positive, table
from lightning_parstrat.core.footprint import PRECISIONS, Footprint, Training, ddp, grids, outer, pipeline, zero1, zero3
from lightning_parstrat.core.policy import ShardingPolicy
from lightning_parstrat.core.shard_groups import ShardGroups
from lightning_parstrat.core.topology import Topology
from lightning_parstrat.core.wording import amount, count_of, counted

_DESCRIPTION = """
Shows what each rank holds at most, between steps, and sends under each strategy, and whether it fits. Of those that
fit it recommends the one that shards least. Activations are not counted: leave room for them (--reserve).

  lightning-parstrat plan --parameters 7B --optimizer adamw --precision bf16-mixed --world-size 16 --memory 80GB
  lightning-parstrat plan --config c.yaml --world-size 16 --devices-per-node 8 --memory 80GB --bandwidth 100Gbit

With --config the numbers are those of the module of a LightningCLI configuration, which is made without memory for its
parameters. --accumulate adds zero2_custom, which shards the gradients that are held between micro-batches.
--activations adds pipeline_custom, which sends them between stages. Its grids are the ranks of a pipeline, by the
number of pipelines, by the ranks that share layers. --outer-every adds shard groups that train alone and meet after so
many steps: their results differ from those of ddp. --rank-shares shows what equal shares of the samples cost if ranks
are unequally fast.
"""
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_MOST_RANKS = 2**20
_LAYERS = 32
"""The layers of a language model of 7B parameters. Larger models have more."""


def make_parser() -> ArgumentParser:
    """The command's arguments."""
    parser = ArgumentParser(description=_DESCRIPTION)
    add = parser.add_argument
    add("--parameters", metavar="NUMBER", help="trained parameters, such as 7B or 350M")
    add("--optimizer", help="such as adamw; or values of state per parameter, such as 1 (default: 2)")
    add("--unit", metavar="NUMBER", help="parameters of the largest layer (default: 1/32 of all)")
    add("--config", metavar="FILE", help="LightningCLI configuration of the module, instead of these")
    add("--model", metavar="CLASS", help="the module's class, if the file does not give it")
    add("--precision", choices=PRECISIONS, help="the Trainer's (default: the file's, or 32-true)")
    add("--world-size", type=positive, required=True, help="number of ranks")
    add("--devices-per-node", type=positive, help="ranks of a node (default: all, on one node)")
    add("--memory", help="memory of a device, such as 80GB or 24GiB; shows what fits")
    add("--reserve", type=float, default=0.2, help="part of the memory left for activations")
    add("--bandwidth", help="of a node's link, such as 100Gbit; shows how long sending takes")
    add("--compute-seconds", type=float, help="time of one process's step alone, to predict step times")
    add("--loader-seconds", type=float, default=0.0, help="time for which that step waits for its loader")
    add("--shard-group", default="all", help="as in ZeRO1Strategy: all, node, or a number")
    add(
        "--tensor-parallel",
        type=positive,
        help="ranks that share layers under zero3_custom (default: the file's, or 1)",
    )
    add("--activations", help="bytes that pass between two blocks for a batch, such as 2MB; shows pipeline_custom")
    add("--microbatches", type=positive, default=4, help="micro-batches of a batch under pipeline_custom")
    add("--accumulate", type=positive, default=1, help="micro-batches of a step (accumulate_grad_batches)")
    add("--outer-every", type=positive, help="steps after which shard groups meet that train alone (zero1_custom)")
    add("--rank-shares", type=float, nargs="+", help="how fast each rank is, as in rank_shares: 3 1")
    add("--json", action="store_true", help="print the result as JSON")
    return parser


def run(arguments: Namespace) -> int:
    """Prints the estimates. The exit code is 1 if no strategy fits.

    Raises:
        UsageError: The configuration does not name a module, or an argument is invalid.
    """
    if not 0 <= arguments.reserve < 1:
        raise UsageError(f"--reserve {arguments.reserve:g}: write a part of the memory, such as 0.2: 0 <= reserve < 1.")
    if arguments.world_size > _MOST_RANKS:
        raise UsageError(f"--world-size {arguments.world_size}: write at most {_MOST_RANKS}.")
    if arguments.compute_seconds is not None and not 0 < arguments.compute_seconds < math.inf:
        raise UsageError(f"--compute-seconds {arguments.compute_seconds:g}: write seconds > 0.")
    loads = arguments.loader_seconds
    if not 0 <= loads < math.inf or (loads and None in (arguments.bandwidth, arguments.compute_seconds)):
        raise UsageError(
            f"--loader-seconds {loads:g}: write seconds >= 0, and give --bandwidth and --compute-seconds, too."
        )
    if arguments.outer_every is not None and arguments.shard_group == "all":
        raise UsageError("--outer-every needs groups that train alone: give --shard-group node, or a number of ranks.")
    training, optimizer = _training(arguments)
    memory = None if arguments.memory is None else _bytes(arguments.memory, "--memory", "80GB or 24GiB")
    room = None if memory is None else memory * (1 - arguments.reserve)
    rate = None if arguments.bandwidth is None else _bytes_per_second(arguments.bandwidth)
    inexact = [] if arguments.outer_every is None else [outer(training, arguments.outer_every)]
    found = [_row(one, room, rate, arguments) for one in (*footprints(training), *inexact)]
    # What changes results is shown, and never recommended.
    choice, why = recommend(found[: len(found) - len(inexact)], training, room)
    left_out = (
        "Left out: activations, which depend on the batch and are the same under every strategy, and what optimizers"
        " and kernels need for a moment."
    )
    if training.tensor_ranks > 1:
        left_out += " Ranks that share layers also send activations, in every layer."
    if memory is not None:
        left_out += f" {amount(memory - room)} of {amount(memory)} are kept for them (--reserve {arguments.reserve:g})."
    slowed = None if arguments.rank_shares is None else _slowed_by_equal_shares(arguments)
    if arguments.json:
        shown = {"estimates": found, "recommended": choice, "why": why, "left_out": left_out}
        print(json.dumps(shown | ({} if slowed is None else {"equal_shares_take_times": slowed})))
    else:
        print(f"{count_of(training.parameters)} trained parameters; optimizer: {optimizer}; {training.precision}")
        of_data = training.ranks // training.tensor_ranks
        grouped = "" if training.shard_ranks == of_data else f", in shard groups of {training.shard_ranks}"
        shared = "" if of_data == training.ranks else f", of which {training.tensor_ranks} share layers"
        print(f"{counted(training.ranks, 'rank')} on {counted(training.nodes, 'node')}{shared}{grouped}; per rank:\n")
        print(f"{_table(found, room)}\n\n{why}\n{left_out}")
        if slowed is not None:
            most = max(arguments.rank_shares) * training.ranks / sum(arguments.rank_shares)
            print(
                f"Equal shares would take {slowed:.2f} times as long to compute, if ranks are as fast as these shares."
                f" By shares, a rank has the activations of up to {most:.3g} equal ones: set max_share to that or more."
            )
    return 1 if choice is None else 0


def footprints(training: Training) -> list[Footprint]:
    """The footprints of all strategies, from the least sharding to the most. One alone has tensor parallelism."""
    possible = grids(training.ranks, training.tensor_ranks) if training.activations else []
    # A module with fewer blocks has no such stages.
    in_stages = [pipeline(training, grid) for grid in possible if training.stages.get(grid.pipeline) != 0]
    if training.tensor_ranks > 1:
        return [zero3(training), *in_stages]
    of_zero = [zero1(training), *([zero1(training, True)] if training.micro_batches > 1 else [])]
    return [ddp(training, tuned=False), ddp(training, tuned=True), *of_zero, zero3(training), *in_stages]


def recommend(rows: list[dict[str, Any]], training: Training, room: float | None) -> tuple[str | None, str]:
    """The recommended flag, and the reason.

    Of the flags that fit in ``room`` bytes, it is the one that shards least, or a faster one. It is None if none fits.
    Lightning's ``ddp`` is left out: for the same results it holds more memory than ``ddp_tuned``.
    """
    by_name = {row["strategy"]: row for row in rows if row["strategy"] != "ddp"}
    fitting = [name for name, row in by_name.items() if row["fits"] is not False]
    if not fitting:
        least = min(footprints(training), key=lambda one: one.peak)
        return None, (
            f"It fits under no strategy: even {least.strategy} holds {amount(least.peak)} at most,"
            f" {amount(least.held)} of it between steps. If most of it is held between steps, take more ranks, or"
            " --precision bf16-true. Otherwise take smaller units, by `auto_wrap_policy` of zero3_custom."
        )
    if training.ranks > 1 and (faster := _better_in_stages(by_name, fitting)) is not None:
        return "pipeline_custom", f"Recommended: {faster}"
    if training.tensor_ranks > 1:
        return "zero3_custom", "Recommended: strategy=zero3_custom. The others cut no layers."
    tuned, sharded = by_name["ddp_tuned"], by_name["zero1_custom"]
    if training.ranks == 1:
        return "none", "Recommended: no strategy. There is one rank: nothing to shard, nothing to send."
    choice, why = fitting[0], "It shards least of those that fit."
    if room is None:
        choice, why = "zero1_custom", "No --memory was given, so it is not known what fits; it leaves more room."
    # The model of times cannot tell a difference below 2 %.
    times = [row["step_seconds"] for row in (tuned, sharded)]
    if None not in times and {"ddp_tuned", "zero1_custom"} <= set(fitting) and max(times) > 1.02 * min(times):
        choice = "ddp_tuned" if times[0] < times[1] else "zero1_custom"
        other = "ddp_tuned" if choice == "zero1_custom" else "zero1_custom"
        gain = max(times) / min(times)
        why = f"It trains {gain:.2f} times as many samples a second as {other}, with the same results."
    if choice == "zero2_custom":
        why = "Only with gradients sharded between micro-batches it fits; the results are the same."
    if choice == "zero3_custom":
        times_as_much = by_name[choice]["sent_bytes"] / sharded["sent_bytes"]
        why = f"Only with parameters sharded, too, it fits; it sends {times_as_much:.1f} times as much as zero1_custom."
        why += " It is torch's FSDP2: some things are refused (docs/limits.md)."
    return choice, f"Recommended: strategy={choice}. {why}"


def _better_in_stages(rows: Mapping[str, dict[str, Any]], fitting: list[str]) -> str | None:
    """The reason for a pipeline: it alone fits, or it trains more samples a second than others that fit."""
    speeds = {name: rows[name]["speed_up"] or 0.0 for name in fitting}
    in_stages = [name for name in fitting if name.startswith("pipeline_custom")]
    others = [name for name in fitting if name not in in_stages]
    if not in_stages:
        return None
    own = max(in_stages, key=lambda name: speeds[name])
    strategy = f"strategy={own}" if own == "pipeline_custom" else _in_grid(own)
    if not others:
        return f"{strategy}. It alone fits: each rank holds its stages alone."
    best = max(others, key=lambda name: speeds[name])
    if speeds[own] <= 1.02 * speeds[best]:
        return None
    return (
        f"{strategy}. It trains {speeds[own] / speeds[best]:.1f} times as many samples a second as {best}: between"
        " stages it sends activations, and no gradients. All ranks of a pipeline have one batch (docs/pipeline.md)."
    )


def _in_grid(name: str) -> str:
    _, data, tensor = re.findall(r"\d+", name)
    return f"PipelineStrategy(data_parallel_size={data}, tensor_parallel_size={tensor})"


def _training(arguments: Namespace) -> tuple[Training, str]:
    """The training, and the optimizer's name."""
    if (arguments.config is None) == (arguments.parameters is None):
        raise UsageError(
            "Give either the number of parameters, such as --parameters 7B, or the module, by --config FILE."
        )
    devices = arguments.devices_per_node or arguments.world_size
    if arguments.world_size % devices:
        raise UsageError(
            f"--world-size {arguments.world_size} is not a multiple of --devices-per-node {devices}: all nodes must"
            " have equally many ranks."
        )
    if arguments.config is None:
        count = _number(arguments.parameters, "--parameters")
        unit = count // _LAYERS if arguments.unit is None else _number(arguments.unit, "--unit")
        if unit > count:
            raise UsageError(
                f"--unit {arguments.unit} is more than --parameters {arguments.parameters}, of which it is a part."
            )
        training = Training(parameters=count, unit=unit, tensor_ranks=arguments.tensor_parallel or 1, cut=count)
        optimizer = "AdamW"
    else:
        training, optimizer = read_module(
            Path(arguments.config), arguments.model, arguments.tensor_parallel, arguments.world_size
        )
    if arguments.world_size % training.tensor_ranks:
        raise UsageError(
            f"--tensor-parallel {training.tensor_ranks} does not divide --world-size {arguments.world_size}."
        )
    groups = _shard_groups(arguments.shard_group, arguments.world_size, devices, training.tensor_ranks)
    if arguments.optimizer is not None:
        values, optimizer = values_of(arguments.optimizer)
        training = replace(training, values=values)
    training = replace(
        training,
        nodes=arguments.world_size // devices,
        devices=devices,
        shard_ranks=groups.size,
        micro_batches=arguments.accumulate,
        precision=arguments.precision or training.precision,
        activations=0.0 if arguments.activations is None else _bytes(arguments.activations, "--activations", "2MB"),
        pieces=arguments.microbatches,
    )
    # Plans are usually for GPUs, and the device hardly changes them.
    model_bytes, policy = training.parameters * training.widths.parameter, ShardingPolicy()
    cap = policy.bucket_cap_bytes(model_bytes, groups.size, "cuda", groups.copies)
    return replace(training, in_flight=cap * (policy.bound_in_flight("cuda") or 1)), optimizer


def _slowed_by_equal_shares(arguments: Namespace) -> float:
    """How many times as long a step computes with equal shares."""
    shares, ranks = arguments.rank_shares, arguments.world_size
    if len(shares) != ranks or not all(0 < share < math.inf for share in shares):
        raise UsageError(f"--rank-shares: write a positive number for each of the {counted(ranks, 'rank')}.")
    return sum(shares) / (ranks * min(shares))


def _shard_groups(asked: str, ranks: int, devices: int, tensor_ranks: int) -> ShardGroups:
    try:
        choice: Any = int(asked) if asked.isdecimal() else asked
        ShardingPolicy(shard_group=choice)
        return ShardGroups.chosen(choice, Topology(tuple(rank // devices for rank in range(0, ranks, tensor_ranks))))
    except ValueError as error:
        raise UsageError(f"--shard-group: {error}") from error


def _quantity(text: str, option: str, examples: str) -> tuple[float, str]:
    """A number with its factor of thousands, and its unit: ``24GiB`` is 24 * 2**30 of ``B``."""
    match = re.fullmatch(r"\s*(\d+\.?\d*)\s*((?i:[KMGT]i?)?)(bits?|bps|b|B)?(/s)?\s*", text)
    if match is None or not (match[2] or match[3]):
        raise UsageError(f"{option} {text!r}: write a number and a unit, such as {examples}.")
    return float(match[1]) * _UNITS[match[2].upper()], match[3] or ""


def _bytes(text: str, option: str, examples: str) -> float:
    number, unit = _quantity(text, option, examples)
    if unit not in ("", "B") or "/" in text:
        raise UsageError(f"{option} {text!r}: write bytes, such as {examples}.")
    return number


def _number(text: str, option: str) -> int:
    number, billions = _quantity(text, option, "7B, 350M or 10K")
    count = round(number * (10**9 if billions else 1))
    if billions not in ("", "b", "B") or not count:
        raise UsageError(f"{option} {text!r}: write a number such as 7B, 350M or 10K.")
    return count


def _bytes_per_second(text: str) -> float:
    """100Gbit, 100Gbit/s and 100G are bits. 12GB/s is bytes."""
    rate, unit = _quantity(text, "--bandwidth", "100Gbit or 12GB/s")
    if rate <= 0:
        raise UsageError(f"--bandwidth {text!r}: must be more than 0.")
    return rate if unit == "B" else rate / 8


def _row(one: Footprint, room: float | None, rate: float | None, arguments: Namespace) -> dict[str, Any]:
    seconds, sending, compute, loads = None, None, arguments.compute_seconds, arguments.loader_seconds
    # The ranks of a pipeline, and those that share layers, train one batch together.
    of_batch = one.stages * one.sharing
    if rate is not None:
        sending = one.on_link / rate
    if rate is not None and compute is not None:
        seconds = loads + one.step_seconds(compute, rate, arguments.accumulate)
    return {
        "strategy": one.strategy,
        "peak_bytes": round(one.peak),
        "held_bytes": round(one.held),
        "accumulating_bytes": round(one.accumulating) if arguments.accumulate > 1 else None,
        "sent_bytes": round(one.sent),
        "sending_seconds": sending,
        "step_seconds": seconds,
        "loading": None if seconds is None or not loads else loads / seconds,
        "computing_per_sending": compute / of_batch / sending if compute is not None and sending else None,
        "speed_up": None if seconds is None else arguments.world_size / of_batch * (compute + loads) / seconds,
        "fits": None if room is None else one.peak <= room,
    }


def _table(rows: list[dict[str, Any]], room: float | None) -> str:
    seconds = "{:.3f} s".format
    columns = {
        "strategy": ("strategy", str),
        "at most": ("peak_bytes", amount),
        "between steps": ("held_bytes", amount),
        "between micro-batches": ("accumulating_bytes", amount),
        "sent per step": ("sent_bytes", amount),
        "sending": ("sending_seconds", seconds),
        "step": ("step_seconds", seconds),
        "loading": ("loading", "{:.0%}".format),
        "computing / sending": ("computing_per_sending", "{:.3g}".format),
        "times one device": ("speed_up", "{:.3g}".format),
        f"fits in {amount(room or 0)}": ("fits", lambda fits: "yes" if fits else "no"),
    }
    known = {name: column for name, column in columns.items() if rows[0][column[0]] is not None}
    shown = [["" if row[key] is None else show(row[key]) for key, show in known.values()] for row in rows]
    return table([list(known), *shown])
