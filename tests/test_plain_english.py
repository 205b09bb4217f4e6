"""What the check of English finds, and what it leaves."""

from pathlib import Path

import pytest

from tests.plain_english import EXCEPTIONS, GLOBS, LONGEST, ROOT, check, complaints_about, paragraphs_of, sentences_of


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


def test_docstrings_are_prose_and_code_is_not(tmp_path: Path) -> None:
    source = (
        '"""Fine."""\n\ndef anew():\n    """Fine.\n\n    Args:\n        one: Made anew.\n        two: Fine.\n    """\n'
    )
    (tmp_path / "code.py").write_text(source)
    (found,) = check([tmp_path / "code.py"])[0]
    assert found.sentence == "one: Made anew."


def test_code_links_and_titles_are_not_prose() -> None:
    page = "# Made anew\n\n```python\nanew = 1\n```\n\nSee `anew. where`, [a page](anew.md).\n\n| a. b | `c` |\n"
    page += "- One.\n- Two. Three.\n"
    sentences = [one for part in paragraphs_of(page) for one in sentences_of(part)]
    assert [one for one in sentences if one.startswith(("See", "One", "Two", "Three"))] == [
        "See `anew__where`, a page.",
        "One.",
        "Two.",
        "Three.",
    ]
    assert not [complaint for one in sentences for complaint in complaints_about(one)]


def test_the_pages_pass_and_exceptions_are_few() -> None:
    assert len(EXCEPTIONS) <= 30 and all(any(ROOT.glob(glob)) for glob in GLOBS)
    assert not check([ROOT / "README.md"])[0]
