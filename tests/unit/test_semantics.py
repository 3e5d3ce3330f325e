"""Every executor of this device, on every problem that it says it can serve, against the oracle.

The matrix is computed at collection: a capability and a problem meet where
`adaattn.planning.support.reasons` finds nothing against it. Approximating methods run with
nothing left out (full rank, every block), where they must be exact.
"""

import itertools
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch

from adaattn._dtypes import torch_dtype
from adaattn.backends import capabilities, execute
from adaattn.backends.interface import Result, Tensors
from adaattn.hardware.probe import describe
from adaattn.planning.simplify import simplify
from adaattn.planning.support import needed_features, reasons
from adaattn.spec import (
    METHODS,
    Align,
    AttentionProblem,
    Aux,
    BlockSparse,
    Capability,
    Feature,
    HeadGroup,
    HeadTerm,
    Launch,
    LowRank,
    MaskKind,
    Method,
    Plan,
    Precision,
    Scheme,
)
from adaattn.testing import (
    Layout,
    assert_gradients_match,
    assert_matches,
    assert_results_match,
    attention,
    cast_tensors,
    gradients_of,
    make_problem,
    make_tensors,
    num_summands,
    term_sizes,
    with_tensors,
)

DEVICES = ("cpu", *(["cuda"] if torch.cuda.is_available() else []))
HARDWARE = {device: describe(device) for device in DEVICES}
PRECISIONS = (Precision.FP32, Precision.FP64, Precision.BF16, Precision.FP16)
HALVES = (Precision.BF16, Precision.FP16)
ALL_AUX = Aux.LSE | Aux.ROW_MAX | Aux.ENTROPY | Aux.WEIGHTS

SEMANTICS: dict[str, dict[str, Any]] = {
    "dense": {},
    "causal": {"is_causal": True},
    "causal wide": {"is_causal": True, "len_k": 47},
    "causal tall": {"is_causal": True, "len_k": 21},
    "bottom right wide": {"is_causal": True, "align": Align.BOTTOM_RIGHT, "len_k": 47},
    "bottom right tall": {"is_causal": True, "align": Align.BOTTOM_RIGHT, "len_k": 21},
    "window": {"window": (5, 3)},
    "left window": {"window": (5, -1)},
    "right window": {"window": (-1, 4)},
    "dilation": {"dilation": 3},
    "boolean mask": {"mask": MaskKind.BOOLEAN},
    "boolean mask with hidden rows": {"mask": MaskKind.BOOLEAN, "num_hidden_rows": 2},
    "additive mask": {"mask": MaskKind.ADDITIVE},
    "additive mask with hidden rows": {"mask": MaskKind.ADDITIVE, "num_hidden_rows": 2},
    "negative scale, causal": {"is_causal": True, "scale": -0.3},
    "zero scale, causal": {"is_causal": True, "scale": 0.0},
    "mask over keys": {"mask": MaskKind.BOOLEAN, "mask_shape": (1, 1, 1, 33), "len_k": 33},
    "mask over heads": {"mask": MaskKind.ADDITIVE, "mask_shape": (1, 4, 1, 1), "num_heads": 4},
    "batch-invariant": {"batch": 2, "batch_invariant": True},
    "batch-invariant, causal": {"batch": 2, "batch_invariant": True, "is_causal": True},
    "batch-invariant mask": {
        "batch": 2,
        "batch_invariant": True,
        "mask": MaskKind.BOOLEAN,
        "window": (9, 4),
    },
    "softcap": {"softcap": 1.5},
    # What one number would say is given, too: no pair says it twice.
    "scale of each head": {"head_terms": HeadTerm.SCALE, "scale": 1.0},
    "window of each head": {"head_terms": HeadTerm.WINDOW, "window": (-1, -1)},
    "softcap of each head": {"head_terms": HeadTerm.SOFTCAP, "softcap": 0.0},
    "sinks": {"has_sinks": True},
    "alibi": {"has_alibi": True},
    "grouped heads": {"num_heads": 4, "num_kv_heads": 2},
    "one kv head": {"num_heads": 4, "num_kv_heads": 1},
    "wide values": {"value_dim": 40},
    "narrow values": {"value_dim": 5},
    "packed": {"lengths_q": (9, 0, 17, 1)},
    "packed, batch-invariant": {"lengths_q": (9, 0, 17, 1), "batch_invariant": True},
    "packed wide": {"lengths_q": (3, 8, 0, 5), "lengths_k": (7, 8, 2, 0)},
    "blocks": {"block_size": (16, 16)},
    "causal blocks": {"block_size": (32, 16), "is_causal": True},
    "blocks of other sizes": {"block_size": (5, 7), "len_q": 33, "len_k": 40},
    "dropped mass": {"block_size": (16, 16), "aux": Aux.DROPPED_MASS, "has_sinks": True},
    "room for one block": {"block_size": (16, 16), "len_k": 47, "most_blocks": 1},
    "lse": {"aux": Aux.LSE},
    "row maximum": {"aux": Aux.ROW_MAX},
    "entropy": {"aux": Aux.ENTROPY},
    "weights": {"aux": Aux.WEIGHTS},
    "all outputs": {"aux": ALL_AUX},
    "deterministic": {"deterministic": True},
    "default door": {"sdpa_default": "sdpa.flash"},
}
ALIGNED: dict[str, Any] = {"head_dim": 64, "value_dim": 64, "dense_columns": True}
ALIGNED |= {"stride_bytes": 16}
"""What kernels that copy by TMA take, on a GPU."""

WIDE: dict[str, Any] = {"head_dim": 320, "value_dim": 320}
"""What kernels of large head dimensions are for, on a GPU, and low rank by sketches."""

SIDES = itertools.product((1, 3, 63, 100), repeat=2)
SHAPES: dict[str, dict[str, Any]] = {
    **{f"{len_q} by {len_k}": {"len_q": len_q, "len_k": len_k} for len_q, len_k in SIDES},
    **{f"dim {dim}": {"head_dim": dim} for dim in (1, 3, 20, 64, 96, 128, 256, 300)},
    "transposed": {"layout": Layout.TRANSPOSED},
    "strided": {"layout": Layout.STRIDED},
    "scale": {"scale": 0.7},
    "no queries": {"len_q": 0, "len_k": 5},
    "no keys": {"len_q": 5, "len_k": 0},
    "nothing at all": {"len_q": 0, "len_k": 0},
    "empty batch": {"batch": 0},
}
DECODE: dict[str, Any] = {"len_q": 1, "len_k": 100, "align": Align.BOTTOM_RIGHT, "is_causal": True}
GROUPS: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2}
MASKED_DECODE = DECODE | {
    "is_causal": False,
    "mask": MaskKind.BOOLEAN,
    "mask_shape": (2, 1, 1, 100),
}
COMBINED: dict[str, dict[str, Any]] = {
    "decode": DECODE,
    "grouped decode": DECODE | GROUPS,
    "grouped decode of few rows": GROUPS | {"len_q": 3, "len_k": 100},
    "grouped decode over a masked cache": MASKED_DECODE | GROUPS,
    "grouped decode with a bias of keys": MASKED_DECODE | GROUPS | {"mask": MaskKind.ADDITIVE},
    "grouped decode with a bias of heads": MASKED_DECODE
    | GROUPS
    | {"mask": MaskKind.ADDITIVE, "mask_shape": (1, 8, 1, 100)},
    "grouped decode of few rows over a masked cache": MASKED_DECODE | GROUPS | {"len_q": 3},
    "grouped decode of few rows with masks of their own": MASKED_DECODE
    | GROUPS
    | {"len_q": 3, "mask_shape": (1, 1, 3, 100)},
    "grouped decode with values of another size": DECODE | GROUPS | {"value_dim": 40},
    "grouped decode, deterministic": DECODE | GROUPS | {"deterministic": True},
    "decode over listed blocks": DECODE | GROUPS | {"block_size": (16, 32)},
    "listed blocks in a window": GROUPS | {"block_size": (16, 16), "window": (20, -1)},
    "listed blocks, scale below 0": {"block_size": (16, 16), "is_causal": True, "scale": -0.3},
    "decode in a window": DECODE | GROUPS | {"window": (20, -1)},
    "window over more keys": {"window": (5, 3), "len_k": 47},
    "left window over fewer keys": {"window": (5, -1), "len_k": 21},
    "window at the end of more keys": {
        "window": (5, 3),
        "len_k": 47,
        "align": Align.BOTTOM_RIGHT,
    },
    "row in a window from the first key": {"len_q": 1, "len_k": 47, "window": (5, 3)},
    "decode with sinks": DECODE | GROUPS | {"has_sinks": True},
    "grouped decode with numbers of each head": DECODE | GROUPS | {"head_terms": HeadTerm(7)},
    "decode over a masked cache": MASKED_DECODE,
    "decode with statistics": DECODE | {"aux": ALL_AUX},
    "sinks over hidden rows": {"has_sinks": True, "aux": ALL_AUX, "mask": MaskKind.BOOLEAN}
    | {"num_hidden_rows": 2},
}
WIDE_MASKS: dict[str, dict[str, Any]] = {
    "wide additive mask": {},
    "wide additive mask with hidden rows": {"num_hidden_rows": 2},
    "wide additive mask over keys": {"mask_shape": (1, 1, 1, 33), "len_k": 33},
    "wide additive mask and softcap": {"softcap": 1.5},
}
DROPOUT: dict[str, dict[str, Any]] = {
    "dropout": {"len_q": 32},
    "dropout, causal": {"len_q": 32, "is_causal": True},
    "dropout, softcap and sinks": {"len_q": 32, "softcap": 2.0, "has_sinks": True},
    "dropout over listed blocks": {"len_q": 32, "block_size": (16, 16)},
    "dropout, grouped decode": {"len_q": 4, "num_heads": 16, "num_kv_heads": 4},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One problem of the matrix, and what its tensors are like."""

    name: str
    problem: AttentionProblem
    lengths_q: tuple[int, ...] = ()
    lengths_k: tuple[int, ...] = ()
    layout: Layout = Layout.CONTIGUOUS
    num_hidden_rows: int = 0

    def tensors(self) -> Tensors:
        """Return fresh tensors, equal each time."""
        return make_tensors(
            self.problem,
            lengths_q=self.lengths_q,
            lengths_k=self.lengths_k,
            layout=self.layout,
            num_hidden_rows=self.num_hidden_rows,
        )


def make_cases(name: str, options: dict[str, Any], precision: Precision) -> list[Case]:
    """Return the case forward only, with gradients for q, k and v, and with all gradients."""
    values = {"batch": 2, "num_heads": 2, "len_q": 33, "head_dim": 16} | options
    about = {
        key: values.pop(key)
        for key in ("lengths_q", "lengths_k", "layout", "num_hidden_rows")
        if key in values
    }
    lengths = {key: about[key] for key in ("lengths_q", "lengths_k") if key in about}
    if lengths:
        values["batch"] = 1
    every = {
        "requires_grad": True,
        "mask_requires_grad": values.get("mask") is MaskKind.ADDITIVE,
        "sinks_require_grad": values.get("has_sinks", False),
        "alibi_requires_grad": values.get("has_alibi", False),
        "head_terms_require_grad": values.get("head_terms", 0) not in (0, HeadTerm.WINDOW),
    }
    levels = {"forward": {}, "gradients": {"requires_grad": True}, "every gradient": every}
    found = {}
    for (level, wanted), device in itertools.product(levels.items(), DEVICES):
        problem = make_problem(
            **values, **lengths, **wanted, precision=precision, device_type=device
        )
        label = f"{name}, {precision.label}, {level}, {device}"
        found.setdefault(problem, Case(name=label, problem=problem, **about))
    return list(found.values())


def all_cases() -> list[Case]:
    """Return every case: semantics alone in each dtype, then pairs, shapes, decoding."""
    cases = []
    for (name, options), precision in itertools.product(SEMANTICS.items(), PRECISIONS):
        cases += make_cases(name, options, precision)
    for (first, one), (second, other) in itertools.combinations(SEMANTICS.items(), 2):
        both = {*one, *other}
        fits = "lengths_q" not in both or not both & {"len_k", "mask_shape", "block_size"}
        if one and other and fits and len(both) == len(one) + len(other):
            cases += make_cases(f"{first} + {second}", one | other, Precision.FP32)[-1:]
    for (name, options), is_causal in itertools.product(SHAPES.items(), (False, True)):
        kind = f"{name}{', causal' * is_causal}"
        cases += make_cases(kind, options | {"is_causal": is_causal}, Precision.FP32)
        cases += make_cases(kind, options | {"is_causal": is_causal}, Precision.BF16)[:1]
    for (name, options), precision in itertools.product(COMBINED.items(), PRECISIONS):
        cases += make_cases(name, options, precision)
    for (name, options), precision in itertools.product(WIDE_MASKS.items(), HALVES):
        wide = {"mask": MaskKind.ADDITIVE, "mask_is_wide": True}
        cases += make_cases(name, wide | options, precision)
    for (name, options), precision in itertools.product(SEMANTICS.items(), HALVES):
        if "cuda" in DEVICES:
            aligned = options | ALIGNED | ({"value_dim": 72} if "value_dim" in options else {})
            cases += make_cases(f"{name}, aligned", aligned, precision)[: len(DEVICES)]
    for (name, options), precision in itertools.product(SEMANTICS.items(), PRECISIONS):
        wide = options | WIDE | ({"value_dim": 264} if "value_dim" in options else {})
        made = make_cases(f"{name}, wide", wide, precision)
        on_gpu = [case for case in made if case.problem.device_type == "cuda"]
        cases += on_gpu or made[:1]
    return cases


def dropout_cases() -> list[Case]:
    """Return the cases with dropout; keys, columns of k and columns of v are equally many."""
    cases = []
    for name, options in DROPOUT.items():
        dims = {"head_dim": 32, "len_k": 32, "num_heads": 8, "dropout_p": 0.25}
        cases += make_cases(name, dims | options, Precision.FP32)[-len(DEVICES) :]
    return cases


def groups_for(capability: Capability, problem: AttentionProblem) -> list[HeadGroup]:
    """Return the ways to run a capability with nothing left out."""
    group = HeadGroup(
        capability=capability.name,
        method=METHODS[capability.method](),
        scheme=Scheme.of(problem.precision),
    )
    if capability.method is Method.LOW_RANK:
        return [replace(group, method=LowRank(rank=problem.head_dim, value_rank=problem.value_dim))]
    if capability.method is Method.BLOCK_SPARSE:
        return [replace(group, method=BlockSparse(block_size=16, kept_mass=1.0))]
    if capability.backend in ("chunked", "streamed"):
        return [group, replace(group, launch=Launch(chunk_rows=7))]
    return [group]


def serves(capability: Capability, problem: AttentionProblem) -> bool:
    """Return whether a capability has nothing against a problem."""
    hardware = HARDWARE[problem.device_type]
    return not reasons(capability, simplify(problem), hardware)


@dataclass(frozen=True, slots=True)
class Meeting:
    """A case and one executor that serves it."""

    case: Case
    group: HeadGroup

    def __str__(self) -> str:
        """Return the test's id."""
        rows = f"/{self.group.launch.chunk_rows} rows" if self.group.launch.chunk_rows else ""
        return f"{self.group.capability}{rows}: {self.case.name}"


def meetings(cases: list[Case]) -> list[Meeting]:
    """Return every pair of a case and a way to run it."""
    return [
        Meeting(case, group)
        for capability in capabilities()
        for case in cases
        if serves(capability, case.problem)
        for group in groups_for(capability, case.problem)
    ]


def as_parameters(found: list[Meeting]) -> list[Any]:
    """Return the meetings as test parameters, those on a GPU marked so."""
    marks = {"cpu": (), "cuda": pytest.mark.gpu}
    return [pytest.param(item, marks=marks[item.case.problem.device_type]) for item in found]


CASES = all_cases()
DROPOUT_CASES = dropout_cases()
MATRIX = meetings(CASES)
DROPOUT_MATRIX = meetings(DROPOUT_CASES)
RUNNABLE = [
    capability
    for capability in capabilities()
    if not capability.unavailable and set(capability.device_types) & set(DEVICES)
]


@dataclass(frozen=True, slots=True)
class Expected:
    """What the oracle and eager PyTorch make of a case."""

    exact: Result
    eager: Result
    exact_gradients: dict[str, torch.Tensor]
    eager_gradients: dict[str, torch.Tensor]
    sizes: dict[str, torch.Tensor]


@cache
def expected(case: Case) -> Expected:
    """Return the oracle's numbers, and the yardstick's."""
    inputs = case.tensors()
    wide = cast_tensors(inputs, torch.float64)
    exact = attention(wide, case.problem)
    dtype = torch_dtype(case.problem.precision)
    eager = attention(inputs, case.problem, compute_dtype=dtype)
    return Expected(
        exact=exact,
        eager=eager,
        exact_gradients=gradients_of(exact, wide),
        eager_gradients=gradients_of(eager, inputs),
        sizes=term_sizes(inputs, case.problem),
    )


def run(meeting: Meeting, tensors: Tensors) -> Result:
    """Return what the executor makes of the tensors."""
    problem = meeting.case.problem
    plan = Plan(groups=(meeting.group,), num_heads=problem.num_heads)
    return execute(tensors, simplify(problem), plan)


@pytest.mark.parametrize("meeting", as_parameters(MATRIX), ids=str)
def test_the_executor_computes_what_the_oracle_defines(meeting: Meeting) -> None:
    problem = meeting.case.problem
    wanted = expected(meeting.case)
    tensors = meeting.case.tensors()
    result = run(meeting, tensors)
    summands = num_summands(problem, result.output)
    assert_results_match(result, wanted.exact, wanted.eager, summands=summands)
    gradients = gradients_of(result, tensors)
    assert_gradients_match(
        gradients,
        wanted.exact_gradients,
        wanted.eager_gradients,
        sizes=wanted.sizes,
        problem=problem,
    )
    if problem.deterministic and gradients:
        again = gradients_of(run(meeting, tensors), tensors)
        assert all(torch.equal(gradients[name], again[name]) for name in gradients)


@pytest.mark.parametrize("meeting", as_parameters(DROPOUT_MATRIX), ids=str)
def test_dropout_drops_its_share_and_scales_what_it_keeps(meeting: Meeting) -> None:
    """With v the identity the output shows which weights were dropped."""
    problem = meeting.case.problem
    kept_share = 1 - problem.dropout_p
    tensors = meeting.case.tensors()
    identity = torch.eye(problem.len_k, device=problem.device_type)
    value = identity.expand(tensors.value.shape).contiguous().requires_grad_()
    tensors = with_tensors(tensors, value=value)
    output = run(meeting, tensors).output
    kept = (output != 0).detach()

    def weights_of(inputs: Tensors) -> torch.Tensor:
        asked = replace(problem, dropout_p=0.0, aux=Aux.WEIGHTS)
        weights = attention(inputs, asked).weights
        assert weights is not None
        return weights

    def with_the_same_dropped(inputs: Tensors) -> Result:
        group_value = inputs.value.repeat_interleave(problem.group_size, dim=1)
        return Result(output=(weights_of(inputs) * kept / kept_share) @ group_value)

    wide = cast_tensors(tensors, torch.float64)
    exact, eager = with_the_same_dropped(wide), with_the_same_dropped(tensors)
    summands = num_summands(problem, output)
    assert_matches(output, exact.output, eager.output, name="output", summands=summands)
    assert_gradients_match(
        gradients_of(Result(output=output), tensors),
        gradients_of(exact, wide),
        gradients_of(eager, tensors),
        sizes=term_sizes(tensors, problem),
        problem=problem,
    )

    seen = weights_of(tensors) > 0
    dropped = (seen & ~kept).sum() / seen.sum()
    six_sigma = 6 * (problem.dropout_p * kept_share / int(seen.sum())) ** 0.5
    assert abs(float(dropped) - problem.dropout_p) < six_sigma


@pytest.mark.parametrize("capability", RUNNABLE, ids=lambda capability: capability.name)
def test_each_feature_that_a_capability_claims_is_exercised(capability: Capability) -> None:
    used = Feature(0)
    for meeting in MATRIX + DROPOUT_MATRIX:
        if meeting.group.capability == capability.name:
            for feature, _ in needed_features(simplify(meeting.case.problem)):
                used |= feature
    assert not capability.features & ~used, f"never exercised: {capability.features & ~used!r}"


@pytest.mark.parametrize("capability", RUNNABLE, ids=lambda capability: capability.name)
def test_each_dtype_that_a_capability_claims_is_exercised(capability: Capability) -> None:
    used = {
        meeting.group.scheme.inputs
        for meeting in MATRIX
        if meeting.group.capability == capability.name
    }
    assert used == set(capability.precisions)


def test_every_case_is_served_by_an_executor_other_than_the_oracle() -> None:
    served = {m.case for m in MATRIX + DROPOUT_MATRIX if m.group.capability != "reference"}
    assert [case.name for case in CASES + DROPOUT_CASES if case not in served] == []


def test_heads_shared_out_among_executors_give_the_same_result() -> None:
    options = {
        "num_heads": 4, "num_kv_heads": 2, "has_sinks": True, "has_alibi": True,
        "is_causal": True, "mask": MaskKind.ADDITIVE, "aux": ALL_AUX,
    }  # fmt: skip
    case = make_cases("shared heads", options, Precision.FP32)[-1]
    groups = (
        HeadGroup(capability="reference", heads=(3, 0)),
        HeadGroup(capability="chunked", heads=(1, 2), launch=Launch(chunk_rows=7)),
    )
    tensors = case.tensors()
    result = execute(tensors, simplify(case.problem), Plan(groups=groups, num_heads=4))
    wanted = expected(case)
    summands = num_summands(case.problem, result.output)
    assert_results_match(result, wanted.exact, wanted.eager, summands=summands)
    assert_gradients_match(
        gradients_of(result, tensors),
        wanted.exact_gradients,
        wanted.eager_gradients,
        sizes=wanted.sizes,
        problem=case.problem,
    )
