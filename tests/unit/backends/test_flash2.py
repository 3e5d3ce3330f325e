"""What is made of FlashAttention-2's output and log-sum-exp; the operator itself runs on GPUs."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adaattn.backends import sdpa
from adaattn.errors import ExecutorError
from adaattn.spec import Align, AttentionProblem, Aux, HeadGroup
from adaattn.testing import (
    assert_matches,
    assert_results_match,
    attention,
    cast_tensors,
    make_problem,
    make_tensors,
    num_summands,
)

GROUP = HeadGroup(capability="sdpa.flash2")


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Put an operator of the same signature in the place of the GPU's; what keys it was given."""
    given: list[tuple[int, ...]] = []

    def forward(*args: Any, scale: float, **window: int) -> tuple[torch.Tensor, ...]:
        given.append(tuple(args[1].shape))
        return _flash_attention(*args, scale=scale, **window)

    operators = SimpleNamespace(_flash_attention_forward=SimpleNamespace(default=forward))
    monkeypatch.setattr(sdpa, "_ATEN", operators)
    return given


def _flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts_q: torch.Tensor | None,
    starts_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float,
    window_size_left: int = -1,
    window_size_right: int = -1,
) -> tuple[torch.Tensor, ...]:
    """Return [B, S, H, D] and [B, H, S], packed [T, H, D] and [H, T]; inf where nothing is seen."""
    if starts_q is not None and starts_k is not None:
        bounds = zip(starts_q.tolist(), starts_q.tolist()[1:], strict=False)
        parts = [
            _flash_attention(
                *(item[None, start:stop] for item in (query, key, value)),
                *(None, None, stop - start, stop - start, dropout_p, is_causal, False),
                scale=scale,
                window_size_left=window_size_left,
                window_size_right=window_size_right,
            )
            for start, stop in bounds
        ]
        return torch.cat([part[0][0] for part in parts]), torch.cat(
            [part[1][0] for part in parts], dim=-1
        )
    assert (query.shape[1], key.shape[1], dropout_p) == (max_q, max_k, 0.0)
    group = query.shape[2] // key.shape[2]
    key, value = (item.repeat_interleave(group, dim=2) for item in (key, value))
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * scale
    distance = torch.arange(max_k) - torch.arange(max_q)[:, None] - (max_k - max_q)
    right = 0 if is_causal else window_size_right
    hidden = (distance > right) if right >= 0 else torch.zeros_like(distance, dtype=torch.bool)
    if window_size_left >= 0:
        hidden = hidden | (distance < -window_size_left)
    scores = scores.masked_fill(hidden, float("-inf"))
    lse = scores.logsumexp(-1)
    is_blind = lse == float("-inf")
    weights = scores.softmax(-1).masked_fill(is_blind[..., None], 0.0)
    output = torch.einsum("bhqk,bkhd->bqhd", weights, value)
    return output, lse.masked_fill(is_blind, float("inf"))


def _check(problem: AttentionProblem, lengths: tuple[int, ...] = ()) -> None:
    """Assert that a call with row outputs, and one of repeated calls, match the oracle."""
    tensors = make_tensors(problem, lengths_q=lengths)
    exact = attention(cast_tensors(tensors, torch.float64), problem)
    eager = attention(tensors, problem)
    summands = num_summands(problem, eager.output)
    found = sdpa.run(tensors, problem, GROUP)
    assert_results_match(found, exact, eager, summands=summands)
    repeated = sdpa.direct(problem, GROUP)
    assert repeated is not None
    output = repeated(*tensors.as_direct()[:8])
    assert_matches(output, exact.output, eager.output, summands=summands)


SHAPES: dict[str, dict[str, Any]] = {
    "square": {"len_q": 24, "is_causal": True},
    "groups": {"len_q": 5, "len_k": 40, "num_heads": 6, "num_kv_heads": 2},
    "rows that see nothing": {"len_q": 9, "len_k": 4, "is_causal": True},
    "window": {"len_q": 24, "is_causal": True, "window": (3, -1)},
    "packed": {"lengths_q": (7, 1, 12), "is_causal": True, "window": (3, -1)},
    "single row": {"len_q": 1, "len_k": 40, "window": (7, -1), "num_kv_heads": 2},
    "short cache": {"len_q": 1, "len_k": 5, "window": (7, -1), "is_causal": True},
}


@pytest.mark.parametrize("has_sinks", [True, False])
@pytest.mark.parametrize("name", SHAPES)
def test_outputs_and_log_sum_exps_are_those_of_the_oracle(
    name: str, has_sinks: bool, shapes: list[tuple[int, ...]]
) -> None:
    values = {"num_heads": 4, "head_dim": 16, "align": Align.BOTTOM_RIGHT} | SHAPES[name]
    problem = make_problem(has_sinks=has_sinks, aux=Aux.LSE, **values)
    _check(problem, values.get("lengths_q", ()))
    assert shapes


def test_sinks_are_not_lost_to_pytorchs_function() -> None:
    """It would run this kernel by itself, without them."""
    problem = make_problem(has_sinks=True, sdpa_default="sdpa.flash2")
    assert not sdpa.goes_through_sdpa(problem, GROUP)
    assert sdpa.goes_through_sdpa(replace(problem, has_sinks=False), GROUP)


@pytest.mark.usefixtures("shapes")
def test_sinks_in_a_graph_and_under_a_transform() -> None:
    problem = make_problem(has_sinks=True, align=Align.BOTTOM_RIGHT)
    tensors = make_tensors(problem)
    sinks = tensors.sinks
    assert sinks is not None

    def attend(sinks: torch.Tensor) -> torch.Tensor:
        return sdpa.run(replace(tensors, sinks=sinks), problem, GROUP).output

    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    exact = attention(cast_tensors(tensors, torch.float64), problem).output
    eager = attention(tensors, problem).output
    assert_matches(compiled(sinks), exact, eager, summands=num_summands(problem, eager))
    several = torch.stack([sinks, sinks])
    with pytest.raises(ExecutorError, match=r"torch\.func"):
        torch.func.vmap(attend)(several)
    run = sdpa.direct(problem, GROUP)
    assert run is not None
    given = tensors.query, tensors.key, tensors.value, None
    with pytest.raises(ExecutorError, match=r"torch\.func"):
        torch.func.vmap(lambda one: run(*given, one))(several)


@pytest.mark.parametrize(("len_k", "seen"), [(40, 8), (5, 5)])
def test_a_single_row_reads_the_keys_of_its_window_alone(
    len_k: int, seen: int, shapes: list[tuple[int, ...]]
) -> None:
    """The kernel splits keys over the GPU where there is no window, and only there."""
    problem = make_problem(len_q=1, len_k=len_k, window=(7, -1), align=Align.BOTTOM_RIGHT)
    _check(problem)
    assert {shape[1] for shape in shapes} == {seen}
