"""What a layer has beyond ``torch.nn.MultiheadAttention``, against the same written out plainly."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from adaattn.attention.dense import DenseAttention
from adaattn.attention.rotary import RotaryConfig
from adaattn.cache import KVCache
from adaattn.errors import (
    AdaAttnError,
    ArgumentError,
    ArgumentTypeError,
    DTypeError,
    ShapeError,
)
from adaattn.testing import assert_matches

EMBED, HEADS, BATCH, LEN = 32, 4, 2, 11
SUMMANDS = EMBED + LEN
ROTARY = RotaryConfig(head_dim=8)
CAUSAL = {"is_causal": True}

FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grouped heads": ({"num_kv_heads": 2}, {}),
    "grouped heads, causal": ({"num_kv_heads": 2}, CAUSAL),
    "one kv head": ({"num_kv_heads": 1}, CAUSAL),
    "head size": ({"head_dim": 12}, {}),
    "head size, grouped": ({"head_dim": 12, "num_kv_heads": 2}, CAUSAL),
    "rotary": ({"rotary": ROTARY}, {}),
    "rotary, causal, grouped": ({"rotary": ROTARY, "num_kv_heads": 2}, CAUSAL),
    "normalised": ({"qk_norm": True}, {}),
    "normalised, rotary": ({"qk_norm": True, "rotary": ROTARY, "num_kv_heads": 2}, CAUSAL),
    "epsilon": ({"qk_norm": True, "qk_norm_eps": 0.5}, {}),
    "window": ({"window": (3, 1)}, {}),
    "window, causal": ({"window": (3, -1)}, CAUSAL),
    "window ahead, causal": ({"window": (2, 4)}, CAUSAL),
    "softcap": ({"softcap": 0.7}, CAUSAL),
    "sinks": ({"sinks": True}, CAUSAL),
    "sinks, window, grouped": ({"sinks": True, "window": (3, -1), "num_kv_heads": 2}, CAUSAL),
    "scale": ({"scale": 0.9}, {}),
    "output bias alone": ({"bias": False, "out_bias": True}, {}),
    "projection biases alone": ({"bias": True, "out_bias": False}, {}),
    "extra keys, causal": ({"add_bias_kv": True, "add_zero_attn": True}, CAUSAL),
    "extra keys, window": ({"add_bias_kv": True, "window": (2, 2)}, {}),
    "extra key of grouped heads": ({"add_bias_kv": True, "num_kv_heads": 2}, {}),
    "sequence first": ({"batch_first": False, "num_kv_heads": 2, "rotary": ROTARY}, CAUSAL),
}


def make(**options: Any) -> DenseAttention:
    """Return a module all of whose parameters matter."""
    module = DenseAttention(EMBED, HEADS, **options)
    for name, parameter in module.named_parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, mean=float("norm" in name))
    return module


def plain_attention(
    module: DenseAttention, x: torch.Tensor, *, is_causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (output, weights per head) of self-attention, written out."""
    config, length = module.config, x.shape[1]
    heads, kv_heads, size = config.num_heads, config.kv_heads, config.size_of_head
    if module.in_proj_weight is not None:
        matrices = module.in_proj_weight.split((config.query_size, config.kv_size, config.kv_size))
    else:
        matrices = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    sizes = [matrix.shape[0] for matrix in matrices]
    biases = [None] * 3 if module.in_proj_bias is None else module.in_proj_bias.split(sizes)
    q, k, v = (
        functional.linear(x, matrix, bias).view(x.shape[0], length, -1, size).transpose(1, 2)
        for matrix, bias in zip(matrices, biases, strict=True)
    )
    if config.qk_norm:
        q, k = (
            item * (item.square().mean(-1, keepdim=True) + config.qk_norm_eps).rsqrt() * norm.weight
            for item, norm in ((q, module.q_norm), (k, module.k_norm))
        )
    if config.rotary is not None:
        exponents = torch.arange(0, size, 2).float() / size
        frequencies = (1.0 / config.rotary.base**exponents).to(x.dtype)
        turns = torch.arange(length)[:, None] * frequencies
        cos, sin = (torch.cat((part, part), -1) for part in (turns.cos(), turns.sin()))
        q, k = (
            item * cos + torch.cat((-item[..., size // 2 :], item[..., : size // 2]), -1) * sin
            for item in (q, k)
        )
    ahead = torch.arange(length) - torch.arange(length)[:, None]
    left, right = config.window
    hidden = (ahead > 0) & is_causal
    hidden |= (ahead < -left) & (left >= 0)
    hidden |= (ahead > right) & (right >= 0)
    for learned in (module.bias_k, module.bias_v) if config.add_bias_kv else ():
        row = learned.view(1, kv_heads, 1, size).expand(x.shape[0], -1, -1, -1)
        k, v = (
            (torch.cat((k, row), 2), v) if learned is module.bias_k else (k, torch.cat((v, row), 2))
        )
    if config.add_zero_attn:
        k, v = functional.pad(k, (0, 0, 0, 1)), functional.pad(v, (0, 0, 0, 1))
    hidden = functional.pad(hidden, (0, k.shape[2] - length))
    k, v = (item.repeat_interleave(heads // kv_heads, 1) for item in (k, v))
    scores = q @ k.mT * (size**-0.5 if config.scale is None else config.scale)
    if config.softcap is not None:
        scores = config.softcap * torch.tanh(scores / config.softcap)
    scores = scores.masked_fill(hidden, float("-inf"))
    if config.sinks:
        sinks = module.sinks.view(1, -1, 1, 1).expand(x.shape[0], -1, length, 1)
        scores = torch.cat((scores, sinks), -1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    return module.out_proj((weights @ v).transpose(1, 2).flatten(-2)), weights


def with_gradients(
    output: torch.Tensor, weights: torch.Tensor, leaves: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return output, weights, and the gradient of each leaf."""
    generator = torch.Generator().manual_seed(2)
    upstream = [
        torch.randn(item.shape, generator=generator, dtype=torch.float64).bfloat16().to(item.dtype)
        for item in (output, weights)
    ]
    found = torch.autograd.grad((output, weights), list(leaves.values()), upstream)
    named = {f"gradient of {name}": item for name, item in zip(leaves, found, strict=True)}
    return {"output": output, "weights": weights} | named


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_computes_what_it_says(name: str) -> None:
    options, call = FEATURES[name]
    module = make(**options)
    x = torch.randn(BATCH, LEN, EMBED)
    found = []
    for dtype in (torch.float32, torch.float32, torch.float64):
        judged = copy.deepcopy(module).to(dtype)
        leaf = x.to(dtype).requires_grad_()
        if found:
            output, weights = plain_attention(judged, leaf, **call)
        else:
            turned = leaf if judged.batch_first else leaf.transpose(0, 1)
            wanted = {"need_weights": True, "average_attn_weights": False}
            output, weights = judged(turned, **call, **wanted)
            output = output if judged.batch_first else output.transpose(0, 1)
            without, none = judged(turned, **call)
            without = without if judged.batch_first else without.transpose(0, 1)
            assert none is None
        found.append(
            with_gradients(output, weights, {"x": leaf, **dict(judged.named_parameters())})
        )
    got, eager, exact = found
    for item in got:
        summands = SUMMANDS + BATCH * LEN * LEN * ("gradient" in item)
        assert_matches(got[item], exact[item], eager[item], name=item, summands=summands)
    assert_matches(without, exact["output"], eager["output"], summands=SUMMANDS)


def test_heads_are_never_repeated() -> None:
    module = make(num_kv_heads=2)
    seen: list[Any] = []
    run = module.runner.run
    module.runner.run = lambda *tensors, **call: (
        seen.append((tensors, call)) or run(*tensors, **call)
    )
    module(torch.randn(BATCH, LEN, EMBED))
    (tensors, call) = seen[0]
    assert [item.shape[1] for item in tensors] == [HEADS, 2, 2]
    assert call["enable_gqa"] is True


def test_only_what_is_used_adds_keys_to_the_state() -> None:
    base = {"in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"}
    assert set(make().state_dict()) == base
    assert set(make(rotary=ROTARY, window=(3, 0), softcap=2.0, scale=0.1).state_dict()) == base
    assert set(make(sinks=True).state_dict()) == base | {"sinks"}
    assert set(make(qk_norm=True).state_dict()) == base | {"q_norm.weight", "k_norm.weight"}
    assert set(make(num_kv_heads=1).state_dict()) == base
    split = {"q_proj_weight", "k_proj_weight", "v_proj_weight"}
    assert set(make(kdim=7).state_dict()) == base - {"in_proj_weight"} | split


CACHED: dict[str, dict[str, Any]] = {
    "plain": {},
    "rotary": {"rotary": ROTARY},
    "all": {"rotary": ROTARY, "num_kv_heads": 2, "qk_norm": True, "sinks": True, "window": (4, -1)},
    "window of both sides": {"window": (3, 2)},
    "extra keys": {"add_bias_kv": True, "add_zero_attn": True},
    "sequence first": {"batch_first": False, "rotary": ROTARY},
}


@pytest.mark.parametrize("steps", [(LEN,), (1,) * LEN, (4, 1, 3, 3)], ids=str)
@pytest.mark.parametrize("name", CACHED)
@pytest.mark.parametrize("padded", [False, True])
def test_tokens_in_steps_give_what_they_give_at_once(
    steps: tuple[int, ...], name: str, padded: bool
) -> None:
    module = make(**CACHED[name])
    exact = copy.deepcopy(module).double()
    along = 1 if module.batch_first else 0
    x = torch.randn(BATCH, LEN, EMBED)
    x = x if module.batch_first else x.transpose(0, 1)
    hidden = torch.zeros(BATCH, LEN, dtype=torch.bool)
    hidden[1, :2] = padded
    call = {"is_causal": True, "key_padding_mask": hidden if padded else None}
    with torch.no_grad():
        eager, reference = module(x, **call)[0], exact(x.double(), **call)[0]
        cache = KVCache(num_layers=1).layer(0)
        parts = []
        for part in x.split(steps, dim=along):
            seen = cache.length + part.shape[along]
            call["key_padding_mask"] = hidden[:, :seen] if padded else None
            parts.append(module(part, cache=cache, **call)[0])
    assert cache.length == LEN
    assert_matches(torch.cat(parts, along), reference, eager, summands=SUMMANDS)


def test_a_cache_that_forgets_what_the_window_hides_changes_nothing() -> None:
    module = make(window=(4, -1), rotary=ROTARY)
    x = torch.randn(BATCH, LEN, EMBED)
    hidden = torch.zeros(BATCH, LEN, dtype=torch.bool)
    hidden[0, 5] = True
    results = []
    with torch.no_grad():
        for cache in (KVCache(num_layers=1), KVCache(num_layers=1, window=4)):
            layer = cache.layer(0)
            steps = [
                module(token, key_padding_mask=hidden[:, : i + 1], is_causal=True, cache=layer)[0]
                for i, token in enumerate(x.split(1, dim=1))
            ]
            results.append(torch.cat(steps, 1))
    assert layer.start > 0
    exact = copy.deepcopy(module).double()
    reference, _ = exact(x.double(), key_padding_mask=hidden, is_causal=True)
    assert_matches(results[1], reference, results[0], summands=SUMMANDS)


def test_a_mask_that_does_not_fit_leaves_the_cache_as_it_was() -> None:
    module = make()
    cache = KVCache(num_layers=1).layer(0)
    x = torch.randn(BATCH, 3, EMBED)
    module(x, cache=cache, is_causal=True)
    with pytest.raises(ShapeError, match=r"key_padding_mask: expected \[2, 6\], got bool\[2, 3\]"):
        module(x, key_padding_mask=torch.zeros(BATCH, 3, dtype=torch.bool), cache=cache)
    assert cache.length == 3


@pytest.mark.parametrize("form", ["[B, L]", "[1, L]", "[L]"])
def test_positions_can_be_given(form: str) -> None:
    """Rotary angles are relative: all positions moved by 5 change rounding only."""
    module = make(rotary=ROTARY)
    x = torch.randn(BATCH, LEN, EMBED)
    moved = torch.arange(5, 5 + LEN)
    shaped = {"[B, L]": moved.expand(BATCH, -1), "[1, L]": moved[None], "[L]": moved}[form]
    exact = copy.deepcopy(module).double()
    # Angles of larger positions round more in float32, and so they do where both start at 5.
    reference, _ = exact(x.double(), is_causal=True, positions=shaped)
    eager = plain_attention_from(module, x, 5)
    assert_matches(
        module(x, is_causal=True, positions=shaped)[0], reference, eager, summands=SUMMANDS
    )
    assert not torch.equal(
        module(x, is_causal=True, positions=2 * shaped)[0], module(x, is_causal=True)[0]
    )


def plain_attention_from(module: DenseAttention, x: torch.Tensor, start: int) -> torch.Tensor:
    """Return causal attention of tokens behind ``start`` others, which no query may see."""
    padded = functional.pad(x, (0, 0, start, 0))
    hidden = torch.zeros(x.shape[0], padded.shape[1], dtype=torch.bool)
    hidden[:, :start] = True
    return module(padded, key_padding_mask=hidden, is_causal=True)[0][:, start:]


BAD_CALLS: dict[str, tuple[dict[str, Any], type[AdaAttnError], str]] = {
    "positions type": ({"positions": [0]}, ArgumentTypeError, "positions: expected None or a"),
    "positions dtype": (
        {"positions": torch.ones(LEN)},
        DTypeError,
        r"positions: expected int64, got torch.float32",
    ),
    "positions shape": ({"positions": torch.arange(3)}, ShapeError, "positions: expected"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_positions_are_refused(name: str) -> None:
    changes, error, message = BAD_CALLS[name]
    with pytest.raises(error, match=message):
        make(rotary=ROTARY)(torch.randn(BATCH, LEN, EMBED), **changes)


def test_rotary_and_caches_are_for_self_attention() -> None:
    x, other = torch.randn(BATCH, LEN, EMBED), torch.randn(BATCH, LEN, EMBED)
    message = r"key with {}: expected the query itself \(self-attention\)"
    with pytest.raises(ArgumentError, match=message.format("rotary")):
        make(rotary=ROTARY)(x, other)
    cache = KVCache(num_layers=1).layer(0)
    with pytest.raises(ArgumentError, match=message.format("cache")):
        make()(x, other, cache=cache)
    assert cache.length == 0
    assert make(rotary=ROTARY)(x, x, other)[0].shape == x.shape


def test_rotary_knows_its_query_after_reentrant_checkpointing() -> None:
    """Which detaches each argument: three objects of the same numbers."""
    module = make(rotary=ROTARY)
    x = torch.randn(BATCH, LEN, EMBED, requires_grad=True)
    output, _ = checkpoint(module, x, x, x, use_reentrant=True)
    output.sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("need_weights", [False, True])
def test_features_work_unbatched(need_weights: bool) -> None:
    module = make(rotary=ROTARY, num_kv_heads=2, qk_norm=True, sinks=True)
    x = torch.randn(LEN, EMBED)
    exact = copy.deepcopy(module).double()
    settings = {"is_causal": True, "need_weights": need_weights}
    found, batched = module(x, **settings), module(x[None], **settings)
    for got, wide, eager in zip(found, exact(x[None].double(), **settings), batched, strict=True):
        assert (got is not None) == (eager is not None)
        if got is not None:
            assert_matches(got, wide[0], eager[0], summands=SUMMANDS)
    assert (found[1] is not None) == need_weights


def test_half_precision_modules_compute_all_features() -> None:
    module = make(rotary=ROTARY, num_kv_heads=2, qk_norm=True, sinks=True, softcap=2.0)
    x = torch.randn(BATCH, LEN, EMBED).bfloat16()
    rounded = module.bfloat16()
    exact = copy.deepcopy(rounded).double()
    eager, _ = plain_attention(rounded, x, is_causal=True)
    reference, _ = plain_attention(exact, x.double(), is_causal=True)
    assert_matches(rounded(x, is_causal=True)[0], reference, eager, summands=SUMMANDS)


def test_autocast_computes_all_features_and_caches_its_own_dtype() -> None:
    module = make(rotary=ROTARY, num_kv_heads=2, qk_norm=True, sinks=True, add_bias_kv=True)
    exact = copy.deepcopy(module).double()
    x = torch.randn(BATCH, LEN, EMBED)
    cache = KVCache(num_layers=1).layer(0)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        whole = module(x, is_causal=True)[0]
        parts = [
            module(part, is_causal=True, cache=cache)[0] for part in x.split((5, LEN - 5), dim=1)
        ]
        eager = plain_attention(module, x, is_causal=True)[0]
    reference = plain_attention(exact, x.double(), is_causal=True)[0]
    assert whole.dtype == torch.bfloat16
    assert_matches(whole, reference, eager.bfloat16(), summands=SUMMANDS)
    assert_matches(torch.cat(parts, 1), reference, eager.bfloat16(), summands=SUMMANDS)


@pytest.mark.parametrize("with_cache", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_a_layer_of_transformers_gives_the_same(with_cache: bool, padded: bool) -> None:
    """Qwen3: grouped heads, its own head size, qk-norm before rotary."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.qwen3 import modeling_qwen3

    config = transformers.Qwen3Config(
        hidden_size=EMBED,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        head_dim=12,
        attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    theirs = modeling_qwen3.Qwen3Attention(config, 0).eval()
    for norm in (theirs.q_norm, theirs.k_norm):
        nn.init.normal_(norm.weight, mean=1.0)
    ours = DenseAttention(
        EMBED,
        HEADS,
        bias=False,
        num_kv_heads=2,
        head_dim=12,
        qk_norm=True,
        qk_norm_eps=config.rms_norm_eps,
        rotary=RotaryConfig(head_dim=12, base=1e4),
    )
    state = theirs.state_dict()
    state["in_proj_weight"] = torch.cat([state.pop(f"{name}_proj.weight") for name in "qkv"])
    state["out_proj.weight"] = state.pop("o_proj.weight")
    ours.load_state_dict(state)
    x = torch.randn(BATCH, LEN, EMBED)
    hidden = torch.zeros(BATCH, LEN, dtype=torch.bool)
    hidden[1, 0] = padded
    blocked = hidden[:, None, None] | torch.ones(LEN, LEN, dtype=torch.bool).triu(1)
    found = []
    for dtype in (torch.float32, torch.float64):
        turning = modeling_qwen3.Qwen3RotaryEmbedding(config)
        angles = turning(x.to(dtype), torch.arange(LEN)[None])
        added = torch.zeros(BATCH, 1, LEN, LEN, dtype=dtype).masked_fill(
            blocked, torch.finfo(dtype).min
        )
        module = copy.deepcopy(theirs).to(dtype)
        found.append(module(x.to(dtype), angles, added)[0])
    if with_cache:
        cache = KVCache(num_layers=1).layer(0)
        parts = [
            ours(part, key_padding_mask=hidden[:, : i + 1], is_causal=True, cache=cache)[0]
            for i, part in enumerate(x.split(1, dim=1))
        ]
        got = torch.cat(parts, 1)
    else:
        got = ours(x, key_padding_mask=hidden, is_causal=True)[0]
    # The first query of the padded sequence sees nothing: zeros here, a mean of all there.
    sighted = ~hidden
    assert_matches(got[sighted], found[1][sighted], found[0][sighted], summands=SUMMANDS)
