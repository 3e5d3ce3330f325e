"""Device code with one text replaced, for tests that show that a fault in it is seen.

A folder of tests says which executor it holds (`executor_name`) and how a problem of its faults is
made (`made`).
"""

import importlib
import inspect
import itertools
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from adaattn import backends
from adaattn.backends import load
from adaattn.backends.interface import Tensors
from adaattn.spec import AttentionProblem, HeadGroup
from adaattn.testing import assert_executor_matches, assert_training_matches

Rewrite = Callable[[Any, str, str], Any]

Fault = tuple[str, str, str, dict[str, Any]]
"""A device function, a text of it, what takes its place, and the problem that shows it."""

Case = tuple[AttentionProblem, Tensors, HeadGroup]


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


@pytest.fixture
def device_code(executor_name: str) -> list[ModuleType]:
    """Return the modules of an executor's device code, and of what several share."""
    root = Path(backends.__file__).parent
    paths = [*root.glob(f"{executor_name}/*.py"), *root.glob("device/*.py")]
    jitted = (path for path in paths if "@triton.jit" in path.read_text())
    return [
        importlib.import_module(f"adaattn.backends.{path.parent.name}.{path.stem}")
        for path in jitted
    ]


@pytest.fixture
def change(
    monkeypatch: pytest.MonkeyPatch, rewritten: Rewrite, device_code: list[ModuleType]
) -> Callable[[str, str, str], None]:
    """Return what replaces a text of a device function, wherever that is called from."""
    before = {name: it for module in device_code for name, it in vars(module).items()}

    def put(name: str, old: str, new: str) -> None:
        copy = rewritten(before[name].fn, old, new)
        for module in device_code:
            if name in vars(module):
                monkeypatch.setattr(module, name, copy)

    return put


@pytest.fixture
def hold_fault_seen(
    change: Callable[[str, str, str], None], made: Callable[[dict[str, Any]], Case]
) -> Callable[[Fault], None]:
    """Return what raises AssertionError unless the comparison sees a fault, and no other change."""

    def hold(fault: Fault) -> None:
        function, old, new, values = fault
        problem, tensors, group = made(values)
        holds = assert_training_matches if problem.requires_grad else assert_executor_matches
        run = partial(load(group.capability), group=group)
        change(function, old, old)
        holds(run, tensors, problem)
        change(function, old, new)
        # What NumPy says of numbers that a fault makes too large is not the comparison's word.
        with warnings.catch_warnings(), pytest.raises(AssertionError, match="beyond their bound"):
            warnings.simplefilter("ignore", RuntimeWarning)
            holds(run, tensors, problem)

    return hold


@pytest.fixture
def files_with_faults(
    device_code: list[ModuleType],
) -> Callable[[dict[str, Fault]], set[str]]:
    """Return what names the files of device code that some faults are in."""

    def of(faults: dict[str, Fault]) -> set[str]:
        broken = {function for function, *_ in faults.values()}
        return {
            _name(module)
            for module in device_code
            if broken & {key for key, it in vars(module).items() if _is_of(it, module.__name__)}
        }

    return of


@pytest.fixture
def device_files(device_code: list[ModuleType]) -> set[str]:
    """Return the names of the files of device code."""
    return {_name(module) for module in device_code}


def _name(module: ModuleType) -> str:
    """Return a module's own name."""
    return module.__name__.rpartition(".")[2]


def _is_of(item: Any, module: str) -> bool:
    """Return whether something is a device function of a module."""
    return getattr(getattr(item, "fn", None), "__module__", None) == module
