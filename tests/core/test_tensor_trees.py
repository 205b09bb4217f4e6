"""Tensors in nested values: found, replaced, and saved without the storage around them."""

from collections import OrderedDict, deque, namedtuple
from typing import Any

import torch
from torch import Tensor

from lightning_parstrat.core.tensor_trees import (
    in_storage_order,
    leaves,
    replace_leaves,
    with_narrow_storage,
    with_own_storage,
)

Pair = namedtuple("Pair", ("one", "other"))


def test_leaves_have_paths() -> None:
    tree = {"a": [torch.zeros(1), (torch.zeros(2),)], 3: {"b": torch.zeros(3)}, "n": None}
    found = {leaf.path: leaf.tensor.numel() for leaf in leaves(tree)}
    assert found == {("a", 0): 1, ("a", 1, 0): 2, (3, "b"): 3}


def test_replacing_keeps_types_and_what_does_not_change() -> None:
    untouched = {"x": torch.ones(1)}
    tree = OrderedDict(a=Pair(torch.zeros(1), 5), b=untouched, c=[torch.zeros(2)], d=(1, 2))
    tree._metadata = {"version": 1}  # type: ignore[attr-defined]
    new = replace_leaves(tree, lambda tensor: tensor + 7 if not tensor.any() else tensor)
    assert type(new) is OrderedDict and new._metadata == {"version": 1}
    assert new["a"] == Pair(torch.tensor([7.0]), 5) and type(new["a"]) is Pair
    assert new["b"] is untouched and new["d"] is tree["d"] and not tree["c"][0].any()


def test_a_queue_is_looked_into_and_stays_as_long_as_it_may_be() -> None:
    queue = deque([torch.zeros(1), 5, torch.ones(1)], maxlen=4)
    assert [leaf.path for leaf in leaves({"q": queue})] == [("q", 0), ("q", 2)]
    new = replace_leaves(queue, lambda tensor: tensor + 1)
    assert new == deque([torch.ones(1), 5, torch.tensor([2.0])]) and new.maxlen == 4
    assert replace_leaves(queue, lambda tensor: tensor) is queue


BUFFER = torch.arange(64.0)
TENSORS: dict[str, Tensor] = {
    "part": BUFFER[8:20],
    "matrix": BUFFER[8:20].view(3, 4),
    "transposed": BUFFER[8:20].view(3, 4).t(),
    "channels last": BUFFER[:24].as_strided((2, 3, 2, 2), (12, 1, 6, 3)),
    "scalar": BUFFER[5],
    "empty": BUFFER[5:5],
    "with gaps": BUFFER[3:40:3],
    "complex": torch.view_as_complex(BUFFER.view(-1, 2))[3:9],
}


def test_storages_are_narrowed_and_read_in_their_order() -> None:
    for name, tensor in TENSORS.items():
        narrow, flat = with_narrow_storage(tensor), in_storage_order(tensor)
        assert torch.equal(narrow, tensor) and narrow.stride() == tensor.stride(), name
        covered = (1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))) * tensor.itemsize
        assert narrow.untyped_storage().nbytes() == (covered if tensor.numel() else 0), name
        assert flat.dim() == 1 and sorted(flat.abs().tolist()) == sorted(tensor.flatten().abs().tolist()), name
        if tensor.numel():
            assert narrow.data_ptr() == tensor.data_ptr(), name
            dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)
            assert (flat.data_ptr() == tensor.data_ptr()) == dense, name


def test_what_lies_in_a_buffer_is_saved_alone_and_once() -> None:
    tied = BUFFER[4:8]
    sparse = torch.eye(3).to_sparse()
    tree: dict[str, Any] = {"a": tied, "b": BUFFER[4:8], "c": torch.ones(3), "d": sparse}
    saved = with_own_storage(tree, {BUFFER.untyped_storage().data_ptr()})
    assert saved["a"] is saved["b"] and saved["a"].data_ptr() == tied.data_ptr()
    assert saved["a"].untyped_storage().nbytes() == 16
    assert saved["c"] is tree["c"] and saved["d"] is sparse
