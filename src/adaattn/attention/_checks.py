"""What a module asks of its policy, its cache and its tokens' positions."""

from typing import TYPE_CHECKING

import torch

from adaattn.attention._layout import Layout
from adaattn.backends.keys_values import KeysValues
from adaattn.call.canonical import described
from adaattn.call.describe import as_autocast
from adaattn.call.recomputing import is_recomputing
from adaattn.errors import (
    ArgumentError,
    ArgumentTypeError,
    DeviceError,
    DTypeError,
    UnsupportedError,
    expected_got,
)
from adaattn.spec import KVKind, Policy

if TYPE_CHECKING:
    from adaattn.cache import LayerCache


def check_ranks(policy: Policy, head_dim: int) -> None:
    """Refuse a policy whose ranks the module's heads do not have."""
    if policy.ranks and max(policy.ranks) >= head_dim:
        raise ArgumentError.got("ranks", f"ranks below the head dimension {head_dim}", policy.ranks)


def check_cache(cache: "LayerCache", left: int) -> None:
    """Refuse what is no cache, one that would be written twice, or one that lacks keys."""
    if is_recomputing():
        raise ArgumentError.got(
            "cache in a recomputed forward pass",
            "none: its tokens were appended in the first one",
            "a cache under activation checkpointing",
            "train without a cache, or do not checkpoint this layer",
        )
    try:
        kept = cache.length - cache.start
    except AttributeError as error:
        hint = "of a KVCache pass layer(index)"
        got = type(cache).__name__
        raise ArgumentTypeError.got("cache", "the cache of one layer", got, hint) from error
    if cache.start > 0 and (left < 0 or left > kept):
        seen = "all earlier keys" if left < 0 else f"{left} earlier keys"
        raise ArgumentError.got(
            "cache",
            f"one that holds {seen}, which the layer's window shows",
            f"the last {kept} of {cache.length}",
            "give the module that window, or the cache a wider one",
        )


def unlike_weights(
    tensors: dict[str, torch.Tensor], weight: torch.Tensor
) -> DeviceError | DTypeError | None:
    """Return the error of inputs of another device or dtype than the weights, if they are.

    Asked once projections have failed, so that calls which work pay nothing for it.
    """
    for name, item in tensors.items():
        if item.device != weight.device:
            hint = "move the module or its inputs"
            expected = f"device {weight.device} of the module's parameters"
            return DeviceError.got(name, expected, item.device, hint)
        empty = item.new_empty(0), weight.new_empty(0)  # memory may have run out
        given, own = (as_autocast(it, item.device.type).dtype for it in empty)
        if given != own:
            expected = f"{weight.dtype} of the module's parameters"
            return DTypeError.got(f"dtype of {name}", expected, item.dtype, "cast one of them")
    return None


def check_self_attention(query: torch.Tensor, key: torch.Tensor, feature: str) -> None:
    """Refuse keys that are not the queries' tokens, where one position serves both."""
    # Reentrant checkpointing detaches each argument: the object changes, the numbers do not.
    if key is not query and not key.is_set_to(query):
        raise ArgumentError.got(
            f"key with {feature}",
            "the query itself (self-attention), whose positions it shares",
            f"another tensor, {described(key)}",
            "pass query alone, or build the module without it",
        )


def new_positions(
    positions: torch.Tensor | None, start: int, layout: Layout, device: torch.device
) -> torch.Tensor:
    """Return the positions of the new tokens; `RotaryEmbedding` checks their numbers."""
    if positions is None:
        return torch.arange(start, start + layout.len_q, device=device)[None]
    if not isinstance(positions, torch.Tensor):
        raise ArgumentTypeError.got("positions", "None or a torch.Tensor", type(positions).__name__)
    return positions


def dense_keys_values(kv: KeysValues) -> KeysValues:
    """Return what a cache handed over, if attention takes it as two tensors.

    Raises:
        UnsupportedError: keys and values of another kind.
    """
    if kv.kind is not KVKind.DENSE:
        raise UnsupportedError(
            "cache",
            [expected_got("keys and values", KVKind.DENSE.value, kv.kind.value)],
            "call adaattn.scaled_dot_product_attention with cu_seqlens_q and cu_seqlens_k",
        )
    return kv
