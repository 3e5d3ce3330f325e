"""What a conversion does to a model, piece by piece, so that it can be undone."""

from typing import Any, Protocol

import torch

__all__ = ["Attend", "Change"]


class Attend(Protocol):
    """Attention as adapters call it: `adaattn.scaled_dot_product_attention` of one module."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **keywords: Any,
    ) -> torch.Tensor:
        """Return attention of q [..., Hq, Sq, D], k [..., Hkv, Sk, D] and v [..., Hkv, Sk, Dv]."""
        ...


class Change(Protocol):
    """One change of a model that was decided on and is not made yet."""

    def apply(self) -> None:
        """Make it."""
        ...

    def undo(self) -> list[str]:
        """Take it back, and return the names of what somebody else changed since, which stays.

        What was never made, or is undone already, is nothing to do.
        """
        ...
