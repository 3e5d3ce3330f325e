"""What tests of faults in the portable kernels share: a fault put in, and whether it is seen."""

import importlib
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from adaattn.backends import load, triton
from adaattn.backends.interface import Tensors
from adaattn.hardware import probe
from adaattn.spec import AttentionProblem, Aux, HeadGroup, Precision, Scheme
from adaattn.testing import (
    assert_executor_matches,
    assert_training_matches,
    make_problem,
    make_tensors,
    with_tensors,
)

Fault = tuple[str, str, str, dict[str, Any]]
"""A device function, a text of it, what takes its place, and the problem that shows it."""

STATISTICS = Aux.LSE | Aux.ROW_MAX | Aux.ENTROPY


def device_code() -> dict[str, Any]:
    """Return the modules of device code, by name."""
    folder = Path(triton.__file__).parent
    names = [path.stem for path in folder.glob("*.py") if "@triton.jit" in path.read_text()]
    return {name: importlib.import_module(f"adaattn.backends.triton.{name}") for name in names}


def made(values: dict[str, Any]) -> tuple[AttentionProblem, Tensors]:
    """Return a problem with all statistics of its kernel, and its tensors."""
    values = {"precision": Precision.FP16, "aux": STATISTICS} | values
    small, sinks = values.pop("small_rows", None), values.pop("sinks", None)
    lengths = {key: values.pop(key) for key in ("lengths_q", "lengths_k") if key in values}
    problem = make_problem(**lengths, **values)
    tensors = make_tensors(problem, **lengths)
    if small is not None:
        rows = torch.ones(problem.len_k, 1)
        rows[1::2] = small
        tensors = with_tensors(tensors, key=tensors.key * rows, value=tensors.value * rows)
    if sinks is not None and tensors.sinks is not None:
        tensors = with_tensors(tensors, sinks=torch.full_like(tensors.sinks, sinks))
    if problem.has_alibi:
        slopes = torch.rand(problem.batch, problem.num_heads)
        slopes.requires_grad_(problem.alibi_requires_grad)
        tensors = with_tensors(tensors, alibi_slopes=slopes)
    return problem, tensors


def hold_to_the_definition(tensors: Tensors, problem: AttentionProblem) -> None:
    """Raise AssertionError unless the kernels' result is right; what nothing wrote is no number."""
    group = HeadGroup(capability="triton", scheme=Scheme.of(problem.precision))
    holds = assert_training_matches if problem.requires_grad else assert_executor_matches
    holds(partial(load("triton"), group=group), tensors, problem)


@pytest.fixture
def change(
    monkeypatch: pytest.MonkeyPatch, rewritten: Callable[[Any, str, str], Any]
) -> Callable[[str, str, str], None]:
    """Return what replaces a text of a device function, wherever that is called from."""
    facts = replace(probe("cpu"), num_processors=13)
    monkeypatch.setattr("adaattn.backends.triton.executor.probe", lambda name: facts)
    modules = list(device_code().values())
    before = {name: it for module in modules for name, it in vars(module).items()}

    def put(name: str, old: str, new: str) -> None:
        copy = rewritten(before[name].fn, old, new)
        for module in modules:
            if name in vars(module):
                monkeypatch.setattr(module, name, copy)

    return put


@pytest.fixture
def hold_fault_seen(change: Callable[[str, str, str], None]) -> Callable[[Fault], None]:
    """Return what raises AssertionError unless the comparison sees a fault, and no other change."""

    def hold(fault: Fault) -> None:
        function, old, new, values = fault
        problem, tensors = made(values)
        change(function, old, old)
        hold_to_the_definition(tensors, problem)
        change(function, old, new)
        # What NumPy says of numbers that a fault makes too large is not the comparison's word.
        with warnings.catch_warnings(), pytest.raises(AssertionError, match="beyond their bound"):
            warnings.simplefilter("ignore", RuntimeWarning)
            hold_to_the_definition(tensors, problem)

    return hold


@pytest.fixture
def files_with_faults() -> Callable[[dict[str, Fault]], set[str]]:
    """Return what names the files of device code that some faults are in."""

    def of(faults: dict[str, Fault]) -> set[str]:
        broken = {function for function, *_ in faults.values()}
        return {
            name
            for name, module in device_code().items()
            if broken & {key for key, it in vars(module).items() if _is_of(it, module.__name__)}
        }

    return of


def _is_of(item: Any, module: str) -> bool:
    """Return whether something is a device function of a module."""
    return getattr(getattr(item, "fn", None), "__module__", None) == module
