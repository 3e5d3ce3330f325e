"""What tests of chunked scores are made of."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from adaattn.backends.interface import Tensors
from adaattn.hardware import probe
from adaattn.spec import AttentionProblem, Aux, HeadGroup, Launch, Precision, Scheme
from adaattn.testing import make_problem, make_tensors, with_tensors

MADE = ("num_hidden_rows", "layout", "step")

Case = tuple[AttentionProblem, Tensors, HeadGroup]


@pytest.fixture
def executor_name() -> str:
    """Return whose device code is broken."""
    return "streamed"


@pytest.fixture(autouse=True)
def some_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split products of few rows, as on a card, in not too many programs for an interpreter."""
    facts = replace(probe("cpu"), num_processors=8)
    monkeypatch.setattr("adaattn.backends.streamed.small.probe", lambda name: facts)


@pytest.fixture
def made() -> Callable[[dict[str, Any]], Case]:
    """Return what makes a problem, with all statistics if it has no gradients, and its tensors."""

    def make(values: dict[str, Any]) -> Case:
        values = {"precision": Precision.FP16, "head_dim": 264, "num_heads": 2} | values
        if not values.get("requires_grad"):
            values = {"aux": Aux.LSE | Aux.ROW_MAX | Aux.ENTROPY} | values
        name = values.pop("executor", "streamed")
        rows, sinks = values.pop("chunk_rows", 0), values.pop("sinks", None)
        how = {key: values.pop(key) for key in MADE if key in values}
        problem = make_problem(**values)
        tensors = make_tensors(problem, **how)
        if problem.has_alibi:
            generator = torch.Generator().manual_seed(1)
            slopes = torch.rand(problem.batch, problem.num_heads, generator=generator)
            tensors = with_tensors(tensors, alibi_slopes=slopes)
        if sinks is not None and tensors.sinks is not None:
            tensors = with_tensors(tensors, sinks=torch.full_like(tensors.sinks, sinks))
        scheme = Scheme.of(problem.precision)
        launch = Launch(chunk_rows=rows)
        return problem, tensors, HeadGroup(capability=name, scheme=scheme, launch=launch)

    return make
