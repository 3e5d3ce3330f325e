"""Single attention problems, each with what a PyTorch user writes for it.

A case is data: its name, its sizes on a CPU and on a GPU, AdaAttn's keywords, and its peers.
Adding one is adding an entry to `CASES`. A peer is the best way that a user has: what does not
change from call to call, such as a mask, is made before and is not timed.

Shape legend in `adaattn.spec`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Final

import torch

from adaattn.backends.sdpa_call import sdpa

__all__ = ["CASES", "Case", "Inputs", "Peer", "Shape"]

_CAP: Final = 50.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a problem.

    Args:
        heads: query heads.
        kv_heads: key heads; the query heads are a multiple.
        len_q: query tokens.
        len_k: keys.
        head_dim: of queries, keys and values.
        window: keys seen before the query's own; 0 is all.
        lengths: of packed documents; () is not packed.
        budget_bytes: memory that a call may take beside inputs and output; None is no limit.
    """

    heads: int
    kv_heads: int
    len_q: int
    len_k: int
    head_dim: int
    window: int = 0
    lengths: tuple[int, ...] = ()
    budget_bytes: int | None = None

    @property
    def num_scores(self) -> int:
        """Scores of all heads."""
        return self.heads * self.len_q * self.len_k

    def words(self) -> str:
        """Return the sizes in words and numbers."""
        grouped = f" over {self.kv_heads} key heads" if self.kv_heads != self.heads else ""
        queries = "1 query" if self.len_q == 1 else f"{self.len_q} queries"
        lengths = f"{self.len_q} tokens"
        if self.len_q != self.len_k:
            lengths = f"{queries} on {self.len_k} keys"
        parts = [f"{self.heads} heads{grouped}", lengths, f"D {self.head_dim}"]
        parts += [f"{self.window} keys back"] if self.window else []
        parts += [f"{len(self.lengths)} documents"] if self.lengths else []
        if self.budget_bytes is not None:
            parts.append(f"at most {self.budget_bytes / 1e6:.0f} MB of workspace")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Tensors of a case.

    Args:
        shape: their sizes.
        query: [1, H, Sq, D].
        key: [1, Hkv, Sk, D].
        value: the same.
    """

    shape: Shape
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


Call = Callable[[], torch.Tensor]
Made = tuple[Call, torch.Tensor | None]
"""A call, and the mask or bias that is kept for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """How a PyTorch user computes a case.

    Args:
        words: what it is.
        make: returns the call, and what is made once and kept for it.
        needs_scores: it holds at least one number for each score.
    """

    words: str
    make: Callable[[Inputs], Made]
    needs_scores: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One problem.

    Args:
        name: what it is, in a few words.
        on_cpu: its sizes there.
        on_cuda: its sizes there.
        keywords: of AdaAttn's call, beside q, k, v and a memory budget.
        peer: PyTorch's way.
        peer_on_cuda: its way there where that is another one.
    """

    name: str
    on_cpu: Shape
    on_cuda: Shape
    keywords: Callable[[Inputs], dict[str, Any]]
    peer: Peer
    peer_on_cuda: Peer | None = None

    def shape(self, device: torch.device) -> Shape:
        """Return the sizes on a device."""
        return self.on_cuda if device.type == "cuda" else self.on_cpu

    def peer_for(self, device: torch.device) -> Peer:
        """Return PyTorch's way on a device."""
        return self.peer_on_cuda or self.peer if device.type == "cuda" else self.peer


def _slopes(inputs: Inputs) -> torch.Tensor:
    """Return the ALiBi slopes of each head, [H]."""
    places = torch.arange(1, inputs.shape.heads + 1, device=inputs.query.device)
    return torch.exp2(-8.0 * places / inputs.shape.heads)


def _starts(inputs: Inputs) -> torch.Tensor:
    """Return the bounds of the packed documents, [N + 1] int32."""
    bounds = (0, *accumulate(inputs.shape.lengths))
    return torch.tensor(bounds, dtype=torch.int32, device=inputs.query.device)


def _documents(inputs: Inputs) -> torch.Tensor:
    """Return the document of each token, [T]."""
    lengths = torch.tensor(inputs.shape.lengths, device=inputs.query.device)
    return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)


def _packed(inputs: Inputs) -> dict[str, Any]:
    starts, longest = _starts(inputs), max(inputs.shape.lengths)
    bounds = {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
    return {"is_causal": True, **bounds, "max_seqlen_q": longest, "max_seqlen_k": longest}


def _visible(inputs: Inputs) -> torch.Tensor:
    """Return which keys each query sees, [Sq, Sk]: causal, in its window and document."""
    shape = inputs.shape
    keys = torch.arange(shape.len_k, device=inputs.query.device)
    rows = keys[: shape.len_q, None]
    seen = rows >= keys
    if shape.window:
        seen &= rows - shape.window <= keys
    if shape.lengths:
        documents = _documents(inputs)
        seen &= documents[:, None] == documents
    return seen


def _grouped(inputs: Inputs) -> Made:
    return lambda: sdpa(inputs.query, inputs.key, inputs.value, enable_gqa=True), None


def _masked(inputs: Inputs) -> Made:
    mask = _visible(inputs)
    return lambda: sdpa(inputs.query, inputs.key, inputs.value, attn_mask=mask), mask


def _biased(inputs: Inputs) -> Made:
    """Return SDPA with the whole bias of ALiBi, in the dtype of the query."""
    keys = torch.arange(inputs.shape.len_k, device=inputs.query.device)
    slopes = _slopes(inputs)[:, None, None]
    bias = slopes.to(inputs.query.dtype) * (keys - keys[:, None]).to(inputs.query.dtype)
    bias = bias.masked_fill_(~_visible(inputs), -torch.inf)[None]
    return lambda: sdpa(inputs.query, inputs.key, inputs.value, attn_mask=bias), bias


def _capped(inputs: Inputs) -> Made:
    """Return what models with a softcap write out, since SDPA has no word for it."""
    query, key, value = inputs.query, inputs.key, inputs.value
    hidden = ~_visible(inputs)
    scale = inputs.shape.head_dim**-0.5

    def call() -> torch.Tensor:
        scores = torch.matmul(query, key.transpose(-2, -1)) * scale
        scores = torch.tanh(scores / _CAP) * _CAP
        weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
        return torch.matmul(weights, value)

    return call, hidden


def _flex_call(inputs: Inputs, score: Callable[..., torch.Tensor] | None) -> Made:
    """Return compiled FlexAttention over the keys that are seen, whose block mask is kept."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    shape, device = inputs.shape, inputs.query.device
    documents = _documents(inputs) if shape.lengths else None

    def is_seen(b: Any, h: Any, q: Any, k: Any) -> Any:
        seen = q >= k
        if shape.window:
            seen = seen & (q - k <= shape.window)
        return seen if documents is None else seen & (documents[q] == documents[k])

    blocks = create_block_mask(is_seen, None, None, shape.len_q, shape.len_k, device=device)
    compiled: Callable[..., torch.Tensor] = torch.compile(flex_attention, dynamic=False)

    def call() -> torch.Tensor:
        return compiled(inputs.query, inputs.key, inputs.value, score_mod=score, block_mask=blocks)

    return call, None


def _flex_masked(inputs: Inputs) -> Made:
    return _flex_call(inputs, None)


def _flex_capped(inputs: Inputs) -> Made:
    return _flex_call(inputs, lambda s, b, h, q, k: _CAP * torch.tanh(s / _CAP))


def _flex_biased(inputs: Inputs) -> Made:
    slopes = _slopes(inputs)
    return _flex_call(inputs, lambda s, b, h, q, k: s - slopes[h] * (q - k))


_GROUPED = Peer(words="F.scaled_dot_product_attention(enable_gqa=True)", make=_grouped)
_MASKED = Peer(words="F.scaled_dot_product_attention, a boolean mask made before", make=_masked)
_BIASED = Peer(
    words="F.scaled_dot_product_attention, a float bias made before",
    make=_biased,
    needs_scores=True,
)
_CAPPED = Peer(words="matmul, tanh, softmax, matmul", make=_capped, needs_scores=True)
_FLEX = "compiled flex_attention, a block mask made before"


def _square(length: int, **more: Any) -> Shape:
    """Return few heads over a text that attends to itself, for a CPU."""
    return Shape(heads=4, kv_heads=4, len_q=length, len_k=length, head_dim=64, **more)


def _large(length: int, **more: Any) -> Shape:
    """Return many heads over a text that attends to itself, for a GPU."""
    return Shape(heads=32, kv_heads=32, len_q=length, len_k=length, head_dim=128, **more)


_DOCUMENTS: Final = (1024, 512, 2048, 256, 1536, 768, 1280, 768)

_SOFTCAP: Final = Case(
    name="softcap",
    on_cpu=_square(4096),
    on_cuda=_large(8192),
    keywords=lambda inputs: {"is_causal": True, "softcap": _CAP},
    peer=_CAPPED,
    peer_on_cuda=Peer(words=_FLEX, make=_flex_capped),
)
_ALIBI: Final = Case(
    name="ALiBi",
    on_cpu=_square(4096),
    on_cuda=_large(8192),
    keywords=lambda inputs: {"is_causal": True, "alibi_slopes": _slopes(inputs)},
    peer=_BIASED,
    peer_on_cuda=Peer(words=_FLEX, make=_flex_biased),
)


def _in_little_memory(case: Case) -> Case:
    """Return the same over more tokens, inside of a memory budget."""
    return replace(
        case,
        name=f"{case.name} in little memory",
        on_cpu=_square(8192, budget_bytes=256_000_000),
        on_cuda=_large(32768, budget_bytes=2_000_000_000),
    )


CASES: Final = (
    Case(
        name="one token on a long cache",
        on_cpu=Shape(heads=32, kv_heads=8, len_q=1, len_k=16384, head_dim=128),
        on_cuda=Shape(heads=32, kv_heads=8, len_q=1, len_k=131072, head_dim=128),
        keywords=lambda inputs: {"enable_gqa": True},
        peer=_GROUPED,
    ),
    Case(
        name="sliding window",
        on_cpu=_square(8192, window=512),
        on_cuda=_large(16384, window=1024),
        keywords=lambda inputs: {"is_causal": True, "window": (inputs.shape.window, 0)},
        peer=_MASKED,
        peer_on_cuda=Peer(words=_FLEX, make=_flex_masked),
    ),
    Case(
        name="packed documents",
        on_cpu=_square(8192, lengths=_DOCUMENTS),
        on_cuda=_large(16384, lengths=2 * _DOCUMENTS),
        keywords=_packed,
        peer=_MASKED,
        peer_on_cuda=Peer(words=_FLEX, make=_flex_masked),
    ),
    _SOFTCAP,
    _ALIBI,
    _in_little_memory(_SOFTCAP),
    _in_little_memory(_ALIBI),
)
"""All of them; on two CPU cores they take half a minute together."""
