"""The cache of a whole model: one storage for each layer."""

from collections.abc import Sequence

import torch

from adaattn._numbers import require_integer
from adaattn.cache.interface import LayerCache
from adaattn.cache.layer import StoredLayer
from adaattn.errors import ArgumentError, ArgumentTypeError

__all__ = ["KVCache"]


class KVCache:
    """Keys and values of the tokens that a model has seen, for each of its layers.

    Nothing is allocated before a layer's first key, which decides dtype, device, batch and heads.
    Storage doubles when it is full, so that a token costs a bounded number of copies; with
    ``max_length`` it is allocated once, at that size. Layers hand out views, valid until the
    cache changes again. Where gradients are followed, tensors are concatenated instead and a
    backward pass through all calls is exact; `torch.no_grad` or inference mode avoids that cost.
    Within one call of a model, layers may differ in length.

    With ``window`` a layer keeps only its last so many tokens between calls, in twice as many
    slots, though ``length`` counts all. The keys returned are still the last ones, so attention
    aligned ``"bottom_right"`` places them right, and with ``window=(left, 0)`` there loses
    nothing if the window here is at least ``left``. The cache hides no key: the mask does that.

    Args:
        num_layers: layers of the model.
        max_length: most tokens in all; None is unlimited and grows.
        window: tokens kept by each layer, or one number for each (None keeps all).
        spare: tokens that layers with a window keep besides, so that `crop` can take back so
            many.

    Raises:
        ArgumentError: a number below 1, a spare below 0 or without a window, windows for another
            number of layers.
        ArgumentTypeError: something else than a number.

    Example:
        >>> cache = KVCache(num_layers=2)
        >>> key = value = torch.randn(1, 4, 3, 16)
        >>> for index in range(2):
        ...     keys, values = cache.layer(index).update(key, value)
        >>> cache.length, tuple(keys.shape)
        (3, (1, 4, 3, 16))
    """

    def __init__(
        self,
        num_layers: int,
        max_length: int | None = None,
        *,
        window: int | Sequence[int | None] | None = None,
        spare: int = 0,
    ) -> None:
        require_integer("num_layers", num_layers, least=1)
        if max_length is not None:
            require_integer("max_length", max_length, least=1)
        require_integer("spare", spare, least=0)
        windows = _windows(window, num_layers)
        if spare and not any(windows):
            raise ArgumentError.got("spare", "0 without a window", spare)
        self.max_length = max_length
        self._layers = [
            StoredLayer(max_length=max_length, window=given, spare=spare) for given in windows
        ]

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self._layers)

    @property
    def length(self) -> int:
        """Tokens that every layer has seen: the position of the next one between calls."""
        return min(layer.length for layer in self._layers)

    @property
    def memory_bytes(self) -> int:
        """Bytes of storage held by all layers, with the room that waits for tokens."""
        return sum(layer.memory_bytes for layer in self._layers)

    def layer(self, index: int) -> LayerCache:
        """Return one layer's cache, the same object each time.

        Args:
            index: 0 to ``num_layers - 1``.

        Raises:
            ArgumentError: no such layer.
            ArgumentTypeError: no integer.
        """
        require_integer("index", index, least=0)
        if index >= len(self._layers):
            raise ArgumentError.got(
                "index", f"a layer below num_layers = {len(self._layers)}", index
            )
        return self._layers[index]

    def crop(self, length: int) -> None:
        """Forget all but the first ``length`` tokens of every layer, or of none on an error.

        That is how speculative decoding takes back rejected tokens, and how a call that failed
        half-way is undone: ``crop`` to the length before it. The storage stays.

        Args:
            length: tokens to keep, 0 to the current length of every layer.

        Raises:
            ArgumentError: longer than a layer is, or into a past that a window dropped.
            ArgumentTypeError: no integer.
        """
        for layer in self._layers:
            layer.check_crop(length)
        for layer in self._layers:
            layer.crop(length)

    def reorder(self, beam_index: torch.Tensor) -> None:
        """Make sequence i what sequence ``beam_index[i]`` was, in every layer or in none.

        Args:
            beam_index: [B'] int64; a sequence may come several times or not at all, and B' may
                differ from the batch so far.

        Raises:
            ArgumentTypeError: no integer tensor of one dimension.
            ArgumentError: an index beyond the batch (read on the CPU; a GPU asserts it).
        """
        for layer in self._layers:
            layer.check_reorder(beam_index)
        for layer in self._layers:
            layer.reorder(beam_index)

    def reset(self) -> None:
        """Forget every token and free the storage."""
        for layer in self._layers:
            layer.reset()

    def __repr__(self) -> str:
        windows = [layer.window for layer in self._layers]
        window = windows[0] if len(set(windows)) == 1 else windows
        return (
            f"KVCache(num_layers={self.num_layers}, length={self.length}, "
            f"max_length={self.max_length}, window={window}, memory_bytes={self.memory_bytes})"
        )


def _windows(given: int | Sequence[int | None] | None, num_layers: int) -> Sequence[int | None]:
    """Return each layer's window."""
    if given is None or isinstance(given, int):
        windows: Sequence[int | None] = (given,) * num_layers
    elif isinstance(given, Sequence) and not isinstance(given, str):
        windows = given
    else:
        raise ArgumentTypeError.got("window", "an integer for each layer", repr(given))
    if len(windows) != num_layers:
        raise ArgumentError.got(
            "window", f"one number for each of {num_layers} layers", len(windows)
        )
    for window in windows:
        if window is not None:
            require_integer("window", window, least=1)
    return windows
