"""DenseAttention against ``torch.nn.MultiheadAttention``, over all of its options.

The oracle is PyTorch's module in float64 and the yardstick is the same in the dtype under
test. Every case leaves each query a key to see: where none is left PyTorch gives NaN and we
give zeros, which has tests of its own.
"""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import nn

from adaattn.attention.dense import DenseAttention
from adaattn.testing import compare

EMBED, HEADS, BATCH, LEN_Q, LEN_K = 12, 3, 2, 4, 5
KEY_SIZE, VALUE_SIZE = 7, 10

CONSTRUCTORS = [
    {"bias": bias, "add_bias_kv": learned, "add_zero_attn": zero, "batch_first": first} | sizes
    for bias, learned, zero, first, sizes in itertools.product(
        (True, False),
        (False, True),
        (False, True),
        (True, False),
        ({}, {"kdim": KEY_SIZE, "vdim": VALUE_SIZE}),
    )
]
PADDINGS = ("no padding", "bool padding", "float padding")
MASKS = ("no mask", "bool 2-D", "float 2-D", "bool 3-D", "float 3-D", "causal")
WEIGHTS: tuple[dict[str, bool], ...] = (
    {"need_weights": False},
    {"need_weights": True},
    {"need_weights": True, "average_attn_weights": False},
)
CALLS = list(itertools.product(PADDINGS, MASKS, WEIGHTS, (True, False)))


def options_name(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())


def make_pair(dtype: torch.dtype, **options: Any) -> tuple[nn.Module, nn.Module, nn.Module]:
    """Return (ours, PyTorch's in float64, PyTorch's), with the same numbers."""
    theirs = nn.MultiheadAttention(EMBED, HEADS, dtype=dtype, **options)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(parameter.shape) / math.sqrt(EMBED))
    oracle = nn.MultiheadAttention(EMBED, HEADS, dtype=torch.float64, **options)
    oracle.load_state_dict(theirs.state_dict())
    ours = DenseAttention(EMBED, HEADS, dtype=dtype, **options)
    ours.load_state_dict(theirs.state_dict())
    return ours, oracle, theirs


def make_inputs(options: dict[str, Any], is_batched: bool, seed: int = 1) -> list[torch.Tensor]:
    """Return query, key and value in float64, exact in the narrowest dtype."""
    generator = torch.Generator().manual_seed(seed)
    inputs = []
    for length, size in (
        (LEN_Q, EMBED),
        (LEN_K, options.get("kdim", EMBED)),
        (LEN_K, options.get("vdim", EMBED)),
    ):
        batched = (BATCH, length, size) if options["batch_first"] else (length, BATCH, size)
        shape = batched if is_batched else (length, size)
        numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
        inputs.append(numbers.bfloat16().double())
    return inputs


def make_masks(padding: str, mask: str, is_batched: bool) -> dict[str, Any]:
    """Return the keywords of the call; the first key is never hidden."""
    batch = BATCH if is_batched else 1
    generator = torch.Generator().manual_seed(2)
    given: dict[str, Any] = {}
    if padding != "no padding":
        hidden = torch.zeros(batch, LEN_K, dtype=torch.bool)
        hidden[-1, -2:] = True
        added = torch.randn(batch, LEN_K, generator=generator).bfloat16().double()
        added = added.masked_fill(hidden, float("-inf"))
        chosen = hidden if padding.startswith("bool") else added
        given["key_padding_mask"] = chosen if is_batched else chosen[0]
    if mask == "causal":
        given["attn_mask"] = torch.ones(LEN_Q, LEN_K, dtype=torch.bool).triu(1)
        given["is_causal"] = True
    elif mask != "no mask":
        pairs = (LEN_Q, LEN_K)
        shape = pairs if mask.endswith("2-D") else (batch * HEADS, *pairs)
        hidden = torch.rand(shape, generator=generator) < 0.4
        hidden[..., 0] = False
        added = torch.randn(shape, generator=generator).bfloat16().double()
        added = added.masked_fill(hidden, float("-inf"))
        given["attn_mask"] = hidden if mask.startswith("bool") else added
    return given


def all_numbers(
    module: nn.Module, inputs: list[torch.Tensor], masks: dict[str, Any], dtype: torch.dtype
) -> dict[str, torch.Tensor | None]:
    """Return the output, the weights, and the gradients of all that can have one."""
    leaves = [tensor.to(dtype).detach().requires_grad_() for tensor in inputs]
    keywords, added = {}, {}
    for name, value in masks.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            value = added[name] = value.to(dtype).detach().requires_grad_()
        keywords[name] = value
    output, weights = module(*leaves, **keywords)
    generator = torch.Generator().manual_seed(3)
    results = [item for item in (output, weights) if item is not None]
    upstream = [
        torch.randn(item.shape, generator=generator, dtype=torch.float64).bfloat16().to(item.dtype)
        for item in results
    ]
    named = dict(zip(("query", "key", "value"), leaves, strict=True)) | added
    named |= dict(module.named_parameters())
    gradients = torch.autograd.grad(results, list(named.values()), upstream, allow_unused=True)
    found = {f"gradient of {name}": item for name, item in zip(named, gradients, strict=True)}
    return {"output": output, "weights": weights} | found


def as_pytorch_wants(masks: dict[str, Any]) -> dict[str, Any]:
    """Return the call with both masks boolean or both added, and without the causal hint.

    The hint says that the mask is causal. With it and without weights PyTorch drops the mask
    for a flag of its kernel, which then hides the keys of ``add_bias_kv`` and
    ``add_zero_attn`` too: the output depends on ``need_weights``. Ours does not.
    """
    masks = {name: value for name, value in masks.items() if name != "is_causal"}
    pair = [masks.get("key_padding_mask"), masks.get("attn_mask")]
    if None in [None if item is None else 0 for item in pair] or pair[0].dtype == pair[1].dtype:
        return masks
    return {
        name: torch.zeros(value.shape, dtype=torch.float64).masked_fill(value, float("-inf"))
        if isinstance(value, torch.Tensor) and value.dtype == torch.bool
        else value
        for name, value in masks.items()
    }


def _numerator_only(scores: torch.Tensor, dim: int) -> torch.Tensor:
    """Return softmax whose gradient leaves its denominator out."""
    numerator = (scores - scores.amax(dim, keepdim=True).detach()).exp()
    return numerator / numerator.sum(dim, keepdim=True).detach()


def term_sizes(
    oracle: nn.Module,
    inputs: list[torch.Tensor],
    call: dict[str, Any],
    exact: dict[str, torch.Tensor | None],
) -> dict[str, torch.Tensor]:
    """Return the size of what cancels in each gradient.

    The gradient of softmax is a difference, numerator's part less denominator's. Where a row
    sees little else than one key it is small beside both, and its own size says nothing about
    the error to expect.
    """

    def spoken(query: torch.Tensor, *others: torch.Tensor, **keywords: Any) -> Any:
        # PyTorch's module computes softmax by this name when weights are wanted.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nn.functional, "softmax", _numerator_only)
            output, weights = oracle(query, *others, **keywords | {"need_weights": True})
        return output, weights if call["need_weights"] else None

    spoken.named_parameters = oracle.named_parameters
    part = all_numbers(spoken, inputs, call, torch.float64)
    return {
        name: part[name].abs() + (total - part[name]).abs()
        for name, total in exact.items()
        if name.startswith("gradient") and total is not None
    }


def differences(
    pair: tuple[nn.Module, nn.Module, nn.Module],
    inputs: list[torch.Tensor],
    call: dict[str, Any],
    dtype: torch.dtype,
) -> list[str]:
    """Return a sentence for each number that is further off than PyTorch's own may be."""
    ours, oracle, theirs = pair
    plain = as_pytorch_wants(call)
    got = all_numbers(ours, inputs, call, dtype)
    reference = all_numbers(oracle, inputs, plain, torch.float64)
    yardstick = all_numbers(theirs, inputs, plain, dtype)
    problems = _beyond(got, reference, yardstick, {})
    if problems:
        sizes = term_sizes(oracle, inputs, plain, reference)
        problems = _beyond(got, reference, yardstick, sizes)
    return problems


def _beyond(
    got: dict[str, torch.Tensor | None],
    reference: dict[str, torch.Tensor | None],
    yardstick: dict[str, torch.Tensor | None],
    sizes: dict[str, torch.Tensor],
) -> list[str]:
    """Return a sentence for each number beyond its bound."""
    problems = []
    for name, item in got.items():
        exact, eager = reference[name], yardstick[name]
        if item is None or exact is None or eager is None:
            problems += [] if item is exact is eager else [f"{name}: one of them is None"]
            continue
        summands = EMBED + LEN_K + BATCH * LEN_Q * LEN_K
        compared = compare(item, exact, eager, summands=summands, terms=sizes.get(name))
        problems += [f"{name}: {problem}" for problem in compared.problems]
    return problems


def wrong_calls(
    pair: tuple[nn.Module, nn.Module, nn.Module],
    options: dict[str, Any],
    calls: list[Any],
    dtype: torch.dtype,
) -> list[str]:
    """Return a line for each number of these calls that is wrong."""
    wrong = []
    for padding, mask, weights, is_batched in calls:
        inputs = make_inputs(options, is_batched)
        call = make_masks(padding, mask, is_batched) | weights
        shape = "batched" if is_batched else "unbatched"
        for problem in differences(pair, inputs, call, dtype):
            wrong.append(f"{padding}, {mask}, {weights}, {shape}: {problem}")
    return wrong


@pytest.mark.parametrize("options", CONSTRUCTORS, ids=options_name)
def test_every_call_gives_the_numbers_of_multihead_attention(options: dict[str, Any]) -> None:
    # Without a batch, batch_first says nothing.
    calls = [call for call in CALLS if options["batch_first"] or call[-1]]
    wrong = wrong_calls(make_pair(torch.float32, **options), options, calls, torch.float32)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("add_bias_kv", [False, True])
def test_every_dtype_gives_the_numbers_of_multihead_attention(
    dtype: torch.dtype, add_bias_kv: bool
) -> None:
    options = {"add_bias_kv": add_bias_kv, "batch_first": True}
    calls = [call for call in CALLS if call[-1]]
    wrong = wrong_calls(make_pair(dtype, **options), options, calls, dtype)
    assert not wrong, "\n".join(wrong)


MISTAKES: dict[str, Any] = {
    "a weight off by a thousandth": lambda module: module.out_proj.weight.mul_(1.001),
    "a bias lost": lambda module: module.in_proj_bias.zero_(),
    "heads swapped": lambda module: module.in_proj_weight.copy_(
        module.in_proj_weight.unflatten(0, (3, HEADS, -1)).flip(1).flatten(0, 2)
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_comparison_catches_a_wrong_module(name: str) -> None:
    options = {"batch_first": True}
    pair = make_pair(torch.float32, **options)
    with torch.no_grad():
        MISTAKES[name](pair[0])
    assert wrong_calls(pair, options, CALLS[:1], torch.float32)


@pytest.mark.parametrize("mask", ["bool 2-D", "float 3-D", "causal"])
def test_the_comparison_catches_a_mask_that_is_ignored(mask: str) -> None:
    options = {"batch_first": True}
    ours, oracle, theirs = make_pair(torch.float32, **options)

    class Deaf(nn.Module):
        def forward(self, *tensors: torch.Tensor, **call: Any) -> Any:
            del call["attn_mask"]
            return ours(*tensors, **call | {"is_causal": False})

    deaf = Deaf()
    deaf.named_parameters = ours.named_parameters
    calls = [("no padding", mask, WEIGHTS[0], True)]
    assert wrong_calls((ours, oracle, theirs), options, calls, torch.float32) == []
    assert wrong_calls((deaf, oracle, theirs), options, calls, torch.float32)
