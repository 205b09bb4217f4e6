"""What older versions of torch, which the package allows, do not have, and which tests need it."""

import re

import pytest
import torch


def is_before(version: str) -> bool:
    """Whether the installed torch is older."""
    installed, other = (tuple(map(int, re.findall(r"\d+", one)[:2])) for one in (torch.__version__, version))
    return installed < other


def needs_torch(version: str, reason: str) -> pytest.MarkDecorator:
    """Leaves a test out where torch is older."""
    return pytest.mark.skipif(is_before(version), reason=f"torch {torch.__version__}: {reason}")
