"""Both sides of a problem of `benchmarks.regret` through a layer, and through a Llama."""

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import adaattn
from adaattn.testing import assert_matches, assert_within_budget
from benchmarks.failures import blamed
from benchmarks.regret_calls import OURS, PEER, Calls, allowed_error, kept, positional, recorded
from benchmarks.regret_problems import Kind, Problem

__all__ = ["generation_calls", "module_calls", "transformers_calls"]


@contextlib.contextmanager
def module_calls(problem: Problem, device: str, policy: str) -> Iterator[Calls]:
    """Yield the calls of `adaattn.AdaAttention` and of a layer written on PyTorch's function."""
    dtype = getattr(torch, problem.dtype)
    torch.manual_seed(problem.index)
    keywords = positional(problem)
    layer = adaattn.AdaAttention(
        problem.heads * problem.dim,
        problem.heads,
        policy=policy,
        num_kv_heads=problem.kv_heads,
        window=keywords.pop("window", (-1, -1)),
    )
    layer = layer.to(device, dtype).train(problem.training)
    visible = _visible(problem, device)
    theirs: dict[str, Any] = {"enable_gqa": True} if problem.heads != problem.kv_heads else {}
    if problem.kind is Kind.CAUSAL:
        theirs["is_causal"] = True
    elif visible is not None:
        theirs["attn_mask"] = visible
    if problem.kind is Kind.PADDING:
        keywords["key_padding_mask"] = ~kept(problem, device)
    peer = _SdpaLayer(layer, theirs, visible).train(problem.training)
    x = torch.randn(problem.batch, problem.len_q, layer.embed_dim, device=device, dtype=dtype)
    upstream = torch.randn_like(x)

    def ours(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = layer(x, **keywords)[0]
        return found

    def check() -> None:
        eager = copy.deepcopy(peer)
        eager.fused = False
        wide = copy.deepcopy(eager).double()
        with torch.no_grad():
            exact, yardstick = wide(x.double()), eager(x)
        wanted = _gradients(wide, wide, x.double(), upstream.double()) if problem.training else ()
        usual = _gradients(eager, eager, x, upstream) if problem.training else ()
        for side, module, call in ((OURS, layer, ours), (PEER, peer, peer)):
            with blamed(side), torch.set_grad_enabled(problem.training):
                output, events = recorded(partial(call, x))
                budget = allowed_error(events)
                allowed = budget * _growth(wide, x.double(), exact) if budget else 0.0
                _hold(output, exact, yardstick, allowed, problem)
                if not wanted:
                    continue
                for got, right, rough in zip(
                    _gradients(module, call, x, upstream), wanted, usual, strict=True
                ):
                    if not allowed:
                        summands = x.shape[0] * x.shape[1] + x.shape[2] + problem.len_k
                        assert_matches(got, right, rough, name="gradient", summands=summands)
                    elif not bool(got.isfinite().all()):
                        raise AssertionError("gradient: expected finite numbers, got others")

    if problem.training:
        yield Calls(
            ours=lambda: _gradients(layer, ours, x, upstream),
            peer=lambda: _gradients(peer, peer, x, upstream),
            check=check,
        )
        return
    with torch.no_grad():
        yield Calls(ours=lambda: ours(x), peer=lambda: peer(x), check=check)


@contextlib.contextmanager
def transformers_calls(problem: Problem, device: str, policy: str) -> Iterator[Calls]:
    """Yield the forward passes of a small Llama through this library and through ``"sdpa"``."""
    from adaattn.integrations.transformers import register

    peer = _llama(problem, device)
    tokens = torch.randint(256, (problem.batch, problem.len_q), device=device)
    # Padding on the left, as in generation: the last token of every entry is real.
    real = kept(problem, device).flip(1) if problem.kind is Kind.PADDING else None

    def forward(model: Any, name: str) -> Callable[[], torch.Tensor]:
        model.set_attn_implementation(name)
        return lambda: model(tokens, attention_mask=real, use_cache=False).last_hidden_state

    with register(policy=policy), torch.no_grad():
        ours, theirs = (forward(copy.deepcopy(peer), name) for name in ("adaattn", "sdpa"))
        rows = torch.ones_like(tokens, dtype=torch.bool) if real is None else real

        def check() -> None:
            # "eager" adds the mask in fp32, where float64's smallest number is infinite: NaN.
            exact = forward(copy.deepcopy(peer).double(), "sdpa")()[rows]
            eager = forward(copy.deepcopy(peer), "eager")()[rows]
            _check(problem, exact, eager, {OURS: ours, PEER: theirs}, rows)

        yield Calls(ours=ours, peer=theirs, check=check)


@contextlib.contextmanager
def generation_calls(problem: Problem, device: str, policy: str) -> Iterator[Calls]:
    """Yield single tokens of a small Llama over a growing cache, by this library and ``"sdpa"``.

    The cache is cut back to the prompt every `_STEPS` tokens.
    """
    from transformers import DynamicCache

    from adaattn.integrations.transformers import register

    peer = _llama(problem, device)
    tokens = torch.randint(256, (problem.batch, problem.len_k), device=device)
    prompt, last = tokens[:, :-1], tokens[:, -1:]
    real = torch.ones(problem.batch, problem.len_k + _STEPS, dtype=torch.bool, device=device)
    if problem.kind is Kind.PADDING:
        real[:, : problem.len_k] = kept(problem, device).flip(1)
    masks = real if problem.kind is Kind.PADDING else None

    def step(model: Any, name: str) -> Callable[[], torch.Tensor]:
        model.set_attn_implementation(name)
        cache = DynamicCache()
        seen = None if masks is None else masks[:, : problem.len_k - 1]
        if problem.len_k > 1:
            model(prompt, attention_mask=seen, past_key_values=cache)
        taken = 0

        def call() -> torch.Tensor:
            nonlocal taken
            if taken == _STEPS:
                cache.crop(-_STEPS)
                taken = 0
            seen = None if masks is None else masks[:, : problem.len_k + taken]
            taken += 1
            output: torch.Tensor = model(last, attention_mask=seen, past_key_values=cache)[0]
            return output

        return call

    with register(policy=policy), torch.no_grad():
        ours, theirs = (step(copy.deepcopy(peer), name) for name in ("adaattn", "sdpa"))

        def check() -> None:
            exact = step(copy.deepcopy(peer).double(), "sdpa")()
            eager = step(copy.deepcopy(peer), "eager")()
            fresh = {
                OURS: step(copy.deepcopy(peer), "adaattn"),
                PEER: step(copy.deepcopy(peer), "sdpa"),
            }
            _check(problem, exact, eager, fresh, ...)

        yield Calls(ours=ours, peer=theirs, check=check)


_STEPS = 64
"""Tokens after the prompt."""


def _llama(problem: Problem, device: str) -> Any:
    """Return a Llama of two layers whose attention is the problem."""
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(problem.index)
    width = problem.heads * problem.dim
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=problem.heads,
        num_key_value_heads=problem.kv_heads,
        head_dim=problem.dim,
        max_position_embeddings=problem.len_k + _STEPS,
    )
    return LlamaModel(config).to(device, getattr(torch, problem.dtype)).eval()


def _check(
    problem: Problem,
    exact: torch.Tensor,
    eager: torch.Tensor,
    calls: dict[str, Callable[[], torch.Tensor]],
    rows: Any,
) -> None:
    """Raise unless what the calls of a model return is right, or finite where it approximates."""
    for side, call in calls.items():
        with blamed(side):
            output, events = recorded(call)
            found = output[rows]
            if allowed_error(events):
                if not bool(found.isfinite().all()):
                    raise AssertionError("output: expected finite numbers, got others")
                continue
            _hold(found, exact, eager, 0.0, problem)


class _SdpaLayer(nn.Module):
    """Self-attention as people write it with PyTorch's function.

    Args:
        ours: the module whose weights it copies.
        keywords: of ``F.scaled_dot_product_attention``.
        visible: which keys are seen, for ``fused=False``; None is all.
    """

    def __init__(
        self, ours: adaattn.AdaAttention, keywords: dict[str, Any], visible: torch.Tensor | None
    ) -> None:
        super().__init__()
        weights = {name: item.detach().clone() for name, item in ours.named_parameters()}
        packed = weights.get("in_proj_weight")
        if packed is None:
            packed = torch.cat([weights[f"{name}_proj_weight"] for name in "qkv"])
        self.in_weight = nn.Parameter(packed)
        self.in_bias = nn.Parameter(weights["in_proj_bias"])
        self.out_weight = nn.Parameter(weights["out_proj.weight"])
        self.out_bias = nn.Parameter(weights["out_proj.bias"])
        self.sizes = (ours.config.num_heads, ours.config.kv_heads, ours.config.kv_heads)
        self.keywords, self.visible, self.fused = keywords, visible, True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output for x [B, S, E]."""
        return F.linear(self.joined_heads(x), self.out_weight, self.out_bias)

    def joined_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Return the heads' outputs side by side, [B, S, E]."""
        packed = F.linear(x, self.in_weight, self.in_bias).unflatten(-1, (sum(self.sizes), -1))
        q, k, v = packed.transpose(1, 2).split(self.sizes, dim=1)
        if self.fused:
            heads = F.scaled_dot_product_attention(q, k, v, **self.keywords)
        else:
            k, v = (item.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for item in (k, v))
            scores = q @ k.mT / math.sqrt(q.shape[-1])
            if self.visible is not None:
                scores = scores.masked_fill(~self.visible, -torch.inf)
            heads = scores.softmax(-1) @ v
        return heads.transpose(1, 2).flatten(-2)


def _growth(layer: _SdpaLayer, x: torch.Tensor, output: torch.Tensor) -> float:
    """Return how many times a relative error of the heads may be in the output [B, S, E]."""
    with torch.no_grad():
        heads, joined = (item.flatten(1).norm(dim=1) for item in (layer.joined_heads(x), output))
        largest = torch.linalg.eigvalsh(layer.out_weight @ layer.out_weight.mT)[-1].sqrt()
        return float((largest * heads / joined).max())


def _visible(problem: Problem, device: str) -> torch.Tensor | None:
    """Return which keys a layer's queries see, for a mask of PyTorch's function; None is all."""
    if problem.kind is Kind.PLAIN:
        return None
    if problem.kind is Kind.PADDING:
        return kept(problem, device)[:, None, None]
    positions = torch.arange(problem.len_k, device=device)
    ahead = positions - positions[:, None]
    left, right = positional(problem).get("window", (problem.len_k, 0))
    seen: torch.Tensor = (ahead >= -left) & (ahead <= right)
    return seen


def _hold(
    output: torch.Tensor,
    exact: torch.Tensor,
    eager: torch.Tensor,
    budget: float,
    problem: Problem,
) -> None:
    """Raise AssertionError unless a layer's output [B, S, E] is right within its budget."""
    if budget:
        assert_within_budget(output, exact, budget)
        return
    summands = output.shape[-1] + problem.dim + problem.len_k
    assert_matches(output, exact, eager, name="output", summands=summands)


def _gradients(
    module: nn.Module,
    call: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    upstream: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of a layer: q, k and v together, their biases, the output's two."""
    found = torch.autograd.grad(call(x), list(module.parameters()), upstream)
    named = dict(zip((name for name, _ in module.named_parameters()), found, strict=True))
    parts = [item for name, item in named.items() if name.endswith("_proj_weight")]
    if len(parts) == 3:
        rest = [item for name, item in named.items() if not name.endswith("_proj_weight")]
        return (torch.cat(parts), *rest)
    return tuple(named.values())
