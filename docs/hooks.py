"""What MkDocs does not do by itself: files beside docs/ that pages link to, and docstrings written for Sphinx too."""

import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
BESIDE = ("benchmarks/results/*.json", "benchmarks/results/*.png", "examples/configs/*.yaml")
"""What pages link to as ``../benchmarks/...``: that works where one reads them in the repository."""

_LINK_OUT = re.compile(r"\]\(\.\./(benchmarks/results|examples/configs)/")
_ROLE = re.compile(r":(?:class|meth|func|attr|mod|exc):`~?([^`]+)`")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Puts result files and configurations into the site."""
    for pattern in BESIDE:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Points links at where the files lie in the site; MkDocs then checks that they are there."""
    return _LINK_OUT.sub(r"](\1/", markdown)


class PlainRoles(griffe.Extension):
    """Shows ``:class:`~package.Name``` as code: mkdocstrings knows Markdown, and no roles of reStructuredText."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrites the docstring of each object that was read."""
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(lambda role: f"`{role[1].split('.')[-1]}`", obj.docstring.value)
