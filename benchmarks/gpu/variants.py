"""The implementations: what people write, what PyTorch has, and this library's modules."""

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from adaattn.policies import resolve_policy

__all__ = [
    "MODULES",
    "ModuleCell",
    "Reference",
    "Variant",
    "joined_gradients",
    "make_variants",
    "module_flops",
    "reference",
    "upstream",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCell:
    """The sizes of a self-attention layer.

    Args:
        name: shown in tables.
        batch: B.
        length: S, tokens.
        embed_dim: E.
        num_heads: H.
        dtype: of weights and inputs.
        rank: rank that each head's q, k and v weights are given; 0 leaves them as drawn.
    """

    name: str
    batch: int
    length: int
    embed_dim: int
    num_heads: int
    dtype: torch.dtype = torch.float32
    rank: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of the whole batch."""
        return self.batch * self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One implementation of the layer.

    Args:
        name: shown in tables.
        label: what it stands for.
        module: its module.
        call: from the module and x [B, S, E] to the output.
    """

    name: str
    label: str
    module: nn.Module
    call: Callable[[Any, torch.Tensor], torch.Tensor]

    @property
    def error_budget(self) -> float:
        """What the module's policy may lose of a head's output; 0 is exact."""
        runner = getattr(self.module, "runner", None)
        return 0.0 if runner is None else resolve_policy(runner.policy).error_budget


class WrittenAttention(nn.MultiheadAttention):
    """Self-attention as people write it: two products and a softmax, or one SDPA call."""

    fused = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Return the output for x [B, S, E]."""
        return self.out_proj(self.joined_heads(x))

    def joined_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Return the heads' outputs side by side, [B, S, E]."""
        batch, length, embed_dim = x.shape
        packed = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        split = packed.view(batch, length, 3, self.num_heads, self.head_dim)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        if self.fused:
            heads = F.scaled_dot_product_attention(q, k, v)
        else:
            weights = torch.softmax(q @ k.mT / math.sqrt(self.head_dim), dim=-1)
            heads = weights @ v
        return heads.transpose(1, 2).reshape(batch, length, embed_dim)


class SdpaAttention(WrittenAttention):
    """The same by ``F.scaled_dot_product_attention``."""

    fused = True


def _ours(module: Any, x: torch.Tensor) -> torch.Tensor:
    return module(x)[0]


def _pytorchs(module: Any, x: torch.Tensor) -> torch.Tensor:
    return module(x, x, x, need_weights=False)[0]


def _written(module: Any, x: torch.Tensor) -> torch.Tensor:
    return module(x)


MODULES = {
    "DenseAttention": ("adaattn.attention.dense", "dense only"),
    "AdaptiveRankAttention": ("adaattn.attention.adaptive_rank", "adaptive rank"),
    "AdaptivePrecisionAttention": ("adaattn.attention.adaptive_precision", "adaptive precision"),
    "AdaAttention": ("adaattn.attention.adaattn", "both adaptive"),
    "AdaptiveFlashAttention": ("adaattn.kernels.flash_attention", "fused kernels"),
}
"""This library's modules: where they are, and what they stand for."""


def make_variants(cell: ModuleCell, device: str, *, training: bool = False) -> list[Variant]:
    """Return every implementation with the same weights, in the cell's dtype."""
    weights = _weights(cell)
    found: list[Variant] = []

    def add(
        name: str, label: str, module: nn.Module, call: Callable[[Any, torch.Tensor], torch.Tensor]
    ) -> None:
        module.load_state_dict(weights)
        module = module.to(device, cell.dtype).train(training)
        found.append(Variant(name=name, label=label, module=module, call=call))

    sizes = (cell.embed_dim, cell.num_heads)
    add("naive", "scores and softmax", WrittenAttention(*sizes), _written)
    add("F.sdpa", "PyTorch's function", SdpaAttention(*sizes), _written)
    theirs = nn.MultiheadAttention(*sizes, batch_first=True)
    add("nn.MultiheadAttention", "PyTorch's module", theirs, _pytorchs)
    for name, (path, label) in MODULES.items():
        kind = getattr(importlib.import_module(path), name)
        add(name, label, kind(*sizes), _ours)
    return found


def _weights(cell: ModuleCell) -> dict[str, torch.Tensor]:
    """Return the layer's weights, drawn anew from one seed, of the cell's rank."""
    torch.manual_seed(0)
    weights = nn.MultiheadAttention(cell.embed_dim, cell.num_heads).state_dict()
    if cell.rank:
        heads, head_dim = 3 * cell.num_heads, cell.embed_dim // cell.num_heads
        left = torch.randn(heads, head_dim, cell.rank)
        right = torch.randn(heads, cell.rank, cell.embed_dim)
        planted = left @ right / math.sqrt(cell.rank * cell.embed_dim)
        weights["in_proj_weight"] = planted.reshape(3 * cell.embed_dim, cell.embed_dim)
    return weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What a cell's layer gives in a wider dtype.

    Args:
        output: [B, S, E].
        gradients: of every parameter, joined; None without training.
        growth: ``|W| |heads| / |output|``: a relative error of e in the heads may become one
            of that many times e in the output.
    """

    output: torch.Tensor
    gradients: torch.Tensor | None
    growth: float


def reference(cell: ModuleCell, x: torch.Tensor, *, training: bool = False) -> Reference:
    """Return the layer's output in a wider dtype.

    fp32 cells are computed in float64 and 16-bit cells in fp32, from weights and inputs before
    they are rounded to the cell's dtype.

    Args:
        cell: the sizes.
        x: [B, S, E] in fp32.
        training: the gradients too.
    """
    dtype = torch.float64 if cell.dtype == torch.float32 else torch.float32
    module = SdpaAttention(cell.embed_dim, cell.num_heads)
    module.load_state_dict(_weights(cell))
    module = module.to(x.device, dtype)
    wide = x.to(dtype)
    with torch.no_grad():
        heads = module.joined_heads(wide)
        output = module.out_proj(heads)
        largest = torch.linalg.matrix_norm(module.out_proj.weight.double(), ord=2)
        growth = float(largest * heads.double().norm() / output.double().norm())
    gradients = joined_gradients(module, _written, wide, upstream(wide)) if training else None
    return Reference(output=output, gradients=gradients, growth=growth)


def upstream(x: torch.Tensor) -> torch.Tensor:
    """Return the output gradient that every implementation gets for x [B, S, E]."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(x.shape, generator=generator).to(x.device, x.dtype)


def joined_gradients(
    module: nn.Module,
    call: Callable[[Any, torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    gradient: torch.Tensor,
) -> torch.Tensor:
    """Return the gradients of every parameter in one vector.

    Args:
        module: an implementation.
        call: from the module and x to the output.
        x: [B, S, E].
        gradient: of the output, [B, S, E].
    """
    found = torch.autograd.grad(call(module, x), list(module.parameters()), gradient)
    return torch.cat([item.flatten() for item in found])


def module_flops(cell: ModuleCell, *, training: bool = False) -> float:
    """Return the FLOPs of the layer: 8 B S E^2 of projections and 4 B S^2 E of attention.

    Training counts three times as many: the backward pass has two products for each of the
    forward pass. What a method recomputes or saves is not counted.
    """
    forward = (
        8.0 * cell.tokens * cell.embed_dim**2 + 4.0 * cell.tokens * cell.length * cell.embed_dim
    )
    return 3 * forward if training else forward
