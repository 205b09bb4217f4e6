"""The table of the scale reading (see ``constants.py``), and the same steps played through.

    python -m benchmarks.scale.reading

The reading's columns are milliseconds of a step without the optimizer's: with compute of 6 operations a parameter and
token, a third of it forward,

    ZeRO-1 = max(backward, sum of reduce-scatters) + max(forward, sum of all-gathers),
    DDP    = forward + max(backward, sum of all-reduces),

each collective by NCCL's model. So 21.5 and 412 are compute alone, of 350M and 6.7G parameters: everything is hidden.
22.6 at N = 8 is a backward of 14.3 and 168 all-gathers of 8 MiB, 49.5 us each, which outlast a forward of 7.2. Groups
of 8 add an all-reduce of the shard after each reduce-scatter. The reading let LL be as fast across nodes as Hopper's
row says, took trees for all all-reduces and left out their correction by size. Here LL is as the reading has it, but
NCCL has its choice and the correction, and what nothing hides is counted: the last bucket of backward, the first of
forward. Flags are left out.

For 350M the reading's buckets are full, so tensors are of 1 MiB here; for 7B they are Llama's, in 258 buckets of 8 MiB.
"""

from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.scale.simulator import accelerator
from benchmarks.scale.study import Cluster, ddp_step, zero1_step
from benchmarks.scale.synthetic import MIB, even_model, llama_7b


class Line(NamedTuple):
    """Milliseconds of a step at so many ranks; the names of the columns are the reading's."""

    ranks: int
    small: float
    small_ddp: float
    small_with_64_mib: float
    small_in_nodes: float | None
    large: float
    large_ddp: float


READ = (
    Line(8, 22.6, 21.5, 21.5, None, 412, 412),
    Line(16, 25.8, 21.5, 21.5, 30, 412, 412),
    Line(64, 58, 21.5, 21.6, 36, 412, 412),
    Line(256, 186, 22.3, 32, 42, 454, 412),
    Line(512, 290, 23.2, 55, 45, 629, 412),
    Line(1024, 499, 24, 101, 48, 1171, 412),
)


def played(ranks: int) -> Line:
    """The line as the simulator has it."""
    small, large = even_model("350M fp32", 350_000_000, 4), llama_7b()
    on_small, on_large = (
        Cluster(machine=accelerator(model.itemsize, updates=False), host_cpu="as Hopper") for model in (small, large)
    )
    in_nodes = zero1_step(small, ranks, 8 * MIB, on_small, 8) if ranks > 8 else None
    return Line(
        ranks,
        1e3 * zero1_step(small, ranks, 8 * MIB, on_small).seconds,
        1e3 * ddp_step(small, ranks, on_small).seconds,
        1e3 * zero1_step(small, ranks, 64 * MIB, on_small).seconds,
        1e3 * in_nodes.seconds if in_nodes else None,
        1e3 * zero1_step(large, ranks, 8 * MIB, on_large).seconds,
        1e3 * ddp_step(large, ranks, on_large).seconds,
    )


def compared() -> Iterator[tuple[int, str, float, float]]:
    """Ranks, column, what was read and what was played."""
    for read in READ:
        here = played(read.ranks)
        for column in Line._fields[1:]:
            expected, found = getattr(read, column), getattr(here, column)
            if expected is not None:
                yield read.ranks, column, expected, found


def main() -> None:
    print("| N | column | read, ms | played, ms | off |", "|---" * 5 + "|", sep="\n")
    for ranks, column, expected, found in compared():
        print(f"| {ranks} | {column} | {expected:g} | {found:.1f} | {found / expected - 1:+.1%} |")


if __name__ == "__main__":
    main()
