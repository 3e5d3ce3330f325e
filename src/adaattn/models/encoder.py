"""A bidirectional transformer, BERT style, on attention modules that adapt.

Shape legend: ``B`` rows, ``L`` tokens, ``E`` width, ``N`` labels. Padding may stand anywhere.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from adaattn.errors import ArgumentError, ShapeError
from adaattn.models.config import TransformerConfig
from adaattn.models.model import TransformerModel, initialise

__all__ = ["Encoder", "EncoderOutput"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncoderOutput:
    """What an encoder's forward pass gives.

    Args:
        last_hidden_state: [B, L, E].
        pooled: [B, E], the pooler's view of the first token; None without a pooler.
        logits: [B, N] of the classification head; None without one.
        loss: mean cross-entropy of the labels, a float32 scalar; None without labels.
        hidden_states: the embeddings and each block's result, if asked for.
    """

    last_hidden_state: torch.Tensor
    pooled: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    loss: torch.Tensor | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None


class Encoder(TransformerModel):
    """A transformer in which every token sees every other.

    Args:
        config: its shape.

    Example:
        >>> import torch
        >>> from adaattn.models import Encoder, TransformerConfig
        >>> config = TransformerConfig(vocab_size=50, num_layers=2, embed_dim=32, num_heads=2)
        >>> model = Encoder(config).eval()
        >>> rows = torch.tensor([[1, 2, 3], [4, 5, 0]])
        >>> model.embed(rows, attention_mask=torch.tensor([[1, 1, 1], [1, 1, 0]])).shape
        torch.Size([2, 32])
    """

    architecture: ClassVar[str] = "encoder"
    is_causal: ClassVar[bool] = False

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        width = config.embed_dim
        self.pooler = nn.Linear(width, width) if config.pooler else None
        self.classifier_dropout = nn.Dropout(config.classifier_dropout or 0.0)
        self.classifier = nn.Linear(width, config.num_labels) if config.num_labels else None
        initialise(self)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        *,
        return_hidden_states: bool = False,
    ) -> EncoderOutput:
        """Return hidden states, and what the model has on top of them.

        Args:
            input_ids: [B, L] int64.
            attention_mask: [B, L] integers or booleans, 1 for tokens and 0 for padding; None is
                no padding.
            token_type_ids: [B, L] int64; None is type 0 everywhere.
            positions: [B or 1, L] int64; None counts columns, as BERT does.
            labels: [B] int64 classes.
            return_hidden_states: give every block's result too.

        Raises:
            ShapeError, DTypeError: bad input.
            ArgumentError: token types or labels that the model has no use for.
        """
        self._check_tokens(input_ids)
        rows, length = input_ids.shape
        self._check_extras(input_ids, token_type_ids, labels)
        hidden_keys = self._hidden_keys(attention_mask, rows, length)
        self._check_positions(positions, rows, length)
        if positions is None:
            self._check_length(length)
            positions = torch.arange(length, device=input_ids.device)[None]
        hidden = self.embeddings(input_ids, positions, token_type_ids)
        hidden, states = self._run_blocks(
            hidden, hidden_keys, positions, None, return_hidden_states
        )
        pooled = None if self.pooler is None else torch.tanh(self.pooler(hidden[:, 0]))
        logits = loss = None
        if self.classifier is not None and pooled is not None:
            logits = self.classifier(self.classifier_dropout(pooled))
            if labels is not None:
                loss = F.cross_entropy(logits.float(), labels.long())
        return EncoderOutput(
            last_hidden_state=hidden,
            pooled=pooled,
            logits=logits,
            loss=loss,
            hidden_states=states,
        )

    def embed(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        *,
        normalize: bool = True,
    ) -> torch.Tensor:
        """Return one vector for each row: the mean of its tokens' states, [B, E].

        A row without tokens gives zeros.

        Args:
            input_ids: [B, L] int64.
            attention_mask: [B, L], 1 for tokens and 0 for padding; None is no padding.
            token_type_ids: [B, L] int64; None is type 0 everywhere.
            normalize: divide each vector by its Euclidean length.

        Raises:
            ShapeError, DTypeError, ArgumentError: bad input.
        """
        hidden = self(input_ids, attention_mask, token_type_ids).last_hidden_state
        if attention_mask is None:
            mean = hidden.mean(1)
        else:
            kept = (attention_mask != 0).to(hidden.dtype)[..., None]
            mean = (hidden * kept).sum(1) / kept.sum(1).clamp_min(1)
        return F.normalize(mean, dim=-1) if normalize else mean

    def _check_extras(
        self,
        input_ids: torch.Tensor,
        token_type_ids: torch.Tensor | None,
        labels: torch.Tensor | None,
    ) -> None:
        """Refuse what the model has no use for, and shapes that do not fit."""
        if token_type_ids is not None and not self.config.type_vocab_size:
            raise ArgumentError.got(
                "token_type_ids", "None: the config has no token types", "a tensor"
            )
        if token_type_ids is not None and token_type_ids.shape != input_ids.shape:
            shape = tuple(token_type_ids.shape)
            raise ShapeError.got("token_type_ids", list(input_ids.shape), shape)
        if labels is not None and self.classifier is None:
            raise ArgumentError.got(
                "labels",
                "None: the model has no classification head",
                "a tensor",
                "set num_labels and pooler in the config",
            )
        if labels is not None and tuple(labels.shape) != (input_ids.shape[0],):
            raise ShapeError.got("labels", [input_ids.shape[0]], tuple(labels.shape))
