"""What the check of English finds, and what it leaves."""

from pathlib import Path

import pytest

from tests.plain_english import LONGEST, check


@pytest.mark.parametrize(
    ("sentence", "complaint"),
    [
        ("word " * LONGEST + "more.", f"{LONGEST + 1} words"),
        ("Buckets are made anew.", '"anew"'),
        ("A bucket is smaller where the network is slow.", "If X, Y"),
    ],
)
def test_a_sentence_is_found_that_breaks_a_rule(sentence: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(f"# Title\n\nThis is fine. {sentence}\n")
    found, _ = check([tmp_path / "page.md"])
    # The mean of a page has no sentence.
    (one,) = [one for one in found if one.sentence]
    assert complaint in one.complaint and one.sentence == sentence.strip()


def test_docstrings_and_messages_are_prose_and_code_is_not(tmp_path: Path) -> None:
    source = (
        '"""Fine."""\n\ndef anew():\n    """Fine.\n\n    Args:\n        one: Made anew.\n        two: Fine.\n    """\n'
        '    raise ValueError(f"The bucket {one} was made anew.")\n'
    )
    (tmp_path / "code.py").write_text(source)
    found = [one.sentence for one in check([tmp_path / "code.py"])[0]]
    assert found == ["one: Made anew.", "The bucket code was made anew."]
