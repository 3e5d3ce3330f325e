"""What the tests of the kernel facade share: a machine of one's choice, and an oracle."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from adaattn import hardware
from adaattn.spec import HardwareFacts
from adaattn.testing import assert_matches, fake_facts


@pytest.fixture(autouse=True)
def fresh_facts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("ADAATTN_CACHE", str(tmp_path))
    hardware.clear_cache()
    yield
    hardware.clear_cache()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., HardwareFacts]:
    """Make every probe answer with the facts of an invented machine."""

    def install(name: str, **changes: Any) -> HardwareFacts:
        facts = replace(fake_facts(name), **changes)
        monkeypatch.setattr(hardware, "probe", lambda device=None: facts)
        return facts

    return install


@pytest.fixture
def draw() -> Callable[..., tuple[torch.Tensor, ...]]:
    """Return q, k and v of [B, H, S, D], with grouped heads where asked."""

    def make(
        shape: tuple[int, int, int, int] = (2, 4, 24, 16),
        *,
        kv_heads: int = 0,
        dtype: torch.dtype = torch.float32,
        grad: bool = False,
    ) -> tuple[torch.Tensor, ...]:
        batch, heads, length, dim = shape
        sizes = [(batch, count, length, dim) for count in (heads, *(kv_heads or heads,) * 2)]
        return tuple(
            torch.randn(size, dtype=torch.float64).to(dtype).requires_grad_(grad) for size in sizes
        )

    return make


@pytest.fixture
def check() -> Callable[..., None]:
    """Hold an output to PyTorch's math path in float64, by the one rule for numbers."""

    def compare(actual: torch.Tensor, inputs: tuple[torch.Tensor, ...], **semantics: Any) -> None:
        semantics = {"enable_gqa": True} | semantics
        wide = [item.detach().double() for item in inputs]
        bias = semantics.pop("attn_mask", None)
        with sdpa_kernel(SDPBackend.MATH):
            eager = F.scaled_dot_product_attention(*inputs, attn_mask=bias, **semantics)
            if bias is not None and bias.is_floating_point():
                bias = bias.double()
            exact = F.scaled_dot_product_attention(*wide, attn_mask=bias, **semantics)
        assert_matches(actual, exact, eager.detach(), summands=sum(inputs[1].shape[-2:]))

    return compare
