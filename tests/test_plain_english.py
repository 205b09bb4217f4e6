"""What the check of English finds, and what it leaves."""

from pathlib import Path

from tests.plain_english import LONGEST, check

WRONG = {
    "word " * LONGEST + "more.": f"{LONGEST + 1} words",
    "Buckets are made anew.": '"anew"',
    "A bucket is smaller where the network is slow.": "If X, Y",
}
SOURCE = (
    '"""Fine."""\n\ndef anew():\n    """Fine.\n\n    Args:\n        one: Made anew.\n        two: Fine.\n    """\n'
    '    raise ValueError(f"The bucket {one} was made anew.")\n'
)


def test_sentences_that_break_a_rule_are_found_in_pages_docstrings_and_messages(tmp_path: Path) -> None:
    page, source = tmp_path / "page.md", tmp_path / "code.py"
    page.write_text("# Title anew\n\nThis is fine.\n\n" + "\n\n".join(WRONG))
    source.write_text(SOURCE)
    *found, docstring, message = [one.sentence for one in check([page, source])[0] if one.sentence]
    assert (docstring, message) == ("one: Made anew.", "The bucket code was made anew.")
    assert found == list(WRONG)
    complaints = [one.complaint for one in check([page])[0] if one.sentence]
    assert all(expected in one for one, expected in zip(complaints, WRONG.values(), strict=True))
