"""Results of one sequence, bit for bit the same whatever else is in the batch."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import adaattn
from adaattn import (
    AdaAttention,
    AttentionEvent,
    BlockList,
    Policy,
    patch_sdpa,
    plan_attention,
    use_policy,
)
from adaattn import scaled_dot_product_attention as attend
from adaattn.backends import capabilities
from adaattn.errors import (
    ArgumentError,
    ArgumentTypeError,
    ExecutorError,
    PlanError,
    UnsupportedError,
)
from adaattn.planning import decide
from adaattn.spec import (
    AttentionProblem,
    Decision,
    HeadGroup,
    MaskKind,
    Method,
    Plan,
    Precision,
    Scheme,
)
from adaattn.testing import fake_facts, make_problem

INVARIANT = Policy(name="invariant", batch_invariant=True)
X = torch.randn(2, 4, 16, 8)

ASKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "to the end": {"is_causal": True, "align": "bottom_right"},
    "window": {"window": (20, 5)},
    "dilation": {"dilation": 2},
    "softcap": {"softcap": 20.0},
}


@pytest.fixture(autouse=True)
def one_thread_again() -> Iterator[None]:
    """Undo what a test sets."""
    yield
    torch.set_num_threads(1)


@st.composite
def calls(draw: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Draw the sizes of sequences, and what is asked of a call."""
    kv_heads = draw(st.sampled_from((1, 2, 3)))
    sizes = {
        "kv_heads": kv_heads,
        "heads": kv_heads * draw(st.sampled_from((1, 2, 4))),
        "dim": draw(st.sampled_from((1, 5, 20, 64))),
        "dtype": draw(st.sampled_from((torch.float32, torch.bfloat16))),
        "seed": draw(st.integers(0, 9)),
    }
    asked = dict(ASKED[draw(st.sampled_from(sorted(ASKED)))], enable_gqa=True)
    torch.set_num_threads(draw(st.sampled_from((1, 2))))
    return sizes, asked


def drawn(sizes: dict[str, Any], batch: int, len_q: int, len_k: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sizes["seed"])
    shapes = [
        (batch, sizes["heads"], len_q, sizes["dim"]),
        *[(batch, sizes["kv_heads"], len_k, sizes["dim"])] * 2,
    ]
    return [torch.randn(shape, generator=generator).to(sizes["dtype"]) for shape in shapes]


@given(
    call=calls(),
    batch=st.integers(2, 4),
    len_q=st.sampled_from((1, 3, 33, 200)),
    len_k=st.sampled_from((1, 40, 129, 600)),
    mask=st.sampled_from(("none", "keys", "rows", "numbers", "shared")),
    transposed=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_a_sequence_of_a_batch_has_the_bits_that_it_has_alone(
    call: tuple[dict[str, Any], dict[str, Any]],
    batch: int,
    len_q: int,
    len_k: int,
    mask: str,
    transposed: bool,
) -> None:
    sizes, asked = call
    tensors = drawn(sizes, batch, len_q, len_k)
    if transposed:
        tensors = [item.transpose(1, 2).contiguous().transpose(1, 2) for item in tensors]
    if mask != "none":
        if asked.get("is_causal"):
            asked["is_causal"], asked["window"] = False, (-1, 0)
        shape = {"keys": (batch, 1, 1, len_k), "shared": (1, 1, len_q, len_k)}
        seen = torch.rand(shape.get(mask, (batch, 1, len_q, len_k))) < 0.7
        asked["attn_mask"] = torch.randn(seen.shape) if mask == "numbers" else seen
    whole = attend(*tensors, batch_invariant=True, **asked)
    for row in range(batch):
        own = slice(row, row + 1)
        alone = dict(asked)
        if mask in ("keys", "rows", "numbers"):
            alone["attn_mask"] = asked["attn_mask"][own].clone()
        views = [item[own] for item in tensors]
        for parts in (views, [item.clone() for item in views]):
            assert torch.equal(whole[own], attend(*parts, batch_invariant=True, **alone))


def starts_of(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor((0, *itertools.accumulate(lengths)), dtype=torch.int32)


def packed(
    tensors: list[torch.Tensor], lengths: tuple[int, ...], **asked: Any
) -> tuple[torch.Tensor, ...]:
    """Return the result of each packed sequence."""
    starts = starts_of(lengths).to(tensors[0].device)
    output = attend(*tensors, cu_seqlens_q=starts, cu_seqlens_k=starts, **asked)
    return output.split(lengths, dim=2)


@given(call=calls(), lengths=st.lists(st.sampled_from((0, 1, 33, 60, 300)), min_size=2, max_size=5))
@settings(max_examples=60, deadline=None)
def test_a_packed_sequence_has_the_same_bits_whatever_its_neighbours(
    call: tuple[dict[str, Any], dict[str, Any]], lengths: list[int]
) -> None:
    sizes, asked = call
    asked["batch_invariant"] = True
    tensors = drawn(sizes, 1, sum(lengths), sum(lengths))
    whole = packed(tensors, tuple(lengths), **asked)
    apart = [item.split(lengths, dim=2) for item in tensors]
    for n, length in enumerate(lengths):
        (alone,) = packed([parts[n] for parts in apart], (length,), **asked)
        assert torch.equal(whole[n], alone)
    others = [torch.cat((parts[-1], parts[0]), dim=2) for parts in apart]
    swapped = packed(others, (lengths[-1], lengths[0]), **asked)
    assert torch.equal(swapped[0], whole[-1])
    assert torch.equal(swapped[1], whole[0])


@pytest.mark.parametrize("is_invariant", [True, False])
def test_usual_calls_do_depend_on_their_neighbours(is_invariant: bool) -> None:
    """One call of SDPA serves short documents, its mask between them: else nothing is shown."""
    lengths = (40, 50, 33, 60)
    sizes = {"heads": 2, "kv_heads": 2, "dim": 16, "dtype": torch.float32, "seed": 0}
    tensors = drawn(sizes, 1, sum(lengths), sum(lengths))
    whole = packed(tensors, lengths, batch_invariant=is_invariant)
    alone = [
        packed([item.split(lengths, dim=2)[n] for item in tensors], (length,),
               batch_invariant=is_invariant)[0]
        for n, length in enumerate(lengths)
    ]  # fmt: skip
    same = all(torch.equal(a, b) for a, b in zip(whole, alone, strict=True))
    assert same is is_invariant


def test_lists_of_blocks_are_each_sequences_own() -> None:
    listed = torch.rand(3, 2, 3, 3) < 0.5
    x = torch.randn(3, 2, 70, 16)
    asked = {"block_q": 32, "block_k": 32}
    blocks = BlockList.from_mask(listed, **asked)
    whole = attend(x, x, x, blocks=blocks, batch_invariant=True)
    for row in range(3):
        own = slice(row, row + 1)
        alone = BlockList.from_mask(listed[own], **asked)
        got = attend(*[x[own].clone()] * 3, blocks=alone, batch_invariant=True)
        assert torch.equal(whole[own], got)


@pytest.mark.parametrize("aux", ["lse", "row_max", "entropy", "weights"])
def test_statistics_beside_the_result_have_the_same_bits(aux: str) -> None:
    request = adaattn.AuxRequest(**{aux: True})
    x = torch.randn(3, 2, 40, 20)
    _, whole = attend(x, x, x, return_aux=request, batch_invariant=True)
    _, alone = attend(x[2:], x[2:], x[2:], return_aux=request, batch_invariant=True)
    assert torch.equal(getattr(whole, aux)[2:], getattr(alone, aux))


# The choice


def taken(problem: AttentionProblem, machine: str, **policy: Any) -> Decision:
    return decide(problem, None, fake_facts(machine), Policy(**policy), capabilities())


def asked_for(machine: str, **values: Any) -> AttentionProblem:
    device = fake_facts(machine).device_type
    return make_problem(**{"device_type": device, "batch_invariant": True, "len_q": 512} | values)


@pytest.mark.parametrize("machine", ["h200", "a100", "cpu"])
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"precision": Precision.BF16, "head_dim": 128},
        {"precision": Precision.BF16, "len_q": 1, "len_k": 8192, "num_heads": 8, "num_kv_heads": 2},
        {"precision": Precision.BF16, "window": (64, 0), "is_causal": True},
        {"requires_grad": True, "softcap": 20.0},
    ],
    ids=str,
)
def test_the_plan_does_not_depend_on_the_batch(machine: str, values: dict[str, Any]) -> None:
    one = asked_for(machine, **values)
    plan = taken(one, machine).plan
    for default in ("", "sdpa.math", "sdpa.cudnn", "sdpa.flash"):
        many = replace(one, batch=300, sdpa_default=default)
        assert taken(many, machine).plan == plan


TRAINED: dict[str, Any] = {"precision": Precision.BF16, "head_dim": 128, "len_q": 4096,
                           "requires_grad": True}  # fmt: skip


@pytest.mark.parametrize(
    ("machine", "values", "name"),
    [
        ("h200", {"precision": Precision.BF16}, "triton"),
        ("h200", {"precision": Precision.BF16, "head_dim": 128}, "triton"),
        ("h200", {"precision": Precision.BF16, "head_dim": 128, "len_q": 4096}, "hopper"),
        ("h200", {"precision": Precision.BF16, "head_dim": 128, "len_q": 1}, "triton"),
        ("a100", {"precision": Precision.BF16, "head_dim": 128}, "triton"),
        ("h200", {"precision": Precision.FP32, "head_dim": 128}, "triton"),
        ("h200", {"precision": Precision.BF16, "requires_grad": True}, "chunked"),
        ("h200", TRAINED, "hopper"),
        ("h200", TRAINED | {"len_q": 2047}, "chunked"),
        ("h200", TRAINED | {"head_dim": 136}, "chunked"),
        ("h200", TRAINED | {"value_dim": 256}, "chunked"),
        ("h200", TRAINED | {"lengths_q": (4096,)}, "chunked"),
        ("h200", TRAINED | {"mask": MaskKind.ADDITIVE}, "chunked"),
        ("a100", TRAINED, "chunked"),
        ("v100", {"precision": Precision.FP16}, "chunked"),
        ("cpu", {"precision": Precision.BF16}, "chunked"),
    ],
)
def test_the_first_in_order_that_declares_it_runs(
    machine: str, values: dict[str, Any], name: str
) -> None:
    decision = taken(asked_for(machine, **values), machine)
    assert decision.plan.groups[0].capability == name
    (entry,) = [it for it in decision.trace if it.accepted]
    assert "the first in a fixed order whose results do not depend on the batch" in entry.reason
    assert decision.later is None


PACKED_SIZES = {"head_dim": 128, "precision": Precision.BF16, "is_causal": True}


@pytest.mark.parametrize("lengths", [(1,), (1, 5000), (700, 40, 9), (2,) * 300], ids=len)
@pytest.mark.parametrize("layout", [(False, 1), (True, 16), (True, 4)], ids=str)
def test_no_neighbour_and_no_layout_has_a_say_in_the_executor(
    lengths: tuple[int, ...], layout: tuple[bool, int]
) -> None:
    """Alone a sequence may lie in memory otherwise than beside others."""
    sizes = PACKED_SIZES | {"dense_columns": layout[0], "stride_bytes": layout[1]}
    problem = make_problem(lengths_q=lengths, device_type="cuda", batch_invariant=True, **sizes)
    assert taken(problem, "h200").plan.groups[0].capability == "triton"
    alone = tuple(it for it in capabilities() if it.name == "hopper")
    assert decide(problem, None, fake_facts("h200"), Policy(), alone).plan.is_exact


def test_who_stands_behind_is_said_to() -> None:
    decision = taken(asked_for("h200", precision=Precision.BF16), "h200")
    reasons = {it.candidate: it.reason for it in decision.trace}
    assert "behind triton/bf16 in the fixed order" in reasons["chunked/bf16"]
    assert "results that do not depend on the rest of the batch" in reasons["sdpa.flash2/bf16"]


def test_nothing_takes_the_place_of_what_has_too_little_memory() -> None:
    """A smaller batch would have fit, and have been computed by it."""
    problem = asked_for("h200", batch=4, len_q=4096)
    with pytest.raises(PlanError, match="triton/fp32: expected at most 1 byte of workspace"):
        taken(problem, "h200", memory_budget_bytes=1)


def test_rows_of_a_chunk_follow_one_sequence() -> None:
    one = asked_for("cpu", len_q=4096, softcap=20.0, num_heads=16)
    plans = [taken(replace(one, batch=batch), "cpu").plan for batch in (1, 64)]
    usual = [taken(replace(one, batch=batch, batch_invariant=False), "cpu") for batch in (1, 64)]
    assert plans[0] == plans[1]
    assert usual[0].plan != usual[1].plan, "else this says nothing"


# Who asks, and what contradicts it


def test_a_policy_asks_for_it_wherever_policies_go(events: list[AttentionEvent]) -> None:
    tensors = torch.randn(2, 8, 16)
    with use_policy(INVARIANT):
        attend(X, X, X)
        with patch_sdpa():
            F.scaled_dot_product_attention(X, X, X)
    AdaAttention(16, 2, policy=INVARIANT)(tensors)
    attend(X, X, X, policy=INVARIANT)
    assert [event.problem.batch_invariant for event in events] == [True] * 4
    assert {event.decision.plan.groups[0].capability for event in events} == {"chunked"}
    attend(X, X, X)
    assert not events[-1].problem.batch_invariant


def test_a_policy_that_asks_for_it_survives_its_file(tmp_path: Any) -> None:
    adaattn.save_policy(INVARIANT, tmp_path / "policy.json")
    assert adaattn.load_policy(tmp_path / "policy.json") == INVARIANT


def test_a_call_that_asks_for_it_is_exact_under_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    # A machine that computes bf16: on others no lower precision is a candidate.
    facts = fake_facts("cpu_amx")
    monkeypatch.setattr("adaattn.hardware.probe", lambda device: facts)
    x = torch.randn(1, 4, 512, 64)
    decision = plan_attention(x, x, x, policy="speed", batch_invariant=True)
    assert decision.plan.is_exact
    said = {it.candidate: it.reason for it in decision.trace}
    assert "results that do not depend" in said["low_rank/fp32"]
    assert "measured on the whole batch" in said["chunked/bf16"]
    exact = attend(x, x, x, batch_invariant=True)
    assert torch.equal(attend(x, x, x, policy="speed", batch_invariant=True), exact)


def test_a_policy_cannot_ask_for_it_and_allow_errors() -> None:
    with pytest.raises(ArgumentError, match="error budgets with batch_invariant=True: expected 0"):
        Policy(error_budget=0.01, batch_invariant=True)
    with pytest.raises(ArgumentTypeError, match="batch_invariant: expected True or False"):
        Policy(batch_invariant="no")  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["sdpa.flash", "sdpa.math", "reference", "unfused", "low_rank"])
def test_an_executor_that_cannot_is_refused_by_name(backend: str) -> None:
    with pytest.raises(UnsupportedError, match="do not depend on the rest of the batch"):
        attend(X, X, X, backend=backend, batch_invariant=True)


def test_a_given_plan_is_held_to_it() -> None:
    usual = plan_attention(X, X, X).plan
    with pytest.raises(UnsupportedError, match="do not depend on the rest of the batch"):
        attend(X, X, X, plan=usual, batch_invariant=True)
    own = plan_attention(X, X, X, batch_invariant=True).plan
    assert torch.equal(
        attend(X, X, X, plan=own, batch_invariant=True), attend(X, X, X, batch_invariant=True)
    )
    lower = HeadGroup(capability="chunked", scheme=Scheme.of(Precision.BF16))
    lossy = Plan(groups=(lower,), num_heads=4, error_budget=0.1)
    with pytest.raises(UnsupportedError, match="audited on the whole batch"):
        attend(X, X, X, plan=lossy, batch_invariant=True)


def test_what_draws_or_sizes_for_all_of_the_batch_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"dropout_p with batch_invariant=True: expected 0\.0"):
        attend(X, X, X, dropout_p=0.1, batch_invariant=True)
    starts = starts_of((10, 6))
    budget = Policy(memory_budget_bytes=1 << 30)
    with pytest.raises(ArgumentError, match="memory budget of batch-invariant packed sequences"):
        attend(
            X[:1], X[:1], X[:1], cu_seqlens_q=starts, cu_seqlens_k=starts, policy=budget,
            batch_invariant=True,
        )  # fmt: skip
    with pytest.raises(ArgumentTypeError, match="batch_invariant: expected True or False"):
        attend(X, X, X, batch_invariant="False")  # type: ignore[arg-type]


def test_transforms_are_refused_which_hide_what_is_in_the_batch() -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        return attend(x, x, x, batch_invariant=True)

    call(X[0])
    with pytest.raises(ExecutorError, match=r"torch\.func"):
        torch.func.vmap(call)(X)


@pytest.mark.parametrize("policy", [None, INVARIANT])
def test_a_graph_is_refused_whose_products_follow_the_batch(policy: Policy | None) -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        return attend(x, x, x, policy=policy, batch_invariant=policy is None)

    graph = torch.compile(call, backend="eager")
    with pytest.raises(UnsupportedError, match=r"torch\.compile with batch_invariant"):
        graph(X)


def test_what_fails_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another executor has other bits, and with less in the batch this one would have run."""

    def fails(*given: Any) -> None:
        raise torch.OutOfMemoryError("the memory is full")

    known = adaattn.backends.registry._KNOWN["chunked"]._replace(run=fails)
    monkeypatch.setitem(adaattn.backends.registry._KNOWN, "chunked", known)
    with pytest.raises(torch.OutOfMemoryError, match="the memory is full"):
        attend(X, X, X, batch_invariant=True)


def test_gradients_of_each_sequence_are_its_own() -> None:
    x = torch.randn(3, 2, 40, 20, requires_grad=True)
    attend(x, x, x, is_causal=True, batch_invariant=True).square().sum().backward()
    one = x.detach()[1:2].clone().requires_grad_()
    attend(one, one, one, is_causal=True, batch_invariant=True).square().sum().backward()
    assert x.grad is not None and one.grad is not None
    assert torch.equal(x.grad[1:2], one.grad)


def test_who_declares_it_is_exact() -> None:
    declared = [it for it in capabilities() if adaattn.spec.Feature.BATCH_INVARIANT in it.features]
    assert {it.name for it in declared} == {"hopper", "triton", "chunked"}
    assert all(it.method is Method.EXACT for it in declared)


# On a card


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "asked",
    [
        {"len_q": 1, "len_k": 5000, "enable_gqa": True},
        {"len_q": 700, "len_k": 700, "is_causal": True},
        {"len_q": 300, "len_k": 300, "window": (100, 0), "softcap": 20.0},
        {"len_q": 33, "len_k": 90, "has_mask": True},
        {"len_q": 333, "len_k": 512, "has_mask": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("batch", [2, 70])
def test_on_a_gpu_too(dtype: torch.dtype, asked: dict[str, Any], batch: int) -> None:
    asked = dict(asked)
    len_q, len_k = asked.pop("len_q"), asked.pop("len_k")
    masked = asked.pop("has_mask", False)
    query = torch.randn(batch, 8, len_q, 64, device="cuda", dtype=dtype)
    heads = 2 if "enable_gqa" in asked else 8
    key, value = torch.randn(2, batch, heads, len_k, 64, device="cuda", dtype=dtype)
    mask = torch.rand(batch, 1, 1, len_k, device="cuda") < 0.7 if masked else None
    whole = attend(query, key, value, mask, batch_invariant=True, **asked)
    for row in {0, batch // 2, batch - 1}:
        own = slice(row, row + 1)
        parts = [None if it is None else it[own].clone() for it in (query, key, value, mask)]
        assert torch.equal(attend(*parts, batch_invariant=True, **asked), whole[own])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [8, 2, 3])
def test_packed_on_a_gpu_too(dtype: torch.dtype, heads: int) -> None:
    lengths = (1, 700, 40, 0, 129, 2000)
    sizes = {"heads": 24, "kv_heads": heads, "dim": 64, "dtype": dtype, "seed": 0}
    tensors = [item.cuda() for item in drawn(sizes, 1, sum(lengths), sum(lengths))]
    asked = {"is_causal": True, "enable_gqa": True, "batch_invariant": True}
    whole = packed(tensors, lengths, **asked)
    for n, length in enumerate(lengths):
        parts = [item.split(lengths, dim=2)[n].clone() for item in tensors]
        if length:
            (alone,) = packed(parts, (length,), **asked)
            assert torch.equal(alone, whole[n])
