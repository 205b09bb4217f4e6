"""Numbers in messages have the right form of their noun."""

import pytest

from lightning_parstrat.core.wording import counted


@pytest.mark.parametrize(
    ("number", "words", "expected"),
    [
        (0, ("rank",), "0 ranks"),
        (1, ("rank",), "1 rank"),
        (2, ("rank",), "2 ranks"),
        (1, ("batch", "batches"), "1 batch"),
        (3, ("batch", "batches"), "3 batches"),
    ],
)
def test_a_number_has_its_noun(number: int, words: tuple[str, ...], expected: str) -> None:
    assert counted(number, *words) == expected
