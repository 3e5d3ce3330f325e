"""The oracle against a second definition, written as loops over single numbers."""

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from adaattn.backends.interface import Result, Tensors
from adaattn.backends.reference import CAPABILITIES, attention, run
from adaattn.spec import Align, AttentionProblem, Aux, Feature, HeadGroup, MaskKind, Precision
from adaattn.testing import (
    assert_matches,
    cast_tensors,
    make_problem,
    make_tensors,
    with_tensors,
)

ALL_AUX = Aux.LSE | Aux.ROW_MAX | Aux.ENTROPY | Aux.WEIGHTS

SEMANTICS: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "bottom right": {"is_causal": True, "align": Align.BOTTOM_RIGHT},
    "window": {"window": (2, 1)},
    "left window": {"window": (0, -1), "align": Align.BOTTOM_RIGHT},
    "dilation": {"dilation": 2},
    "boolean mask": {"mask": MaskKind.BOOLEAN, "num_hidden_rows": 1},
    "additive mask": {"mask": MaskKind.ADDITIVE, "num_hidden_rows": 1},
    "softcap": {"softcap": 1.5},
    "sinks": {"has_sinks": True},
    "alibi": {"has_alibi": True},
    "grouped heads": {"num_heads": 4, "num_kv_heads": 2},
    "value dim": {"value_dim": 5},
    "few keys": {"len_k": 3},
    "packed": {"lengths_q": (3, 0, 2, 1), "lengths_k": (2, 1, 4, 0)},
}


@dataclass
class Drawn:
    """A problem with its tensors."""

    problem: AttentionProblem
    tensors: Tensors
    options: dict[str, Any] = field(default_factory=dict)


def draw(*names: str, precision: Precision = Precision.FP64, grad: bool = False) -> Drawn:
    """Return a small problem with the named semantics, and its tensors."""
    options: dict[str, Any] = {"batch": 2, "len_q": 6, "len_k": 7, "head_dim": 4, "aux": ALL_AUX}
    for name in names:
        options |= SEMANTICS[name]
    if grad:
        options |= {
            "requires_grad": True,
            "mask_requires_grad": options.get("mask") is MaskKind.ADDITIVE,
            "sinks_require_grad": "has_sinks" in options,
            "alibi_requires_grad": "has_alibi" in options,
        }
    hidden = options.pop("num_hidden_rows", 0)
    lengths = {key: options.pop(key) for key in ("lengths_q", "lengths_k") if key in options}
    if lengths:
        options["batch"] = 1
        del options["len_k"], options["len_q"]
    problem = make_problem(**options, **lengths, precision=precision)
    return Drawn(problem, make_tensors(problem, num_hidden_rows=hidden, **lengths))


def place(bounds: tuple[int, ...], token: int) -> tuple[int, int, int]:
    """Return sequence, index within it and length of it for a packed token."""
    for sequence, (start, end) in enumerate(itertools.pairwise(bounds)):
        if start <= token < end:
            return sequence, token - start, end - start
    raise AssertionError("token outside every sequence")


def seen_by_loops(drawn: Drawn, b: int, h: int, i: int) -> list[tuple[int, int]]:
    """Return (key, distance) of each key that row i sees, by the words of the specification."""
    problem, tensors = drawn.problem, drawn.tensors
    bounds_q = tensors.bounds_q or (0, problem.len_q)
    bounds_k = tensors.bounds_k or (0, problem.len_k)
    sequence, row, length_q = place(bounds_q, i)
    length_k = bounds_k[sequence + 1] - bounds_k[sequence]
    p = row + (length_k - length_q if problem.align is Align.BOTTOM_RIGHT else 0)
    seen = []
    for j in range(length_k):
        key = bounds_k[sequence] + j
        left, right = problem.window
        hidden = (
            (problem.is_causal and j > p)
            or (left != -1 and j < p - left)
            or (right != -1 and j > p + right)
            or (p - j) % problem.dilation != 0
        )
        if problem.mask is not MaskKind.NONE:
            entry = tensors.mask[b, h, i, key].item()
            hidden = hidden or (
                not entry if problem.mask is MaskKind.BOOLEAN else entry == -math.inf
            )
        if not hidden:
            seen.append((key, abs(p - j)))
    return seen


def score_by_loops(drawn: Drawn, b: int, h: int, i: int, key: int, distance: int) -> float:
    """Return one score with softcap, ALiBi and additive mask."""
    problem, tensors = drawn.problem, drawn.tensors
    query = tensors.query[b, h, i].tolist()
    other = tensors.key[b, h // problem.group_size, key].tolist()
    score = problem.scale * math.fsum(x * y for x, y in zip(query, other, strict=True))
    if problem.softcap > 0:
        score = problem.softcap * math.tanh(score / problem.softcap)
    if problem.has_alibi:
        score -= tensors.alibi_slopes[0, h].item() * distance
    if problem.mask is MaskKind.ADDITIVE:
        score += tensors.mask[b, h, i, key].item()
    return score


def by_loops(drawn: Drawn) -> Result:
    """Return attention and every auxiliary output, one number at a time."""
    problem, tensors = drawn.problem, drawn.tensors
    rows = (problem.batch, problem.num_heads, problem.len_q)
    output = torch.zeros(*rows, problem.value_dim, dtype=torch.float64)
    weights = torch.zeros(*rows, problem.len_k, dtype=torch.float64)
    lse = torch.full(rows, -math.inf, dtype=torch.float64)
    row_max, entropy = lse.clone(), torch.zeros(rows, dtype=torch.float64)
    for b, h, i in itertools.product(*map(range, rows)):
        seen = seen_by_loops(drawn, b, h, i)
        if not seen:
            continue
        scores = [score_by_loops(drawn, b, h, i, key, distance) for key, distance in seen]
        outcomes = scores + ([tensors.sinks[h].item()] if problem.has_sinks else [])
        total = math.fsum(math.exp(score) for score in outcomes)
        shares = [math.exp(score) / total for score in outcomes]
        for (key, _), share in zip(seen, shares, strict=False):
            weights[b, h, i, key] = share
            output[b, h, i] += share * tensors.value[b, h // problem.group_size, key].double()
        lse[b, h, i], row_max[b, h, i] = math.log(total), max(scores)
        entropy[b, h, i] = -math.fsum(share * math.log2(share) for share in shares)
    return Result(output=output, lse=lse, row_max=row_max, entropy=entropy, weights=weights)


def assert_same_to_fp32(actual: Result, exact: Result) -> None:
    """Compare two float64 results where rounding to float32 hides their own rounding."""
    for name in ("output", "lse", "row_max", "entropy", "weights"):
        got, truth = getattr(actual, name), getattr(exact, name)
        assert got.dtype is torch.float64
        assert_matches(got.float(), truth, truth.float(), name=name)


CLASHES = ({"boolean mask", "additive mask"}, {"few keys", "packed"})
PAIRS = [
    pair
    for pair in itertools.combinations(SEMANTICS, 2)
    if not any(set(pair) == c for c in CLASHES)
]


@pytest.mark.parametrize("names", [(), *((name,) for name in SEMANTICS), *PAIRS], ids="+".join)
def test_the_oracle_is_the_definition_for_each_semantics_and_each_pair(
    names: tuple[str, ...],
) -> None:
    drawn = draw(*names)
    assert_same_to_fp32(attention(drawn.tensors, drawn.problem), by_loops(drawn))


def test_the_oracle_is_the_definition_with_everything_at_once() -> None:
    drawn = draw("bottom right", "window", "additive mask", "softcap", "sinks", "alibi")
    assert_same_to_fp32(attention(drawn.tensors, drawn.problem), by_loops(drawn))


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16, Precision.FP16])
@pytest.mark.parametrize("names", [(), ("causal",), ("boolean mask",), ("sinks", "softcap")])
def test_low_precision_input_gives_output_as_good_as_eager_pytorch(
    names: tuple[str, ...], precision: Precision
) -> None:
    drawn = draw(*names, precision=precision)
    actual = attention(drawn.tensors, drawn.problem)
    exact = attention(cast_tensors(drawn.tensors, torch.float64), drawn.problem)
    dtype = drawn.tensors.query.dtype
    eager = attention(drawn.tensors, drawn.problem, compute_dtype=dtype)
    assert actual.output.dtype is dtype
    assert actual.weights is not None and actual.weights.dtype is torch.float32
    assert actual.lse is not None and actual.lse.dtype is torch.float32
    assert_matches(actual.output, exact.output, eager.output)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("mask", list(MaskKind))
def test_the_oracle_agrees_with_sdpa_math_where_both_apply(is_causal: bool, mask: MaskKind) -> None:
    if is_causal and mask is not MaskKind.NONE:
        mask = MaskKind.NONE
    problem = make_problem(
        batch=2, num_heads=4, num_kv_heads=2, len_q=9, len_k=7, value_dim=5, mask=mask,
        is_causal=is_causal, precision=Precision.FP64,
    )  # fmt: skip
    tensors = make_tensors(problem)
    with sdpa_kernel(SDPBackend.MATH):
        expected = functional.scaled_dot_product_attention(
            tensors.query, tensors.key, tensors.value, attn_mask=tensors.mask,
            is_causal=is_causal, scale=problem.scale, enable_gqa=True,
        )  # fmt: skip
    output = attention(tensors, problem).output
    assert_matches(output.float(), expected, expected.float())


@pytest.mark.parametrize(
    "names",
    [
        *((name,) for name in SEMANTICS),
        ("softcap", "sinks"),
        ("alibi", "additive mask"),
        ("alibi", "bottom right"),
        ("sinks", "boolean mask"),
        ("sinks", "additive mask", "softcap", "alibi"),
        ("packed", "causal", "alibi"),
    ],
    ids="+".join,
)
def test_every_gradient_is_the_derivative(names: tuple[str, ...]) -> None:
    drawn = draw(*names, grad=True)
    fields = ("query", "key", "value", "mask", "sinks", "alibi_slopes")
    inputs = {
        name: getattr(drawn.tensors, name).detach()
        for name in fields
        if getattr(drawn.tensors, name) is not None and getattr(drawn.tensors, name).requires_grad
    }

    def outputs(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tensors = with_tensors(drawn.tensors, **dict(zip(inputs, values, strict=True)))
        result = attention(tensors, drawn.problem)
        assert result.lse is not None and result.entropy is not None and result.weights is not None
        seen = torch.isfinite(result.lse)
        return result.output, result.lse[seen], result.entropy, result.weights

    leaves = [value.clone().requires_grad_() for value in inputs.values()]
    assert torch.autograd.gradcheck(outputs, leaves)


@pytest.mark.parametrize("kind", ["boolean mask", "additive mask"])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_rows_that_see_nothing_are_zero_and_so_are_their_gradients(
    kind: str, with_sinks: bool
) -> None:
    drawn = draw(kind, *(["sinks"] if with_sinks else []), grad=True)
    result = attention(drawn.tensors, drawn.problem)
    assert not result.output[:, :, 0].any()
    assert result.lse is not None and bool((result.lse[:, :, 0] == -math.inf).all())
    assert result.row_max is not None and bool((result.row_max[:, :, 0] == -math.inf).all())
    assert result.entropy is not None and not result.entropy[:, :, 0].any()
    result.output.square().sum().backward()
    gradient = drawn.tensors.query.grad
    assert gradient is not None and bool(torch.isfinite(gradient).all())
    assert not gradient[:, :, 0].any()
    assert gradient[:, :, 1:].any()


def test_a_row_that_only_the_causal_order_hides_is_zero_with_finite_gradients() -> None:
    """Bottom right with more queries than keys leaves the first rows before every key."""
    problem = make_problem(
        len_q=6, len_k=4, is_causal=True, align=Align.BOTTOM_RIGHT, requires_grad=True
    )
    tensors = make_tensors(problem)
    output = attention(tensors, problem).output
    output.sum().backward()
    assert not output[:, :, :2].any()
    assert all(bool(torch.isfinite(x.grad).all()) for x in (tensors.query, tensors.key))


@pytest.mark.parametrize(("len_q", "len_k"), [(0, 4), (4, 0), (0, 0)])
@pytest.mark.parametrize("names", [(), ("sinks",), ("causal",)], ids="+".join)
def test_empty_sequences_give_zeros_of_the_right_shape(
    len_q: int, len_k: int, names: tuple[str, ...]
) -> None:
    options = {key: value for name in names for key, value in SEMANTICS[name].items()}
    problem = make_problem(
        len_q=len_q, len_k=len_k, aux=ALL_AUX, value_dim=3, requires_grad=True, **options
    )
    tensors = make_tensors(problem)
    result = attention(tensors, problem)
    assert result.output.shape == (1, 2, len_q, 3)
    assert not result.output.any()
    assert result.weights is not None and result.weights.shape == (1, 2, len_q, len_k)
    assert result.lse is not None and bool((result.lse == -math.inf).all())
    result.output.sum().backward()
    assert tensors.value.grad is not None and not tensors.value.grad.any()


def test_a_sink_of_minus_infinity_is_no_sink() -> None:
    drawn = draw("sinks")
    off = replace(drawn.tensors, sinks=torch.full((2,), -math.inf, dtype=torch.float64))
    without = replace(drawn.problem, has_sinks=False)
    expected = attention(replace(drawn.tensors, sinks=None), without)
    assert_same_to_fp32(attention(off, drawn.problem), expected)


def test_huge_scores_neither_overflow_nor_lose_the_largest_key() -> None:
    problem = make_problem(len_q=3, len_k=4, scale=1e6, aux=ALL_AUX)
    tensors = make_tensors(problem)
    result = attention(tensors, problem)
    assert bool(torch.isfinite(result.output).all())
    assert result.weights is not None
    best = (tensors.query @ tensors.key.mT).argmax(-1)
    assert torch.equal(result.weights.argmax(-1), best)


def test_not_a_number_in_a_query_reaches_its_row_and_no_other() -> None:
    problem = make_problem(len_q=4, aux=ALL_AUX)
    tensors = make_tensors(problem)
    tensors.query[0, 0, 2, 0] = math.nan
    spoiled = attention(tensors, problem).output.isnan().any(-1)
    expected = torch.zeros_like(spoiled)
    expected[0, 0, 2] = True
    assert torch.equal(spoiled, expected)


def test_dropout_zeroes_weights_and_scales_the_rest_and_spares_the_weights_output() -> None:
    problem = make_problem(
        batch=4, num_heads=4, len_q=64, len_k=64, head_dim=64, dropout_p=0.25, aux=Aux.WEIGHTS
    )
    tensors = make_tensors(problem)
    tensors = with_tensors(tensors, value=torch.eye(64).expand(4, 4, 64, 64))
    result = attention(tensors, problem)
    plain = attention(tensors, replace(problem, dropout_p=0.0)).output
    assert result.weights is not None and torch.equal(result.weights, plain)
    dropped = result.output == 0
    expected = (plain / 0.75).masked_fill(dropped, 0.0)
    assert_matches(result.output, expected.double(), expected)
    spread = math.sqrt(0.25 * 0.75 / dropped.numel())
    assert abs(dropped.double().mean().item() - 0.25) < 6 * spread


def test_outputs_that_nobody_asked_for_are_none() -> None:
    problem = make_problem(aux=Aux.ENTROPY)
    result = attention(make_tensors(problem), problem)
    assert result.entropy is not None
    assert (result.lse, result.row_max, result.weights) == (None, None, None)


def test_the_executor_form_is_the_function_and_claims_every_feature_but_one() -> None:
    problem = make_problem(is_causal=True)
    tensors = make_tensors(problem)
    result = run(tensors, problem, HeadGroup(capability="reference"))
    assert torch.equal(result.output, attention(tensors, problem).output)
    (capability,) = CAPABILITIES
    lacking = [feature for feature in Feature if feature not in capability.features]
    assert lacking == [Feature.BATCH_INVARIANT]
