"""What is kept beside a caller's mask, and what kernels for GPUs are never handed."""

from typing import Any

import pytest
import torch

from adaattn.backends import masked, sdpa_call
from adaattn.backends.masks import kept_beside
from adaattn.backends.sdpa_call import careful_sdpa


def test_what_is_made_of_a_mask_is_made_once_until_it_is_written_to() -> None:
    mask, made = torch.rand(3, 4) > 0.5, []

    def invert() -> torch.Tensor:
        made.append(~mask)
        return made[-1]

    assert kept_beside(mask, ("inverse",), invert) is kept_beside(mask, ("inverse",), invert)
    mask.logical_not_()
    again = kept_beside(mask, ("inverse",), invert)
    assert len(made) == 2 and torch.equal(again, ~mask)
    kept_beside(mask, ("another",), invert)
    assert len(made) == 3


def test_of_each_kind_the_newest_are_kept() -> None:
    mask = torch.rand(3, 4) > 0.5

    def found(*facts: object) -> torch.Tensor:
        return kept_beside(mask, facts, lambda: ~mask, most=2)

    first, other = found("a", 1), found("b", 1)
    assert found("a", 2) is found("a", 2) and found("a", 1) is first
    third = found("a", 3)
    assert found("a", 1) is not first and found("b", 1) is other
    assert found("a", 3) is third
    alone = kept_beside(mask, ("b", 2), lambda: ~mask)
    assert found("b", 2) is alone and found("b", 1) is not other


def test_nothing_is_kept_of_an_inference_tensor_whose_writes_nobody_counts() -> None:
    with torch.inference_mode():
        mask = torch.rand(3) > 0.5
    assert kept_beside(mask, (), lambda: ~mask) is not kept_beside(mask, (), lambda: ~mask)


class OnGpu(torch.Tensor):
    """A tensor in main memory that says it is on a GPU."""

    is_cuda = True


def on_gpu(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype).as_subclass(OnGpu)


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Note what PyTorch's function is called with."""
    found: list[dict[str, Any]] = []

    def sdpa(query: torch.Tensor, *rest: torch.Tensor, **keywords: Any) -> torch.Tensor:
        found.append({"query": query, **keywords})
        return query

    monkeypatch.setattr(sdpa_call, "sdpa", sdpa)
    return found


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16])
def test_one_column_for_all_keys_is_stored_for_a_gpu(
    handed: list[dict[str, Any]], dtype: torch.dtype
) -> None:
    """Kernels refused it, or read misaligned addresses."""
    x = on_gpu(1, 4, 33, 16, dtype=torch.bfloat16)
    mask = on_gpu(1, 4, 1, 1, dtype=dtype)
    careful_sdpa(x, x, x, mask, scale=0.25)
    (keywords,) = handed
    assert keywords["attn_mask"].shape == (1, 4, 1, 33)
    assert keywords["attn_mask"].stride(-1) == 1
    assert keywords["attn_mask"].dtype is torch.bfloat16


@pytest.mark.parametrize(("scale", "used"), [(-0.3, 0.3), (0.0, 1.0), (0.3, 0.3)])
def test_no_kernel_for_a_gpu_is_handed_a_scale_of_0_or_less(
    handed: list[dict[str, Any]], scale: float, used: float
) -> None:
    x = on_gpu(1, 4, 33, 16)
    careful_sdpa(x, x, x, None, scale=scale)
    assert handed[0]["scale"] == used
    assert (handed[0]["query"] is x) == (scale > 0)


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_another_sign_of_the_query_is_another_sign_of_the_scale(scale: float) -> None:
    query, key, value = torch.randn(3, 1, 2, 9, 8, dtype=torch.float64)
    expected = careful_sdpa(query, key, value, None, scale=scale)
    turned = 0.0 * query if scale == 0 else -query
    actual = careful_sdpa(turned, key, value, None, scale=abs(scale) or 1.0)
    torch.testing.assert_close(actual, expected)


def test_a_bias_is_found_again_by_its_slopes_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masked, "stream_of", lambda tensor: 7)
    slopes, bias, query = on_gpu(4), torch.rand(1, 4, 8, 8), on_gpu(1, 4, 8, 16)
    recent = masked._Recent(bias, slopes, query)
    assert recent.bias_of(slopes, query) is bias
    assert recent.bias_of(on_gpu(4), query) is None
    slopes.mul_(2)
    assert recent.bias_of(slopes, query) is None
    recent = masked._Recent(bias, slopes, query)
    slopes.data = on_gpu(4)  # which no version counts
    assert recent.bias_of(slopes, query) is None
    recent = masked._Recent(bias, slopes, query)
    del bias
    assert recent.bias_of(slopes, query) is None


def test_slopes_on_a_cpu_are_read_at_each_call() -> None:
    slopes, bias, query = torch.rand(4), torch.rand(1, 4, 8, 8), torch.rand(1, 4, 8, 16)
    recent = masked._Recent(bias, slopes, query)
    assert recent.bias_of(slopes, query) is bias
    assert recent.bias_of(slopes.clone(), query) is bias
    slopes.data[1] = 2.0  # which no version counts
    assert recent.bias_of(slopes, query) is None


def test_the_mask_of_a_window_is_found_again_on_its_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = 7
    monkeypatch.setattr(masked, "stream_of", lambda tensor: stream)
    mask, query = torch.rand(8, 8), on_gpu(1, 4, 8, 16)
    assert masked._Recent().bias_of(None, query) is None
    recent = masked._Recent(mask, None, query)
    assert recent.bias_of(None, query) is mask
    stream = 8
    assert recent.bias_of(None, query) is None
    stream = 7
    del mask
    assert recent.bias_of(None, query) is None
