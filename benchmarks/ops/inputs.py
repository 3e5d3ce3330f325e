"""Tensors of a cell, which keys its rows see, and the masks that PyTorch's function needs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch

from adaattn import BlockList
from benchmarks.ops.registry import Cell

__all__ = ["Inputs", "alibi_mask", "make_inputs", "peer_mask", "seen", "tiny"]

_KEPT_SHARE = 0.7
_BLOCK = 128
_NUM_DOCUMENTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The tensors of a cell, the same for all who compute it.

    Args:
        query: [B, Hq, Sq, D], and so on.
        key: likewise.
        value: likewise.
        gradient: of the output, where the backward pass is timed.
        mask: [1 or B, 1 or Hq, Sq, Sk] where the cell has one.
        slopes: [Hq] of ALiBi.
        sinks: [Hq].
        starts: int32 bounds of packed documents.
        documents: [T] each token's document.
        listed: boolean [1, Hq, Nq, Nk], the blocks of keys that each block of rows sees.
        blocks: the same as a list.
        made: masks of PyTorch's function, made once.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    gradient: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    starts: torch.Tensor | None = None
    documents: torch.Tensor | None = None
    listed: torch.Tensor | None = None
    blocks: BlockList | None = None
    made: list[torch.Tensor] = field(default_factory=list)

    @property
    def qkv(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What every function takes first."""
        return self.query, self.key, self.value

    @property
    def is_grouped(self) -> bool:
        """Whether several query heads share a key head."""
        return self.query.shape[1] != self.key.shape[1]

    def listed_keys(self, places: Sequence[int] | slice) -> torch.Tensor:
        """Return which keys the lists leave to some query rows: boolean [1, Hq, R, Sk]."""
        assert self.listed is not None
        rows = torch.arange(self.query.shape[2], device=self.query.device)[places] // _BLOCK
        keys = torch.arange(self.key.shape[2], device=self.key.device) // _BLOCK
        return self.listed[:, :, rows][..., keys]

    def keywords(self, cell: Cell) -> dict[str, Any]:
        """Return the keywords of ``adaattn.scaled_dot_product_attention``."""
        given = cell.given
        found: dict[str, Any] = {"is_causal": given.is_causal, "enable_gqa": self.is_grouped}
        if given.window:
            found["window"] = (given.window, -1)
        if given.dilation > 1:
            found["dilation"] = given.dilation
        if given.softcap:
            found["softcap"] = given.softcap
        if self.starts is not None:
            longest = max(cell.lengths)
            found |= {"cu_seqlens_q": self.starts, "cu_seqlens_k": self.starts}
            found |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
        named: dict[str, Any] = {
            "attn_mask": self.mask,
            "alibi_slopes": self.slopes,
            "sinks": self.sinks,
        }
        named["blocks"] = self.blocks
        return found | {name: item for name, item in named.items() if item is not None}


def make_inputs(cell: Cell, device: str) -> Inputs:
    """Return random normal tensors, the same in each run."""
    batch, heads, kv_heads, len_q, len_k, dim = cell.shape
    generator = torch.Generator(device).manual_seed(len_k + dim)

    def normal(*shape: int, dtype: torch.dtype = cell.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    query = normal(batch, heads, len_q, dim)
    key, value = (normal(batch, kv_heads, len_k, columns) for columns in (dim, cell.dim_v))
    for item in (query, key, value):
        item.requires_grad_(cell.backward)
    mask = None
    if cell.given.mask == "boolean":
        mask = torch.rand((1, 1, len_q, len_k), generator=generator, device=device) < _KEPT_SHARE
        mask[..., 0] = True
    elif cell.given.mask == "additive":
        mask = normal(1, heads, len_q, len_k)
    elif cell.given.mask:
        mask = _pattern(cell, device)
    starts = documents = None
    if cell.lengths:
        bounds = (0, *accumulate(cell.lengths))
        starts = torch.tensor(bounds, dtype=torch.int32, device=device)
        tokens = torch.arange(len_q, device=device)
        documents = torch.searchsorted(starts[1:].long(), tokens, right=True)
    listed = blocks = None
    if cell.given.listed:
        listed = _some_blocks(cell, generator)
        # On a CPU its room is that of the longest list: planning looks at it.
        blocks = BlockList.from_mask(listed.cpu(), block_q=_BLOCK, block_k=_BLOCK).to(device)
    places = torch.arange(1, heads + 1, device=device)
    return Inputs(
        query=query,
        key=key,
        value=value,
        gradient=normal(batch, heads, len_q, cell.dim_v) if cell.backward else None,
        mask=mask,
        slopes=torch.exp2(-8.0 * places / heads) if cell.given.has_alibi else None,
        sinks=normal(heads, dtype=torch.float32) if cell.given.has_sinks else None,
        starts=starts,
        documents=documents,
        listed=listed,
        blocks=blocks,
    )


def _pattern(cell: Cell, device: str) -> torch.Tensor:
    """Return a boolean mask as people make it: causal order, and padding or documents.

    Prompts of a batch are shorter than the longest by up to a half; tokens of padding see
    themselves. Documents are an eighth of all tokens each.
    """
    batch, _, _, len_q, len_k, _ = cell.shape
    rows, keys = (torch.arange(length, device=device) for length in (len_q, len_k))
    ordered = rows[:, None] >= keys
    if cell.given.mask == "documents":
        size = -(-len_k // _NUM_DOCUMENTS)
        return (ordered & (rows[:, None] // size == keys // size))[None, None]
    padding = len_k // 2 * torch.arange(batch, device=device) // max(batch - 1, 1)
    is_real = keys >= padding[:, None, None, None]
    return (ordered & is_real) | (rows[:, None] == keys)


def _some_blocks(cell: Cell, generator: torch.Generator) -> torch.Tensor:
    """Return a head's own share of the blocks of each row of blocks, its diagonal one included."""
    _, heads, _, len_q, len_k, _ = cell.shape
    num_q, num_k = (-(-length // _BLOCK) for length in (len_q, len_k))
    device = generator.device
    order = torch.rand((1, heads, num_q, num_k), generator=generator, device=device)
    rows = torch.arange(num_q, device=device)
    order[..., rows, rows.clamp(max=num_k - 1)] = -1.0
    kept = max(round(num_k * cell.given.listed / 100), 1)
    return torch.zeros_like(order, dtype=torch.bool).scatter_(
        -1, order.argsort(-1)[..., :kept], value=True
    )


def seen(cell: Cell, inputs: Inputs) -> Callable[[Any, Any], Any]:
    """Return whether query i sees key j by its position, for index tensors that broadcast."""
    is_causal, window, dilation = cell.given.is_causal, cell.given.window, cell.given.dilation
    documents = inputs.documents

    def is_seen(i: Any, j: Any) -> Any:
        found = i >= j if is_causal else (i == i) & (j == j)
        if window:
            found = found & (i - j <= window)
        if dilation > 1:
            found = found & ((i - j) % dilation == 0)
        if documents is not None:
            found = found & (documents[i] == documents[j])
        return found

    return is_seen


def peer_mask(cell: Cell, inputs: Inputs) -> torch.Tensor | None:
    """Return the mask that says to PyTorch's function what it lacks a word for, else None."""
    if not cell.given.sdpa_needs_mask:
        return None
    if inputs.mask is not None:
        return inputs.mask
    if not inputs.made:
        inputs.made.append(_made_mask(cell, inputs))
    return inputs.made[0]


def _made_mask(cell: Cell, inputs: Inputs) -> torch.Tensor:
    """Return what positions hide, with the bias of ALiBi, as a mask."""
    if inputs.slopes is not None:
        return alibi_mask(inputs.query, inputs.key, {"alibi_slopes": inputs.slopes})
    rows, keys = (torch.arange(item.shape[2], device=item.device) for item in inputs.qkv[:2])
    visible = seen(cell, inputs)(rows[:, None], keys)[None, None]
    return visible if inputs.listed is None else visible & inputs.listed_keys(slice(None))


def alibi_mask(query: torch.Tensor, key: torch.Tensor, semantics: dict[str, Any]) -> torch.Tensor:
    """Return the additive mask of causal ALiBi; the queries are the last tokens of the keys."""
    cols = torch.arange(key.shape[2], device=query.device)
    rows = cols[key.shape[2] - query.shape[2] :, None]
    slopes = semantics["alibi_slopes"][:, None, None].to(query.dtype)
    bias = -slopes * (rows - cols).abs().to(query.dtype)
    return bias.masked_fill_(rows < cols, float("-inf")).unsqueeze(0)


def tiny(cell: Cell) -> Cell:
    """Return a cell at toy sizes, to see that all of it runs."""
    batch, heads, kv_heads, len_q, len_k, dim = cell.shape
    group = heads // kv_heads
    heads = min(heads, 4)
    most = 600 if cell.given.listed else 48
    lengths = (min(len_q, most), min(len_k, most))
    shape = (min(batch, 2), heads, max(heads // group, 1), *lengths, dim // 4)
    given = replace(
        cell.given,
        window=min(cell.given.window, 8),
        longest=min(cell.given.longest, 16),
    )
    return replace(cell, shape=shape, value_dim=cell.value_dim // 4, given=given)
