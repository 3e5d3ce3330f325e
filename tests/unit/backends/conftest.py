"""Device code with one text replaced, for tests that show that a fault in it is seen."""

import inspect
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Rewrite = Callable[[Any, str, str], Any]


@pytest.fixture
def rewritten(tmp_path: Path) -> Rewrite:
    """Return what makes a copy of a function in which one text stands for another.

    The copy has the names of the function's module around it, and its own name there is the
    caller's to change. Its text is in a file, where Triton's interpreter looks for it. A text that
    is not there exactly once is an error, so that no fault vanishes when the code changes.
    """
    numbers = itertools.count()

    def make(function: Any, old: str, new: str) -> Any:
        text = inspect.getsource(function)
        times = text.count(old)
        assert times == 1, f"{function.__name__}: {old!r} is there {times} times, expected once"
        path = tmp_path / f"{function.__name__}_{next(numbers)}.py"
        path.write_text(text.replace(old, new))
        made: dict[str, Any] = {}
        exec(compile(path.read_text(), str(path), "exec"), function.__globals__, made)
        return made[function.__name__]

    return make
