import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F

from adaattn.cache import KVCache
from adaattn.errors import ArgumentError, ArgumentTypeError, DTypeError, ShapeError
from adaattn.models import AttentionKind, Decoder, TransformerConfig

Maker = Callable[..., Decoder]
Tokens = Callable[..., torch.Tensor]
Check = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
STYLES = ["gpt", "llama", "local"]
SHORT, LONG = 6, 10


def padded(rows: torch.Tensor, side: str) -> tuple[torch.Tensor, torch.Tensor, slice]:
    """Return rows whose first is shorter, their mask, and where its tokens are."""
    mask = torch.ones_like(rows)
    place = slice(LONG - SHORT, LONG) if side == "left" else slice(0, SHORT)
    mask[0] = 0
    mask[0, place] = 1
    return rows * mask, mask, place


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("style", STYLES)
@torch.no_grad()
def test_padding_on_either_side_changes_no_logits(
    decoder: Maker, tokens: Tokens, exact: Any, same_numbers: Check, style: str, side: str
) -> None:
    model = decoder(style)
    rows, mask, place = padded(tokens(2, LONG), side)
    logits = model(rows, attention_mask=mask).logits
    alone = rows[:1, place]
    same_numbers(logits[:1, place], exact(model)(alone).logits, model(alone).logits)
    same_numbers(logits[1:], exact(model)(rows[1:]).logits, model(rows[1:]).logits)


@torch.no_grad()
def test_a_token_that_is_masked_in_the_middle_is_not_seen(decoder: Maker, tokens: Tokens) -> None:
    model, rows = decoder(), tokens(1, 8)
    mask = torch.ones_like(rows)
    mask[0, 3] = 0
    other = rows.clone()
    other[0, 3] = (other[0, 3] + 1) % 64
    seen = mask[0].bool()
    first, second = (
        model(ids, attention_mask=mask.bool()).logits[0, seen] for ids in (rows, other)
    )
    assert torch.equal(first, second)
    assert not torch.equal(model(rows).logits[0, seen], model(other).logits[0, seen])


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("style", STYLES)
@torch.no_grad()
def test_tokens_in_portions_through_a_cache_give_the_logits_of_one_pass(
    decoder: Maker, tokens: Tokens, exact: Any, same_numbers: Check, style: str, pad: bool
) -> None:
    model = decoder(style)
    rows, mask, place = padded(tokens(2, LONG), "left")
    given = mask if pad else None
    cache = KVCache(2)
    parts, start = [], 0
    for size in (4, 3, 1, 2):
        seen = None if given is None else given[:, : start + size]
        parts.append(model(rows[:, start : start + size], seen, cache=cache).logits)
        start += size
    logits = torch.cat(parts, dim=1)
    whole, oracle = model(rows, given).logits, exact(model)(rows, given).logits
    place = place if pad else slice(None)
    same_numbers(logits[:1, place], oracle[:1, place], whole[:1, place])
    same_numbers(logits[1:], oracle[1:], whole[1:])
    assert cache.length == LONG


@torch.no_grad()
def test_given_positions_are_used(decoder: Maker, tokens: Tokens) -> None:
    model, rows = decoder(), tokens(1, 4)
    logits = model(rows).logits
    assert torch.equal(model(rows, positions=torch.arange(4)[None]).logits, logits)
    assert not torch.equal(model(rows, positions=torch.arange(1, 5)[None]).logits, logits)


@torch.no_grad()
def test_without_positions_one_block_sees_a_set(
    decoder: Maker, tokens: Tokens, exact: Any, same_numbers: Check
) -> None:
    model, rows = decoder(positions="none", num_layers=1), tokens(1, 5)
    swapped = rows[:, [1, 0, 2, 3, 4]]
    assert model.embeddings.positions is None
    logits = model(swapped).logits[:, 2:]
    same_numbers(logits, exact(model)(rows).logits[:, 2:], model(rows).logits[:, 2:])


@torch.no_grad()
def test_the_loss_is_the_cross_entropy_of_the_next_token(
    decoder: Maker, tokens: Tokens, exact: Any, same_numbers: Check
) -> None:
    model, rows = decoder(), tokens(2, 6)
    labels = rows.clone()
    labels[0, :4] = -100
    scored = [(0, 4), (0, 5), *((1, place) for place in range(1, 6))]

    def loss_of(network: Decoder) -> torch.Tensor:
        shares = network(rows).logits.log_softmax(-1)
        return -torch.stack([shares[r, p - 1, rows[r, p]] for r, p in scored]).mean()

    loss = model(rows, labels=labels).loss
    same_numbers(loss, loss_of(exact(model)), loss_of(model))


@torch.no_grad()
def test_only_the_last_logits_can_be_asked_for(decoder: Maker, tokens: Tokens) -> None:
    model, rows = decoder(), tokens()
    whole = model(rows).last_hidden_state
    output = model(rows, num_logits=2)
    assert torch.equal(output.logits, model.project(whole[:, -2:]))
    assert model(rows, num_logits=100).logits.shape == model(rows).logits.shape


@torch.no_grad()
def test_hidden_states_are_the_embeddings_and_each_block(decoder: Maker, tokens: Tokens) -> None:
    model, rows = decoder(), tokens()
    output = model(rows, return_hidden_states=True)
    first, middle, last = output.hidden_states
    assert torch.equal(first, model.embeddings(rows, torch.arange(10)[None]))
    assert torch.equal(model.final_norm(model.blocks[1](middle)), last)
    assert last is output.last_hidden_state
    assert model(rows).hidden_states is None


def test_a_tied_head_is_the_embedding_and_is_stored_once(decoder: Maker, tokens: Tokens) -> None:
    tied, untied = decoder(), decoder(tie_embeddings=False)
    assert "head.weight" not in tied.state_dict()
    assert set(untied.state_dict()) - set(tied.state_dict()) == {"head.weight"}
    rows = tokens()
    absent = 0
    assert absent not in rows
    tied(rows, labels=rows).loss.backward()
    untied(rows, labels=rows).loss.backward()
    assert tied.embeddings.tokens.weight.grad[absent].any()  # only the head reaches it
    assert not untied.embeddings.tokens.weight.grad[absent].any()


@pytest.mark.parametrize("style", STYLES)
def test_every_parameter_gets_a_gradient(decoder: Maker, tokens: Tokens, style: str) -> None:
    model, rows = decoder(style), tokens()
    model(rows, labels=rows).loss.backward()
    idle = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert idle == []


@pytest.mark.parametrize("style", STYLES)
def test_training_lowers_the_loss(tokens: Tokens, decoder: Maker, style: str) -> None:
    model = Decoder(decoder(style).config).train()
    rows = tokens(4, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = model(rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradient_checkpointing_gives_the_same_gradients(
    decoder: Maker, tokens: Tokens, dropout: float
) -> None:
    rows = tokens()
    plain = decoder("llama", dropout=dropout, attention_dropout=dropout).train()
    again = copy.deepcopy(plain)
    again.enable_gradient_checkpointing()
    for model in (plain, again):
        torch.manual_seed(5)
        model(rows, labels=rows).loss.backward()
    for one, other in zip(plain.parameters(), again.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    runs = [model.get_statistics()["recomputed_calls"] for model in (plain, again)]
    assert runs == [0, 2]  # each block ran once more on the way back
    again.enable_gradient_checkpointing(False)
    again.reset_statistics()
    again(rows, labels=rows).loss.backward()
    assert again.get_statistics()["recomputed_calls"] == 0


@torch.no_grad()
def test_statistics_are_those_of_all_layers(decoder: Maker, tokens: Tokens) -> None:
    model = decoder()
    model(tokens())
    model(tokens())
    assert [m.get_statistics()["calls"] for m in model.attention_modules()] == [2, 2]
    assert model.get_statistics()["calls"] == 4
    model.reset_statistics()
    assert model.get_statistics()["calls"] == 0


@pytest.mark.parametrize("kind", list(AttentionKind))
@torch.no_grad()
def test_every_attention_module_serves(decoder: Maker, tokens: Tokens, kind: AttentionKind) -> None:
    model = decoder(attention=kind)
    name = f"{kind.value.title().replace('_', '')}Attention"
    assert {type(module).__name__ for module in model.attention_modules()} == {name}
    assert [module.config.layer for module in model.attention_modules()] == [0, 1]
    assert model(tokens()).logits.isfinite().all()
    assert model.get_statistics()["calls"] >= 2


def test_settings_reach_the_attention_module(decoder: Maker) -> None:
    model = decoder(attention="ada", attention_settings={"policy": "speed"})
    assert {module.runner.policy.name for module in model.attention_modules()} == {"speed"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"heads": 3}, r"attention_settings: expected some of \[.*'policy'.*got \['heads'\]"),
        ({"window": (1, 1)}, r"got \['window'\]; sizes and kinds are fields of TransformerConfig"),
    ],
)
def test_unknown_settings_are_refused(
    decoder: Maker, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArgumentTypeError, match=message):
        decoder(attention="ada", attention_settings=settings)


def test_fresh_weights_are_narrower_where_blocks_add_up() -> None:
    torch.manual_seed(0)
    config = TransformerConfig(vocab_size=500, num_layers=8, embed_dim=64, num_heads=4)
    model = Decoder(config)
    block = model.blocks[3]
    wide_std = [
        weight.std().item()
        for weight in (
            model.embeddings.tokens.weight,
            block.attention.in_proj_weight,
            block.mlp.up.weight,
        )
    ]
    narrow_std = [m.weight.std().item() for m in (block.attention.out_proj, block.mlp.down)]
    # The standard deviation of n numbers is known to about 1 / sqrt(2 n): 6 of these are allowed.
    for std, wanted in [(s, 0.02) for s in wide_std] + [(s, 0.02 / 4) for s in narrow_std]:
        assert abs(std / wanted - 1) < 6 / math.sqrt(2 * 64 * 64)
    assert not block.mlp.up.bias.any()


def test_the_same_seed_gives_the_same_weights() -> None:
    config = TransformerConfig(vocab_size=10, num_layers=1, embed_dim=8, num_heads=2)
    models = []
    for _ in range(2):
        torch.manual_seed(7)
        models.append(Decoder(config))
    one, other = (model.state_dict() for model in models)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_gated_and_plain_mlps_do_what_they_say(decoder: Maker) -> None:
    hidden = torch.randn(2, 3, 32)
    plain = decoder().blocks[0].mlp
    assert torch.equal(plain(hidden), plain.down(F.gelu(plain.up(hidden), approximate="tanh")))
    gated = decoder("llama").blocks[0].mlp
    wanted = gated.down(F.silu(gated.gate(hidden)) * gated.up(hidden))
    assert torch.equal(gated(hidden), wanted)
    quick = decoder(activation="quick_gelu").blocks[0].mlp
    inner = quick.up(hidden)
    assert torch.equal(quick(hidden), quick.down(inner * torch.sigmoid(1.702 * inner)))


ROWS = torch.ones(2, 5, dtype=torch.long)


@pytest.mark.parametrize(
    ("error", "arguments", "message"),
    [
        (
            ArgumentTypeError,
            {"input_ids": [[1]]},
            r"input_ids: expected a tensor \[B, L\], got list",
        ),
        (ShapeError, {"input_ids": ROWS[0]}, r"input_ids: expected \[B, L\], got \(5,\)"),
        (DTypeError, {"input_ids": ROWS.float()}, r"input_ids: expected int64 or int32, got torch"),
        (
            ShapeError,
            {"attention_mask": ROWS[:, :4]},
            r"attention_mask: expected \[2, 5\], cached tokens among them, got \(2, 4\)",
        ),
        (
            DTypeError,
            {"attention_mask": ROWS.float()},
            r"attention_mask: expected integers or booleans, got torch.float32; 1 or True marks",
        ),
        (
            ShapeError,
            {"positions": ROWS[0]},
            r"positions: expected \[2, 5\] or \[1, 5\], got \(5,\)",
        ),
        (DTypeError, {"positions": ROWS.float()}, r"positions: expected int64 or int32, got torch"),
        (ShapeError, {"labels": ROWS[:, :4]}, r"labels: expected \[2, 5\], got \(2, 4\)"),
        (
            ArgumentError,
            {"input_ids": 64 * ROWS},
            r"input_ids: expected numbers from 0 to 63, got 64",
        ),
        (
            ArgumentError,
            {"positions": -ROWS},
            r"positions: expected numbers from 0 to 47, got -1 to",
        ),
        (ArgumentError, {"num_logits": 0}, r"num_logits: expected an integer of at least 1, with"),
        (ArgumentError, {"num_logits": 1, "labels": ROWS}, r"without labels, got labels too"),
        (ArgumentError, {"cache": KVCache(3)}, r"num_layers of the cache: expected 2, got 3"),
        (
            ArgumentError,
            {"input_ids": torch.ones(1, 49, dtype=torch.long)},
            r"tokens in a row: expected at most max_positions 48, got 49; cut the input",
        ),
    ],
)
def test_bad_input_is_refused(
    decoder: Maker, error: type[Exception], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(error, match=message):
        decoder()(**{"input_ids": ROWS, **arguments})


def test_a_cache_and_checkpointing_do_not_go_together(decoder: Maker) -> None:
    model = decoder().train()
    model.enable_gradient_checkpointing()
    with pytest.raises(ArgumentError, match=r"would append twice; call eval\(\) first"):
        model(ROWS, cache=KVCache(2))
    assert model.eval()(ROWS, cache=KVCache(2)).logits.isfinite().all()


@pytest.mark.parametrize(
    "changes", [{"type_vocab_size": 2}, {"pooler": True}, {"pooler": True, "num_labels": 2}]
)
def test_the_parts_of_an_encoder_are_refused(decoder: Maker, changes: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=r"of a decoder: expected none, got .*; an Encoder"):
        decoder(**changes)


def test_a_config_of_another_type_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match=r"config: expected a TransformerConfig, got dict"):
        Decoder({"vocab_size": 10})  # type: ignore[arg-type]


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("style", STYLES)
@torch.no_grad()
def test_a_compiled_decoder_is_one_graph(
    decoder: Maker, tokens: Tokens, exact: Any, same_numbers: Check, style: str, pad: bool
) -> None:
    torch._dynamo.reset()
    model, rows = decoder(style), tokens(2, LONG)
    rows, mask, place = padded(rows, "left") if pad else (rows, None, slice(None))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    found, right, eager = (
        run(rows, attention_mask=mask).logits[:, place] for run in (compiled, exact(model), model)
    )
    same_numbers(found, right, eager)


@pytest.mark.parametrize(("dynamic", "graphs"), [(None, 2), (True, 1)])
@torch.no_grad()
def test_lengths_share_the_graphs_of_a_compiled_decoder(
    decoder: Maker, tokens: Tokens, dynamic: bool | None, graphs: int
) -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(decoder(), backend=counter, fullgraph=True, dynamic=dynamic)
    for length in (6, 7, 9, 12, 16):
        compiled(tokens(2, length))
    assert counter.frame_count == graphs
