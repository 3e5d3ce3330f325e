"""The storage of one layer: a buffer with room, of which the used part is handed out as a view."""

import torch

from adaattn._numbers import require_integer
from adaattn.backends.keys_values import KeysValues
from adaattn.errors import ArgumentError, ArgumentTypeError, DeviceError, DTypeError, ShapeError

__all__ = ["StoredLayer"]


class StoredLayer:
    """One layer of a `KVCache`; a `LayerCache`.

    The buffer has slots; those from ``offset`` on hold the kept tokens. Appending writes behind
    them; full, the buffer doubles, or, with a window, moves the kept tokens to its front. Either
    way a token is copied a bounded number of times on average.

    Args:
        max_length: most tokens in all, preallocated on first use; None grows.
        window: tokens that must be kept between calls; None keeps all.
        spare: tokens kept beyond the window, for `crop`.
    """

    def __init__(
        self, *, max_length: int | None = None, window: int | None = None, spare: int = 0
    ) -> None:
        self.max_length = max_length
        self.window = window
        self._keep = None if window is None else window + spare
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None
        self._offset = 0
        self._kept = 0
        self._length = 0

    @property
    def length(self) -> int:
        """Tokens seen: the position of the next one."""
        return self._length

    @property
    def start(self) -> int:
        """Position of the first key that is kept."""
        return self._length - self._kept

    @property
    def memory_bytes(self) -> int:
        """Bytes of storage held, with the room that waits for tokens."""
        if self._keys is None or self._values is None:
            return 0
        return self._keys.untyped_storage().nbytes() + self._values.untyped_storage().nbytes()

    def update(self, key: torch.Tensor, value: torch.Tensor) -> KeysValues:
        """Return the keys and values kept with the new ones behind, as views where possible.

        The views hold until the next call that changes the cache. Where gradients are followed
        (gradients enabled, and the new or the kept tensors require them) the parts are
        concatenated instead, so that nothing a backward pass needs is ever written over.

        Args:
            key: [B, Hkv, L, D].
            value: [B, Hkv, L, Dv].

        Raises:
            ShapeError: not the batch, heads or head size of before, or no room left.
            DTypeError: not the dtype of before, or of each other.
            DeviceError: not the device of before, or of each other.
        """
        self._check(key, value)
        new = KeysValues(key=key, value=value)
        parts = [self._view(), new] if self._kept else [new]
        total = self._kept + key.shape[2]
        if self._follows_gradients(key, value):
            self._keys, self._values = (torch.cat(side, dim=2) for side in zip(*parts, strict=True))
            self._offset = 0
        elif self._keep is not None and total > 2 * self._keep:
            keys, values = (
                torch.cat(side, dim=2) if len(side) > 1 else side[0]
                for side in zip(*parts, strict=True)
            )
            self._refill(keys, values, self._keep)
            self._length += key.shape[2]
            return KeysValues(key=keys, value=values)
        else:
            self._append(key, value)
        self._length += key.shape[2]
        self._kept = total
        result = self._view()
        if self._keep is not None and total > self._keep:
            self._offset += total - self._keep
            self._kept = self._keep
        return result

    def check_crop(self, length: int) -> None:
        """Refuse a length that `crop` cannot give.

        Raises:
            ArgumentError: it is longer than what is held, or a window has dropped keys that the
                shorter past would need.
        """
        require_integer("length", length, least=0)
        if length > self._length:
            raise ArgumentError.got("length", f"at most the {self._length} tokens held", length)
        if self.window is not None and length and self.start > max(0, length - self.window):
            expected = f"0, or {self.start + self.window} to {self._length}, with its window"
            hint = f"keys before position {self.start} were dropped; spare= keeps more"
            raise ArgumentError.got("length", expected, length, hint)

    def crop(self, length: int) -> None:
        """Forget all but the first ``length`` tokens; the storage stays."""
        self.check_crop(length)
        self._kept = max(0, length - self.start)
        self._length = length

    def check_reorder(self, beam_index: torch.Tensor) -> None:
        """Refuse what is no list of this layer's sequences.

        The range is read where that is free, on the CPU; a GPU asserts it by itself.

        Raises:
            ArgumentTypeError: no integer tensor of one dimension.
            ArgumentError: an index beyond the batch.
        """
        integer = isinstance(beam_index, torch.Tensor) and beam_index.dtype in (
            torch.int64,
            torch.int32,
        )
        if not integer or beam_index.ndim != 1:
            got = (
                f"{beam_index.dtype} {tuple(beam_index.shape)}"
                if isinstance(beam_index, torch.Tensor)
                else repr(beam_index)
            )
            raise ArgumentTypeError.got("beam_index", "an int64 tensor [B]", got)
        if self._keys is not None and beam_index.numel() and beam_index.device.type == "cpu":
            low, high = (int(edge) for edge in beam_index.aminmax())
            if low < 0 or high >= self._keys.shape[0]:
                expected = f"indices in [0, {self._keys.shape[0]})"
                raise ArgumentError.got("beam_index", expected, f"{low} to {high}")

    def reorder(self, beam_index: torch.Tensor) -> None:
        """Make sequence i what sequence ``beam_index[i]`` was; their number may change."""
        self.check_reorder(beam_index)
        if self._keys is None or self._values is None:
            return
        index = beam_index.to(self._keys.device)
        keys, values = (part.index_select(0, index) for part in self._view())
        self._allocate(keys, values, self._keys.shape[2])
        self._write(keys, values, 0)

    def reset(self) -> None:
        """Forget every token and free the storage; the next key decides the dtype again."""
        self._keys = self._values = None
        self._offset = self._kept = self._length = 0

    def _view(self) -> KeysValues:
        """Return the kept keys and values, no copy."""
        assert self._keys is not None and self._values is not None
        return KeysValues(
            key=self._keys.narrow(2, self._offset, self._kept),
            value=self._values.narrow(2, self._offset, self._kept),
        )

    def _append(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write the new tensors behind the kept ones, in room that is made if there is none."""
        needed = self._kept + key.shape[2]
        slots = 0 if self._keys is None else self._keys.shape[2]
        if self._keys is None or needed > slots or self._holds_gradients():
            self._grow(key, value, max(needed, self._next_slots(slots)))
        elif self._offset + needed > slots:
            # Copied twice: source and destination may overlap.
            keys, values = self._view()
            self._write(keys.clone(), values.clone(), 0)
            self._offset = 0
        self._write(key, value, self._offset + self._kept)

    def _next_slots(self, slots: int) -> int:
        """Return how many slots the next buffer has, more if more are needed at once."""
        limit = None if self._keep is None else 2 * self._keep
        if self.max_length is not None:
            return self.max_length if limit is None else min(self.max_length, limit)
        return 2 * slots if limit is None else min(2 * slots, limit)

    def _grow(self, key: torch.Tensor, value: torch.Tensor, slots: int) -> None:
        """Replace the buffer by one of so many slots, the kept tokens at its front."""
        kept = None if self._keys is None else self._view()
        self._allocate(key, value, slots)
        if kept is not None:
            self._write(kept.key, kept.value, 0)

    def _refill(self, keys: torch.Tensor, values: torch.Tensor, keep: int) -> None:
        """Store the last ``keep`` tokens of a call that is longer than the buffer."""
        slots = 0 if self._keys is None else self._keys.shape[2]
        if slots < keep or self._holds_gradients():
            self._allocate(keys, values, max(keep, self._next_slots(slots)))
        first = keys.shape[2] - keep
        self._offset, self._kept = 0, keep
        self._write(keys[:, :, first:], values[:, :, first:], 0)

    def _allocate(self, key: torch.Tensor, value: torch.Tensor, slots: int) -> None:
        """Make buffers of so many slots, with the other sizes of a key and a value."""
        # A tensor made in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            self._keys, self._values = (
                torch.empty((*x.shape[:2], slots, x.shape[3]), dtype=x.dtype, device=x.device)
                for x in (key, value)
            )
        self._offset = 0

    def _write(self, keys: torch.Tensor, values: torch.Tensor, slot: int) -> None:
        """Copy tensors into the buffers from a slot on."""
        assert self._keys is not None and self._values is not None
        self._keys.narrow(2, slot, keys.shape[2]).copy_(keys)
        self._values.narrow(2, slot, values.shape[2]).copy_(values)

    def _holds_gradients(self) -> bool:
        """Return whether a graph hangs on what is stored, which must then not be written to."""
        assert self._keys is not None and self._values is not None
        return self._keys.requires_grad or self._values.requires_grad

    def _follows_gradients(self, key: torch.Tensor, value: torch.Tensor) -> bool:
        """Return whether the result of this update has to carry gradients."""
        if not torch.is_grad_enabled():
            return False
        held = self._keys is not None and self._holds_gradients()
        return held or key.requires_grad or value.requires_grad

    def _check(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Refuse tensors that do not fit each other, what is held, or the room that is left."""
        for name, tensor in (("key", key), ("value", value)):
            if tensor.ndim != 4:
                raise ShapeError.got(name, "[B, Hkv, L, D]", tuple(tensor.shape))
        if value.shape[:3] != key.shape[:3]:
            expected = f"{tuple(key.shape[:3])} before its last dimension, as key has"
            raise ShapeError.got("value", expected, tuple(value.shape))
        _check_kind("value", value, "key", key)
        if self._keys is not None and self._values is not None:
            for name, new, held in (("key", key, self._keys), ("value", value, self._values)):
                batch, heads, _, dim = held.shape
                if (new.shape[0], new.shape[1], new.shape[3]) != (batch, heads, dim):
                    expected = f"[{batch}, {heads}, L, {dim}], as this layer holds"
                    hint = "reset() starts anew, reorder() changes the batch"
                    raise ShapeError.got(name, expected, tuple(new.shape), hint)
                _check_kind(name, new, "cache", held)
        added = key.shape[2]
        if self.max_length is not None and self._length + added > self.max_length:
            left = self.max_length - self._length
            expected = (
                f"at most {left} new tokens (max_length {self.max_length}, {self._length} held)"
            )
            hint = "crop, reset, or make the cache with a larger max_length"
            raise ShapeError.got("key", expected, added, hint)


def _check_kind(name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """Refuse another dtype or another device."""
    if tensor.dtype != other.dtype:
        expected = f"{other.dtype}, as the {other_name} has"
        raise DTypeError.got(f"dtype of {name}", expected, tensor.dtype)
    if tensor.device != other.device:
        expected = f"{other.device}, as the {other_name} has"
        raise DeviceError.got(f"device of {name}", expected, tensor.device)
