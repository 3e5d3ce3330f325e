"""Bad input ends in one typed error that says what was expected and what came."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from adaattn import (
    HeadGroup,
    LowRank,
    Plan,
    Policy,
    Precision,
    Scheme,
    load_policy,
    plan_attention,
    save_policy,
    use_policy,
)
from adaattn import scaled_dot_product_attention as attend
from adaattn.call.bind import bound_calls
from adaattn.errors import (
    AdaAttnError,
    ArgumentError,
    ArgumentTypeError,
    DeviceError,
    DTypeError,
    NonFiniteError,
    PolicyError,
    ShapeError,
    UnsupportedError,
)
from adaattn.testing import fake_facts

NAN, INFINITY = float("nan"), float("inf")


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """One thing done wrong to a good call, and what is said about it."""

    match: str
    error: type[AdaAttnError]
    query: Any = None
    key: Any = None
    value: Any = None
    settings: dict[str, Any] = field(default_factory=dict)

    def arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """Return the positional and the keyword arguments."""
        given = (self.query, self.key, self.value)
        positional = [rand(2, 4, 12, 8) if item is None else item for item in given]
        return positional, self.settings


def tensors_gone_wrong() -> dict[str, Wrong]:
    meta = rand(2, 4, 12, 8).to("meta")
    dims = "2 to 5 dimensions, [..., heads, length, dim]"
    escaped = dims.replace("[", r"\[").replace("]", r"\]")
    return {
        "no tensor": Wrong(
            query=[1.0], error=ArgumentTypeError, match="query: expected a torch.Tensor, got list"
        ),
        "one dimension": Wrong(
            key=rand(8),
            error=ShapeError,
            match=rf"rank of key: expected {escaped}, got 1 \(float32\[8\]\)",
        ),
        "six dimensions": Wrong(
            query=rand(1, 1, 2, 4, 12, 8), error=ShapeError, match="rank of query: .* got 6"
        ),
        "sparse queries": Wrong(
            query=rand(2, 4, 12, 8).to_sparse(),
            error=UnsupportedError,
            match=r"query is a tensor of layout sparse_coo; .*\n.*query.to_dense\(\)",
        ),
        "sparse keys": Wrong(
            key=rand(2, 4, 12, 8).to_sparse(),
            error=UnsupportedError,
            match="key is a tensor of layout sparse_coo",
        ),
        "a sparse mask": Wrong(
            settings={"attn_mask": torch.ones(12, 12).to_sparse()},
            error=UnsupportedError,
            match="attn_mask is a tensor of layout sparse_coo",
        ),
        "sparse sinks": Wrong(
            settings={"sinks": torch.ones(4).to_sparse()},
            error=UnsupportedError,
            match="sinks is a tensor of layout sparse_coo",
        ),
        "heads that differ": Wrong(
            query=rand(2, 8, 12, 8),
            error=ShapeError,
            match="heads of query and key: expected the same, got 8, 4; pass enable_gqa=True",
        ),
        "heads that do not divide": Wrong(
            query=rand(2, 6, 12, 8),
            error=ShapeError,
            match="heads of query and key: expected the same, got 6, 4; use equal heads",
        ),
        "grouped heads that do not divide": Wrong(
            query=rand(2, 6, 12, 8),
            settings={"enable_gqa": True},
            error=ShapeError,
            match="query heads with enable_gqa=True: expected a multiple of 4, got 6",
        ),
        "heads of key and value": Wrong(
            value=rand(2, 2, 12, 8),
            settings={"enable_gqa": True},
            error=ShapeError,
            match="heads of key and value: expected the same, got 4, 2",
        ),
        "no key heads": Wrong(
            key=rand(2, 0, 12, 8),
            value=rand(2, 0, 12, 8),
            settings={"enable_gqa": True},
            error=ShapeError,
            match="expected a multiple of 0, got 4",
        ),
        "head dimensions": Wrong(
            key=rand(2, 4, 12, 9),
            error=ShapeError,
            match="head dimension of key: expected 8 as in query, got 9",
        ),
        "no head dimension": Wrong(
            query=rand(2, 4, 12, 0),
            key=rand(2, 4, 12, 0),
            error=ShapeError,
            match="head dimension: expected at least 1, got 0",
        ),
        "k and v of different length": Wrong(
            value=rand(2, 4, 13, 8),
            error=ShapeError,
            match="length of value: expected 12 as in key, got 13",
        ),
        "batches that do not broadcast": Wrong(
            key=rand(3, 4, 12, 8),
            error=ShapeError,
            match=r"leading dimensions: expected sizes that broadcast, got float32\[2, 4, 12, 8\]",
        ),
        "dtypes that differ": Wrong(
            key=rand(2, 4, 12, 8).half(),
            error=DTypeError,
            match=r"one dtype, got torch.float32, torch.float16, torch.float32; cast them",
        ),
        "integers": Wrong(
            query=torch.ones(2, 4, 12, 8, dtype=torch.int32),
            error=DTypeError,
            match="dtype of query: expected float64, float32, bfloat16 or float16, got torch.int32",
        ),
        "devices that differ": Wrong(
            key=meta,
            error=DeviceError,
            match="query, key and value: expected one device, got cpu, meta, cpu; move them",
        ),
        "a device that computes nothing": Wrong(
            query=meta, key=meta, value=meta, error=DeviceError, match="'cpu' or 'cuda', got 'meta'"
        ),
        "mask of the wrong shape": Wrong(
            settings={"attn_mask": rand(12, 13) > 0},
            error=ShapeError,
            match=r"a shape that broadcasts to \[2, 4, 12, 12\], got bool\[12, 13\]",
        ),
        "mask of a higher rank": Wrong(
            settings={"attn_mask": rand(1, 2, 4, 12, 12)},
            error=ShapeError,
            match=r"attn_mask: .* got float32\[1, 2, 4, 12, 12\]",
        ),
        "mask that would enlarge the result": Wrong(
            query=rand(1, 4, 12, 8),
            key=rand(1, 4, 12, 8),
            value=rand(1, 4, 12, 8),
            settings={"attn_mask": rand(2, 1, 12, 12)},
            error=ShapeError,
            match=r"broadcasts to \[1, 4, 12, 12\], got float32\[2, 1, 12, 12\]",
        ),
        "mask of integers": Wrong(
            settings={"attn_mask": torch.ones(12, 12, dtype=torch.int64)},
            error=DTypeError,
            match="dtype of attn_mask: expected bool or floating point, got torch.int64",
        ),
        "mask on another device": Wrong(
            settings={"attn_mask": rand(12, 12).to("meta")},
            error=DeviceError,
            match="attn_mask: expected device cpu, got meta",
        ),
        "mask that is no tensor": Wrong(
            settings={"attn_mask": [[True]]},
            error=ArgumentTypeError,
            match="attn_mask: expected None or a torch.Tensor, got list",
        ),
        "mask with is_causal": Wrong(
            settings={"attn_mask": rand(12, 12), "is_causal": True},
            error=ArgumentError,
            match="attn_mask with is_causal=True: expected only one of them, got both; fold",
        ),
        "causal bias of other lengths": Wrong(
            settings={"attn_mask": causal_lower_right(12, 13)},
            error=ShapeError,
            match=r"causal bias: expected lengths \(12, 12\), got \(12, 13\)",
        ),
        "sinks of the wrong shape": Wrong(
            settings={"sinks": rand(3)},
            error=ShapeError,
            match=r"sinks: expected a tensor \[4\], got float32\[3\]",
        ),
        "sinks that are integers": Wrong(
            settings={"sinks": torch.ones(4, dtype=torch.int32)},
            error=DTypeError,
            match="dtype of sinks: expected floating point, got torch.int32",
        ),
        "sinks on another device": Wrong(
            settings={"sinks": rand(4).to("meta")},
            error=DeviceError,
            match="sinks: expected device cpu, got meta",
        ),
        "slopes of the wrong shape": Wrong(
            settings={"alibi_slopes": rand(2, 3)},
            error=ShapeError,
            match=r"alibi_slopes: expected a tensor \[4\] or \[2, 4\], got float32\[2, 3\]",
        ),
    }


def numbers_gone_wrong() -> dict[str, Wrong]:
    window = r"window: expected \(left, right\), each at least -1, got "
    softcap = "softcap: expected None or a finite number of at least 0, got "
    dropout = r"dropout_p: expected a probability in \[0, 1\], got "
    dilation = "dilation: expected an integer of at least 1, got "
    table: list[tuple[str, Any, type[AdaAttnError], str]] = [
        ("window", (-2, 0), ArgumentError, window + r"\(-2, 0\)"),
        ("window", (0, -2), ArgumentError, window + r"\(0, -2\)"),
        ("window", (1,), ArgumentError, window + r"\(1,\)"),
        ("window", (1.5, 0), ArgumentTypeError, window + r"\(1.5, 0\)"),
        ("window", (True, 0), ArgumentTypeError, window + r"\(True, 0\)"),
        ("window", 5, ArgumentTypeError, window + r"5; \(5, 5\) looks both ways, \(4, 0\) is 5"),
        ("window", 1.5, ArgumentTypeError, window + "1.5"),
        ("window", "12", ArgumentTypeError, window + "'12'"),
        ("dilation", 0, ArgumentError, dilation + "0"),
        ("dilation", 1.5, ArgumentError, dilation + "1.5"),
        ("scale", NAN, ArgumentError, "scale: expected None or a finite number, got nan"),
        ("scale", INFINITY, ArgumentError, "scale: expected None or a finite number, got inf"),
        ("scale", "big", ArgumentTypeError, "scale: expected a number, got 'big'"),
        ("scale", "0.5", ArgumentTypeError, "scale: expected a number, got '0.5'"),
        ("scale", b"0.5", ArgumentTypeError, "scale: expected a number, got b'0.5'"),
        ("scale", True, ArgumentTypeError, "scale: expected a number, got True"),
        ("softcap", "30", ArgumentTypeError, "softcap: expected a number, got '30'"),
        ("softcap", False, ArgumentTypeError, "softcap: expected a number, got False"),
        ("dropout_p", "0.1", ArgumentTypeError, "dropout_p: expected a number, got '0.1'"),
        ("dropout_p", True, ArgumentTypeError, "dropout_p: expected a number, got True"),
        ("is_causal", None, ArgumentTypeError, "is_causal: expected True or False, got None"),
        (
            "is_causal",
            torch.tensor(True),
            ArgumentTypeError,
            r"is_causal: expected True or False, got tensor\(True\)",
        ),
        ("enable_gqa", 1, ArgumentTypeError, "enable_gqa: expected True or False, got 1"),
        ("batch_invariant", None, ArgumentTypeError, "expected True or False, got None"),
        ("max_seqlen_q", 12, ArgumentError, "max_seqlen_q and max_seqlen_k: expected cu_seqlens"),
        ("max_seqlen_k", 12, ArgumentError, "beside them, got neither; they say how long"),
        ("layer", "a", ArgumentTypeError, "layer: expected an integer of at least -1, got 'a'"),
        ("layer", True, ArgumentTypeError, "layer: expected an integer of at least -1, got True"),
        ("layer", -2, ArgumentError, "layer: expected an integer of at least -1, got -2"),
        ("history", 3, ArgumentTypeError, "history: expected None or a History, got 3"),
        ("backend", ["sdpa.flash"], ArgumentTypeError, r"backend: .* got \['sdpa.flash'\]"),
        ("backend", {}, ArgumentTypeError, "backend: expected a string such as 'auto', got {}"),
        ("plan", 3, ArgumentTypeError, "plan: expected None or a Plan, got int; a Decision of"),
        ("tag", 3, ArgumentTypeError, "tag: expected a string, got 3"),
        ("softcap", -1.0, ArgumentError, softcap + "-1.0"),
        ("softcap", NAN, ArgumentError, softcap + "nan"),
        ("softcap", INFINITY, ArgumentError, softcap + "inf"),
        ("softcap", [5.0], ArgumentTypeError, r"softcap: expected a number, got \[5.0\]"),
        ("dropout_p", -0.1, ArgumentError, dropout + "-0.1"),
        ("dropout_p", 1.5, ArgumentError, dropout + "1.5; 0 turns it off"),
        ("dropout_p", NAN, ArgumentError, dropout + "nan"),
        ("dropout_p", None, ArgumentTypeError, "dropout_p: expected a number, got None"),
        ("align", "middle", ArgumentError, "align: expected 'top_left' or 'bottom_right', got"),
        ("align", ["top_left"], ArgumentError, "or .bottom_right., got"),
        ("policy", "fastest", PolicyError, "'quality', 'balanced', 'speed', .* got 'fastest'"),
        ("policy", 3, PolicyError, r"policy file or an error budget in \[0, 1\), got 3"),
        (
            "backend",
            "cudnn9",
            ArgumentError,
            "backend: expected 'auto', 'flash', 'unfused', 'sdpa' or one of .* got 'cudnn9'",
        ),
        ("return_aux", "lse", ArgumentTypeError, "return_aux: expected None, True or an AuxReq"),
    ]
    return {
        f"{name}={value}": Wrong(settings={name: value}, error=error, match=match)
        for name, value, error, match in table
    }


WRONG = tensors_gone_wrong() | numbers_gone_wrong()


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_ends_in_one_typed_error(name: str) -> None:
    wrong = WRONG[name]
    positional, settings = wrong.arguments()
    with pytest.raises(wrong.error, match=wrong.match) as caught:
        attend(*positional, **settings)
    assert isinstance(caught.value, (ValueError, TypeError, RuntimeError))


OF_THE_CALL = ("return_aux", "plan", "tag")
"""What planning does not take."""


@pytest.mark.parametrize("name", [name for name in WRONG if not name.startswith(OF_THE_CALL)])
def test_planning_refuses_what_the_call_refuses(name: str) -> None:
    wrong = WRONG[name]
    positional, settings = wrong.arguments()
    with pytest.raises(wrong.error, match=wrong.match):
        plan_attention(*positional, **settings)


def test_an_unknown_keyword_is_refused() -> None:
    query = rand(1, 1, 4, 8)
    with pytest.raises(TypeError, match="causal"):
        attend(query, query, query, causal=True)
    with pytest.raises(ArgumentTypeError, match=r"keyword arguments: .* got \['causal'\]"):
        plan_attention(query, query, query, causal=True)


@pytest.mark.parametrize(
    "settings",
    [{"scale": "0.5"}, {"is_causal": None}, {"layer": "a"}, {"history": 3}, {"max_seqlen_q": 12}],
    ids=str,
)
def test_bad_input_is_refused_among_good_calls(settings: dict[str, Any]) -> None:
    """What good calls have bound is not found for it, nor is it bound itself."""
    tensors = [rand(2, 4, 12, 8) for _ in range(3)]
    for _ in range(4):
        attend(*tensors)
        with pytest.raises(AdaAttnError):
            attend(*tensors, **settings)


@pytest.mark.parametrize(
    "number",
    [0.5, np.float32(0.5), np.float64(0.5), np.array(0.5), torch.tensor(0.5), Fraction(1, 2)],
    ids=lambda number: type(number).__name__,
)
def test_numbers_of_other_types_are_taken(number: Any) -> None:
    tensors = [rand(2, 4, 12, 8) for _ in range(3)]
    assert torch.equal(attend(*tensors, scale=number), attend(*tensors, scale=0.5))
    assert torch.equal(attend(*tensors, softcap=number), attend(*tensors, softcap=0.5))


@pytest.mark.parametrize("length", [12, 1])
def test_no_window_is_written_as_none_too(length: int) -> None:
    """As in configurations of Transformers; such calls are bound, as others are."""
    query, key, value = rand(2, 4, length, 8), rand(2, 4, 12, 8), rand(2, 4, 12, 8)
    expected, known = attend(query, key, value), bound_calls()
    for _ in range(4):
        assert torch.equal(attend(query, key, value, window=None), expected)
    assert bound_calls() == known
    assert plan_attention(query, key, value, window=None) == plan_attention(query, key, value)


@pytest.mark.parametrize("lead", [(2, 4), (4,), ()], ids=str)
@pytest.mark.parametrize("length", [12, 1])
def test_a_mask_of_one_dimension_is_one_of_keys(lead: tuple[int, ...], length: int) -> None:
    """PyTorch's math path broadcasts it; here a boolean and a float once ended in IndexError."""
    query, key, value = rand(*lead, length, 8), rand(*lead, 12, 8), rand(*lead, 12, 8)
    for mask in (torch.arange(12) % 3 > 0, rand(12)):
        with sdpa_kernel(SDPBackend.MATH):
            expected = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        for _ in range(3):
            torch.testing.assert_close(attend(query, key, value, attn_mask=mask), expected)
        wide = attend(query, key, value, attn_mask=mask.expand(length, 12))
        assert torch.equal(attend(query, key, value, attn_mask=mask), wide)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_are_refused_with_the_way_out(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([rand(4, 8), rand(5, 8)], layout=layout)
    dense = rand(2, 4, 4, 8)
    for tensors in ((nested, nested, nested), (dense, nested, dense)):
        with pytest.raises(UnsupportedError, match="is a nested tensor") as caught:
            attend(*tensors)
        assert "cu_seqlens_q" in str(caught.value)


class TestNonFiniteInput:
    """Measuring needs finite numbers; the exact path passes them on as PyTorch does."""

    @pytest.mark.parametrize("position", [0, 1, 2])
    @pytest.mark.parametrize("bad", [NAN, INFINITY, -INFINITY])
    def test_it_is_refused_where_an_approximation_would_be_measured(
        self, monkeypatch: pytest.MonkeyPatch, bad: float, position: int
    ) -> None:
        facts = fake_facts("cpu_amx")
        monkeypatch.setattr("adaattn.hardware.probe", lambda device: facts)
        tensors = [rand(1, 2, 2048, 64) for _ in range(3)]
        tensors[position][0, 1, 7, 3] = bad
        name = ("query", "key", "value")[position]
        with pytest.raises(NonFiniteError, match=f"{name}: expected finite numbers .*quality"):
            attend(*tensors, policy="balanced")

    @pytest.mark.parametrize("policy", ["quality", "speed"])
    def test_it_passes_where_nothing_is_measured(self, policy: str) -> None:
        """So few tokens are exact under any policy, and are not scanned."""
        tensors = [rand(1, 2, 32, 8) for _ in range(3)]
        tensors[2][0, 1, 7, 3] = NAN
        output = attend(*tensors, policy=policy)
        assert output[0, 1, :, 3].isnan().all()
        assert output[0, 0].isfinite().all()


class TestPlans:
    """A plan must fit the call that it is given with."""

    def test_a_plan_for_other_heads_is_refused(self) -> None:
        four, eight = rand(1, 4, 16, 8), rand(1, 8, 16, 8)
        plan = plan_attention(four, four, four).plan
        with pytest.raises(ArgumentError, match="plan: expected one for 8 heads, got one for 4"):
            attend(eight, eight, eight, plan=plan)

    def test_a_plan_whose_executor_cannot_serve_is_refused_with_every_reason(self) -> None:
        query = rand(1, 4, 16, 8)
        plan = plan_attention(query, query, query, backend="sdpa.flash").plan
        with pytest.raises(UnsupportedError, match=r"the plan.s executor sdpa\.flash") as caught:
            attend(query, query, query, softcap=2.0, window=(3, 0), plan=plan)
        assert caught.value.reasons == (
            "it does not support a sliding window",
            "it does not support softcap",
        )

    @pytest.mark.parametrize("choice", [{"policy": "speed"}, {"backend": "chunked"}], ids=str)
    def test_a_plan_leaves_nothing_to_choose(self, choice: dict[str, str]) -> None:
        query = rand(1, 4, 16, 8)
        plan = plan_attention(query, query, query).plan
        with pytest.raises(
            ArgumentError, match=r"policy, backend and history with a plan: .* none of them"
        ):
            attend(query, query, query, plan=plan, **choice)

    def test_a_plan_of_lower_precision_without_an_error_budget_is_refused(self) -> None:
        query = rand(1, 4, 16, 8)
        group = HeadGroup(capability="sdpa.flash", scheme=Scheme.of(Precision.BF16))
        with pytest.raises(UnsupportedError, match="computes in bf16 and allows no error"):
            attend(query, query, query, plan=Plan(groups=(group,), num_heads=4))
        allowed = Plan(groups=(group,), num_heads=4, error_budget=0.05)
        assert attend(query, query, query, plan=allowed).dtype is torch.float32

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            (
                {"capability": "sdpa.flash", "method": LowRank(rank=4)},
                "its method is exact, the plan asks for low_rank",
            ),
            ({"capability": "low_rank"}, "its method is low_rank, the plan asks for exact"),
            (
                {"capability": "sdpa.flash", "scheme": Scheme(pv=Precision.BF16)},
                r"it computes in one format, the plan asks for fp32\+bf16\+fp32",
            ),
            (
                {"capability": "sdpa.flash", "scheme": Scheme(accumulate=Precision.FP64)},
                r"it computes in one format, the plan asks for fp32\+fp32\+fp64",
            ),
        ],
        ids=str,
    )
    def test_a_plan_that_its_executor_would_not_follow_is_refused(
        self, values: dict[str, Any], message: str
    ) -> None:
        """An exact executor once ran under the name of a low rank."""
        query = rand(1, 4, 16, 8)
        plan = Plan(groups=(HeadGroup(**values),), num_heads=4, error_budget=0.5)
        with pytest.raises(UnsupportedError, match=message):
            attend(query, query, query, plan=plan)

    def test_a_plan_that_names_no_executor_is_refused(self) -> None:
        query = rand(1, 4, 16, 8)
        plan = Plan(groups=(HeadGroup(capability="sdpa.fast"),), num_heads=4)
        with pytest.raises(ArgumentError, match=r"one of sdpa\.flash, .* got 'sdpa\.fast'"):
            attend(query, query, query, plan=plan)


def test_only_a_policy_is_saved(tmp_path: Path) -> None:
    with pytest.raises(ArgumentTypeError, match="policy: expected a Policy, got 'speed'"):
        save_policy("speed", tmp_path / "policy.json")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def document(**changes: Any) -> str:
    """Return a policy file's text with some entries replaced."""
    good = {"format": "adaattn-policy", "version": 1, "policy": Policy().to_dict()}
    return json.dumps(good | changes)


FILES: dict[str, tuple[str | bytes, str]] = {
    "breaks off": (document()[:40], "expected JSON, got text that breaks off at line 1"),
    "empty": ("", "expected JSON"),
    "no text": (b"\xff\xfe\x00\x01", "expected a readable file, got UnicodeDecodeError"),
    "a list": ("[1, 2]", 'an object with "format": "adaattn-policy", got another file'),
    "another format": (document(format="other"), 'with "format": "adaattn-policy"'),
    "a later version": (document(version=2), "version of policy file .* expected 1, got 2"),
    "no policy": (document(policy=[]), 'an object under "policy"'),
    "an unknown key": (document(policy={"budget": 0.1}), r"policy keys: .* got \['budget'\]"),
    "an unknown method": (document(policy={"methods": ["magic"]}), "policy values: .*'MAGIC'"),
    "a budget out of range": (
        document(policy={"error_budget": 2.0}),
        r"error_budget: expected a number in \[0, 1\), got 2.0",
    ),
    "a budget of the wrong type": (document(policy={"error_budget": "low"}), "policy values"),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("use", [load_policy, use_policy, attend], ids=lambda use: use.__name__)
def test_a_corrupt_or_foreign_policy_file_is_refused(
    name: str, use: Callable[..., Any], tmp_path: Path
) -> None:
    content, match = FILES[name]
    path = tmp_path / "policy.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    query = rand(1, 1, 4, 8)
    with pytest.raises(PolicyError, match=match):
        if use is attend:
            attend(query, query, query, policy=str(path))
        elif use is use_policy:
            with use_policy(path):
                pass
        else:
            use(path)


def test_a_missing_policy_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="expected a readable file, got FileNotFoundError"):
        load_policy(tmp_path / "none.json")


def test_a_policy_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="expected a place that can be written"):
        save_policy(Policy(), tmp_path / "no folder" / "policy.json")
    (tmp_path / "policy.json").mkdir()
    with pytest.raises(PolicyError, match="expected a place that can be written"):
        save_policy(Policy(), tmp_path / "policy.json")
    assert [path.name for path in tmp_path.iterdir()] == ["policy.json"]
