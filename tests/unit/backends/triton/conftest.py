"""What tests of faults in the portable kernels are made of."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from adaattn.backends.interface import Tensors
from adaattn.backends.triton import launch
from adaattn.hardware import clear_cache, probe
from adaattn.spec import AttentionProblem, Aux, HeadGroup, Precision, Scheme
from adaattn.testing import make_problem, make_tensors, with_tensors

STATISTICS = Aux.LSE | Aux.ROW_MAX | Aux.ENTROPY


@pytest.fixture
def little_work(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have fp32 matrices taken apart in training however little there is to compute."""
    monkeypatch.setattr(launch, "_HALVED_WORK", 0.0)
    clear_cache()
    yield
    clear_cache()


@pytest.fixture
def halved(little_work: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have them taken apart however few rows they have, too."""
    monkeypatch.setattr(launch, "_HALVED_FROM", 1)


@pytest.fixture
def executor_name() -> str:
    """Return whose device code is broken."""
    return "triton"


@pytest.fixture
def made() -> Callable[[dict[str, Any]], tuple[AttentionProblem, Tensors, HeadGroup]]:
    """Return what makes a problem with all statistics of its kernel, and its tensors."""
    return _made


def _made(values: dict[str, Any]) -> tuple[AttentionProblem, Tensors, HeadGroup]:
    values = {"precision": Precision.FP16, "aux": STATISTICS} | values
    small, sinks = values.pop("small_rows", None), values.pop("sinks", None)
    lengths = {key: values.pop(key) for key in ("lengths_q", "lengths_k") if key in values}
    step = values.pop("step", 0.0)
    problem = make_problem(**lengths, **values)
    tensors = make_tensors(problem, **lengths, step=step)
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
    group = HeadGroup(capability="triton", scheme=Scheme.of(problem.precision))
    return problem, tensors, group


@pytest.fixture
def change(
    change: Callable[[str, str, str], None], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, str, str], None]:
    """Return what breaks device code, on a device of so few processors that keys are not split."""
    facts = replace(probe("cpu"), num_processors=13)
    monkeypatch.setattr("adaattn.backends.triton.executor.probe", lambda name: facts)
    return change
