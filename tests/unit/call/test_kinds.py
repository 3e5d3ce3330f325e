"""Calls that look like earlier ones and are not: each once got what was made for the other."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from adaattn import HeadGroup, Plan, Policy, Precision, Scheme, save_policy
from adaattn import scaled_dot_product_attention as attend
from adaattn.backends import slice_heads
from adaattn.backends.masks import kept_bias
from adaattn.call.arguments import Arguments
from adaattn.call.describe import build_call
from adaattn.errors import PolicyError, ShapeError, UnsupportedError
from adaattn.testing import assert_matches


def draw(length: int = 32, heads: int = 2, batch: int = 1) -> torch.Tensor:
    return torch.randn(batch, heads, length, 16)


def check(found: torch.Tensor, *tensors: torch.Tensor, **given: Any) -> None:
    """Hold a result against the definition in fp64, in fp32 as the yardstick."""
    wide = {
        k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for k, v in given.items()
    }
    exact = attend(*(item.double() for item in tensors), backend="reference", **wide)
    eager = attend(*tensors, backend="reference", **given)
    assert_matches(found, exact, eager, summands=tensors[1].shape[-2] + 16)


@pytest.mark.parametrize("window", [(10, 0), (-1, 12), (10, -1)])
def test_a_window_that_reaches_all_keys_of_a_cache_hides_some_when_it_has_grown(
    window: tuple[int, int],
) -> None:
    query, keys = draw(1), draw(16)
    given: dict[str, Any] = {"window": window, "align": "bottom_right"}
    attend(query, keys[:, :, :10], keys[:, :, :10], **given)
    check(attend(query, keys, keys, **given), query, keys, keys, **given)


def test_values_shorter_than_a_growing_cache_are_refused_after_right_ones() -> None:
    query, keys = draw(1), draw(16)
    attend(query, keys, keys)
    with pytest.raises(ShapeError, match="length of value"):
        attend(query, keys, keys[:, :, :10])


def test_slopes_written_past_pytorchs_counter_are_noticed_on_a_cpu() -> None:
    """A bias is kept between calls; ``.data`` does not raise a tensor's version."""
    x, slopes = draw(), torch.tensor([0.5, 0.1])
    attend(x, x, x, alibi_slopes=slopes)
    slopes.data.mul_(8)
    check(attend(x, x, x, alibi_slopes=slopes), x, x, x, alibi_slopes=slopes)


def test_heads_sliced_apart_have_their_own_mask() -> None:
    mask = torch.rand(1, 4, 8, 8) > 0.5
    x = draw(8, heads=4)
    call = build_call(x, x, x, Arguments(attn_mask=mask))
    for heads in ((0, 1), (2, 3)):
        part, _ = slice_heads(call.tensors, call.problem, heads)
        assert part.mask is not None
        bias = kept_bias(part.mask, part.mask_given, x.dtype)
        assert torch.equal(bias == 0, mask[:, list(heads)])


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("mask_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_additive_mask_of_any_floating_dtype_serves(
    dtype: torch.dtype, mask_dtype: torch.dtype
) -> None:
    """PyTorch's function takes few pairs; a step down for any error used to hide the rest."""
    x, mask = draw(16).to(dtype), torch.randn(16, 16).to(mask_dtype)
    exact = attend(x.double(), x.double(), x.double(), mask.double(), backend="reference")
    eager = attend(x, x, x, mask.to(dtype), backend="reference")
    for _ in range(2):
        assert_matches(attend(x, x, x, mask), exact, eager, summands=32)


def test_a_plan_in_a_wider_format_computes_in_it() -> None:
    x = draw(64).bfloat16()
    group = HeadGroup(capability="sdpa.flash", scheme=Scheme.of(Precision.FP32))
    plan = Plan(groups=(group,), num_heads=2)
    wide = attend(x.float(), x.float(), x.float()).bfloat16()
    assert torch.equal(attend(x, x, x, plan=plan), wide)


def test_what_is_bound_keeps_no_tensor_of_its_first_call() -> None:
    x, mask = draw(12), torch.ones(12, 12, dtype=torch.bool).tril()
    alive = weakref.ref(mask)
    attend(x, x, x, mask, softcap=3.0)
    del mask
    gc.collect()
    assert alive() is None


def test_what_a_caller_writes_into_its_error_estimate_stays_there() -> None:
    x = draw()
    for _ in range(2):
        _, aux = attend(x, x, x, return_aux=True)
        assert aux.error_estimate is not None and not aux.error_estimate.any()
        aux.error_estimate.add_(7)


def test_a_policy_file_named_by_a_path_is_read_anew(tmp_path: Path) -> None:
    path, x = tmp_path / "policy.json", draw()
    save_policy(Policy(name="first"), path)
    attend(x, x, x, policy=path)  # type: ignore[arg-type]
    path.write_text("{}")
    with pytest.raises(PolicyError):
        attend(x, x, x, policy=path)  # type: ignore[arg-type]


def test_zeros_for_no_keys_can_be_written_to() -> None:
    query, nothing = draw(4), draw(0)
    attend(query, nothing, nothing).add_(1)


class TestCompiled:
    """Under ``torch.compile`` a call gives what it gives outside, or is refused as there."""

    @pytest.fixture(autouse=True)
    def fresh(self) -> None:
        torch._dynamo.reset()

    @pytest.mark.parametrize("backend", ["sdpa.flash", "flash"])
    @pytest.mark.parametrize("given", [{"softcap": 1.0}, {"sinks": torch.zeros(2)}], ids=str)
    def test_a_kernel_asked_for_by_name_that_cannot_serve_is_refused(
        self, backend: str, given: dict[str, Any]
    ) -> None:
        x = draw()
        compiled = torch.compile(
            lambda x: attend(x, x, x, backend=backend, **given), backend="eager"
        )
        with pytest.raises((UnsupportedError, torch._dynamo.exc.TorchDynamoException)):
            compiled(x)

    @pytest.mark.parametrize("scale", [-0.5, 0.0])
    def test_causal_order_with_a_scale_of_0_or_less(self, scale: float) -> None:
        x = draw()
        compiled = torch.compile(
            lambda x: attend(x, x, x, is_causal=True, scale=scale), backend="eager", fullgraph=True
        )
        check(compiled(x), x, x, x, is_causal=True, scale=scale)

    def test_numbers_that_change_from_call_to_call(self) -> None:
        x = draw()
        compiled = torch.compile(
            lambda x, scale: attend(x, x, x, scale=scale), backend="eager", fullgraph=True
        )
        for scale in (0.5, 0.25, 0.125):
            check(compiled(x, scale), x, x, x, scale=scale)
