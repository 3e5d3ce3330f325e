"""A mask of Transformers as structure, until somebody computes with it.

It travels from the mask function to the layers, which read the structure. Shape legend in
`adaattn.spec`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map

__all__ = ["UNLIMITED", "MaskStructure", "StructuredMask", "segments_of"]

UNLIMITED = -1
"""A side of a window that reaches as far as there are keys."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MaskStructure:
    """Which keys are seen, without a mask.

    Args:
        is_causal: key j is seen from position p only if j <= p.
        window: ``(left, right)``: only p - left <= j <= p + right; -1 is unlimited.
        num_keys: keys from here on are seen by nobody and can be cut off. The last query
            stands at the last of the remaining keys.
        starts: int32 [N + 1], starts of packed sequences and their end; None if not packed.
    """

    is_causal: bool
    window: tuple[int, int]
    num_keys: int
    starts: torch.Tensor | None = None

    @property
    def is_order_alone(self) -> bool:
        """Whether nothing but causal order, if that, hides a key that is not cut off."""
        return self.window == (UNLIMITED, UNLIMITED) and self.starts is None

    def dense(self, len_q: int, len_k: int, device: torch.device) -> torch.Tensor:
        """Return the same mask as booleans [Sq, Sk], True where a key is seen."""
        key = torch.arange(len_k, device=device)
        position = torch.arange(len_q, device=device)[:, None] + (self.num_keys - len_q)
        seen = (key < self.num_keys).expand(len_q, len_k)
        left, right = self.window
        if self.is_causal:
            seen = seen & (key <= position)
        if left != UNLIMITED:
            seen = seen & (key >= position - left)
        if right != UNLIMITED:
            seen = seen & (key <= position + right)
        if self.starts is not None:
            segments = segments_of(self.starts, len_q)
            seen = seen & (segments[:, None] == segments[None, :])
        return seen


def segments_of(starts: torch.Tensor, length: int) -> torch.Tensor:
    """Return the number of the packed sequence that each token belongs to, [length].

    Args:
        starts: [N + 1], starts of the sequences and their end.
        length: tokens of all sequences together.
    """
    tokens = torch.arange(length, device=starts.device, dtype=starts.dtype)
    return torch.bucketize(tokens, starts[1:-1].contiguous(), right=True)


class StructuredMask(torch.Tensor):
    """A mask [B, 1, Sq, Sk], stored as structure or booleans until somebody computes with it.

    Any operation on it works on the ordinary tensor, which is made once: booleans (True where a
    key is seen) or, in a floating dtype, zeros and the lowest number, which are added to scores.
    From then on that tensor is the truth, since views of it may have been written to.
    """

    structure: MaskStructure | torch.Tensor
    visibility: object
    """What the structure is as arguments of the public call, once a layer has asked for it."""
    _dense: torch.Tensor | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        structure: MaskStructure | torch.Tensor,
        shape: tuple[int, ...],
        device: torch.device | str,
        dtype: torch.dtype = torch.bool,
    ) -> "StructuredMask":
        """Return the mask of a structure; nothing of its size is allocated."""
        mask: StructuredMask = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=torch.device(device)
        )
        mask.structure = structure
        mask.visibility = None
        mask._dense = None
        return mask

    def __init__(self, *args: object) -> None:
        """Do nothing: ``__new__`` has set everything."""

    @property
    def is_dense(self) -> bool:
        """True once the ordinary tensor exists."""
        return self._dense is not None

    def materialise(self) -> torch.Tensor:
        """Return the ordinary tensor [B, 1, Sq, Sk]."""
        if self._dense is None:
            seen = self.structure
            if isinstance(seen, MaskStructure):
                seen = seen.dense(self.shape[-2], self.shape[-1], self.device)
            if self.dtype != torch.bool:
                zero = torch.zeros((), dtype=self.dtype, device=self.device)
                seen = torch.where(seen, zero, torch.finfo(self.dtype).min)
            self._dense = seen.expand(self.shape).clone()
        return self._dense

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return the structure as text."""
        return f"StructuredMask({self.structure}, shape={tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run any operation on the ordinary tensor."""

        def plain(value: object) -> object:
            return value.materialise() if isinstance(value, cls) else value

        return func(*tree_map(plain, args), **tree_map(plain, dict(kwargs or {})))
