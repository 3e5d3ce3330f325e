import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from adaattn.errors import ArgumentError, ArgumentTypeError, DTypeError, ShapeError
from adaattn.models import Decoder, from_hugging_face
from adaattn.models.generation import GenerationSettings, generate_tokens, limit_logits

Maker = Callable[..., Decoder]
Tokens = Callable[..., torch.Tensor]
ROWS = torch.tensor([[3, 4, 5], [6, 7, 8]])
SIGMAS = 6.0
"""How far a count of independent draws may be from its mean: one in 10^9 is farther."""


def fits(counts: torch.Tensor, shares: torch.Tensor) -> bool:
    """Return whether draws follow a distribution."""
    total = counts.sum()
    spread = (total * shares * (1 - shares)).sqrt()
    return bool(((counts - total * shares).abs() <= SIGMAS * spread + 1).all())


def draw(model: Decoder, **options: Any) -> torch.Tensor:
    """Return how often each token follows one prompt, of 20,000 draws."""
    rows = torch.tensor([[3, 4]]).expand(20_000, -1)
    generator = torch.Generator().manual_seed(2)
    found = model.generate(rows, 1, do_sample=True, generator=generator, **options)
    return torch.bincount(found[:, -1], minlength=64).double()


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("use_cache", [True, False])
def test_greedy_tokens_are_those_of_transformers(
    theirs: Callable[..., Any], tokens: Tokens, name: str, use_cache: bool
) -> None:
    source = theirs(name)
    rows = tokens(3, 8)
    mask = torch.ones_like(rows)
    mask[0, :5] = 0
    mask[1, :2] = 0
    rows = rows * mask
    wanted = source.generate(rows, attention_mask=mask, max_new_tokens=12, do_sample=False)
    model = from_hugging_face(source)
    found = model.generate(rows, 12, attention_mask=mask, pad_token_id=0, use_cache=use_cache)
    assert torch.equal(found, wanted)


def test_rows_of_a_padded_batch_are_those_generated_alone(decoder: Maker, tokens: Tokens) -> None:
    model, rows = decoder("local"), tokens(2, 8)
    mask = torch.ones_like(rows)
    mask[0, :5] = 0
    found = model.generate(rows * mask, 10, attention_mask=mask)
    assert torch.equal(found[:1, 5:], model.generate(rows[:1, 5:], 10))
    assert torch.equal(found[1:], model.generate(rows[1:], 10))


def test_a_row_ends_at_its_end_token_and_all_at_the_last(decoder: Maker) -> None:
    model = decoder()
    free = model.generate(ROWS, 8)
    first, second = free[0, 5].item(), free[1, 7].item()
    ends = [first, second]
    stops = [next(i for i, t in enumerate(row[3:]) if t in ends) for row in free.tolist()]
    found = model.generate(ROWS, 8, eos_token_id=ends, pad_token_id=63)
    assert found.shape == (2, 3 + max(stops) + 1)
    for row, stop in enumerate(stops):
        assert torch.equal(found[row, : 4 + stop], free[row, : 4 + stop])
        assert (found[row, 4 + stop :] == 63).all()


def test_end_and_padding_default_to_the_config(decoder: Maker) -> None:
    free = decoder().generate(ROWS, 8)
    end = free[0, 3].item()
    model = decoder(eos_token_ids=(end,), pad_token_id=62)
    found = model.generate(ROWS, 8)
    assert (found[0, 4:] == 62).all()
    assert torch.equal(model.generate(ROWS, 8, eos_token_id=()), free)
    filled = decoder().generate(ROWS, 8, eos_token_id=end)
    assert (filled[0, 3:] == end).all()


@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
@torch.no_grad()
def test_samples_follow_the_distribution(decoder: Maker, temperature: float) -> None:
    model = decoder()
    logits = model(torch.tensor([[3, 4]])).logits[0, -1].double()
    counts = draw(model, temperature=temperature)
    assert fits(counts, (logits / temperature).softmax(-1))
    assert not fits(counts, (logits / (1.5 * temperature)).softmax(-1))  # the check can fail


@torch.no_grad()
def test_samples_stay_within_top_k_and_top_p(decoder: Maker) -> None:
    model = decoder()
    shares = model(torch.tensor([[3, 4]])).logits[0, -1].double().softmax(-1)
    ordered, order = shares.sort(descending=True)
    for options, kept in (
        ({"top_k": 3}, 3),
        ({"top_p": float(ordered[:4].sum()) - 1e-3}, 4),
        ({"top_k": 2, "top_p": 0.999}, 2),
    ):
        counts = draw(model, **options)
        wanted = torch.zeros_like(shares)
        wanted[order[:kept]] = ordered[:kept] / ordered[:kept].sum()
        assert set(counts.nonzero().flatten().tolist()) <= set(order[:kept].tolist())
        assert fits(counts, wanted)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.9])
@pytest.mark.parametrize("top_k", [None, 1, 5, 100])
@pytest.mark.parametrize("top_p", [None, 0.05, 0.5, 0.95, 1.0])
def test_excluded_tokens_are_those_of_transformers(
    temperature: float, top_k: int | None, top_p: float | None
) -> None:
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = 3 * torch.randn(8, 40)
    wanted = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k is not None:
        wanted = TopKLogitsWarper(top_k)(None, wanted)
    if top_p is not None:
        wanted = TopPLogitsWarper(top_p)(None, wanted)
    settings = GenerationSettings(
        max_new_tokens=1, do_sample=True, temperature=temperature, top_k=top_k, top_p=top_p
    )
    assert torch.equal(limit_logits(logits, settings), wanted)


def test_the_same_generator_gives_the_same_rows(decoder: Maker) -> None:
    model = decoder("llama")
    one, other = (
        model.generate(ROWS, 6, do_sample=True, generator=torch.Generator().manual_seed(1))
        for _ in range(2)
    )
    assert torch.equal(one, other)


def test_generation_leaves_the_mode_as_it_was_and_no_gradients(decoder: Maker) -> None:
    model = decoder(dropout=0.5).train()
    found = model.generate(ROWS, 4)
    assert model.training
    assert torch.equal(found, model.eval().generate(ROWS, 4))
    assert not model.training
    with pytest.raises(ShapeError):
        model.train().generate(ROWS[:, :0], 4)
    assert model.training


def test_without_padding_a_mask_changes_nothing(decoder: Maker) -> None:
    model = decoder()
    found = model.generate(ROWS, 4, attention_mask=torch.ones_like(ROWS))
    assert torch.equal(found, model.generate(ROWS.int(), 4))
    assert found.dtype == torch.int64


@pytest.mark.parametrize(
    ("error", "arguments", "message"),
    [
        (ArgumentError, {"max_new_tokens": 0}, r"max_new_tokens: expected an integer of at least"),
        (
            ArgumentTypeError,
            {"max_new_tokens": 1.5},
            r"max_new_tokens: expected an integer .*, got",
        ),
        (ArgumentError, {"temperature": 0.0}, r"temperature: expected a finite number above 0"),
        (
            ArgumentError,
            {"temperature": math.nan},
            r"temperature: expected a finite number above 0, got nan",
        ),
        (ArgumentError, {"top_p": 0.0}, r"top_p: expected a number in \(0, 1\], got 0\.0"),
        (ArgumentError, {"top_k": 0}, r"top_k: expected an integer of at least 1, got 0"),
        (
            ArgumentError,
            {"top_k": 5, "do_sample": False},
            r"without do_sample: expected their defaults, got \(1\.0, 5, None\); pass do_sample",
        ),
        (
            ArgumentTypeError,
            {"eos_token_id": ["</s>"]},
            r"eos_token_id: expected an integer or several, got \['</s>'\]",
        ),
        (ArgumentTypeError, {"eos_token_id": 2.5}, r"expected an integer or several, got 2\.5"),
        (
            ArgumentTypeError,
            {"pad_token_id": "0"},
            r"pad_token_id: expected an integer .*, got '0'",
        ),
        (
            DTypeError,
            {"attention_mask": torch.ones(2, 3)},
            r"attention_mask: expected integers or booleans, got torch.float32",
        ),
        (
            ArgumentError,
            {"attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]])},
            r"attention_mask: expected a token at the end of each row, got padding there; pad on",
        ),
        (
            ShapeError,
            {"attention_mask": torch.ones(2, 4, dtype=torch.bool)},
            r"attention_mask: expected \[2, 3\], .*, got \(2, 4\)",
        ),
        (
            ShapeError,
            {"input_ids": ROWS[:, :0]},
            r"input_ids: expected \[B, L\] with at least one token, got \(2, 0\)",
        ),
        (
            ArgumentError,
            {"max_new_tokens": 46},
            r"tokens in a row: expected at most max_positions 48, got 49",
        ),
    ],
)
def test_bad_input_is_refused(
    decoder: Maker, error: type[Exception], arguments: dict[str, Any], message: str
) -> None:
    given = {"input_ids": ROWS, "max_new_tokens": 2, "do_sample": True, **arguments}
    with pytest.raises(error, match=message):
        decoder().generate(**given)


def test_a_mask_of_another_shape_is_refused_even_if_it_hides_nothing(decoder: Maker) -> None:
    settings, mask = GenerationSettings(max_new_tokens=1), torch.ones(2, 1)
    with pytest.raises(ShapeError, match=r"attention_mask: expected \[2, 3\], got \(2, 1\)"):
        generate_tokens(decoder(), ROWS, mask, settings)
