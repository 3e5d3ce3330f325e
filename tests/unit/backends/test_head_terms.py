"""Scale, window and softcap of each head: each is a call of its own, whoever computes them."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import adaattn
from adaattn import scaled_dot_product_attention as attend
from adaattn.backends import capabilities, load, slice_heads
from adaattn.backends.head_terms import HeadTerms
from adaattn.call import bound
from adaattn.call.bind import bound_calls
from adaattn.errors import (
    AdaAttnError,
    ArgumentError,
    ArgumentTypeError,
    DeviceError,
    DTypeError,
    ShapeError,
    UnsupportedError,
)
from adaattn.planning import decide
from adaattn.spec import Decision, HeadGroup, HeadTerm, Plan, Precision, Scheme
from adaattn.testing import (
    assert_matches,
    fake_facts,
    make_problem,
    make_tensors,
    num_summands,
)

INTERPRETED = [] if torch.cuda.is_available() else ["triton"]
HEADS = 4
NUMBERS: dict[str, torch.Tensor] = {
    "scale": torch.tensor([0.1, 0.5, -0.2, 1.0]),
    "window": torch.tensor([[3, 0], [-1, -1], [70, 2], [0, -1]]),
    "softcap": torch.tensor([0.0, 5.0, 0.0, 2.0]),
}
TERMS: dict[str, dict[str, Any]] = {
    **{name: {name: numbers} for name, numbers in NUMBERS.items()},
    "all": NUMBERS,
    "scale beside a window": {"scale": NUMBERS["scale"], "window": (9, 1)},
    "window beside a softcap": {"window": NUMBERS["window"], "softcap": 3.0},
}
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "bottom right": {"is_causal": True, "align": "bottom_right"},
    "ALiBi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.05])},
    "packed": {
        "is_causal": True,
        "cu_seqlens_q": torch.tensor([0, 9, 40], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 9, 40], dtype=torch.int32),
    },
}


@pytest.fixture(autouse=True)
def fresh_graphs() -> None:
    torch._dynamo.reset()


def draw(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, HEADS, 40, 16), (1, 2, 40, 16), (1, 2, 40, 16))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def alone(tensors: list[torch.Tensor], **keywords: Any) -> torch.Tensor:
    """Return the heads, each computed by a call of its own with its own numbers."""
    query, key, value = tensors
    outputs = []
    for head in range(HEADS):
        own = dict(keywords)
        for name in NUMBERS.keys() & own.keys():
            if isinstance(own[name], torch.Tensor):
                own[name] = own[name][head].tolist()
        if "alibi_slopes" in own:
            own["alibi_slopes"] = own["alibi_slopes"][head : head + 1]
        kv = slice(head // 2, head // 2 + 1)
        part = query[:, head : head + 1], key[:, kv], value[:, kv]
        outputs.append(attend(*part, backend="reference", **own))
    return torch.cat(outputs, dim=1)


def check(found: torch.Tensor, tensors: list[torch.Tensor], **keywords: Any) -> None:
    """Hold a result against heads computed alone, in fp64; those in its own dtype measure."""
    exact = alone([item.double() for item in tensors], **keywords)
    assert_matches(found, exact, alone(tensors, **keywords), summands=sum(tensors[0].shape[-2:]))


@pytest.mark.parametrize("backend", ["auto", "chunked", "reference"])
@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("name", CALLS)
def test_each_head_is_a_call_of_its_own(name: str, terms: str, backend: str) -> None:
    tensors, keywords = draw(), CALLS[name] | TERMS[terms]
    for _ in range(3):  # described, bound, and found again
        found = attend(*tensors, backend=backend, enable_gqa=True, **keywords)
        check(found, tensors, **keywords)


@pytest.mark.parametrize("executor", ["reference", "chunked", *INTERPRETED])
@pytest.mark.parametrize("len_q", [1, 7, 70])
def test_a_head_alone_is_what_it_is_among_others(executor: str, len_q: int) -> None:
    groups = {"num_heads": 6, "num_kv_heads": 2, "len_q": len_q, "len_k": 90}
    problem = make_problem(**groups, head_terms=HeadTerm(7), is_causal=True)
    tensors = make_tensors(problem)
    group = HeadGroup(capability=executor, scheme=Scheme.of(problem.precision))
    together = load(executor)(tensors, problem, group).output
    for heads in ((0, 1, 2), (3, 4, 5), (1, 4)):
        part, own = slice_heads(tensors, problem, heads)
        found = load(executor)(part, own, group).output
        exact = load("reference")(part, own, group).output.double()
        rows = together[:, list(heads)]
        assert_matches(rows, exact, found, summands=num_summands(own, found))


def test_numbers_that_change_in_place_are_noticed() -> None:
    tensors, scale = draw(), NUMBERS["scale"].clone()
    attend(*tensors, enable_gqa=True, scale=scale)
    count = bound_calls()
    scale.fill_(0.3)
    found = attend(*tensors, enable_gqa=True, scale=scale)
    other = attend(*tensors, enable_gqa=True, scale=torch.full((HEADS,), 0.3))
    assert bound_calls() == count
    assert torch.equal(found, other)
    check(found, tensors, scale=0.3)
    scale[2] = float("inf")
    with pytest.raises(ArgumentError, match="scale of each head: expected finite numbers, got inf"):
        attend(*tensors, enable_gqa=True, scale=scale)


def test_equal_numbers_are_what_one_number_is() -> None:
    tensors = draw()
    window = torch.tensor([[5, 0]] * HEADS, dtype=torch.int32)
    found = attend(
        *tensors, enable_gqa=True, scale=torch.full((4,), 0.2), window=window, backend="reference"
    )
    one = attend(*tensors, enable_gqa=True, scale=0.2, window=(5, 0), backend="reference")
    assert_matches(found, one.double(), one, summands=16)


@pytest.mark.parametrize("backend", ["auto", "chunked", "reference"])
def test_scales_and_caps_are_learnt(backend: str) -> None:
    """A learned logit scale, as of Swin V2, has the gradient of a factor of the query."""
    tensors = draw(torch.float64)
    scale = NUMBERS["scale"].double().requires_grad_()
    softcap = torch.tensor([4.0, 5.0, 0.5, 2.0], dtype=torch.float64, requires_grad=True)

    def attended(scale: torch.Tensor, softcap: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = attend(
            *tensors, enable_gqa=True, scale=scale, softcap=softcap, backend=backend
        )
        return found

    assert torch.autograd.gradcheck(attended, (scale, softcap))


REFUSED: list[tuple[dict[str, Any], type[AdaAttnError], str]] = [
    (
        {"scale": torch.tensor(0.5, requires_grad=True)},
        ShapeError,
        r"scale: expected a number, or a tensor \[4\], got float32\[\]; what serves all heads is a",
    ),
    ({"softcap": torch.ones(3)}, ShapeError, r"softcap: .*tensor \[4\], got float32\[3\]"),
    ({"scale": torch.ones(1, 4)}, ShapeError, r"scale: .*got float32\[1, 4\]"),
    (
        {"window": torch.tensor([5, 0])},
        ShapeError,
        r"window: expected \(left, right\), or a tensor \[4, 2\], got int64\[2\]",
    ),
    (
        {"window": torch.ones(4, 2, dtype=torch.uint8)},
        DTypeError,
        r"int32 or int64, got torch.uint8; use \.to",
    ),
    ({"softcap": torch.ones(4, dtype=torch.complex64)}, DTypeError, "dtype of softcap: expected"),
    ({"scale": torch.ones(4).int()}, DTypeError, "dtype of scale: expected floating point"),
    ({"window": torch.ones(4, 2)}, DTypeError, r"int32 or int64, got torch.float32; use \.to"),
    ({"scale": torch.ones(4, device="meta")}, DeviceError, "scale: expected device cpu, got meta"),
    ({"window": torch.ones(4, 2, device="meta").int()}, DeviceError, "window: expected device cpu"),
    (
        {"scale": torch.tensor([1.0, float("nan"), 1.0, 1.0])},
        ArgumentError,
        "scale of each head: expected finite numbers, got nan",
    ),
    (
        {"softcap": torch.tensor([1.0, 0.0, -2.0, 1.0])},
        ArgumentError,
        "softcap of each head: expected finite numbers of at least 0, which is none, got -2",
    ),
    (
        {"window": torch.tensor([[1, 0], [-1, -2], [0, 0], [0, 0]])},
        ArgumentError,
        "window of each head: expected numbers of at least -1, which is unlimited, got -2",
    ),
]


@pytest.mark.parametrize(("given", "error", "words"), REFUSED)
def test_wrong_numbers_of_heads_are_refused(
    given: dict[str, Any], error: type[AdaAttnError], words: str
) -> None:
    for _ in range(2):
        with pytest.raises(error, match=words):
            attend(*draw(), enable_gqa=True, **given)
    with pytest.raises(error, match=words):
        adaattn.plan_attention(*draw(), enable_gqa=True, **given)


@pytest.mark.parametrize("name", NUMBERS)
def test_a_module_has_numbers_for_all_heads(name: str) -> None:
    words = "module: expected numbers that serve all heads, got a tensor"
    with pytest.raises(ArgumentTypeError, match=words):
        adaattn.AdaAttention(64, HEADS, **{name: NUMBERS[name]})


@pytest.mark.parametrize("wants_grad", [False, True])
def test_what_calls_with_numbers_of_each_head_run_is_warmed_up(wants_grad: bool) -> None:
    grads = {"requires_grad": wants_grad, "head_terms_require_grad": wants_grad}
    problem = make_problem(len_q=40, head_terms=HeadTerm(7), **grads)
    plans = adaattn.warmup([problem], device="cpu")
    assert [plan.groups[0].capability for plan in plans] == ["chunked"]


class TestOnAGpu:
    """Numbers on a GPU are not read, unless ``ADAATTN_DEBUG=1``."""

    @pytest.fixture(autouse=True)
    def as_on_a_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Say of tensors on this CPU that they are on a GPU."""
        monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def test_debugging_checks_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        wrong = HeadTerms(scale=torch.tensor([1.0, float("nan")]))
        with pytest.raises(ArgumentError, match="scale of each head"):
            wrong.check()
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        wrong.check()

    def test_debugging_checks_each_call_of_a_kind(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What runs a kernel at once does not look at the numbers."""
        monkeypatch.setenv("ADAATTN_DEBUG", "1")
        query = torch.randn(1, 2, 12, 8)
        problem = make_problem(head_terms=HeadTerm.SOFTCAP, head_dim=8, device_type="cuda")
        group = HeadGroup(capability="reference", scheme=Scheme.of(problem.precision))
        decision = Decision(plan=Plan(groups=(group,), num_heads=problem.num_heads))
        monkeypatch.setattr(bound, "direct", lambda *_: pytest.fail("it was run at once"))
        run, _ = bound._direct(bound._Alike(problem, None, None), decision)
        for softcap in (torch.tensor([1.0, 0.0]), torch.tensor([1.0, -1.0])):
            given = (query, query, query, *[None] * 6, HeadTerms(softcap=softcap))
            if softcap[1] < 0:
                with pytest.raises(ArgumentError, match="softcap of each head"):
                    run(*given)
            else:
                assert run(*given).shape == query.shape


def test_the_trace_names_who_refused_and_why() -> None:
    decision = adaattn.plan_attention(*draw(), enable_gqa=True, scale=NUMBERS["scale"])
    assert decision.plan.groups[0].capability == "chunked"
    told = {entry.candidate.split("/")[0]: entry.reason for entry in decision.trace}
    for name in ("sdpa.flash", "sdpa.math", "flex", "block_sparse", "low_rank"):
        assert any(
            "a scale, window or softcap of each head" in reason
            for candidate, reason in told.items()
            if candidate.startswith(name)
        ), name


@pytest.mark.parametrize(
    ("machine", "len_q", "wants_grad", "name"),
    [
        ("h200", 4096, False, "hopper"),
        ("h200", 512, False, "triton"),
        ("h200", 1, False, "triton"),
        ("h200", 4096, True, "chunked"),
        ("a100", 4096, False, "triton"),
    ],
)
def test_on_a_gpu_our_kernels_serve_them_and_chunks_train(
    machine: str, len_q: int, wants_grad: bool, name: str
) -> None:
    installed = tuple(replace(item, unavailable="") for item in capabilities())
    layout = {"device_type": "cuda", "dense_columns": True, "stride_bytes": 16}
    sizes = {"num_heads": 32, "num_kv_heads": 8, "len_k": 4096, "head_dim": 128}
    problem = make_problem(
        **layout,
        **sizes,
        len_q=len_q,
        precision=Precision.BF16,
        head_terms=HeadTerm(7),
        requires_grad=wants_grad,
    )
    found = decide(problem, None, fake_facts(machine), adaattn.PRESETS["quality"], installed)
    assert found.plan.groups[0].capability == name


@pytest.mark.parametrize("backend", ["sdpa.math", "flash", "block_sparse"])
def test_an_explicit_backend_without_them_gives_every_reason(backend: str) -> None:
    with pytest.raises(UnsupportedError, match="a scale, window or softcap of each head") as caught:
        attend(*draw(), enable_gqa=True, softcap=NUMBERS["softcap"], backend=backend)
    assert any("it does not support softcap" in reason for reason in caught.value.reasons)


def test_a_plan_is_followed_with_numbers_of_each_head() -> None:
    tensors, keywords = draw(), {"enable_gqa": True} | NUMBERS
    plan = adaattn.plan_attention(*tensors, **keywords, backend="reference").plan
    assert torch.equal(
        attend(*tensors, **keywords, plan=plan), attend(*tensors, **keywords, backend="reference")
    )


def test_an_error_budget_leaves_them_exact() -> None:
    tensors = draw()
    found, aux = attend(
        *tensors, enable_gqa=True, **NUMBERS, policy="speed", return_aux=adaattn.AuxRequest()
    )
    assert aux.decision.plan.is_exact
    check(found, tensors, **NUMBERS)


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("name", CALLS)
def test_a_graph_holds_them(name: str, terms: str) -> None:
    tensors, keywords = draw(), CALLS[name] | TERMS[terms]
    numbers = {name: item for name, item in keywords.items() if isinstance(item, torch.Tensor)}

    def called(*items: torch.Tensor, **given: Any) -> torch.Tensor:
        found: torch.Tensor = attend(*items, enable_gqa=True, **(keywords | given))
        return found

    compiled = torch.compile(called, fullgraph=True, backend="aot_eager")
    check(compiled(*tensors, **numbers), tensors, **keywords)


def test_a_graph_under_an_error_budget_computes_them_exactly() -> None:
    tensors, scale = draw(), NUMBERS["scale"]
    compiled = torch.compile(
        lambda *items: attend(*items, enable_gqa=True, scale=scale, policy="speed"),
        fullgraph=True,
        backend="aot_eager",
    )
    with torch.no_grad():
        check(compiled(*tensors), tensors, scale=scale)


def test_they_are_exported() -> None:
    class Attention(torch.nn.Module):
        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = attend(x, x, x, scale=scale, is_causal=True)
            return found

    x = draw()[0]
    exported = torch.export.export(Attention(), (x, NUMBERS["scale"])).module()
    repeated = [x, x[:, ::2], x[:, ::2]]
    scale = NUMBERS["scale"].flip(0)
    found = exported(x, scale)
    exact = Attention()(x.double(), scale)
    assert_matches(found, exact, Attention()(x, scale), summands=len(repeated) + 40)


def test_numbers_of_some_heads_are_those_heads_numbers() -> None:
    terms = HeadTerms(**NUMBERS)
    part = terms.of_heads(torch.tensor([2, 0]))
    assert part.scale is not None and part.window is not None and part.softcap is not None
    assert part.window.tolist() == [[70, 2], [3, 0]]
    assert torch.equal(part.scale, NUMBERS["scale"][[2, 0]])
    assert part.kinds == HeadTerm.SCALE | HeadTerm.WINDOW | HeadTerm.SOFTCAP
    assert HeadTerms(window=NUMBERS["window"]).kinds is HeadTerm.WINDOW
