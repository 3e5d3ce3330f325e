"""What decoders and encoders have in common: their blocks, statistics, and files.

Shape legend: ``B`` rows, ``L`` new tokens, ``S`` tokens seen so far and new, ``E`` width.
"""

import math
import os
from abc import ABC
from collections.abc import Iterator
from typing import ClassVar, Self

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from adaattn.attention.base import BaseAttention
from adaattn.attention.statistics import AttentionStatistics
from adaattn.cache import KVCache
from adaattn.errors import ArgumentError, ArgumentTypeError, DTypeError, ShapeError
from adaattn.models.config import TransformerConfig
from adaattn.models.kinds import NormPlacement, PositionKind
from adaattn.models.layers import Block, Embeddings, make_norm
from adaattn.models.saving import check_tensors, read_folder, write_folder

__all__ = ["TransformerModel", "initialise"]


class TransformerModel(nn.Module, ABC):
    """Base class of `Decoder` and `Encoder`.

    Args:
        config: the model's shape.

    Raises:
        ArgumentTypeError: no `TransformerConfig`.
    """

    architecture: ClassVar[str]
    is_causal: ClassVar[bool]

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        if not isinstance(config, TransformerConfig):
            raise ArgumentTypeError.got("config", "a TransformerConfig", type(config).__name__)
        self.config = config
        self.gradient_checkpointing = False
        self.embeddings = Embeddings(config)
        self.blocks = nn.ModuleList(
            Block(config, layer, is_causal=self.is_causal) for layer in range(config.num_layers)
        )
        is_pre = config.norm_placement is NormPlacement.PRE
        self.final_norm = make_norm(config) if is_pre else None

    def attention_modules(self) -> tuple[BaseAttention, ...]:
        """Return the attention module of each block, in order."""
        return tuple(block.attention for block in self._each_block())

    def get_statistics(self) -> AttentionStatistics:
        """Return the statistics of every layer's attention calls, merged.

        Example:
            >>> import torch
            >>> from adaattn.models import Decoder, TransformerConfig
            >>> model = Decoder(
            ...     TransformerConfig(vocab_size=50, num_layers=2, embed_dim=32, num_heads=2)
            ... )
            >>> _ = model(torch.tensor([[1, 2, 3]]))
            >>> model.get_statistics()["calls"]
            2
        """
        return AttentionStatistics.merge([m.get_statistics() for m in self.attention_modules()])

    def reset_statistics(self) -> None:
        """Forget every layer's calls."""
        for module in self.attention_modules():
            module.reset_statistics()

    def enable_gradient_checkpointing(self, enabled: bool = True) -> None:
        """Keep only each block's input in training, and compute the rest again going back.

        Args:
            enabled: False keeps everything, the default of a fresh model.
        """
        self.gradient_checkpointing = enabled

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write ``config.json`` and ``model.safetensors`` into a folder, each whole or not at all.

        Args:
            folder: made if it is not there; other files in it stay as they are.

        Raises:
            AssetError: it cannot be written, or safetensors is missing.
            ArgumentTypeError: ``attention_settings`` holds what JSON cannot say.
        """
        write_folder(folder, self.architecture, self.config, self.state_dict())

    @classmethod
    def load(
        cls,
        folder: str | os.PathLike[str],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Return the model that `save` wrote, in evaluation mode.

        Args:
            folder: the folder.
            device: where the weights go.
            dtype: of the weights; None keeps the file's.

        Raises:
            AssetError: a file is missing, corrupt, foreign, or does not fit; says what to do.
        """
        config, tensors = read_folder(folder, cls.architecture, device)
        with torch.random.fork_rng(devices=[]):  # fresh weights are replaced: no number is spent
            model = cls(config)
        model.assign(tensors, f"weights in {os.fspath(folder)}")
        return model.to(device=device, dtype=dtype).eval()

    def assign(self, tensors: dict[str, torch.Tensor], subject: str) -> None:
        """Take tensors as the weights, in their own dtypes.

        Args:
            tensors: by the names of `state_dict`.
            subject: what a message calls them.

        Raises:
            AssetError: names or shapes differ from the model's.
        """
        check_tensors(tensors, self.state_dict(), subject)
        self.load_state_dict(tensors, assign=True)

    def _each_block(self) -> Iterator[Block]:
        """Yield the blocks, typed."""
        for block in self.blocks:
            assert isinstance(block, Block)
            yield block

    def _run_blocks(
        self,
        hidden: torch.Tensor,
        hidden_keys: torch.Tensor | None,
        positions: torch.Tensor,
        cache: KVCache | None,
        keep: bool,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...] | None]:
        """Return (the last states, normalised; those before and after each block, if kept)."""
        again = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        states = [hidden] if keep else []
        last = self.config.num_layers - 1
        for layer, block in enumerate(self._each_block()):
            if again:
                hidden = checkpoint(block, hidden, hidden_keys, positions, use_reentrant=False)
            else:
                entry = None if cache is None else cache.layer(layer)
                hidden = block(hidden, hidden_keys, positions, entry)
            if layer == last and self.final_norm is not None:
                hidden = self.final_norm(hidden)
            if keep:
                states.append(hidden)
        return hidden, tuple(states) if keep else None

    def _check_tokens(self, input_ids: torch.Tensor) -> None:
        """Refuse what is no [B, L] of integers."""
        if not isinstance(input_ids, torch.Tensor):
            raise ArgumentTypeError.got("input_ids", "a tensor [B, L]", type(input_ids).__name__)
        if input_ids.ndim != 2:
            raise ShapeError.got("input_ids", "[B, L]", tuple(input_ids.shape))
        if input_ids.dtype not in (torch.int64, torch.int32):
            raise DTypeError.got("input_ids", "int64 or int32", input_ids.dtype)

    def _hidden_keys(self, mask: torch.Tensor | None, rows: int, keys: int) -> torch.Tensor | None:
        """Return [B, S], True for tokens that nobody sees."""
        if mask is None:
            return None
        if mask.is_floating_point() or mask.is_complex():
            hint = "1 or True marks tokens, 0 or False padding"
            raise DTypeError.got("attention_mask", "integers or booleans", mask.dtype, hint)
        if tuple(mask.shape) != (rows, keys):
            raise ShapeError.got(
                "attention_mask", f"[{rows}, {keys}], cached tokens among them", tuple(mask.shape)
            )
        return mask == 0

    def _check_positions(self, positions: torch.Tensor | None, rows: int, length: int) -> None:
        """Refuse given positions of another shape or dtype."""
        if positions is None:
            return
        if positions.ndim != 2 or tuple(positions.shape) not in ((rows, length), (1, length)):
            raise ShapeError.got(
                "positions", f"[{rows}, {length}] or [1, {length}]", tuple(positions.shape)
            )
        if positions.dtype not in (torch.int64, torch.int32):
            raise DTypeError.got("positions", "int64 or int32", positions.dtype)

    def _check_length(self, length: int) -> None:
        """Refuse more tokens than the table of learned positions has."""
        if self.config.positions is PositionKind.LEARNED and length > self.config.max_positions:
            raise ArgumentError.got(
                "tokens in a row",
                f"at most max_positions {self.config.max_positions}",
                length,
                "cut the input",
            )


@torch.no_grad()
def initialise(model: TransformerModel) -> None:
    """Draw fresh weights: normal, and narrower where blocks add to the residual stream.

    Args:
        model: its matrices are drawn anew; biases become 0, norms stay 1.
    """
    std = model.config.init_std
    narrow = std / math.sqrt(2 * model.config.num_layers)  # GPT-2, section 2.3
    for name, parameter in model.named_parameters():
        if name.endswith(("out_proj.weight", "mlp.down.weight")):
            parameter.normal_(std=narrow)
        elif parameter.ndim > 1:
            parameter.normal_(std=std)
        elif name.endswith("bias"):
            parameter.zero_()
