"""How a batch is cut into micro-batches, and how what steps return is joined."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from lightning_parstrat.core.micro_batches import check_samples, cut_batch, has_no_mean, join_outputs, mean_over
from tests.comparing import assert_same


class Pair(NamedTuple):
    images: Any
    labels: Any


IMAGES = torch.arange(12.0).reshape(4, 3)
LABELS = torch.arange(4)
BATCHES = {
    "a tensor": (IMAGES, [IMAGES[:2], IMAGES[2:]]),
    "a tuple": ((IMAGES, LABELS), [(IMAGES[:2], LABELS[:2]), (IMAGES[2:], LABELS[2:])]),
    "a named tuple": (Pair(IMAGES, LABELS), [Pair(IMAGES[:2], LABELS[:2]), Pair(IMAGES[2:], LABELS[2:])]),
    "a list of samples": (
        {"x": LABELS, "text": list("abcd")},
        [{"x": LABELS[:2], "text": ["a", "b"]}, {"x": LABELS[2:], "text": ["c", "d"]}],
    ),
    "what has no samples": (
        {"x": LABELS, "scale": 2.0, "temperature": torch.tensor(3.0), "name": "words"},
        [
            {"x": one, "scale": 2.0, "temperature": torch.tensor(3.0), "name": "words"}
            for one in (LABELS[:2], LABELS[2:])
        ],
    ),
    "as many parts as samples": (
        [LABELS, LABELS, LABELS, ["a", "b", "c", "d"]],
        [[LABELS[:2]] * 3 + [["a", "b"]], [LABELS[2:]] * 3 + [["c", "d"]]],
    ),
    "boxes of each sample": (
        (IMAGES, [{"box": torch.zeros(number, 2)} for number in range(4)]),
        [
            (IMAGES[:2], [{"box": torch.zeros(number, 2)} for number in (0, 1)]),
            (IMAGES[2:], [{"box": torch.zeros(number, 2)} for number in (2, 3)]),
        ],
    ),
}


@pytest.mark.parametrize(("batch", "expected"), BATCHES.values(), ids=BATCHES)
def test_a_batch_is_cut_by_samples(batch: Any, expected: list[Any]) -> None:
    parts, sizes = cut_batch(batch, 2)
    assert sizes == [2, 2]
    assert [type(one) for one in parts] == [type(one) for one in expected]
    assert_same(parts, expected)


def test_the_first_micro_batches_have_what_the_division_leaves() -> None:
    parts, sizes = cut_batch(torch.arange(8), 3)
    assert sizes == [3, 3, 2]
    assert_same(torch.cat(parts), torch.arange(8))


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        (torch.zeros(1, 3), "A batch of 1 sample cannot be cut into microbatches=2"),
        ((IMAGES, torch.zeros(3, 4)), r"shape \(3, 4\) in a batch of 4 samples"),
        ((IMAGES, {1, 2}), "A set in a batch cannot be cut"),
        ({"text": ["a", "b"]}, "no tensor whose first dimension counts samples"),
    ],
)
def test_what_cannot_be_cut_is_an_error(batch: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        cut_batch(batch, 2)


@pytest.mark.parametrize(
    ("batch", "batch_sizes"),
    [
        ((IMAGES, LABELS), {4}),
        ([LABELS, LABELS], {2, 4}),
        # The only batch of an epoch.
        ([LABELS[:3], LABELS[:3]], {4}),
        # Nothing is known.
        ([LABELS, LABELS], set()),
    ],
)
def test_a_loader_s_batch_may_be_parts_of_its_samples(batch: Any, batch_sizes: set[int]) -> None:
    check_samples(batch, batch_sizes)


@pytest.mark.parametrize(
    "batch",
    [
        [torch.zeros(16)] * 8,
        {"tokens": [torch.zeros(16)] * 8, "number": 8},
        (tuple(torch.zeros(3, 5, number) for number in range(8)), [{"label": torch.tensor(1)}] * 8),
        [{"image": torch.zeros(3, 5), "label": 1}] * 8,
        {"nodes": torch.zeros(37, 2), "graphs": torch.zeros(37)},
    ],
)
def test_a_list_of_samples_is_no_list_of_parts(batch: Any) -> None:
    with pytest.raises(ValueError, match="and the loader's batches have 8 samples"):
        check_samples(batch, {8})


def test_tensors_outside_of_lists_count_samples() -> None:
    texts = [torch.arange(3), torch.arange(3), torch.arange(3), torch.arange(3)]
    parts, sizes = cut_batch((texts, LABELS), 2)
    assert sizes == [2, 2] and [len(tokens) for tokens, _ in parts] == [2, 2]


@dataclass
class Found:
    rows: torch.Tensor


OUTPUTS: dict[str, tuple[list[Any], Any]] = {
    "rows": ([IMAGES[:3], IMAGES[3:]], IMAGES),
    "means": ([torch.tensor(1.0), torch.tensor(5.0)], torch.tensor(2.0)),
    "numbers": ([1.0, 5.0], 2.0),
    "a dictionary": (
        [{"loss": torch.tensor(1.0), "rows": IMAGES[:3]}, {"loss": torch.tensor(5.0), "rows": IMAGES[3:]}],
        {"loss": torch.tensor(2.0), "rows": IMAGES},
    ),
    "a list of samples": ([["a", "b", "c"], ["d"]], ["a", "b", "c", "d"]),
    "samples as wide as a micro-batch": ([[*IMAGES[:3]], [*IMAGES[3:]]], [*IMAGES]),
    "a tuple of texts": ([("a", "b", "c"), ("d",)], ("a", "b", "c", "d")),
    "a tuple of rows and texts": ([(IMAGES[:3], ["a", "b", "c"]), (IMAGES[3:], ["d"])], (IMAGES, ["a", "b", "c", "d"])),
    "as many parts as samples": (
        [(IMAGES[:3], torch.tensor(1.0), torch.tensor(1.0)), (IMAGES[3:], torch.tensor(5.0), torch.tensor(5.0))],
        (IMAGES, torch.tensor(2.0), torch.tensor(2.0)),
    ),
    "what is the same": (["words", "words"], "words"),
    "a kind of dictionary": ([OrderedDict(rows=IMAGES[:3]), OrderedDict(rows=IMAGES[3:])], OrderedDict(rows=IMAGES)),
}


@pytest.mark.parametrize(("outputs", "expected"), OUTPUTS.values(), ids=OUTPUTS)
def test_outputs_are_joined_as_one_step_would_return_them(outputs: list[Any], expected: Any) -> None:
    joined = join_outputs(outputs, [3, 1])
    assert type(joined) is type(expected)
    assert_same(joined, expected)


def test_arrays_are_joined_as_tensors_are() -> None:
    joined = join_outputs([IMAGES[:3].numpy(), IMAGES[3:].numpy()], [3, 1])
    assert isinstance(joined, np.ndarray) and joined.tolist() == IMAGES.tolist()
    reversed_rows = IMAGES.numpy()[:, ::-1]
    assert join_outputs([reversed_rows[:3], reversed_rows[3:]], [3, 1]).tolist() == reversed_rows.tolist()
    with pytest.raises(ValueError, match="values of type ndarray that differ"):
        join_outputs([np.array(["a", "b", "c"]), np.array(["d"])], [3, 1])


def test_outputs_that_differ_and_are_no_numbers_are_an_error() -> None:
    with pytest.raises(ValueError, match="values of type str that differ"):
        join_outputs(["a", "b"], [3, 1])
    with pytest.raises(ValueError, match="values of type list that differ"):
        join_outputs([[1.0, 2.0], [1.0]], [3, 3])
    with pytest.raises(ValueError, match="values of type Found that differ"):
        join_outputs([Found(IMAGES), Found(IMAGES + 1)], [4, 4])


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ({"rows": IMAGES, "mean": torch.tensor(1.0), "names": ["a", "b"]}, False),
        ([*IMAGES], False),
        ((IMAGES, 3), True),
        (torch.tensor(3), True),
        ({"sums": IMAGES[:1]}, True),
    ],
)
def test_counts_and_sums_have_no_mean(output: Any, expected: bool) -> None:
    assert has_no_mean(output, len(IMAGES)) is expected


def test_what_has_no_weight_does_not_count() -> None:
    nothing, two, five = torch.tensor(float("nan")), torch.tensor(2.0), torch.tensor(5.0)
    assert mean_over([nothing, two, five], [0, 3, 1]) == 2.75
    # Of a batch without any weight there is a value to show, as one step has.
    assert mean_over([two, five], [0, 0]) == 2.0
