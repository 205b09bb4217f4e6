"""What there is to measure: each row runs by itself, in processes of its own."""

from collections.abc import Sequence
from itertools import product
from typing import Literal, NamedTuple

Setting = Literal["world", "ranks", "fake"]

PRECISIONS = ("bf16-mixed", "bf16-true")
PLAIN = "single_device"
OURS = "zero1_custom"
IN_16_BITS = "zero1_custom(master_weights=False)"
"""In "bf16-true" every other strategy steps in 16 bits; ``zero1_custom`` keeps fp32 master weights unless told."""

ALL_SHARDED = "zero3_custom"

ONE_RANK = (PLAIN, OURS, "ddp", "ddp_tuned", "fsdp2", ALL_SHARDED, "zero_redundancy")
TWO_RANKS = ("ddp", OURS, "ddp_tuned", "fsdp2", ALL_SHARDED, "zero_redundancy")
PLAYED = (OURS, "ddp", "ddp_tuned")


class Row(NamedTuple):
    """One setting, in which strategies take turns.

    Attributes:
        setting: "world": the ranks there are, each with a device of its own, of which this machine has one; "ranks":
            processes that share the device; "fake": one process plays one rank, collectives send nothing.
        ranks: How many ranks there are, played ones included.
        model: A name in ``model.py``.
        precision: Lightning's name for it.
    """

    setting: Setting
    ranks: int
    model: str
    precision: str

    @property
    def key(self) -> str:
        """By which the row is chosen, and replaced in a result file."""
        return f"{self.setting}{self.ranks}-{self.model}-{self.precision}"

    @property
    def processes(self) -> int:
        """How many are started."""
        return self.ranks if self.setting == "ranks" else 1

    @property
    def contenders(self) -> tuple[str, ...]:
        """The strategies that take turns; ratios are to the first one."""
        if self.setting == "fake":
            return PLAYED
        alike = ONE_RANK if self.setting == "world" else TWO_RANKS
        return (*alike[:2], IN_16_BITS, *alike[2:]) if self.precision == "bf16-true" else alike


_BY_VALUE: tuple[tuple[Setting, int, str], ...] = (
    # What the package promises where it has nothing to share out, and whether a host keeps up with a GPU.
    ("world", 1, "bf16-mixed"),
    ("fake", 64, "bf16-mixed"),
    ("ranks", 2, "bf16-mixed"),
    ("world", 1, "bf16-true"),
    ("fake", 512, "bf16-true"),
    ("ranks", 2, "bf16-true"),
)


def all_rows(models: Sequence[str]) -> list[Row]:
    """All rows of these models, the most valuable ones first."""
    rows = [Row(setting, ranks, model, precision) for setting, ranks, precision in _BY_VALUE for model in models]
    played = [
        Row("fake", ranks, model, precision) for ranks, precision, model in product((8, 64, 512), PRECISIONS, models)
    ]
    return list(dict.fromkeys([*rows, *played]))


def chosen(rows: Sequence[Row], names: Sequence[str]) -> list[Row]:
    """The rows whose keys begin with one of ``names``, in their order; all where none is given.

    Raises:
        ValueError: No row has such a key.
    """
    unknown = [name for name in names if not any(row.key.startswith(name) for row in rows)]
    if unknown:
        raise ValueError(f"no row begins with {', '.join(unknown)}; there are {', '.join(row.key for row in rows)}")
    return [row for row in rows if not names or row.key.startswith(tuple(names))]
