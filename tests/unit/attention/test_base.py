"""What every attention module shares: parameters, masks, bad input, and PyTorch's machinery."""

import copy
import io
import itertools
import math
import os
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import adaattn
from adaattn.attention import _causal_hint
from adaattn.attention.adaattn import AdaAttention
from adaattn.attention.base import BaseAttention
from adaattn.attention.dense import DenseAttention
from adaattn.attention.runner import Runner
from adaattn.cache import KVCache
from adaattn.errors import (
    ArgumentError,
    ArgumentTypeError,
    DeviceError,
    DTypeError,
    ShapeError,
    UnsupportedError,
)
from adaattn.kernels import AdaptiveFlashAttention
from adaattn.testing import assert_matches

EMBED, HEADS, BATCH, LEN = 16, 4, 2, 6
NOTHING = float("-inf")

BUILDS = [
    {"bias": bias, "add_bias_kv": learned, "dtype": dtype} | sizes
    for bias, learned, dtype, sizes in itertools.product(
        (True, False),
        (False, True),
        (torch.float32, torch.float64),
        ({}, {"kdim": 7}, {"vdim": 5}, {"kdim": 7, "vdim": 5}, {"kdim": EMBED}),
    )
]


class Spy:
    """Stands before a runner and keeps the keywords of its calls."""

    def __init__(self, module: BaseAttention) -> None:
        self.calls: list[dict[str, Any]] = []
        self._run = module.runner.run
        module.runner.run = self

    def __call__(self, *tensors: torch.Tensor, **keywords: Any) -> Any:
        self.calls.append(keywords)
        return self._run(*tensors, **keywords)


def tokens(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (BATCH, LEN, EMBED)))


def test_the_base_class_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="abstract"):
        BaseAttention(EMBED, HEADS, runner=Runner("quality"))


@pytest.mark.parametrize("options", BUILDS, ids=str)
def test_one_seed_gives_the_parameters_of_multihead_attention(options: dict[str, Any]) -> None:
    torch.manual_seed(5)
    theirs = nn.MultiheadAttention(EMBED, HEADS, **options)
    after = torch.get_rng_state()
    torch.manual_seed(5)
    ours = DenseAttention(EMBED, HEADS, **options)
    assert torch.equal(torch.get_rng_state(), after)
    named, wanted = dict(ours.named_parameters()), dict(theirs.named_parameters())
    assert list(named) == list(wanted)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for name, parameter in wanted.items():
        assert torch.equal(named[name], parameter)
        assert named[name].dtype == parameter.dtype


@pytest.mark.parametrize("options", BUILDS, ids=str)
def test_a_state_dict_loads_in_both_directions(options: dict[str, Any]) -> None:
    theirs = nn.MultiheadAttention(EMBED, HEADS, **options)
    ours = DenseAttention(EMBED, HEADS, **options)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    back = nn.MultiheadAttention(EMBED, HEADS, **options)
    back.load_state_dict(ours.state_dict(), strict=True)
    for name, parameter in theirs.state_dict().items():
        assert torch.equal(back.state_dict()[name], parameter)


def test_a_checkpoint_of_other_shapes_is_refused_with_the_name_and_both_shapes() -> None:
    ours = DenseAttention(EMBED, HEADS)
    other = nn.MultiheadAttention(2 * EMBED, HEADS).state_dict()
    with pytest.raises(RuntimeError, match=r"size mismatch for in_proj_weight.*\[96, 32\].*\[48"):
        ours.load_state_dict(other)
    split = nn.MultiheadAttention(EMBED, HEADS, kdim=7).state_dict()
    with pytest.raises(RuntimeError, match=r"Missing key.*in_proj_weight"):
        ours.load_state_dict(split)


def test_parameters_are_made_on_the_device_and_in_the_dtype_given() -> None:
    module = DenseAttention(
        EMBED, HEADS, add_bias_kv=True, sinks=True, qk_norm=True, device="meta", dtype=torch.half
    )
    parameters = list(module.parameters())
    assert {item.device.type for item in parameters} == {"meta"}
    assert {item.dtype for item in parameters} == {torch.half}


def test_the_defaults_are_batch_first_self_attention_without_weights() -> None:
    module = DenseAttention(EMBED, HEADS)
    x = tokens()
    output, weights = module(x)
    assert weights is None
    assert output.shape == x.shape
    assert torch.equal(output, module(x, x, x)[0])
    assert torch.equal(output, module(x, x)[0])
    other = tokens(BATCH, 3, EMBED)
    assert torch.equal(module(x, other)[0], module(x, other, other)[0])


def test_the_default_of_need_weights_can_be_set() -> None:
    module = DenseAttention(EMBED, HEADS)
    module.need_weights_by_default = True
    assert module(tokens())[1] is not None
    assert module(tokens(), need_weights=False)[1] is None
    assert copy.deepcopy(module)(tokens())[1] is not None


def test_causal_order_alone_is_that_of_a_mask() -> None:
    module = DenseAttention(EMBED, HEADS).double()
    x = tokens().double()
    hidden = torch.ones(LEN, LEN, dtype=torch.bool).triu(1)
    output, weights = module(x, is_causal=True, need_weights=True)
    assert torch.equal(weights.masked_select(hidden), torch.zeros(BATCH * hidden.sum()))
    wanted = module(x, attn_mask=hidden, need_weights=True)[1]
    assert_matches(weights, wanted, wanted, summands=LEN + EMBED)
    assert_matches(module(x, is_causal=True)[0], output, output, summands=LEN + EMBED)


@pytest.mark.parametrize("added", [False, True])
def test_causal_order_holds_beside_another_mask(added: bool) -> None:
    module = DenseAttention(EMBED, HEADS)
    x = tokens()
    hidden = torch.zeros(LEN, LEN, dtype=torch.bool)
    hidden[:, 1] = True
    mask = torch.zeros(LEN, LEN).masked_fill(hidden, NOTHING) if added else hidden
    weights = module(x, attn_mask=mask, is_causal=True, need_weights=True)[1]
    unseen = hidden | torch.ones(LEN, LEN, dtype=torch.bool).triu(1)
    assert torch.equal(weights == 0, unseen.expand_as(weights))


def test_a_padding_mask_stays_one_row_and_causal_order_a_flag() -> None:
    module = DenseAttention(EMBED, HEADS)
    spy = Spy(module)
    padding = torch.zeros(BATCH, LEN, dtype=torch.bool)
    module(tokens(), key_padding_mask=padding)
    module(tokens(), is_causal=True)
    module(tokens(), key_padding_mask=padding, is_causal=True)
    module(tokens())
    first, second, third, fourth = spy.calls
    assert first["attn_mask"].shape == (BATCH, 1, 1, LEN)
    assert first["attn_mask"].dtype == torch.bool
    assert "attn_mask" not in second
    assert second["is_causal"] is True
    # Beside a mask the public call takes causal order as a window that ends at the query.
    assert third["attn_mask"].shape == (BATCH, 1, 1, LEN)
    assert third["window"] == (-1, 0)
    assert "attn_mask" not in fourth
    assert "is_causal" not in fourth


@pytest.mark.parametrize("added", [False, True])
def test_a_mask_that_only_repeats_causal_order_is_left_out(added: bool) -> None:
    module = DenseAttention(EMBED, HEADS)
    spy = Spy(module)
    hidden = torch.ones(LEN, LEN, dtype=torch.bool).triu(1)
    causal = nn.Transformer.generate_square_subsequent_mask(LEN) if added else hidden
    module(tokens(), attn_mask=causal, is_causal=True)
    assert "attn_mask" not in spy.calls[-1]
    assert spy.calls[-1]["is_causal"] is True
    # Without the flag the mask is a mask, and one number more makes it another mask.
    module(tokens(), attn_mask=causal)
    assert "attn_mask" in spy.calls[-1]
    causal[3, 1] = True if added else not causal[3, 1]
    module(tokens(), attn_mask=causal, is_causal=True)
    assert "attn_mask" in spy.calls[-1]


def test_a_mask_is_compared_again_only_after_a_write() -> None:
    """From a GPU the comparison waits for the device, so its answer is kept with the mask."""
    mask = torch.ones(LEN, LEN, dtype=torch.bool).triu(1)
    with pytest.MonkeyPatch.context() as patch:
        compared: list[torch.Tensor] = []
        compare = _causal_hint._compared
        patch.setattr(_causal_hint, "_compared", lambda m: compared.append(m) or compare(m))
        assert [_causal_hint._remembered(mask) for _ in range(3)] == [True] * 3
        assert len(compared) == 1
        mask[0, 0] = True
        assert [_causal_hint._remembered(mask) for _ in range(3)] == [False] * 3
        assert len(compared) == 2
        with torch.inference_mode():
            counted = torch.ones(LEN, LEN, dtype=torch.bool).triu(1)
            assert _causal_hint._remembered(counted)
            assert _causal_hint._remembered(counted)
        # What was made in inference mode has no version, so nothing is kept.
        assert len(compared) == 4


def test_a_causal_mask_that_learns_gets_its_gradient() -> None:
    module = DenseAttention(EMBED, HEADS)
    causal = nn.Transformer.generate_square_subsequent_mask(LEN).requires_grad_()
    x = tokens()
    (slope,) = torch.autograd.grad(
        module(x, attn_mask=causal, is_causal=True)[0].square().sum(), causal
    )
    assert slope.abs().sum() > 0
    with torch.no_grad():
        spy = Spy(module)
        module(x, attn_mask=causal, is_causal=True)
    assert "attn_mask" not in spy.calls[0]


def test_a_causal_mask_beside_a_cache_counts_from_its_own_corner() -> None:
    """The mask hides keys ahead of the first ones; ``is_causal`` those ahead of the last."""
    module = DenseAttention(EMBED, HEADS)
    cache = KVCache(num_layers=1).layer(0)
    x = tokens()
    module(x[:, :4], is_causal=True, cache=cache)
    mask = torch.ones(2, LEN, dtype=torch.bool).triu(1)
    weights = module(x[:, 4:], attn_mask=mask, is_causal=True, cache=cache, need_weights=True)[1]
    assert torch.equal(weights == 0, mask.expand_as(weights))


def test_a_two_dimensional_mask_is_not_expanded() -> None:
    module = DenseAttention(EMBED, HEADS)
    spy = Spy(module)
    module(tokens(), attn_mask=torch.eye(LEN, dtype=torch.bool).roll(1, 0), is_causal=True)
    assert spy.calls[0]["attn_mask"].shape == (LEN, LEN)


@pytest.mark.parametrize("kind", ["padding", "pairs", "heads"])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
def test_rows_that_see_no_key_give_zeros_and_finite_gradients(
    kind: str, added: bool, need_weights: bool
) -> None:
    """Where PyTorch's module gives NaN."""
    shape, blind = {
        "padding": ((BATCH, LEN), (1,)),
        "pairs": ((LEN, LEN), (3,)),
        "heads": ((BATCH * HEADS, LEN, LEN), (slice(HEADS, None), 3)),
    }[kind]
    hidden = torch.zeros(shape, dtype=torch.bool)
    hidden[blind] = True
    mask = torch.zeros(shape).masked_fill(hidden, NOTHING) if added else hidden
    name = "key_padding_mask" if kind == "padding" else "attn_mask"
    module = DenseAttention(EMBED, HEADS)
    nn.init.normal_(module.out_proj.bias)
    x = tokens().requires_grad_()
    output, weights = module(x, **{name: mask}, need_weights=need_weights)
    rows = {"padding": output[1], "pairs": output[:, 3], "heads": output[1, 3]}[kind]
    assert torch.equal(rows, module.out_proj.bias.expand_as(rows))
    loss = output.sum() if weights is None else output.sum() + weights.square().sum()
    loss.backward()
    for item in (x, *module.parameters()):
        assert item.grad.isfinite().all()


def test_dropout_is_for_training_only_and_weights_are_those_before_it() -> None:
    module = DenseAttention(EMBED, HEADS, dropout=1.0)
    x = tokens()
    output, weights = module(x, need_weights=True)
    assert torch.equal(output, torch.zeros_like(output))
    module.eval()
    kept, same = module(x, need_weights=True)
    assert not torch.equal(kept, output)
    assert torch.equal(weights, same)
    module.train()
    module.dropout = 0.0
    assert torch.equal(module(x, need_weights=True)[0], kept)


def test_dropout_of_a_half_keeps_the_mean() -> None:
    """Deviations of the mean over n draws shrink as 1 / sqrt(n); five of them are allowed."""
    module = DenseAttention(EMBED, HEADS, dropout=0.5)
    x = tokens(1, LEN, EMBED)
    with torch.no_grad():
        wanted = module.eval()(x)[0]
        drawn = torch.stack([module.train()(x)[0] for _ in range(200)])
    assert not torch.equal(drawn[0], drawn[1])
    deviation = drawn.std(0) / math.sqrt(len(drawn))
    assert ((drawn.mean(0) - wanted).abs() <= 5 * deviation).all()


@pytest.mark.parametrize("shape", [(0, LEN, EMBED), (BATCH, 0, EMBED), (0, EMBED)])
def test_empty_input_gives_empty_output(shape: tuple[int, ...]) -> None:
    output, weights = DenseAttention(EMBED, HEADS)(tokens(*shape), need_weights=True)
    assert output.shape == shape
    assert weights.numel() == 0


def test_no_keys_give_the_bias() -> None:
    module = DenseAttention(EMBED, HEADS)
    output, _ = module(tokens(), tokens(BATCH, 0, EMBED))
    assert torch.equal(output, torch.zeros_like(output))


def call_of(**changes: Any) -> dict[str, Any]:
    return {"query": tokens(), "key": tokens(), "value": tokens()} | changes


BAD_CALLS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no tensor": ({"query": [1.0]}, ArgumentTypeError, "query: expected a torch.Tensor, got list"),
    "rank 4": ({"query": torch.ones(1, 1, 1, EMBED)}, ShapeError, "rank of query: .* got 4"),
    "rank 1": ({"query": torch.ones(EMBED)}, ShapeError, "rank of query: .* got 1"),
    "ranks differ": ({"key": torch.ones(LEN, EMBED)}, ShapeError, "rank of key: expected 3"),
    "query size": ({"query": torch.ones(BATCH, LEN, 5)}, ShapeError, "last dimension of query"),
    "key size": ({"key": torch.ones(BATCH, LEN, 5)}, ShapeError, "last dimension of key: .* 16"),
    "value size": ({"value": torch.ones(BATCH, LEN, 5)}, ShapeError, "last dimension of value"),
    "lengths": ({"value": torch.ones(BATCH, 3, EMBED)}, ShapeError, "value: expected batch and"),
    "batches": (
        {"key": torch.ones(3, LEN, EMBED), "value": torch.ones(3, LEN, EMBED)},
        ShapeError,
        r"batch of key: expected 2 .* tensors are \[B, L, E\] with batch_first=True",
    ),
    "value alone": ({"key": None}, ArgumentError, "value without key: expected None"),
    "padding type": ({"key_padding_mask": 3}, ArgumentTypeError, "key_padding_mask: .* got int"),
    "padding dtype": (
        {"key_padding_mask": torch.ones(BATCH, LEN, dtype=torch.int64)},
        DTypeError,
        "dtype of key_padding_mask: expected bool .True = masked. or floating point",
    ),
    "padding shape": (
        {"key_padding_mask": torch.ones(LEN, BATCH, dtype=torch.bool)},
        ShapeError,
        r"key_padding_mask: expected \[2, 6\], got bool\[6, 2\]",
    ),
    "mask type": ({"attn_mask": "causal"}, ArgumentTypeError, "attn_mask: expected None or a"),
    "mask dtype": (
        {"attn_mask": torch.ones(LEN, LEN, dtype=torch.int32)},
        DTypeError,
        "dtype of attn_mask: expected bool",
    ),
    "mask shape": (
        {"attn_mask": torch.zeros(LEN, 3)},
        ShapeError,
        r"attn_mask: expected \[6, 6\] or \[8, 6, 6\], got float32\[6, 3\]",
    ),
    "mask heads": ({"attn_mask": torch.zeros(2, LEN, LEN)}, ShapeError, r"or \[8, 6, 6\]"),
    "half precision": (
        {"query": tokens().half()},
        DTypeError,
        "dtype of query: expected torch.float32 of the module's parameters, got torch.float16",
    ),
    "integers": ({"query": torch.ones(BATCH, LEN, EMBED).int()}, DTypeError, "got torch.int32"),
    "dtype of value": ({"value": tokens().double()}, DTypeError, "value: .* got torch.float64"),
    "device": (
        {"query": tokens().to("meta")},
        DeviceError,
        "query: expected device cpu of the module's parameters, got meta; move the module",
    ),
    "need_weights": ({"need_weights": "a"}, ArgumentTypeError, "need_weights: expected True or"),
    "cache": (
        {"key": None, "value": None, "cache": 3},
        ArgumentTypeError,
        "cache: expected the cache of one layer, got int; of a KVCache pass layer",
    ),
    "a whole cache": (
        {"key": None, "value": None, "cache": KVCache(num_layers=1)},
        ArgumentTypeError,
        "cache: expected the cache of one layer, got KVCache",
    ),
    "positions": (
        {"positions": torch.arange(LEN)},
        ArgumentError,
        "positions: expected None without rotary, got int64",
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_bad_call_is_refused(name: str) -> None:
    changes, error, message = BAD_CALLS[name]
    with pytest.raises(error, match=message):
        DenseAttention(EMBED, HEADS)(**call_of(**changes))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused_with_the_way_round() -> None:
    nested = torch.nested.nested_tensor([torch.ones(3, EMBED), torch.ones(5, EMBED)])
    with pytest.raises(UnsupportedError, match="query is a nested tensor") as caught:
        DenseAttention(EMBED, HEADS)(nested)
    assert "enable_nested_tensor=False" in str(caught.value)


@pytest.mark.parametrize("own", [True, False])
def test_one_tensor_for_all_of_another_dtype_is_refused_outside_of_autocast(own: bool) -> None:
    """Autocast casts floating point, and no integers."""
    module, x = DenseAttention(EMBED, HEADS, kdim=None if own else 7), tokens()
    given = (x,) if own else (x, tokens(BATCH, LEN, 7), x)
    with pytest.raises(DTypeError, match=r"dtype of query: .* got torch.float64; cast one"):
        module(*(item.double() for item in given))
    with torch.autocast("cpu", torch.bfloat16):
        assert module(*(item.half() for item in given))[0].dtype is torch.bfloat16
        with pytest.raises(DTypeError, match=r"dtype of query: .* got torch.int64"):
            module(*(item.long() for item in given))


def test_other_errors_of_projections_are_raised_as_they_are() -> None:
    class Full(DenseAttention):
        def _heads(self, *given: Any) -> Any:
            raise torch.OutOfMemoryError("the memory is full")

    with pytest.raises(torch.OutOfMemoryError, match="the memory is full"):
        Full(EMBED, HEADS)(tokens())


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64], ids=str)
def test_parameters_of_a_dtype_without_attention_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(DTypeError, match=f"dtype of the module's parameters: .* got {dtype}"):
        DenseAttention(EMBED, HEADS, dtype=dtype)


@pytest.mark.parametrize("kind", [DenseAttention, AdaAttention, AdaptiveFlashAttention])
def test_a_layer_that_is_no_number_is_refused(kind: type[BaseAttention]) -> None:
    with pytest.raises(ArgumentTypeError, match="layer: expected an integer of at least -1, got"):
        kind(EMBED, HEADS, layer="a")


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match=r"keyword arguments: .*'kdim'.* got \['kdims'\]"):
        DenseAttention(EMBED, HEADS, kdims=3)


def test_the_printed_module_names_what_is_not_the_default() -> None:
    module = DenseAttention(EMBED, HEADS, bias=False, window=(3, 0))
    assert module.extra_repr() == "16, 4, bias=False, window=(3, 0)"


def test_calls_are_counted_and_forgotten() -> None:
    module = DenseAttention(EMBED, HEADS)
    assert module.get_statistics()["calls"] == 0
    module(tokens())
    module(tokens())
    assert module.get_statistics()["calls"] == 2
    module.reset_statistics()
    assert module.get_statistics()["calls"] == 0


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "save"])
def test_a_copy_computes_the_same_and_counts_for_itself(way: str) -> None:
    module = DenseAttention(EMBED, HEADS, dropout=0.1, sinks=True, qk_norm=True).eval()
    x = tokens()
    output, _ = module(x)
    if way == "deepcopy":
        copied = copy.deepcopy(module)
    elif way == "pickle":
        copied = pickle.loads(pickle.dumps(module))
    else:
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    assert copied.config == module.config
    assert torch.equal(copied(x)[0], output)
    copied.reset_statistics()
    assert (module.get_statistics()["calls"], copied.get_statistics()["calls"]) == (1, 0)


def test_gradients_are_those_of_finite_differences() -> None:
    module = DenseAttention(4, 2, num_kv_heads=1, qk_norm=True, sinks=True).double()
    nn.init.normal_(module.in_proj_bias)
    names = [name for name, _ in module.named_parameters()]

    def run(query: torch.Tensor, *parameters: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state = dict(zip(names, parameters, strict=True))
        call = {"is_causal": True, "need_weights": True}
        return torch.func.functional_call(module, state, (query,), call)

    inputs = (torch.randn(2, 3, 4, dtype=torch.float64), *module.parameters())
    leaves = tuple(item.detach().requires_grad_() for item in inputs)
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpointing_gives_the_same_gradients(reentrant: bool, dropout: float) -> None:
    module = DenseAttention(EMBED, HEADS, dropout=dropout)
    x = tokens()

    def gradients(run: Callable[[torch.Tensor], Any]) -> list[torch.Tensor]:
        torch.manual_seed(1)
        module.zero_grad()
        leaf = x.clone().requires_grad_()
        run(leaf)[0].square().sum().backward()
        return [leaf.grad, *(item.grad for item in module.parameters())]

    wanted = gradients(module)
    got = gradients(lambda leaf: checkpoint(module, leaf, use_reentrant=reentrant))
    for item, plain in zip(got, wanted, strict=True):
        assert torch.equal(item, plain)


@pytest.mark.parametrize("need_weights", [False, True])
def test_autocast_gives_the_numbers_and_dtypes_of_multihead_attention(need_weights: bool) -> None:
    theirs = nn.MultiheadAttention(EMBED, HEADS, batch_first=True)
    ours = DenseAttention(EMBED, HEADS)
    ours.load_state_dict(theirs.state_dict())
    exact = copy.deepcopy(theirs).double()
    x = tokens()
    padding = torch.zeros(BATCH, LEN, dtype=torch.bool)
    padding[1, 4:] = True
    call = {"key_padding_mask": padding, "need_weights": need_weights}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, got_weights = ours(x, x, x, **call)
        eager, eager_weights = theirs(x, x, x, **call)
    reference, reference_weights = exact(*[x.double()] * 3, **call)
    assert_matches(got, reference, eager, summands=LEN + EMBED)
    assert (got_weights is None) == (eager_weights is None)
    if need_weights:
        # PyTorch's are bfloat16 on a CPU and float32 on a GPU; ours are in the query's dtype.
        assert got_weights.dtype == x.dtype
        assert eager_weights.dtype == torch.bfloat16
        narrow = got_weights.bfloat16()
        assert_matches(narrow, reference_weights, eager_weights, summands=LEN + EMBED)
    got.float().sum().backward()
    assert ours.in_proj_weight.grad.dtype == torch.float32


# Dynamo looks at .grad of what one graph hands to the next.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("call", [{}, {"is_causal": True}, {"need_weights": True}], ids=str)
def test_a_compiled_module_gives_the_same(call: dict[str, Any]) -> None:
    torch._dynamo.reset()
    module = DenseAttention(EMBED, HEADS)
    compiled = torch.compile(module, backend="eager")
    x = tokens().requires_grad_()
    found, wanted = compiled(x, **call), module(x, **call)
    for got, plain in zip(found, wanted, strict=True):
        assert (got is None and plain is None) or torch.equal(got, plain)
    slopes = [torch.autograd.grad(outputs[0].square().sum(), x)[0] for outputs in (found, wanted)]
    assert torch.equal(*slopes)


@pytest.mark.parametrize("need_weights", [False, True])
def test_with_a_plan_a_module_compiles_into_one_graph(need_weights: bool) -> None:
    torch._dynamo.reset()
    module = DenseAttention(EMBED, HEADS)
    x = tokens()
    heads = torch.randn(BATCH, HEADS, LEN, EMBED // HEADS)
    if not need_weights:
        module.runner.plan = adaattn.plan_attention(heads, heads, heads, is_causal=True).plan
    else:
        asked = adaattn.AuxRequest(weights=True)
        _, aux = adaattn.scaled_dot_product_attention(
            heads, heads, heads, is_causal=True, return_aux=asked
        )
        module.runner.plan = aux.decision.plan
    wanted = module(x, is_causal=True, need_weights=need_weights)[0]
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x, is_causal=True, need_weights=need_weights)[0], wanted)


_TRAINING = """
    import sys
    import torch
    from torch import distributed, nn
    from torch.distributed.fsdp import fully_shard
    from adaattn.attention.dense import DenseAttention

    wrapper, rank, store = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    module = DenseAttention(16, 4)
    batch = torch.randn(4, 6, 16)
    module(batch, is_causal=True)[0].square().mean().backward()
    wanted = [item.grad.clone() for item in module.parameters()]
    module.zero_grad()
    if wrapper == "DDP":
        parallel = nn.parallel.DistributedDataParallel(module)
    else:
        parallel = fully_shard(module)
    mine = batch[2 * rank : 2 * rank + 2]
    parallel(mine, is_causal=True)[0].square().mean().backward()
    size = max(item.abs().max() for item in wanted)
    unit = torch.finfo(torch.float32).eps * size * (4 * 6) ** 0.5
    for item, whole in zip(module.parameters(), wanted):
        found = item.grad if wrapper == "DDP" else item.grad.full_tensor()
        assert (found - whole).abs().max() <= unit, (found - whole).abs().max()
    distributed.destroy_process_group()
    print("equal")
"""


@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])
def test_two_processes_average_their_gradients(wrapper: str, tmp_path: Path) -> None:
    program = textwrap.dedent(_TRAINING)
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path), OMP_NUM_THREADS="1")
    command = [sys.executable, "-c", program]
    ranks = [
        subprocess.Popen(
            [*command, wrapper, str(rank), str(tmp_path / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    results = [process.communicate(timeout=120) for process in ranks]
    for output, errors in results:
        assert output.strip() == "equal", errors
