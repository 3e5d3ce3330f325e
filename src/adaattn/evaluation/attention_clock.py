"""What happens inside a model's attention calls: time, and entropy of the exact rows.

Both look in through Transformers' attention registry, whose entries an instance may shadow
and un-shadow. Every implementation is timed at the same door, adapter included, so that
PyTorch's and ours can be compared.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from adaattn.linalg.entropy import sampled_attention_entropy

__all__ = ["AttentionClock", "EntropyProbe", "intercepted"]

_SAMPLED_ROWS = 64

_Attention = Callable[..., Any]


@contextlib.contextmanager
def intercepted(name: str, wrap: Callable[[_Attention], _Attention]) -> Iterator[bool]:
    """Replace a registered attention function inside the block; tell whether there was one.

    Args:
        name: as in ``attn_implementation``. Transformers does not register ``"eager"``.
        wrap: takes the registered function and returns the one to call instead.
    """
    from transformers import modeling_utils

    registry = modeling_utils.ALL_ATTENTION_FUNCTIONS
    if name not in registry:
        yield False
        return
    registry[name] = wrap(registry[name])
    try:
        yield True
    finally:
        del registry[name]


class AttentionClock:
    """Time spent in attention calls since the last reading.

    Args:
        device: on CUDA, events in the stream are used, which stop nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_on_gpu = device.type == "cuda"
        self._spans: list[tuple[Any, Any]] = []

    def wrap(self, attention: _Attention) -> _Attention:
        """Return the same function, timed."""
        now = _recorded if self._is_on_gpu else time.perf_counter

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = now()
            result = attention(*args, **kwargs)
            self._spans.append((start, now()))
            return result

        return timed

    def read_ms(self) -> float:
        """Return the milliseconds since the last reading; on CUDA after a synchronisation."""
        spans, self._spans = self._spans, []
        if self._is_on_gpu:
            return sum((float(start.elapsed_time(end)) for start, end in spans), 0.0)
        return sum((1e3 * (end - start) for start, end in spans), 0.0)


def _recorded() -> torch.cuda.Event:
    """Return an event of the device's current moment."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class EntropyProbe:
    """Mean row entropy in bits of each layer's heads, from rows sampled in sdpa's calls."""

    def __init__(self) -> None:
        self._layers: dict[int, tuple[float, ...]] = {}

    @property
    def layers(self) -> tuple[tuple[float, ...], ...]:
        """One tuple of heads for each layer, in order."""
        return tuple(self._layers[index] for index in sorted(self._layers))

    def wrap(self, attention: _Attention) -> _Attention:
        """Return the same function, which notes the entropy of what it is given."""

        def probed(
            module: torch.nn.Module,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attention_mask: torch.Tensor | None = None,
            **kwargs: Any,
        ) -> Any:
            causal = kwargs.get("is_causal")
            causal = getattr(module, "is_causal", True) if causal is None else causal
            estimate = sampled_attention_entropy(
                query,
                key,
                rows=_SAMPLED_ROWS,
                scale=kwargs.get("scaling"),
                is_causal=bool(causal) and attention_mask is None and query.shape[2] > 1,
                mask=attention_mask,
            )
            layer = getattr(module, "layer_idx", None)
            index = len(self._layers) if layer is None else int(layer)
            self._layers[index] = tuple(estimate.mean.mean(0).tolist())
            return attention(module, query, key, value, attention_mask, **kwargs)

        return probed
