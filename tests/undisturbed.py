"""Tests of what other programs on the machine may disturb."""

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.pool import RankError

ATTEMPTS = 3


def undisturbed(test: Callable[..., None]) -> Callable[..., None]:
    """It must hold in one of three attempts, with time between; each gets a folder of its own as ``tmp_path``."""

    @functools.wraps(test)
    def attempt(*args: Any, tmp_path: Path, **kwargs: Any) -> None:
        for number in range(ATTEMPTS):
            folder = tmp_path / str(number)
            folder.mkdir()
            try:
                return test(*args, tmp_path=folder, **kwargs)
            except RankError:
                raise
            except AssertionError:
                if number == ATTEMPTS - 1:
                    raise
                time.sleep(10.0 * number)
        return None

    return attempt
