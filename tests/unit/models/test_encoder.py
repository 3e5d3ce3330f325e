from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from adaattn.errors import ArgumentError, DTypeError, ShapeError
from adaattn.models import Encoder

Maker = Callable[..., Encoder]
Tokens = Callable[..., torch.Tensor]
Check = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
ROWS = torch.ones(2, 5, dtype=torch.long)


@torch.no_grad()
def test_padding_changes_neither_states_nor_embeddings(
    encoder: Maker, tokens: Tokens, exact: Any, same_numbers: Check
) -> None:
    model, rows = encoder(), tokens(2, 10)
    mask = torch.ones_like(rows)
    mask[0, 6:] = 0
    alone, wide = rows[:1, :6], exact(model)
    states = model(rows * mask, attention_mask=mask).last_hidden_state[:1, :6]
    same_numbers(states, wide(alone).last_hidden_state, model(alone).last_hidden_state)
    vectors = model.embed(rows * mask, attention_mask=mask)
    same_numbers(vectors[:1], wide.embed(alone), model.embed(alone))


@torch.no_grad()
def test_padding_on_the_left_only_moves_positions(
    encoder: Maker, tokens: Tokens, exact: Any, same_numbers: Check
) -> None:
    model, rows = encoder(), tokens(1, 10)
    mask = torch.ones_like(rows)
    mask[0, :4] = 0
    places = torch.arange(10)[None] - 4
    states = model(rows, mask, positions=places.clamp_min(0)).last_hidden_state[:, 4:]
    alone = rows[:, 4:]
    same_numbers(states, exact(model)(alone).last_hidden_state, model(alone).last_hidden_state)


@torch.no_grad()
def test_embeddings_are_normalised_means_over_tokens(encoder: Maker, tokens: Tokens) -> None:
    model, rows = encoder(), tokens(3, 6)
    mask = torch.ones_like(rows)
    mask[0, 4:] = 0
    mask[2] = 0
    plain = model.embed(rows, mask, normalize=False)
    states = model(rows, mask).last_hidden_state
    assert torch.equal(plain[0], (states[0] * mask[0, :, None]).sum(0) / 4)
    assert torch.equal(model.embed(rows, mask), F.normalize(plain, dim=-1))
    assert not plain[2].any()  # no token, no direction


@torch.no_grad()
def test_later_tokens_are_seen(encoder: Maker, tokens: Tokens) -> None:
    model, rows = encoder(), tokens(1, 6)
    other = rows.clone()
    other[0, -1] = (other[0, -1] + 1) % 64
    first, second = (model(ids).last_hidden_state[:, 0] for ids in (rows, other))
    assert not torch.equal(first, second)


@torch.no_grad()
def test_token_types_default_to_the_first(encoder: Maker, tokens: Tokens) -> None:
    model, rows = encoder(), tokens()
    states = model(rows).last_hidden_state
    zeros = torch.zeros_like(rows)
    assert torch.equal(model(rows, token_type_ids=zeros).last_hidden_state, states)
    assert not torch.equal(model(rows, token_type_ids=zeros + 1).last_hidden_state, states)


@torch.no_grad()
def test_the_pooler_reads_the_first_token(encoder: Maker, tokens: Tokens) -> None:
    model = encoder()
    output = model(tokens(), return_hidden_states=True)
    first = output.last_hidden_state[:, 0]
    assert torch.equal(output.pooled, torch.tanh(model.pooler(first)))
    assert len(output.hidden_states) == 3
    assert output.hidden_states[-1] is output.last_hidden_state
    assert encoder(pooler=False)(tokens()).pooled is None


def test_a_classifier_learns_two_rows_apart(encoder: Maker, tokens: Tokens) -> None:
    torch.manual_seed(0)
    model = Encoder(encoder(num_labels=2).config).train()
    rows, labels = tokens(2), torch.tensor([0, 1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(20):
        output = model(rows, labels=labels)
        optimizer.zero_grad()
        output.loss.backward()
        optimizer.step()
        losses.append(output.loss.item())
    assert losses[-1] < losses[0]
    assert model.eval()(rows).logits.argmax(-1).tolist() == [0, 1]


def test_the_loss_is_the_cross_entropy_of_the_classes(encoder: Maker, tokens: Tokens) -> None:
    model, labels = encoder(num_labels=3), torch.tensor([2, 0])
    output = model(tokens(), labels=labels)
    assert torch.equal(output.loss, F.cross_entropy(output.logits, labels))
    output.loss.backward()
    idle = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert idle == []


@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize("kind", ["learned", "rotary", "none"])
def test_every_style_runs_and_only_pre_norm_ends_with_a_norm(
    encoder: Maker, tokens: Tokens, placement: str, kind: str
) -> None:
    model = encoder(norm_placement=placement, positions=kind)
    assert model(tokens()).last_hidden_state.isfinite().all()
    assert (model.final_norm is None) == (placement == "post")


@pytest.mark.parametrize(
    ("error", "changes", "arguments", "message"),
    [
        (
            ArgumentError,
            {"type_vocab_size": 0},
            {"token_type_ids": ROWS},
            r"token_type_ids: expected None: the config has no token types, got a tensor",
        ),
        (
            ShapeError,
            {},
            {"token_type_ids": ROWS[:, :3]},
            r"token_type_ids: expected \[2, 5\], got \(2, 3\)",
        ),
        (
            ArgumentError,
            {},
            {"labels": ROWS[:, 0]},
            r"labels: expected None: the model has no classification head, .*; set num_labels",
        ),
        (
            ShapeError,
            {"num_labels": 3},
            {"labels": ROWS},
            r"labels: expected \[2\], got \(2, 5\)",
        ),
        (
            ArgumentError,
            {},
            {"token_type_ids": 2 * ROWS},
            r"token_type_ids: expected numbers from 0 to 1, got 2 to 2",
        ),
        (DTypeError, {}, {"input_ids": ROWS.double()}, r"input_ids: expected int64 or int32"),
        (
            ArgumentError,
            {},
            {"input_ids": torch.ones(1, 49, dtype=torch.long)},
            r"tokens in a row: expected at most max_positions 48, got 49",
        ),
    ],
)
def test_bad_input_is_refused(
    encoder: Maker,
    error: type[Exception],
    changes: dict[str, Any],
    arguments: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        encoder(**changes)(**{"input_ids": ROWS, **arguments})
