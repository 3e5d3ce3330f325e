"""Who computes a cell: PyTorch's ways, other libraries where they are installed, and AdaAttn's.

Each is a function that makes the call, and may refuse or fail; what it makes beforehand, such as
a mask, is not timed.
"""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import adaattn
from adaattn import AuxRequest
from adaattn.backends import capabilities
from adaattn.tuning.inputs import algorithms
from benchmarks.failures import RefusedError
from benchmarks.ops.inputs import Inputs, peer_mask, seen
from benchmarks.ops.registry import Cell
from benchmarks.written_out import written_out

__all__ = [
    "ALL_BLOCKS",
    "NAIVE",
    "ORDERED",
    "OURS",
    "OWN",
    "SDPA",
    "Call",
    "Gradients",
    "contestants",
    "naive",
]

SDPA, NAIVE, MATH, CUDNN = "F.sdpa", "naive", "math", "cudnn"
FLEX, OURS = "flex", "adaattn"
ALL_BLOCKS, PLAIN = "F.sdpa, all blocks", "adaattn, no entropy"
"""What a cell costs without what it asks for: the other result, and its time."""

ORDERED = "adaattn[hopper], same bits"
"""A backward pass whose sums are the same each time."""

OWN = ("hopper", "triton", "streamed", "small")
"""Executors of this library that are timed by name, too."""

_OTHERS = {"FA3": "flash_attn_interface", "FA4": "flash_attn.cute"}
_MOST_DIM_FLEX = 256
_MOST_MASK_BYTES = 1 << 33
_MOST_WRITTEN_OUT = 1 << 30
"""Pairs of a mask up to which FlexAttention's blocks are found from all of it: compiled, that takes
minutes over 16K tokens."""

Gradients = Callable[[], tuple[torch.Tensor, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One way to compute a cell.

    Args:
        run: the call, or what makes its gradients.
        mask: what was made for it beforehand.
        chosen: what AdaAttn settles on; "" of others.
        is_the_cell: it computes the cell; else more or less than that, which is not checked.
        is_ordered: under deterministic algorithms.
    """

    run: Callable[[], Any]
    mask: torch.Tensor | None = None
    chosen: str = ""
    is_the_cell: bool = True
    is_ordered: bool = False

    def with_backward(self, inputs: Inputs, *, is_alone: bool) -> Gradients:
        """Return a function that gives the inputs' gradients, of a forward pass before or of each.

        Args:
            inputs: whose, with the gradient of the output.
            is_alone: the forward pass has been.
        """
        given, upstream = inputs.qkv, inputs.gradient
        mode = partial(algorithms, deterministic=self.is_ordered)
        with mode():
            output = self.run() if is_alone else None

        def gradients() -> tuple[torch.Tensor, ...]:
            with mode():
                if output is None:
                    return torch.autograd.grad(self.run(), given, upstream)
                return torch.autograd.grad(output, given, upstream, retain_graph=True)

        return gradients


Make = Callable[[Cell, Inputs], Call]


def contestants(cell: Cell, *, with_flex: bool = True) -> Iterator[tuple[str, Make]]:
    """Yield each name with what makes its call; making raises `RefusedError` where it cannot.

    Args:
        cell: what is computed.
        with_flex: FlexAttention takes part where its users would write such a cell.
    """
    if cell.given.listed:
        yield ALL_BLOCKS, _sdpa_of_all
    yield SDPA, _sdpa
    yield CUDNN, partial(_by, SDPBackend.CUDNN_ATTENTION)
    if cell.with_naive:  # before whoever is held against its error
        yield NAIVE, naive
    if cell.with_naive and not cell.backward:
        yield MATH, partial(_by, SDPBackend.MATH)
    if cell.given.is_for_flex and with_flex and not cell.is_alone:  # its graph runs back once
        yield FLEX, _flex
    for name, module in _OTHERS.items():
        yield name, partial(_flash_attention, name, module)
    if cell.given.has_entropy:
        yield PLAIN, _without_entropy
    yield OURS, partial(_ours, "auto")
    for name in OWN[:1] if cell.is_alone else OWN:
        yield f"{OURS}[{name}]", partial(_ours, name)
    if cell.backward:
        yield ORDERED, _in_order


def _sdpa(cell: Cell, inputs: Inputs) -> Call:
    """Return PyTorch's function as a user must call it for the cell."""
    if lack := cell.given.sdpa_lacks:
        raise RefusedError(f"it cannot be told {lack}")
    _, heads, _, len_q, len_k, _ = cell.shape
    if cell.given.listed and heads * len_q * len_k > _MOST_MASK_BYTES:
        raise RefusedError("its mask takes more than 8 GiB")
    mask = peer_mask(cell, inputs)
    keywords: dict[str, Any] = {"attn_mask": mask}
    if mask is None:
        keywords = {"is_causal": cell.given.is_causal}
    if inputs.is_grouped:
        keywords["enable_gqa"] = True
    run = partial(F.scaled_dot_product_attention, *inputs.qkv, **keywords)
    return Call(run=run, mask=None if mask is inputs.mask else mask)


def _sdpa_of_all(cell: Cell, inputs: Inputs) -> Call:
    """Return PyTorch's function over all blocks, listed or not."""
    whole = replace(cell, given=replace(cell.given, listed=0))
    return replace(_sdpa(whole, inputs), is_the_cell=False)


def _without_entropy(cell: Cell, inputs: Inputs) -> Call:
    """Return our own choice for the cell without the entropy."""
    plain = replace(cell, given=replace(cell.given, has_entropy=False))
    return replace(_ours("auto", plain, inputs), is_the_cell=False)


def _in_order(cell: Cell, inputs: Inputs) -> Call:
    """Return the call of our kernels for training whose sums have a fixed order."""
    with algorithms(deterministic=True):
        return replace(_ours("hopper", cell, inputs), is_ordered=True)


def _by(backend: SDPBackend, cell: Cell, inputs: Inputs) -> Call:
    """Return the same call with one of PyTorch's kernels alone."""
    if backend is SDPBackend.CUDNN_ATTENTION:
        if inputs.query.device.type != "cuda":
            raise RefusedError("it runs on a GPU")
        if cell.dtype is torch.float32:
            raise RefusedError("it takes 16-bit numbers")
    call = _sdpa(cell, inputs)

    def run() -> torch.Tensor:
        with sdpa_kernel(backend):
            return call.run()

    return Call(run=run, mask=call.mask)


def naive(cell: Cell, inputs: Inputs) -> Call:
    """Return softmax(Q Kᵀ) V written out, with softcap or sinks where the cell has them."""
    hidden = None
    if cell.given.is_causal:
        rows, keys = (torch.arange(item.shape[2], device=item.device) for item in inputs.qkv[:2])
        hidden = ~seen(cell, inputs)(rows[:, None], keys)
    run = written_out(*inputs.qkv, hidden=hidden, softcap=cell.given.softcap, sinks=inputs.sinks)
    return Call(run=run, mask=hidden)


def _flex(cell: Cell, inputs: Inputs) -> Call:
    """Return compiled FlexAttention; sinks rescale its result by the log-sum-exp."""
    query = inputs.query
    if query.device.type != "cuda":
        raise RefusedError("it is compared on a GPU")
    if max(cell.shape[5], cell.dim_v) > _MOST_DIM_FLEX:
        raise RefusedError(f"it takes D up to {_MOST_DIM_FLEX}")
    flex: Any = importlib.import_module("torch.nn.attention.flex_attention")
    is_seen, softcap, slopes = seen(cell, inputs), cell.given.softcap, inputs.slopes
    lengths = (query.shape[2], inputs.key.shape[2])
    if inputs.listed is not None:  # whole blocks: nobody writes a function of positions for them
        counts = inputs.listed.sum(-1, dtype=torch.int32)
        order = inputs.listed.int().argsort(dim=-1, descending=True, stable=True).int()
        blocks = flex.BlockMask.from_kv_blocks(
            torch.zeros_like(counts), order, counts, order, seq_lengths=lengths
        )
    else:
        make_blocks = flex.create_block_mask
        if lengths[0] * lengths[1] > _MOST_WRITTEN_OUT:
            torch.compiler.reset()
            make_blocks = torch.compile(make_blocks)
        blocks = make_blocks(
            lambda b, h, i, j: is_seen(i, j), None, None, *lengths, device=query.device
        )
    changed = None
    if softcap:
        changed = lambda s, b, h, i, j: softcap * torch.tanh(s / softcap)  # noqa: E731 as users do
    elif slopes is not None:
        changed = lambda s, b, h, i, j: s - slopes[h] * (i - j)  # noqa: E731
    options = {"score_mod": changed, "block_mask": blocks, "enable_gqa": inputs.is_grouped}

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if inputs.sinks is None:
            found: torch.Tensor = flex.flex_attention(query, key, value, **options)
            return found
        request = flex.AuxRequest(lse=True)
        found, aux = flex.flex_attention(query, key, value, return_aux=request, **options)
        share = torch.sigmoid(aux.lse - inputs.sinks[None, :, None])
        return (found * share.unsqueeze(-1)).to(found.dtype)

    # A cell is compiled once: what was compiled for others would only be guarded against.
    torch.compiler.reset()
    compiled = torch.compile(attend, dynamic=False, fullgraph=True)
    return Call(run=lambda: compiled(*inputs.qkv))


def _flash_attention(name: str, module: str, cell: Cell, inputs: Inputs) -> Call:
    """Return FlashAttention's own function, for what it can be told by position."""
    given = cell.given
    others = given.has_alibi or given.has_sinks or given.mask or given.longest or given.softcap
    if others or given.dilation > 1 or cell.dtype is torch.float32:
        raise RefusedError("not compared on such a cell")
    try:
        function = importlib.import_module(module).flash_attn_func
    except (ImportError, OSError, AttributeError) as error:
        raise RefusedError(f"{name} cannot be imported") from error
    turned = [item.transpose(1, 2).contiguous() for item in inputs.qkv]
    if cell.backward:
        raise RefusedError("its training is not compared")
    options: dict[str, Any] = {"causal": given.is_causal}
    if given.window:
        options["window_size"] = (given.window, 0)

    def run() -> torch.Tensor:
        found = function(*turned, **options)
        output: torch.Tensor = found[0] if isinstance(found, tuple) else found
        return output.transpose(1, 2)

    return Call(run=run)


def _ours(backend: str, cell: Cell, inputs: Inputs) -> Call:
    """Return AdaAttn's call: its own choice once it has settled, or one executor."""
    if backend in OWN and backend not in {item.backend for item in capabilities()}:
        raise RefusedError("it is not registered")
    keywords = inputs.keywords(cell)
    asked = {"return_aux": AuxRequest(entropy=True)} if cell.given.has_entropy else {}
    try:
        decision = adaattn.plan_attention(*inputs.qkv, backend=backend, **keywords)
    except adaattn.errors.UnsupportedError as error:
        raise RefusedError("; ".join(error.reasons)) from error
    keywords["backend"] = backend
    if decision.later is not None and not asked:  # what is compiled takes over after some calls
        del keywords["backend"]
        keywords["plan"] = decision.later
    plan = decision.later or decision.plan
    chosen = " + ".join(dict.fromkeys(group.label for group in plan.groups))
    attend: Any = partial(adaattn.scaled_dot_product_attention, *inputs.qkv, **keywords, **asked)
    return Call(run=(lambda: attend()[0]) if asked else attend, chosen="" if asked else chosen)
