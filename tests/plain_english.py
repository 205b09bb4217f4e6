"""Checks text by those rules of CONTRIBUTING.md that a program can check: ``python -m tests.plain_english [file]``."""

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
GLOBS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md", "examples/*.md", "lightning_parstrat/**/*.py")
"""Which files are checked."""

LONGEST, LONGEST_MEAN = 25, 18
"""Words of a sentence, and of a page's sentences on average."""

INSTEAD = {
    r"anew|afresh": "again, or a verb such as rebuild",
    r"wires?": "network",
    r"whoever|nobody|somebody": "a named thing, or you",
    r"go(?:es)? on|going on|went on": "continue, or resume",
    r"st[ao]nds? still": "hang, or wait",
    r"(?:in|out of) step(?! \d)|drift apart|part ways": "synchronized",
    r"(?:says?|said|told) so|(?:is|are) (?:said|told|heard)": "log, warn or raise",
    r"speaks?|spoken": "log",
    r"dealt|deals? out": "distribute",
    r"of (?:its|their|your) own": "own",
    r"at hand|by turns|heed(?:ed|s)?|comes? home|come together|beside each other": "a plainer word",
    r"what (?:is|was|are) (?:the matter|there|in vain)": "a named thing",
    r"as (?:does|do|did|is|are) (?:those|that|it)": "repeat the noun",
}
"""What is not written, as a regular expression, and what to write instead."""
_UNWANTED = re.compile("|".join(rf"\b(?:{words})\b" for words in INSTEAD), re.IGNORECASE)


class Finding(NamedTuple):
    """A sentence, and what is wrong with it."""

    file: str
    sentence: str
    complaint: str


def paragraphs_of(markdown: str) -> Iterator[str]:
    """Prose: paragraphs, list items and cells of tables, without code blocks, headings and comments."""
    text = re.sub(r"^(`{3,}).*?^\1$", "\n", markdown, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->|^#.*$|^:::.*$|^ {4,}\S.*$", "\n", text, flags=re.MULTILINE)
    for part in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )|\n(?=\|)|\n(?=> )", text):
        cells = part.strip().strip("|").split(" |") if part.strip().startswith("|") else [part]
        for cell in cells:
            words = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", cell)
            words = re.sub(r"\[([^\]]*)\]\([^)\s]*\)", r"\1", words)
            yield " ".join(re.sub(r"^\s*(?:[-*>]|\d+\.) ", "", words).split())


def texts_of(source: str) -> str:
    """A file's docstrings, each argument a paragraph, and its messages: other strings of four words or more."""
    nodes = list(ast.walk(ast.parse(source)))
    owners = (one for one in nodes if isinstance(one, ast.Module | ast.ClassDef | ast.FunctionDef))
    docstrings = "\n\n".join(ast.get_docstring(one) or "" for one in owners)
    docstrings = re.sub(r"\n *(?=[*\w]+: )", "\n\n", docstrings).replace("\n    ", "\n")
    parts = {part for one in nodes if isinstance(one, ast.JoinedStr | ast.Expr) for part in ast.iter_child_nodes(one)}
    strings = (one for one in nodes if isinstance(one, ast.JoinedStr | ast.Constant) and one not in parts)
    texts = (re.sub(r"\{[^{}]*\}", "code", ast.unparse(one)) for one in strings)
    messages = [one.strip("f'\"").replace("\\n", "\n") for one in texts]
    return "\n\n".join([docstrings, *(one for one in messages if len(one.split()) >= 4)])


def sentences_of(paragraph: str) -> list[str]:
    """Its sentences. Code counts as one word, and a dot within it ends nothing."""
    plain = re.sub(r"(`+)[^`]+\1", lambda code: re.sub(r"[\s.:;?!]", "_", code[0]), paragraph)
    return [one for one in re.split(r"(?<=[.?!])[)*\"]*\s+", plain) if re.search(r"[A-Za-z]{2}", one)]


def words_of(sentence: str) -> int:
    """How many words it has; a lone sign or number is none."""
    return sum(bool(re.search(r"[A-Za-z]", word)) for word in sentence.split())


def complaints_about(sentence: str) -> Iterator[str]:
    """What is wrong with a sentence."""
    if (count := words_of(sentence)) > LONGEST:
        yield f"{count} words, of at most {LONGEST}"
    prose = re.sub(r"`[^`]*`", "code", sentence)
    for found in _UNWANTED.finditer(prose):
        instead = next(right for wrong, right in INSTEAD.items() if re.fullmatch(wrong, found[0], re.IGNORECASE))
        yield f'"{found[0]}": write {instead}'
    if re.search(r"\S.*[\s,(]where\b", prose):
        yield 'a trailing "where": write "If X, Y"'


def check(paths: Iterable[Path]) -> tuple[list[Finding], dict[str, float]]:
    """What is wrong in files, and the mean length of each file's sentences in words."""
    found, means = [], {}
    for path in paths:
        name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)
        text = texts_of(path.read_text()) if path.suffix == ".py" else path.read_text()
        sentences = [one for part in paragraphs_of(text) for one in sentences_of(part)]
        lengths = [words_of(one) for one in sentences if words_of(one) > 3]
        means[name] = sum(lengths) / max(len(lengths), 1)
        if means[name] > LONGEST_MEAN and path.suffix == ".md":
            found.append(Finding(name, "", f"mean sentence of {means[name]:.1f} words, of at most {LONGEST_MEAN}"))
        found += [Finding(name, one, complaint) for one in sentences for complaint in complaints_about(one)]
    return found, means


def main(files: list[str]) -> int:
    """Prints what is wrong; returns the exit status."""
    chosen = [Path(file).resolve() for file in files] or [one for glob in GLOBS for one in sorted(ROOT.glob(glob))]
    found, means = check(chosen)
    for file, sentence, complaint in found:
        print(f"{file}: {complaint}\n    {sentence}")
    print("\n".join(f"{mean:5.1f} words a sentence: {file}" for file, mean in means.items() if files))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
