"""The cells of the operator benchmark: what a user has, and what they must call without AdaAttn."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import adaattn

Function = Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One comparison.

    Args:
        name: shown in the table.
        shape: (B, Hq, Hkv, Sq, Sk, D).
        dtype: of q, k and v.
        backward: time the backward pass too.
        semantics: keywords of ``adaattn.scaled_dot_product_attention``.
        mask: makes what the user of ``F.scaled_dot_product_attention`` must pass instead.
        backends: executors of AdaAttn to time beside its own choice.
    """

    name: str
    shape: tuple[int, int, int, int, int, int]
    dtype: torch.dtype = torch.bfloat16
    backward: bool = False
    semantics: dict[str, Any] = field(default_factory=dict)
    mask: Callable[[torch.Tensor, torch.Tensor, dict[str, Any]], torch.Tensor] | None = None
    backends: tuple[str, ...] = ()


def window_mask(query: torch.Tensor, key: torch.Tensor, semantics: dict[str, Any]) -> torch.Tensor:
    """Return the boolean mask of a causal window."""
    rows = torch.arange(query.shape[2], device=query.device)[:, None]
    cols = torch.arange(key.shape[2], device=query.device)
    return (rows - cols >= 0) & (rows - cols <= semantics["window"][0])


def packed_mask(query: torch.Tensor, key: torch.Tensor, semantics: dict[str, Any]) -> torch.Tensor:
    """Return the boolean mask of packed causal documents."""
    bounds = semantics["cu_seqlens_q"].long()
    tokens = torch.arange(query.shape[2], device=query.device)
    document = torch.searchsorted(bounds[1:], tokens, right=True)
    same = document[:, None] == document
    return same & (tokens[:, None] >= tokens)


def alibi_mask(query: torch.Tensor, key: torch.Tensor, semantics: dict[str, Any]) -> torch.Tensor:
    """Return the additive mask of causal ALiBi."""
    rows = torch.arange(query.shape[2], device=query.device)[:, None]
    cols = torch.arange(key.shape[2], device=query.device)
    slopes = semantics["alibi_slopes"][:, None, None].to(query.dtype)
    bias = -slopes * (rows - cols).abs().to(query.dtype)
    return bias.masked_fill(rows < cols, float("-inf")).unsqueeze(0)


def cells(device: str) -> Iterator[Cell]:
    """Yield the cells that suit a device."""
    if device == "cuda":
        yield from _gpu_dense()
        yield from _gpu_masked()
    else:
        yield from _cpu_cells()


def _gpu_dense() -> Iterator[Cell]:
    for dim in (64, 128, 256):
        for length in (512, 2048, 16384):
            batch = max(1, 16384 // length)
            heads = 2048 // dim
            for causal in (False, True):
                kind = "causal" if causal else "full"
                semantics = {"is_causal": causal}
                shape = (batch, heads, heads, length, length, dim)
                name = f"dense D{dim} S{length} {kind}"
                yield Cell(name=name, shape=shape, semantics=semantics)
                yield Cell(name=f"{name} backward", shape=shape, semantics=semantics, backward=True)
    for length in (2048, 16384):
        shape = (max(1, 16384 // length), 32, 8, length, length, 128)
        yield Cell(
            name=f"GQA 32/8 D128 S{length} causal", shape=shape, semantics={"is_causal": True}
        )
    for batch, length in ((1, 32768), (16, 8192), (64, 8192)):
        yield Cell(
            name=f"decode B{batch} 32/8 D128 S{length}", shape=(batch, 32, 8, 1, length, 128)
        )


def _gpu_masked() -> Iterator[Cell]:
    wide = (1, 16, 16, 16384, 16384, 128)
    device = torch.device("cuda")
    yield Cell(
        name="window 1024, causal, S16384 D128",
        shape=wide,
        semantics={"is_causal": True, "window": (1024, 0)},
        mask=window_mask,
        backends=("sdpa.flash2", "flex"),
    )
    yield Cell(
        name="window 1024, causal, S16384 D128 backward",
        shape=wide,
        semantics={"is_causal": True, "window": (1024, 0)},
        mask=window_mask,
        backward=True,
        backends=("sdpa.flash2", "flex"),
    )
    lengths = torch.tensor([0, 4096, 1000, 3096, 192, 2048, 1952, 3000, 1000], device=device)
    bounds = lengths.cumsum(0).to(torch.int32)
    packed = {"is_causal": True, "cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
    yield Cell(
        name="8 packed documents, causal, T16384 D128",
        shape=wide,
        semantics=packed,
        mask=packed_mask,
        backends=("sdpa.flash2", "flex"),
    )
    slopes = torch.exp2(-torch.arange(1, 17, device=device) / 2)
    yield Cell(
        name="ALiBi, causal, S8192 D128",
        shape=(1, 16, 16, 8192, 8192, 128),
        semantics={"is_causal": True, "alibi_slopes": slopes},
        mask=alibi_mask,
    )
    yield Cell(
        name="GQA 16/4 D512 S4096 causal",
        shape=(1, 16, 4, 4096, 4096, 512),
        semantics={"is_causal": True},
    )


def _cpu_cells() -> Iterator[Cell]:
    fp32 = torch.float32
    for dim, length in ((64, 512), (64, 2048), (128, 1024), (128, 2048)):
        for causal in (False, True):
            kind = "causal" if causal else "full"
            yield Cell(
                name=f"dense D{dim} S{length} {kind}",
                shape=(1, 8, 8, length, length, dim),
                dtype=fp32,
                semantics={"is_causal": causal},
            )
    yield Cell(
        name="dense D64 S1024 causal backward",
        shape=(1, 8, 8, 1024, 1024, 64),
        dtype=fp32,
        semantics={"is_causal": True},
        backward=True,
    )
    yield Cell(
        name="GQA 9/3 D64 S2048 causal",
        shape=(1, 9, 3, 2048, 2048, 64),
        dtype=fp32,
        semantics={"is_causal": True},
    )
    for heads, kv_heads, dim in ((32, 4, 128), (32, 8, 128), (9, 3, 64)):
        yield Cell(
            name=f"decode B1 {heads}/{kv_heads} D{dim} S8192",
            shape=(1, heads, kv_heads, 1, 8192, dim),
            dtype=fp32,
        )
    yield Cell(
        name="window 256, causal, S4096 D64",
        shape=(1, 8, 8, 4096, 4096, 64),
        dtype=fp32,
        semantics={"is_causal": True, "window": (256, 0)},
        mask=window_mask,
    )


def functions(cell: Cell, device: str) -> tuple[dict[str, Function], Function, str]:
    """Return the functions to compare, their reference in a wider dtype, and AdaAttn's choice."""
    batch, heads, kv_heads, len_q, len_k, dim = cell.shape
    generator = torch.Generator(device).manual_seed(len_k + dim)

    def tensor(num_heads: int, length: int) -> torch.Tensor:
        made = torch.randn(
            batch, num_heads, length, dim, generator=generator, device=device, dtype=cell.dtype
        )
        return made.requires_grad_(cell.backward)

    inputs = (tensor(heads, len_q), tensor(kv_heads, len_k), tensor(kv_heads, len_k))
    gradient = torch.randn(inputs[0].shape, generator=generator, device=device, dtype=cell.dtype)
    gqa = {"enable_gqa": True} if heads != kv_heads else {}
    theirs: dict[str, Any] = {"is_causal": cell.semantics.get("is_causal", False)}
    if cell.mask is not None:
        theirs = {"attn_mask": cell.mask(*inputs[:2], cell.semantics)}

    def peer() -> torch.Tensor:
        return F.scaled_dot_product_attention(*inputs, **theirs, **gqa)

    def ours(backend: str) -> Function:
        return lambda: adaattn.scaled_dot_product_attention(
            *inputs, backend=backend, **cell.semantics, **gqa
        )

    forwards = {"F.sdpa": peer, "adaattn": ours("auto")}
    forwards |= {f"adaattn:{name}": ours(name) for name in cell.backends}
    choice = adaattn.plan_attention(*inputs, **cell.semantics, **gqa)
    chosen = choice.plan.groups[0].label
    if cell.backward:
        forwards = {k: _with_backward(run, inputs, gradient) for k, run in forwards.items()}
    return forwards, partial(_wide, inputs, gradient, theirs, cell.backward), chosen


def _wide(
    inputs: tuple[torch.Tensor, ...],
    gradient: torch.Tensor,
    theirs: dict[str, Any],
    backward: bool,
) -> torch.Tensor:
    """Return the same in fp32 for 16-bit input and in fp64 for fp32, k and v repeated for GQA."""
    dtype = torch.float64 if inputs[0].dtype == torch.float32 else torch.float32
    query, key, value = (item.detach().to(dtype).requires_grad_(backward) for item in inputs)
    group = query.shape[1] // key.shape[1]
    mask = theirs.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        theirs = theirs | {"attn_mask": mask.to(dtype)}

    def run() -> torch.Tensor:
        repeated = (item.repeat_interleave(group, dim=1) for item in (key, value))
        return F.scaled_dot_product_attention(query, *repeated, **theirs)

    if not backward:
        return run()
    return _with_backward(run, (query, key, value), gradient.to(dtype))()


def _with_backward(
    run: Function, inputs: tuple[torch.Tensor, ...], gradient: torch.Tensor
) -> Function:
    """Return a function that runs forward and backward and gives the inputs' gradients, joined."""

    def both() -> torch.Tensor:
        found = torch.autograd.grad(run(), inputs, gradient)
        return torch.cat([item.flatten() for item in found])

    return both
