"""What every executor takes and returns.

An executor is a function ``run(tensors, problem, group) -> Result``. It receives
canonical 4-D tensors, never chooses, never falls back and never imports another
executor. Shape legend in `adaattn.spec`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import torch

from adaattn.backends.block_list import BlockList
from adaattn.backends.head_terms import HeadTerms
from adaattn.backends.keys_values import KeysValues, PackedKeysValues
from adaattn.spec import AttentionProblem, Aux, HeadGroup

__all__ = [
    "BEFORE_BLOCKS",
    "STATISTICS",
    "Direct",
    "Executor",
    "Result",
    "Tensors",
    "combine",
    "num_taken",
]


STATISTICS: Final = (Aux.LSE, Aux.ROW_MAX, Aux.ENTROPY, Aux.DROPPED_MASS)
"""The outputs that have one number for each row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensors:
    """The tensors of one call.

    Args:
        query: [B, Hq, Sq, D].
        kv: keys and values.
        mask: boolean (True = attend) or floating point, 4-D, broadcastable to [B, Hq, Sq, Sk].
        mask_given: the mask as the caller gave it: what is known of it is kept by its identity.
        sinks: [Hq] logits that join the denominator.
        alibi_slopes: [B or 1, Hq] positive slopes; the bias is -slope * abs(p - j).
        cu_seqlens_q: int32 [N + 1], starts of packed query sequences and their end.
        bounds_q: the same numbers on the host; () when not packed, or on a GPU.
        blocks: which blocks of keys are seen.
        head_terms: scale, window and softcap of each head, where they are not the problem's.
    """

    query: torch.Tensor
    kv: KeysValues
    mask: torch.Tensor | None = None
    mask_given: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    bounds_q: tuple[int, ...] = ()
    blocks: BlockList | None = None
    head_terms: HeadTerms | None = None

    @classmethod
    def of(
        cls,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        mask_given: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_k: torch.Tensor | None = None,
        bounds_q: tuple[int, ...] = (),
        bounds_k: tuple[int, ...] = (),
        blocks: BlockList | None = None,
        head_terms: HeadTerms | None = None,
    ) -> "Tensors":
        """Return the tensors of a call, keys and values dense or packed as they were given.

        Args:
            query: [B, Hq, Sq, D].
            key: [B, Hkv, Sk, D], unrepeated.
            value: [B, Hkv, Sk, Dv], unrepeated.
            mask: as in the fields, and so on.
            mask_given: likewise.
            sinks: likewise.
            alibi_slopes: likewise.
            cu_seqlens_q: likewise.
            cu_seqlens_k: int32 [N + 1], starts of packed keys and their end.
            bounds_q: likewise.
            bounds_k: the numbers of ``cu_seqlens_k`` on the host, where they are known.
            blocks: as in the fields.
            head_terms: likewise.
        """
        kv = KeysValues(key=key, value=value)
        if cu_seqlens_k is not None:
            kv = PackedKeysValues(key=key, value=value, cu_seqlens=cu_seqlens_k, bounds=bounds_k)
        return cls(
            query=query,
            kv=kv,
            mask=mask,
            mask_given=mask_given,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
            cu_seqlens_q=cu_seqlens_q,
            bounds_q=bounds_q,
            blocks=blocks,
            head_terms=head_terms,
        )

    @classmethod
    def of_direct(cls, *given: Any) -> "Tensors":
        """Return the tensors that a `Direct` takes, in its order."""
        return cls.of(*given[:3], **dict(zip(_DIRECT, given[3:], strict=False)))

    def as_direct(self) -> tuple[Any, ...]:
        """Return all tensors that a `Direct` takes, in its order."""
        return (self.query, self.key, self.value, *(getattr(self, name) for name in _DIRECT))

    @property
    def key(self) -> torch.Tensor:
        """The keys, [B, Hkv, Sk, D]."""
        return self.kv.key

    @property
    def value(self) -> torch.Tensor:
        """The values, [B, Hkv, Sk, Dv]."""
        return self.kv.value

    @property
    def head_scale(self) -> torch.Tensor | None:
        """The scale of each head, [Hq]; None where one serves all."""
        return None if self.head_terms is None else self.head_terms.scale

    @property
    def head_window(self) -> torch.Tensor | None:
        """The window of each head, [Hq, 2], likewise."""
        return None if self.head_terms is None else self.head_terms.window

    @property
    def head_softcap(self) -> torch.Tensor | None:
        """The softcap of each head, [Hq], likewise."""
        return None if self.head_terms is None else self.head_terms.softcap

    @property
    def cu_seqlens_k(self) -> torch.Tensor | None:
        """Starts of packed keys and their end, int32 [N + 1]; None where they are dense."""
        return self.kv.cu_seqlens if isinstance(self.kv, PackedKeysValues) else None

    @property
    def bounds_k(self) -> tuple[int, ...]:
        """The same on the host, where they are known."""
        return self.kv.bounds if isinstance(self.kv, PackedKeysValues) else ()


@dataclass(slots=True, kw_only=True, eq=False)
class Result:
    """What an executor returns; auxiliary fields are None unless the problem asks for them.

    It is made at each call: a frozen one takes three times as long to make.

    Args:
        output: [B, Hq, Sq, Dv] in the dtype of the query.
        lse: [B, Hq, Sq] fp32 (fp64 for fp64 input): natural log of the softmax denominator,
            sinks included; -inf where nothing is seen.
        row_max: [B, Hq, Sq] the largest score after softcap, bias and masks; -inf likewise.
        entropy: [B, Hq, Sq] entropy in bits of the softmax (before dropout), the sink counted as
            one more outcome; 0 where nothing is seen.
        weights: [B, Hq, Sq, Sk] softmax weights before dropout, zero rows where nothing is seen.
        dropped_mass: [B, Hq, Sq] the share of the softmax that keys in blocks which are not listed
            would have, or more: an upper bound. Sinks count among the rest; 0 where nothing is seen
            with or without the list.
    """

    output: torch.Tensor
    lse: torch.Tensor | None = None
    row_max: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    dropped_mass: torch.Tensor | None = None


_OUTPUTS: Final = tuple(field.name for field in fields(Result))


def combine(parts: Sequence[Result], join: Callable[[list[torch.Tensor]], torch.Tensor]) -> Result:
    """Return one result from several: each field joined where every part has it, else None."""
    columns = {name: [getattr(part, name) for part in parts] for name in _OUTPUTS}
    whole = [name for name in _OUTPUTS if all(item is not None for item in columns[name])]
    return Result(**{name: join(columns[name]) for name in whole})


Executor = Callable[[Tensors, AttentionProblem, HeadGroup], Result]

_DIRECT: Final = (
    "mask",
    "sinks",
    "alibi_slopes",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "blocks",
    "head_terms",
)
Direct = Callable[..., torch.Tensor]
"""What an executor does for one problem without auxiliary outputs, worked out beforehand.

Takes the first `num_taken` of q, k, v, mask, sinks, slopes, both cu_seqlens, blocks and numbers of
each head, as the caller gave them; q, k and v in 4-D. Returns the output. The tensors of each call
are like those that the problem was described from.
"""


BEFORE_BLOCKS: Final = 8
"""Tensors of a `Direct` before a list of blocks and numbers of heads."""


def num_taken(problem: AttentionProblem) -> int:
    """Return how many tensors a `Direct` takes: mask and before, or all where others are there."""
    if problem.head_terms.value:
        return 10
    if problem.has_blocks:
        return 9
    return BEFORE_BLOCKS if problem.has_sinks or problem.has_alibi or problem.num_sequences else 4
