"""The shapes of a module's inputs, checked, and the way back to the caller's."""

from typing import NamedTuple

import torch

from adaattn.attention.config import AttentionConfig
from adaattn.call.canonical import described
from adaattn.errors import ArgumentTypeError, ShapeError, UnsupportedError


class Layout(NamedTuple):
    """How a call's tensors lie.

    Args:
        is_batched: inputs have three dimensions; else two.
        batch_first: batched inputs are [B, L, E], else [L, B, E].
        batch: sequences; 1 if not batched.
        len_q: tokens of the query.
        len_k: keys, without those cached.
    """

    is_batched: bool
    batch_first: bool
    batch: int
    len_q: int
    len_k: int

    def split_heads(self, projected: torch.Tensor, num_heads: int) -> torch.Tensor:
        """Return [B, H, L, D], a view.

        Args:
            projected: [B, L, H * D] or [L, B, H * D]; [L, H * D] if not batched.
            num_heads: H.
        """
        return self.heads_first(
            projected.view(*projected.shape[:-1], num_heads, projected.shape[-1] // num_heads)
        )

    def heads_first(self, heads: torch.Tensor) -> torch.Tensor:
        """Return [B, H, L, D], a view of [B, L, H, D], [L, B, H, D] or [L, H, D]."""
        if not self.is_batched:
            return heads.transpose(0, 1).unsqueeze(0)
        return heads.transpose(1, 2) if self.batch_first else heads.permute(1, 2, 0, 3)

    def merge_heads(self, output: torch.Tensor) -> torch.Tensor:
        """Return what `split_heads` takes, of [B, H, L, D]."""
        if not self.is_batched:
            return output.squeeze(0).transpose(0, 1).flatten(-2)
        output = output.transpose(1, 2) if self.batch_first else output.permute(2, 0, 1, 3)
        return output.flatten(-2)

    def restore_weights(self, weights: torch.Tensor) -> torch.Tensor:
        """Return weights [B, ...] without B if the inputs had none."""
        return weights if self.is_batched else weights.squeeze(0)


def check_inputs(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    config: AttentionConfig,
    batch_first: bool,
) -> Layout:
    """Return how the inputs lie.

    Args:
        query: [B, L, E], [L, B, E] or [L, E].
        key: [B, S, Ek], [S, B, Ek] or [S, Ek].
        value: [B, S, Ev], [S, B, Ev] or [S, Ev].
        config: what the module is made of.
        batch_first: which of the batched forms.

    Raises:
        ArgumentTypeError: no tensor.
        UnsupportedError: a nested tensor.
        ShapeError: sizes that do not fit.
    """
    own = config.has_packed_weights and query is key is value
    if own and type(query) is torch.Tensor and not query.is_nested and query.dim() == 3:
        first, second, size = query.shape
        batch, length = (first, second) if batch_first else (second, first)
        if size == config.embed_dim:
            return Layout(True, batch_first, batch, length, length)
    named = [("query", query, config.embed_dim)]
    if not own:
        named += [("key", key, config.key_size), ("value", value, config.value_size)]
    for name, item, size in named:
        _check_tensor(name, item)
        if item.dim() != query.dim() or item.dim() not in (2, 3):
            raise ShapeError.got(
                f"rank of {name}",
                "3 dimensions, or 2 without a batch, as the query's",
                f"{item.dim()} ({described(item)}; query {described(query)})",
            )
        if item.shape[-1] != size:
            raise ShapeError.got(f"last dimension of {name}", size, described(item))
    is_batched = query.dim() == 3
    where_length = 1 if is_batched and batch_first else 0
    layout = Layout(
        is_batched=is_batched,
        batch_first=batch_first,
        batch=query.shape[1 - where_length] if is_batched else 1,
        len_q=query.shape[where_length],
        len_k=key.shape[where_length],
    )
    if key is query and value is query:
        return layout
    if key.shape[:-1] != value.shape[:-1]:
        raise ShapeError.got("value", f"batch and length of key {described(key)}", described(value))
    if is_batched and key.shape[1 - where_length] != layout.batch:
        hint = "tensors are [B, L, E]" if batch_first else "tensors are [L, B, E]"
        raise ShapeError.got(
            "batch of key",
            f"{layout.batch} as in query {described(query)}",
            described(key),
            f"{hint} with batch_first={batch_first}",
        )
    return layout


def _check_tensor(name: str, item: object) -> None:
    """Refuse what is no tensor, or a nested one."""
    if not isinstance(item, torch.Tensor):
        raise ArgumentTypeError.got(name, "a torch.Tensor", type(item).__name__)
    if item.is_nested:
        raise UnsupportedError(
            "This module",
            [f"{name} is a nested tensor; its layout hides the lengths that planning reads"],
            "Pass a padded tensor with key_padding_mask. A torch.nn.TransformerEncoder makes "
            "nested tensors of its own unless built with enable_nested_tensor=False; "
            "adaattn.convert turns that off.",
        )
