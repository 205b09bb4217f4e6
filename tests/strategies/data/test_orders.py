"""What a checkpoint keeps of an order is plain, and says which orders can be put together."""

import io
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler

from lightning_parstrat.strategies.data.orders import (
    NotPlainError,
    can_be_shared,
    can_go_on,
    order_of,
    packed,
    plain,
    unpacked,
)
from lightning_parstrat.strategies.data.samplers import PositionedSampler
from lightning_parstrat.strategies.data.streams import Streamed
from tests.strategies.data.rows import Permuted, Stream, Unknown, loader


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        (list(np.arange(3)), [0, 1, 2]),
        ([torch.tensor(2), np.int32(1), 0], [2, 1, 0]),
        ([[np.int64(4), 5], [6]], [[4, 5], [6]]),
        ([np.array([4, 5]), np.array([6])], [[4, 5], [6]]),
        ([(0, 1), (2, 3)], [(0, 1), (2, 3)]),
        ([True, False], [True, False]),
        ([np.str_("a"), "b", None], ["a", "b", None]),
        ([{"index": np.int64(1), "scale": np.float64(0.5)}], [{"index": 1, "scale": 0.5}]),
        ([2**70, 1], [2**70, 1]),
    ],
)
def test_items_come_back_from_a_checkpoint(items: list[Any], expected: list[Any]) -> None:
    file = io.BytesIO()
    torch.save(packed([plain(item) for item in items]), file)
    found = unpacked(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    assert found == expected
    assert [type(item) for item in found] == [type(item) for item in expected]


@pytest.mark.parametrize("item", [object(), {1, 2}, [object()], np.array([None])])
def test_what_a_checkpoint_cannot_hold_is_refused(item: Any) -> None:
    with pytest.raises(NotPlainError):
        plain(item)


def state_of(sampler: Any) -> Any:
    order = order_of(sampler)
    next(iter(order))
    return order.state(1)


def distributed() -> Any:
    return DistributedSampler(range(10), 2, 0)


@pytest.mark.parametrize(
    ("saved", "now", "expected"),
    [
        (distributed, distributed, True),
        (lambda: RandomSampler(range(10)), distributed, False),
        (distributed, lambda: RandomSampler(range(10)), False),
        (Permuted, distributed, True),
        (Permuted, Unknown, False),
    ],
)
def test_orders_that_ranks_share_can_be_dealt_out_again(saved: Any, now: Any, expected: bool) -> None:
    states = [state_of(saved()) for _ in range(2)]
    assert can_be_shared(now(), states) == expected


class KnowsItsPlace(Unknown):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_a_sampler_that_knows_its_place_is_left_to_its_owner() -> None:
    assert can_go_on(Unknown())
    assert not can_go_on(KnowsItsPlace())
    assert not can_go_on(BatchSampler(KnowsItsPlace(), 2, False))


def test_of_a_stream_only_states_are_kept_that_a_checkpoint_may_be_set_back_to() -> None:
    stream = Stream()
    order = Streamed(range(20), stream, lambda: 3)
    for place in order:
        stream.position = place + 1
        kept = range(max(0, place - 3), place + 1)
        # A pass begins anew, wherever its dataset stood: mostly at the end of the pass before.
        assert [order.state(taken) for taken in kept] == [
            {"stream": {"position": taken} if taken else None, "taken": taken} for taken in kept
        ]
        assert len(order._states) == len(kept)


def test_a_stream_that_has_read_nothing_since_it_was_loaded_stands_where_it_was() -> None:
    stream = Stream()
    loaded = {"position": 8}
    stream.load_state_dict(loaded)
    order = Streamed(range(20), stream, lambda: 3, loaded)
    assert order.state(0) == {"stream": loaded, "taken": 0}
    # The next batch is drawn, but not read yet.
    next(iter(order))
    assert order.state(0) == {"stream": loaded, "taken": 0}
    assert Streamed(range(20), stream, lambda: 3).state(0) is None


def test_what_is_set_on_a_loaders_sampler_is_its_own() -> None:
    given: Any = loader(shuffle=False)
    own = given.batch_sampler
    sampler = PositionedSampler(given, lambda: 1)
    assert given.batch_sampler is sampler
    given.batch_sampler.batch_size = 9
    assert own.batch_size == 9
    assert [len(batch) for batch in given] == [9] * 5 and len(given) == 5
    sampler.remove(given)
    assert given.batch_sampler is own and [len(batch) for batch in given] == [9] * 5
