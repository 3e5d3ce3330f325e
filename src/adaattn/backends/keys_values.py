"""Keys and values as one value of a kind: what caches hand over, and executors take."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from adaattn.spec import KVKind

__all__ = ["KeysValues", "PackedKeysValues"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeysValues:
    """Keys and values as dense tensors. Unpacks into both.

    Args:
        key: [B, Hkv, Sk, D], unrepeated.
        value: [B, Hkv, Sk, Dv], unrepeated.
    """

    kind: ClassVar[KVKind] = KVKind.DENSE
    key: torch.Tensor
    value: torch.Tensor

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Yield the keys, then the values."""
        yield self.key
        yield self.value

    def to(self, dtype: torch.dtype) -> "KeysValues":
        """Return them in another dtype."""
        return replace(self, key=self.key.to(dtype), value=self.value.to(dtype))

    def of_heads(self, heads: torch.Tensor) -> "KeysValues":
        """Return those of some heads, by their numbers [H]; a head may come several times."""
        key, value = (item.index_select(1, heads) for item in self)
        return replace(self, key=key, value=value)

    def of_tokens(self, tokens: range) -> "KeysValues":
        """Return those of some tokens, as dense views."""
        key, value = (item[:, :, tokens.start : tokens.stop] for item in self)
        return KeysValues(key=key, value=value)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedKeysValues(KeysValues):
    """Keys and values of several sequences, one behind another in a batch of 1.

    Args:
        cu_seqlens: int32 [N + 1], starts of the sequences and their end.
        bounds: the same numbers on the host; () on a GPU, where reading them would wait
            (`adaattn.backends.common.host_bounds` does).
    """

    kind: ClassVar[KVKind] = KVKind.PACKED
    cu_seqlens: torch.Tensor
    bounds: tuple[int, ...] = ()
