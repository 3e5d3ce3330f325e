"""What an attention layer needs of a cache."""

from typing import Protocol, runtime_checkable

import torch

from adaattn.backends.keys_values import KeysValues

__all__ = ["LayerCache"]


@runtime_checkable
class LayerCache(Protocol):
    """The keys and values of one layer's earlier tokens.

    Positions count from 0 over all tokens ever seen. An `update` by L tokens returns the keys at
    positions ``start`` to ``length + L - 1``, ``start`` and ``length`` as before the call: always
    the last ones. So attention runs with ``align="bottom_right"``, a causal order and windows
    hold unchanged, and a mask over all positions is cut to ``[..., start:]``.
    """

    @property
    def length(self) -> int:
        """Tokens seen: the position of the next one."""
        ...

    @property
    def start(self) -> int:
        """Position of the first key that is still kept; 0 unless a window dropped some."""
        ...

    def update(self, key: torch.Tensor, value: torch.Tensor) -> KeysValues:
        """Return the keys [B, Hkv, S, D] and values kept, with the new ones behind.

        Args:
            key: [B, Hkv, L, D], rotated if the layer rotates.
            value: [B, Hkv, L, Dv].
        """
        ...
