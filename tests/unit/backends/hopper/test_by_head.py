"""Heads of the Hopper kernel with scales, windows and softcaps of their own, run on a CPU."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from adaattn.backends import hopper
from adaattn.backends.head_terms import HeadTerms
from adaattn.backends.hopper.launch import choose
from adaattn.backends.interface import Result, Tensors
from adaattn.spec import Align, AttentionProblem, Aux, HeadGroup, HeadTerm, MaskKind, Precision
from adaattn.testing import (
    assert_executor_matches,
    make_problem,
    make_tensors,
    poisoned_memory,
    with_tensors,
)

pytestmark = pytest.mark.usefixtures("simulated")

ALL = HeadTerm.SCALE | HeadTerm.WINDOW | HeadTerm.SOFTCAP
ALL_AUX = Aux.LSE | Aux.ROW_MAX | Aux.ENTROPY
USUAL: dict[str, Any] = {"precision": Precision.BF16, "head_dim": 32, "num_heads": 4}
TO_END: dict[str, Any] = {"is_causal": True, "align": Align.BOTTOM_RIGHT}
WINDOWS: dict[str, Any] = {"head_terms": HeadTerm.WINDOW}
FP16: dict[str, Any] = {"precision": Precision.FP16}
CALLS: dict[str, dict[str, Any]] = {
    "plain": {"len_q": 300, "aux": Aux.LSE | Aux.ENTROPY},
    "two sequences": {"len_q": 140, "batch": 2, "len_k": 200},
    "causal": {"len_q": 300, "is_causal": True, "aux": Aux.LSE},
    "causal to the end": {"len_q": 150, "len_k": 400, **TO_END},
    "to the end, fewer keys": {"len_q": 200, "len_k": 130, **TO_END, "aux": ALL_AUX},
    "grouped heads": {"len_q": 200, "num_kv_heads": 2, "is_causal": True},
    "columns of 128": {"len_q": 200, "head_dim": 128},
    "columns of 256": {"len_q": 140, "head_dim": 256, "is_causal": True},
    "half": {"len_q": 200, **FP16, "aux": ALL_AUX},
    "half, causal": {"len_q": 200, **FP16, "is_causal": True},
    "one row": {"len_q": 1, "len_k": 300},
    "scale beside a window": {"len_q": 200, "head_terms": HeadTerm.SCALE, "window": (50, 20)},
    "scale beside a softcap": {"len_q": 100, "head_terms": HeadTerm.SCALE, "softcap": 3.0},
    "scale beside a softcap in half": {"len_q": 100, "head_terms": HeadTerm.SCALE, "softcap": 3.0,
                                       **FP16},
    "windows beside a softcap": {"len_q": 200, **WINDOWS, "softcap": 3.0},
    "windows alone": {"len_q": 300, **WINDOWS, "aux": Aux.LSE | Aux.ENTROPY},
    "windows alone, of long sequences": {"len_q": 1100, "num_heads": 2, **WINDOWS, **TO_END},
    "softcap beside a scale": {"len_q": 100, "head_terms": HeadTerm.SOFTCAP, "scale": 0.4},
    "ALiBi and sinks": {"len_q": 150, "has_alibi": True, "has_sinks": True, **TO_END,
                        "len_k": 190, "aux": ALL_AUX},
    "mask": {"len_q": 150, "mask": MaskKind.BOOLEAN},
    "bias": {"len_q": 150, "mask": MaskKind.ADDITIVE, "is_causal": True},
    "staged mask": {"len_q": 150, "len_k": 208, "mask": MaskKind.BOOLEAN, "aux": ALL_AUX},
    "staged bias": {"len_q": 300, "len_k": 272, "mask": MaskKind.ADDITIVE},
    "staged bias in windows": {"len_q": 300, "len_k": 272, "mask": MaskKind.ADDITIVE, **WINDOWS},
    "bias beside scales": {"len_q": 100, "mask": MaskKind.ADDITIVE, "head_terms": HeadTerm.SCALE},
    "packed": {"lengths_q": (9, 0, 170, 1, 65), "aux": ALL_AUX},
    "packed to the end": {"lengths_q": (3, 150, 70, 5), "lengths_k": (70, 80, 150, 0), **TO_END},
    "packed windows": {"lengths_q": (300, 70, 17, 1), "is_causal": True, **WINDOWS},
    "listed": {"len_q": 300, "len_k": 500, "block_size": (128, 128), "aux": ALL_AUX},
    "listed, causal": {"len_q": 500, "block_size": (128, 64), "is_causal": True},
    "listed windows": {"len_q": 500, "len_k": 700, "block_size": (128, 128), **WINDOWS},
}  # fmt: skip


def made(values: dict[str, Any]) -> tuple[AttentionProblem, Tensors]:
    """Return a problem whose heads have numbers of their own, and its tensors."""
    values = USUAL | {"head_terms": ALL} | values
    lengths = {name: values.pop(name) for name in ("lengths_q", "lengths_k") if name in values}
    problem = make_problem(**lengths, **values)
    return problem, make_tensors(problem, **lengths)


def run(tensors: Tensors, problem: AttentionProblem) -> Result:
    with poisoned_memory():
        return hopper.run(tensors, problem, HeadGroup(capability="hopper"))


def held_to_the_oracle(tensors: Tensors, problem: AttentionProblem) -> Result:
    return assert_executor_matches(run, tensors, problem)


@pytest.mark.parametrize("name", CALLS)
def test_each_head_has_its_numbers(name: str) -> None:
    problem, tensors = made(CALLS[name])
    held_to_the_oracle(tensors, problem)


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP16], ids=lambda it: it.label)
@pytest.mark.parametrize("terms", [HeadTerm.SCALE, ALL])
def test_a_scale_may_be_0_or_below(terms: HeadTerm, precision: Precision) -> None:
    problem, tensors = made({"len_q": 150, "precision": precision, "head_terms": terms})
    scale = torch.tensor([0.0, -0.3, 0.2, -1.0])
    held_to_the_oracle(with_tensors(tensors, head_scale=scale), problem)


EDGES = [
    [[0, 0]] * 4,
    [[-1, -1]] * 4,
    [[0, -1], [-1, 0], [63, 64], [64, 63]],
    [[9999, 2**31 - 1]] * 4,
]


@pytest.mark.parametrize("windows", EDGES, ids=str)
@pytest.mark.parametrize("values", [{}, TO_END | {"len_k": 190}], ids=str)
def test_windows_of_every_width(values: dict[str, Any], windows: list[list[int]]) -> None:
    problem, tensors = made({"len_q": 260} | WINDOWS | values)
    held_to_the_oracle(with_tensors(tensors, head_window=torch.tensor(windows)), problem)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_numbers_of_every_dtype_are_read_where_they_lie(dtype: torch.dtype) -> None:
    problem, tensors = made({"len_q": 100})
    terms = HeadTerms(
        scale=torch.tensor([0.5, 9.0, 0.25, 9.0, 0.125, 9.0, 1.0, 9.0], dtype=dtype)[::2],
        window=torch.tensor([[5, 9], [-1, 0], [2**40, 3], [7, 2**33]]),
        softcap=torch.tensor([0.0, 2.0, 4.0, 0.0], dtype=dtype),
    )
    held_to_the_oracle(replace(tensors, head_terms=terms), problem)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", ["plain", "packed", "listed", "windows alone"])
def test_scores_beyond_the_fixed_reference_are_computed_again(name: str, is_causal: bool) -> None:
    problem, tensors = made(CALLS[name] | {"is_causal": is_causal, "aux": Aux.LSE})
    assert choose(problem).fixed
    key = tensors.key.clone()
    key[:, :, 20:90] *= 300
    held_to_the_oracle(with_tensors(tensors, key=key), problem)


def test_numbers_that_nobody_checked_hide_nothing_and_cap_nothing() -> None:
    """As of `HeadTerms`: windows below -1 are unlimited, softcaps below 0 or NaN are none."""
    problem, tensors = made({"len_q": 150, "head_terms": HeadTerm.WINDOW | HeadTerm.SOFTCAP})
    terms = tensors.head_terms
    assert terms is not None and terms.window is not None and terms.softcap is not None
    terms.window.fill_(-1)
    terms.softcap.zero_()
    plain = run(tensors, problem).output
    terms.window.copy_(torch.tensor([[-(2**31), -2], [-2, -5], [-1, -7], [-3, -1]]))
    terms.softcap.copy_(torch.tensor([-1.0, float("nan"), -float("inf"), 0.0]))
    assert torch.equal(run(tensors, problem).output, plain)


def test_a_head_reads_what_its_window_reaches(simulated: Any) -> None:
    copied: list[int] = []

    def counted(function: Any) -> Any:
        def copy(source: Any, full: Any, buffer: Any, place: Any) -> Any:
            if source.shape[2] == 700:
                copied.append(int(place[1]))
            return function(source, full, buffer, place)

        return copy

    simulated.replace("copy", counted)
    problem, tensors = made({"len_q": 70, "len_k": 700, "num_heads": 2, **WINDOWS})
    windows = torch.tensor([[20, 10], [-1, -1]])
    held_to_the_oracle(with_tensors(tensors, head_window=windows), problem)
    block_n = choose(problem).tiling.block_n
    assert copied.count(0) == 2 * -(-80 // block_n)  # keys and values
    assert copied.count(1) == 2 * -(-700 // block_n)
