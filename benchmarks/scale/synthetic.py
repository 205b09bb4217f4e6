"""The record of a training step, made from a list of tensors: planned by the package, but no rank runs.

What a run on torch's fake backend records is closer to the truth; this is for sizes and buckets that nobody has run.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from benchmarks.scale.events import Compute, Event, Kind, Launch, Wait
from lightning_parstrat.core.cost_model import AlphaBeta
from lightning_parstrat.core.grouping import group_by_readiness
from lightning_parstrat.core.layout import BucketLayout, LayoutPolicy, ParameterSpec, plan_buckets
from lightning_parstrat.distributed.ddp.ddp_compat import assign_to_buckets

MIB = 2**20
DDP_CAPS = (1 * MIB, 25 * MIB)
"""torch's default: the first bucket ends as soon as it holds 1 MiB, the others 25."""


class Model(NamedTuple):
    """Tensors in the order of their registration, in which forward needs them."""

    name: str
    numels: tuple[int, ...]
    itemsize: int

    @property
    def nbytes(self) -> int:
        return sum(self.numels) * self.itemsize


class Replan(NamedTuple):
    """What a plan is made anew by: what a reduce-scatter takes, and a backward's pace."""

    cost: AlphaBeta
    backward_seconds_per_byte: float


def even_model(name: str, parameters: int, itemsize: int) -> Model:
    """Tensors of 1 MiB each, so that buckets hold what their cap allows."""
    whole, rest = divmod(parameters, MIB // itemsize)
    return Model(name, (MIB // itemsize,) * whole + ((rest,) if rest else ()), itemsize)


def gpt2_medium() -> Model:
    """GPT-2 with 24 layers of width 1,024, in fp32: 355 million parameters in 292 tensors, biases and norms apart."""
    width = 1024
    block = (width, width, width * 3 * width, 3 * width, width * width, width, width, width)
    mlp = (width * 4 * width, 4 * width, 4 * width * width, width)
    return Model("350M fp32", (50257 * width, width * width, *(block + mlp) * 24, width, width), 4)


def llama_7b() -> Model:
    """Llama with 32 layers of width 4,096, in bf16: 6.7 billion parameters in 291 tensors, as transformers has them."""
    width, inner, vocabulary = 4096, 11008, 32000
    layer = (*[width * width] * 4, *[width * inner] * 3, width, width)
    return Model("7B bf16", (vocabulary * width, *layer * 32, width, vocabulary * width), 2)


def sharded_plan(model: Model, shard_ranks: int, cap_bytes: int, replan: Replan | None = None) -> list[BucketLayout]:
    """The buckets of zero1_custom, in the order of their reductions; slots count from the last parameter.

    Args:
        model: The tensors.
        shard_ranks: How many ranks share a bucket.
        cap_bytes: The most that a bucket of several tensors holds.
        replan: None for the plan of the first steps, which fills buckets up to the cap.
    """
    specs = [
        ParameterSpec(name=str(index), shape=(numel,), dtype="float", itemsize=model.itemsize, group=None)
        for index, numel in reversed(list(enumerate(model.numels)))
    ]
    groups = None
    if replan is not None:
        pace = replan.backward_seconds_per_byte * model.itemsize
        ready = list(accumulate(spec.numel * pace for spec in specs))
        groups = group_by_readiness(specs, ready, cap_bytes, replan.cost)
    policy = LayoutPolicy(world_size=shard_ranks, bucket_cap_bytes=cap_bytes)
    return list(plan_buckets(specs, policy, groups))


class _Launches:
    """Makes launches, and numbers them."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, group: str, kind: Kind, nbytes: int) -> Launch:
        self._count += 1
        return Launch("step", group, kind, nbytes, None, self._count)


def zero1_record(
    model: Model, layouts: Sequence[BucketLayout], steps: int, *, replicas: bool = False, control: bool = True
) -> Iterator[Event]:
    """Steps of zero1_custom: buckets are reduced beside backward, and gathered beside the next forward.

    Args:
        model: The tensors.
        layouts: Its :func:`sharded_plan`.
        steps: How many.
        replicas: Whether each reduce-scatter is followed, on its stream, by an all-reduce of the shard: ranks shard
            within a group, and replicate across groups.
        control: Whether the flags of used parameters are sent at the end of backward.
    """
    launch, gathers = _Launches(), dict[int, Launch]()
    count = len(model.numels)
    bucket_of = {count - 1 - slot.parameter: index for index, layout in enumerate(layouts) for slot in layout.slots}
    for _ in range(steps):
        for parameter, numel in enumerate(model.numels):
            if (gather := gathers.pop(bucket_of[parameter], None)) is not None:
                yield Wait("step", gather.number)
            yield Compute("step", "forward", numel * model.itemsize)
        reductions: list[Launch] = []
        for event in _backward(model, layouts, launch, replicas):
            if isinstance(event, Launch):
                reductions.append(event)
            yield event
        if control:
            # One flag a parameter and a bucket, and two to compare what was expected.
            yield (flags := launch("control", "all_reduce", 4 * (count + len(layouts) + 2)))
            yield Wait("step", flags.number)
        yield from (Wait("step", reduction.number) for reduction in reductions)
        # The next forward needs first what backward had last.
        for index in reversed(range(len(layouts))):
            layout = layouts[index]
            yield Compute("step", "update", layout.shard_numel(0) * model.itemsize)
            yield (gather := launch("parameters", "all_gather", layout.numel * model.itemsize))
            gathers[index] = gather


def _backward(model: Model, layouts: Sequence[BucketLayout], launch: _Launches, replicas: bool) -> Iterator[Event]:
    """Each bucket leaves with the last of its gradients, and after its predecessors."""
    ready, waiting = set[int](), list(layouts)
    for position, numel in enumerate(reversed(model.numels)):
        yield Compute("step", "backward", numel * model.itemsize)
        ready.add(position)
        while waiting and all(slot.parameter in ready for slot in waiting[0].slots):
            layout = waiting.pop(0)
            yield launch("gradients", "reduce_scatter", layout.numel * model.itemsize)
            if replicas:
                yield launch("gradients", "all_reduce", layout.shard_numel(0) * model.itemsize)


def ddp_record(model: Model, steps: int, caps: Sequence[int] = DDP_CAPS) -> Iterator[Event]:
    """Steps of torch's DDP, after it has brought its buckets into the order of the gradients.

    Args:
        model: The tensors.
        steps: How many.
        caps: When a bucket ends, in bytes; the last holds for all further ones.
    """
    launch = _Launches()
    dtype = {2: torch.bfloat16, 4: torch.float32}[model.itemsize]
    # Without memory: DDP looks at sizes alone.
    tensors = [torch.empty(numel, dtype=dtype, device="meta") for numel in reversed(model.numels)]
    last_of = [bucket[-1] for bucket in assign_to_buckets(tensors, list(caps), [False] * len(tensors))]
    for _ in range(steps):
        yield from (Compute("step", "forward", numel * model.itemsize) for numel in model.numels)
        reductions, held = list[Launch](), 0
        for position, tensor in enumerate(tensors):
            yield Compute("step", "backward", tensor.nbytes)
            held += tensor.nbytes
            if position in last_of:
                reductions.append(launch("gradients", "all_reduce", held))
                yield reductions[-1]
                held = 0
        yield from (Wait("step", reduction.number) for reduction in reductions)
        yield Compute("step", "update", model.nbytes)
