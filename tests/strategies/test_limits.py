"""The table that docs/limits.md begins with: each cell is what rows of the tables of trainings, or tests, show."""

import inspect
import itertools
from collections.abc import Mapping
from pathlib import Path

from lightning_parstrat import TunedDDPStrategy, ZeRO1Strategy, ZeRO3Strategy
from tests.pool import RankPool
from tests.strategies import cases, test_callbacks, zoo
from tests.strategies.checkpoint.test_routes import ROUTES
from tests.strategies.data import test_rank_shares
from tests.strategies.gradients import test_steps, trainings
from tests.strategies.parity import Looks, train

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "limits.md"
STRATEGIES = ("zero1_custom", "zero2_custom", "zero3_custom", "ddp_tuned")
IN_TABLES = ("zero1", "zero2", "zero3", "ddp_tuned")
"""The strategies' names in the tables of trainings."""

Shown = Mapping[str, str]
"""By strategy: "yes", "error", "by a flag" or "none"."""


def shown_by(values: Mapping[str, str | None]) -> Shown:
    """What a row says: it is equal, or has the text of an error; None is not tried."""
    words = {cases.EQUAL: "yes", cases.WAITS: "by a flag"}
    found = {flag: values[name] for flag, name in zip(STRATEGIES, IN_TABLES, strict=True)}
    return {flag: words.get(value, "error") for flag, value in found.items() if value is not None}


def trained(*names: str) -> list[Shown]:
    return [shown_by(cases.CASES[name]._asdict()) for name in names]


def called_back(*names: str) -> list[Shown]:
    rows = {name: test_callbacks.CASES[name]._asdict() for name in names}
    with_zero2 = {name: row for name, row in rows.items() if name in test_callbacks.BY_ZERO2}
    return [
        shown_by({**row, "zero1": row["zero1_custom"], "zero2": cases.EQUAL if name in with_zero2 else None})
        for name, row in rows.items()
    ]


def stepped(name: str) -> Shown:
    kinds = test_steps.FOR.get(name, trainings.KINDS)
    return shown_by({kind: cases.EQUAL if kind in kinds else None for kind in IN_TABLES})


def saved(form: str) -> Shown:
    sources = {route.source for route in ROUTES if route.form == form}
    kinds = {"zero1": "zero1", "zero2": "zero2", "zero3": "zero3", "ddp_tuned": "tuned"}
    return shown_by({kind: cases.EQUAL if source in sources else None for kind, source in kinds.items()})


def by_test(test: str, **shown: str) -> Shown:
    """A test by its file and name."""
    file, _, name = test.partition("::")
    assert f"\ndef {name}(" in (TESTS / file).read_text(), test
    return shown


FEATURES: dict[str, list[Shown]] = {
    'fp32, "bf16-mixed", "16-mixed"': trained("mlp", "bf16 autocast", "fp16 autocast, a scaler"),
    '"bf16-true", "16-true"': [
        *trained("bf16-true", "16-true"),
        # With fp32 master weights.
        by_test(
            "strategies/test_master_weights.py::test_masters_are_trained_as_ddp_trains_parameters", zero1_custom="yes"
        ),
    ],
    "element-wise optimizers (Adam, SGD, ...)": trained("mlp", "sgd", "amsgrad", "rmsprop", "foreach", "fused"),
    "Muon, Adafactor": trained("muon", "adafactor, which looks at whole matrices", "adafactor, clipped"),
    "LBFGS": trained("lbfgs", "lbfgs, line search"),
    "sparse gradients": trained("sparse gradients"),
    "several optimizers, manual optimization": trained(
        "gan", "a parameter in two optimizers", "a parameter moves over", "by closure", "two speeds"
    ),
    "unused parameters": trained("unused", "unused by some ranks", "sgd, unused", "accumulate, unused"),
    "freezing and unfreezing in training": trained("frozen", "frozen later", "toggling"),
    "accumulation, token weights, clipping": [
        *trained("accumulate", "accumulate, short window", "clip by norm", "clip by value"),
        stepped("weights"),
    ],
    "ranks of [unequal speed](unequal_ranks.md)": [{row.strategy: "yes"} for row in test_rank_shares.ROWS.values()],
    "shard groups": [
        by_test("strategies/ways.py::in_groups", zero1_custom="yes", zero2_custom="yes"),
        by_test("strategies/ways.py::zero3_in_groups", zero3_custom="yes"),
        # Nothing is sharded.
        by_test("strategies/test_limits.py::test_ddp_alone_shards_nothing", ddp_tuned="none"),
    ],
    "[groups that train alone](slow_networks.md)": [
        by_test(
            "strategies/test_meetings.py::test_groups_train_as_written_out", zero1_custom="yes", zero2_custom="yes"
        ),
        by_test(
            "strategies/test_limits.py::test_groups_of_zero1_alone_train_alone", zero3_custom="none", ddp_tuned="none"
        ),
    ],
    "[tensor parallelism](tensor_parallel.md)": [
        by_test("strategies/test_tensor_parallel.py::test_trains_as_one_process_does", zero3_custom="yes"),
        by_test(
            "strategies/test_tensor_parallel.py::test_what_does_not_fit_is_refused",
            zero1_custom="error",
            zero2_custom="error",
            ddp_tuned="error",
        ),
    ],
    "`activation_checkpointing_policy`": [
        by_test(
            "strategies/test_activation_checkpointing.py::test_activations_are_computed_again",
            **dict.fromkeys(STRATEGIES[:3], "yes"),
        ),
        by_test("strategies/test_limits.py::test_ddp_alone_shards_nothing", ddp_tuned="none"),
    ],
    "compiled blocks": trained("compiled blocks", "compiled blocks within wrappers", "compiled and checkpointed"),
    "a module compiled as a whole": trained("compiled as a whole"),
    "captured CUDA graphs": [
        *trained("shards: a captured graph"),
        by_test(
            "gpu/test_features.py::test_captured_blocks_replay_with_what_was_stepped",
            zero1_custom="yes",
            zero2_custom="yes",
        ),
    ],
    "averaged weights (EMA, SWA)": called_back("exponential averaging", "stochastic weight averaging, batch norm"),
    "pruning by callback": called_back("pruning"),
    "gradient penalty": trained("gradient penalty"),
    "full and sharded checkpoints": [saved("full"), saved("sharded")],
    "`trainer.model.module`": [
        by_test(
            "strategies/test_limits.py::test_ddp_alone_wraps_the_module",
            **dict.fromkeys(STRATEGIES[:3], "none"),
            ddp_tuned="yes",
        )
    ],
}
WORDS = {
    "steps in 16 bits": "yes",
    "every rank does all work": "yes",
    "in `on_train_start`": "yes",
    **{word: word for word in ("yes", "error", "by a flag", "none", "not tested")},
}
"""What the first words of a cell say."""


def rows_of_the_page() -> dict[str, list[str]]:
    """What each feature's cells say; "the same" is what the cell before says."""
    lines = PAGE.read_text().partition("\n## ")[2].partition("\n## ")[0].splitlines()
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines if line[:1] == "|")
    assert header == ["Feature", *(f"`{flag}`" for flag in STRATEGIES)]
    found = {}
    for feature, *cells in rows:
        same = itertools.accumulate(cells, lambda before, cell: before if cell == "the same" else cell)
        found[feature] = [WORDS[cell.partition(",")[0]] for cell in same]
    return found


def test_each_cell_says_what_tests_show() -> None:
    page = rows_of_the_page()
    assert page.keys() == FEATURES.keys()
    for feature, cells in page.items():
        for flag, said in zip(STRATEGIES, cells, strict=True):
            shown = {row[flag] for row in FEATURES[feature] if flag in row}
            assert (shown or {"not tested"}) == {said}, (feature, flag)


def test_ddp_alone_shards_nothing() -> None:
    for argument in ("shard_group", "activation_checkpointing_policy"):
        assert argument in inspect.signature(ZeRO1Strategy).parameters
        assert argument not in inspect.signature(TunedDDPStrategy).parameters


def test_groups_of_zero1_alone_train_alone() -> None:
    assert "outer_every" in inspect.signature(ZeRO1Strategy).parameters
    for strategy in (TunedDDPStrategy, ZeRO3Strategy):
        assert "outer_every" not in inspect.signature(strategy).parameters


def wrapped(flag: str) -> bool:
    looks = Looks(lambda trainer: hasattr(trainer.model, "module"))
    train(zoo.MLP, flag, callbacks=[looks], max_steps=1)
    return looks.seen


def test_ddp_alone_wraps_the_module(pool: RankPool) -> None:
    for flag in STRATEGIES:
        assert pool.run(2, wrapped, flag) == [flag == "ddp_tuned"] * 2
