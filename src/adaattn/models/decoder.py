"""A causal language model, GPT or LLaMA style, on attention modules that adapt.

Shape legend: ``B`` rows, ``L`` new tokens, ``S`` tokens seen so far and new, ``E`` width,
``V`` vocabulary. Padding may stand on either side of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from adaattn.cache import KVCache
from adaattn.errors import ArgumentError, ShapeError
from adaattn.models.config import TransformerConfig
from adaattn.models.generation import GenerationSettings, generate_tokens
from adaattn.models.model import TransformerModel, initialise

__all__ = ["Decoder", "DecoderOutput"]

_IGNORED_LABEL = -100


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecoderOutput:
    """What a decoder's forward pass gives.

    Args:
        logits: [B, L, V], or of the last tokens only if so asked.
        loss: mean cross-entropy in nats a token, a float32 scalar; None without labels.
        last_hidden_state: [B, L, E], what the head projects.
        hidden_states: the embeddings and each block's result, if asked for; the last one is
            ``last_hidden_state``.
    """

    logits: torch.Tensor
    last_hidden_state: torch.Tensor
    loss: torch.Tensor | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None


class Decoder(TransformerModel):
    """A causal transformer with a language-model head.

    Args:
        config: its shape; without the parts of an encoder.

    Raises:
        ArgumentError: the config has token types, a pooler or labels.

    Example:
        >>> import torch
        >>> from adaattn.models import Decoder, TransformerConfig
        >>> config = TransformerConfig(vocab_size=50, num_layers=2, embed_dim=32, num_heads=2)
        >>> model = Decoder(config)
        >>> tokens = torch.tensor([[1, 2, 3, 4]])
        >>> model(tokens, labels=tokens).logits.shape
        torch.Size([1, 4, 50])
        >>> model.generate(tokens, max_new_tokens=3).shape
        torch.Size([1, 7])
    """

    architecture: ClassVar[str] = "decoder"
    is_causal: ClassVar[bool] = True

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        for name in ("type_vocab_size", "pooler", "num_labels"):
            if value := getattr(config, name):
                raise ArgumentError.got(f"{name} of a decoder", "none", value, "an Encoder has it")
        tied = config.tie_embeddings
        self.head = None if tied else nn.Linear(config.embed_dim, config.vocab_size, bias=False)
        initialise(self)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        cache: KVCache | None = None,
        labels: torch.Tensor | None = None,
        *,
        num_logits: int | None = None,
        return_hidden_states: bool = False,
    ) -> DecoderOutput:
        """Return logits, and the loss when labels are given.

        Args:
            input_ids: [B, L] int64.
            attention_mask: [B, S] integers or booleans, 1 for tokens and 0 for padding,
                cached tokens first; None is no padding.
            positions: [B or 1, L] int64; None counts the tokens of each row that are no padding.
            cache: keys and values of earlier tokens; these are appended to it.
            labels: [B, L] int64, usually ``input_ids``: each is predicted from those before it;
                -100 is left out.
            num_logits: compute those of so many last tokens only; None is all.
            return_hidden_states: give every block's result too.

        Raises:
            ShapeError, DTypeError, ArgumentError: bad input.
        """
        self._check_tokens(input_ids)
        rows, length = input_ids.shape
        past = 0 if cache is None else cache.length
        self._check_call(cache, labels, num_logits, input_ids)
        hidden_keys = self._hidden_keys(attention_mask, rows, past + length)
        self._check_positions(positions, rows, length)
        if positions is None:
            self._check_length(past + length)
            positions = _count_positions(input_ids, attention_mask, past)
        hidden = self.embeddings(input_ids, positions)
        hidden, states = self._run_blocks(
            hidden, hidden_keys, positions, cache, return_hidden_states
        )
        scored = hidden if num_logits is None else hidden[:, max(length - num_logits, 0) :]
        logits = self.project(scored)
        return DecoderOutput(
            logits=logits,
            loss=None if labels is None else _next_token_loss(logits, labels),
            last_hidden_state=hidden,
            hidden_states=states,
        )

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [..., V] of hidden states.

        Args:
            hidden: [..., E], such as ``last_hidden_state``.
        """
        if self.head is None:
            return F.linear(hidden, self.embeddings.tokens.weight)
        return self.head(hidden)  # type: ignore[no-any-return]

    def generate(
        self,
        input_ids: torch.Tensor,
        max_new_tokens: int,
        *,
        attention_mask: torch.Tensor | None = None,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        generator: torch.Generator | None = None,
        use_cache: bool = True,
    ) -> torch.Tensor:
        """Return the rows continued: [B, L + new], int64, without gradients.

        The model runs in evaluation mode and is put back afterwards. A row ends at an end
        token and is filled up with padding; all ends when each row has, or at the limit.

        Args:
            input_ids: [B, L] int64; shorter rows are padded on the left.
            max_new_tokens: most tokens to add to a row.
            attention_mask: [B, L], 1 for tokens and 0 for padding; None is no padding.
            do_sample: draw from the distribution; False takes the likeliest token.
            temperature: divides the logits before sampling.
            top_k: only so many of the likeliest tokens; None is all. Ties at the border stay.
            top_p: the fewest likeliest tokens whose probabilities reach this sum; None is all.
            eos_token_id: the end token or tokens; None is the config's, () is none.
            pad_token_id: what fills ended rows; None is the config's, else the first end token.
            generator: random numbers; None is the default generator of the device.
            use_cache: keep keys and values; False computes every token again at each step.

        Raises:
            ArgumentError: a number out of range, sampling options without ``do_sample``, padding
                on the right, or more tokens than learned positions.
            ShapeError, DTypeError, ArgumentTypeError: bad input.

        Example:
            >>> import torch
            >>> from adaattn.models import Decoder, TransformerConfig
            >>> config = TransformerConfig(vocab_size=50, num_layers=1, embed_dim=32, num_heads=2)
            >>> model = Decoder(config)
            >>> rows = torch.tensor([[0, 0, 7], [1, 2, 3]])
            >>> mask = torch.tensor([[0, 0, 1], [1, 1, 1]])
            >>> model.generate(rows, 5, attention_mask=mask, do_sample=True, top_p=0.9).shape
            torch.Size([2, 8])
        """
        if eos_token_id is None:
            eos_token_id = self.config.eos_token_ids
        ends = (eos_token_id,) if isinstance(eos_token_id, int) else eos_token_id
        if pad_token_id is None:
            pad_token_id = self.config.pad_token_id
        settings = GenerationSettings(
            max_new_tokens=max_new_tokens,
            do_sample=do_sample,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            eos_token_ids=ends,
            pad_token_id=pad_token_id,
            use_cache=use_cache,
        )
        self._check_tokens(input_ids)
        self._check_length(input_ids.shape[1] + settings.max_new_tokens)
        self._hidden_keys(attention_mask, *input_ids.shape)
        return generate_tokens(self, input_ids, attention_mask, settings, generator)

    def _check_call(
        self,
        cache: KVCache | None,
        labels: torch.Tensor | None,
        num_logits: int | None,
        input_ids: torch.Tensor,
    ) -> None:
        """Refuse arguments that do not go together."""
        if cache is not None and cache.num_layers != self.config.num_layers:
            raise ArgumentError.got(
                "num_layers of the cache", self.config.num_layers, cache.num_layers
            )
        if cache is not None and self.gradient_checkpointing and self.training:
            raise ArgumentError.got(
                "cache with gradient checkpointing in training",
                "None",
                "a cache",
                "blocks that run twice would append twice; call eval() first",
            )
        if num_logits is not None and (labels is not None or num_logits < 1):
            got = "labels too" if labels is not None else num_logits
            raise ArgumentError.got("num_logits", "an integer of at least 1, without labels", got)
        if labels is not None and labels.shape != input_ids.shape:
            raise ShapeError.got("labels", list(input_ids.shape), tuple(labels.shape))


def _count_positions(input_ids: torch.Tensor, mask: torch.Tensor | None, past: int) -> torch.Tensor:
    """Return [B or 1, L]: each token's place among its row's tokens that are no padding."""
    if mask is None:
        return torch.arange(past, past + input_ids.shape[1], device=input_ids.device)[None]
    places = (mask != 0).long().cumsum(-1) - 1
    return places.clamp_min(0)[:, past:]


def _next_token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of each label given the tokens before it."""
    scores = logits[:, :-1].flatten(0, 1).float()
    return F.cross_entropy(scores, labels[:, 1:].flatten().long(), ignore_index=_IGNORED_LABEL)
