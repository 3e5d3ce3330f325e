"""Tokens chosen one after another, greedily or by sampling.

Sampling divides the logits by the temperature, then keeps the likeliest ``top_k``, then the
fewest whose probabilities reach ``top_p``, in this order, as Transformers does. Not covered:
beams, penalties, and processors of the user's own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from adaattn._numbers import require_integer, require_number
from adaattn.cache import KVCache
from adaattn.errors import ArgumentError, ArgumentTypeError, ShapeError

if TYPE_CHECKING:
    from adaattn.models.decoder import Decoder

__all__ = ["GenerationSettings", "generate_tokens", "limit_logits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSettings:
    """How tokens are chosen and when a row ends.

    Args:
        max_new_tokens: most tokens to add.
        do_sample: draw from the distribution; False takes the likeliest token.
        temperature: divides the logits.
        top_k: only so many of the likeliest; None is all.
        top_p: the fewest likeliest that reach this sum; None is all.
        eos_token_ids: tokens that end a row.
        pad_token_id: what fills ended rows; None is the first end token.
        use_cache: keep keys and values.

    Raises:
        ArgumentError: a value out of range, or sampling options without ``do_sample``.
        ArgumentTypeError: a value has another type.
    """

    max_new_tokens: int
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    eos_token_ids: Sequence[int] = ()
    pad_token_id: int | None = None
    use_cache: bool = True

    def __post_init__(self) -> None:
        """Check every value."""
        require_integer("max_new_tokens", self.max_new_tokens, least=1)
        if self.top_k is not None:
            require_integer("top_k", self.top_k, least=1)
        hint = "do_sample=False takes the likeliest token"
        require_number("temperature", self.temperature, above=0, hint=hint)
        if self.top_p is not None:
            require_number("top_p", self.top_p, above=0, most=1)
        ends = self.eos_token_ids
        if not isinstance(ends, Sequence) or any(type(token) is not int for token in ends):
            raise ArgumentTypeError.got("eos_token_id", "an integer or several", repr(ends))
        if self.pad_token_id is not None:
            require_integer("pad_token_id", self.pad_token_id, least=0)
        if not self.do_sample and (self.temperature, self.top_k, self.top_p) != (1.0, None, None):
            raise ArgumentError.got(
                "temperature, top_k and top_p without do_sample",
                "their defaults",
                (self.temperature, self.top_k, self.top_p),
                "pass do_sample=True",
            )


@torch.no_grad()
def generate_tokens(
    model: "Decoder",
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    settings: GenerationSettings,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Return the rows continued: [B, L + new] int64.

    Args:
        model: it runs in evaluation mode, and is put back.
        input_ids: [B, L] int64, padded on the left.
        attention_mask: [B, L], 1 for tokens; None is no padding.
        settings: how tokens are chosen.
        generator: random numbers; None is the device's default.

    Raises:
        ArgumentError: padding on the right, or a row without tokens.
        ShapeError: no tokens, or a mask of another shape.
    """
    mask = _check_prompt(input_ids, attention_mask)
    training = [module for module in model.modules() if module.training]
    model.train(False)
    try:
        return _continue(model, input_ids.long(), mask, settings, generator)
    finally:
        for module in training:  # train() would wake frozen blocks too
            module.training = True


def limit_logits(logits: torch.Tensor, settings: GenerationSettings) -> torch.Tensor:
    """Return the logits to sample from: [B, V] float32, -inf where a token is excluded.

    Args:
        logits: [B, V].
        settings: temperature, top_k and top_p.
    """
    scores = logits.float() / settings.temperature
    if settings.top_k is not None and settings.top_k < scores.shape[-1]:
        border = scores.topk(settings.top_k).values[..., -1:]
        scores = scores.masked_fill(scores < border, float("-inf"))
    if settings.top_p is not None and settings.top_p < 1.0:
        ordered, order = scores.sort(descending=True)
        shares = ordered.softmax(-1)
        before = shares.cumsum(-1) - shares
        excluded = before >= settings.top_p  # never the first: nothing stands before it
        scores = scores.masked_fill(excluded.scatter(-1, order, excluded), float("-inf"))
    return scores


def _check_prompt(
    input_ids: torch.Tensor, attention_mask: torch.Tensor | None
) -> torch.Tensor | None:
    """Return the mask, or None when it hides nothing."""
    if input_ids.ndim != 2 or not input_ids.numel():
        raise ShapeError.got("input_ids", "[B, L] with at least one token", tuple(input_ids.shape))
    if attention_mask is None:
        return None
    if attention_mask.shape != input_ids.shape:
        raise ShapeError.got("attention_mask", list(input_ids.shape), tuple(attention_mask.shape))
    seen = attention_mask != 0
    if bool(seen.all()):
        return None
    if not bool(seen[:, -1].all()):
        raise ArgumentError.got(
            "attention_mask",
            "a token at the end of each row",
            "padding there",
            "pad on the left (padding_side='left' of a tokenizer)",
        )
    return seen.long()


def _continue(
    model: "Decoder",
    tokens: torch.Tensor,
    mask: torch.Tensor | None,
    settings: GenerationSettings,
    generator: torch.Generator | None,
) -> torch.Tensor:
    """Return the rows continued, the model being in evaluation mode."""
    rows, length = tokens.shape
    ends = torch.tensor(settings.eos_token_ids, dtype=torch.long, device=tokens.device)
    fill = _fill_token(settings)
    limit = length + settings.max_new_tokens
    cache = KVCache(model.config.num_layers, limit) if settings.use_cache else None
    finished = torch.zeros(rows, dtype=torch.bool, device=tokens.device)
    new = tokens
    for _ in range(settings.max_new_tokens):
        output = model(new if cache is not None else tokens, mask, cache=cache, num_logits=1)
        chosen = _choose(output.logits[:, -1], settings, generator)
        if len(ends):
            chosen = torch.where(finished, fill, chosen)
            finished |= torch.isin(chosen, ends)
        new = chosen[:, None]
        tokens = torch.cat((tokens, new), dim=1)
        if mask is not None:
            mask = torch.cat((mask, torch.ones_like(new)), dim=1)
        if len(ends) and bool(finished.all()):
            break
    return tokens


def _fill_token(settings: GenerationSettings) -> int:
    """Return what fills ended rows; without end tokens no row ends and it is never used."""
    if settings.pad_token_id is not None:
        return settings.pad_token_id
    return settings.eos_token_ids[0] if settings.eos_token_ids else 0


def _choose(
    logits: torch.Tensor, settings: GenerationSettings, generator: torch.Generator | None
) -> torch.Tensor:
    """Return one token for each row: [B] int64."""
    if not settings.do_sample:
        return logits.argmax(-1)
    shares = limit_logits(logits, settings).softmax(-1)
    return torch.multinomial(shares, 1, generator=generator)[:, 0]
