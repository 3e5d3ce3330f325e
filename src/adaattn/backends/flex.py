"""FlexAttention, for score changes that SDPA lacks. GPUs only.

On a CPU it has no backward pass and compiles with a C++ compiler that users may not have,
so the reference and `chunked` serve there. The compiled functions are kept, and so are block
masks that follow from positions and packed sequences; a sink is applied to the result through
the log-sum-exp, which FlexAttention differentiates.
"""

import importlib.util
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, TypeVar

import torch
import torch.nn.functional as F

from adaattn.backends.common import packed_positions
from adaattn.backends.interface import Result, Tensors
from adaattn.errors import ExecutorError
from adaattn.spec import AttentionProblem, Aux, Capability, Feature, HeadGroup, Precision

__all__ = ["CAPABILITIES", "run"]

_KEPT_VALUES: Final = 64
_KEPT_KERNELS: Final = 256


def _unavailable() -> str:
    """Return why FlexAttention cannot run here, or ""."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return ""


_LEAST_COLUMNS: Final = 16


def _narrow(problem: AttentionProblem) -> str:
    """Return why columns are too few for its blocks, or ""."""
    columns = min(problem.head_dim, problem.value_dim)
    few = f"it takes D and Dv from {_LEAST_COLUMNS} on, got {columns}"
    return few if columns < _LEAST_COLUMNS else ""


CAPABILITIES = (
    Capability(
        name="flex",
        backend="flex",
        device_types=("cuda",),
        precisions=(Precision.FP32, Precision.BF16, Precision.FP16),
        features=(
            Feature.CAUSAL_TOP_LEFT
            | Feature.CAUSAL_BOTTOM_RIGHT
            | Feature.BOOLEAN_MASK
            | Feature.ADDITIVE_MASK
            | Feature.MASKED_POSITIONS
            | Feature.WIDE_MASK
            | Feature.SCALE_SIGN
            | Feature.WINDOW
            | Feature.DILATION
            | Feature.SOFTCAP
            | Feature.SINKS
            | Feature.SINKS_GRADIENT
            | Feature.ALIBI
            | Feature.PACKED
            | Feature.VALUE_DIM
            | Feature.BACKWARD
            | Feature.LSE
            | Feature.LSE_GRADIENT
        ),
        rules=(_narrow,),
        max_head_dim=256,
        min_len_q=16,
        min_compute_capability=(8, 0),
        skips_hidden=True,
        is_fused=True,
        efficiency=0.55,
        # Host time, mostly the guards of the compiled function: 270 microseconds more than
        # the memory-efficient kernel's in training on an H200 (docs/kernel-notes.md).
        num_launches=50,
        unavailable=_unavailable(),
        # Behind masks written out for SDPA: a first call compiles for seconds.
        order=lambda problem: 40,
        compiles=True,
    ),
)

_ScoreMod = Callable[..., torch.Tensor]
_Value = TypeVar("_Value")

_BLOCK: Final = 128
"""Side of FlexAttention's blocks."""

_MASK_ELEMENTS: Final = 1 << 22
"""Decisions of a mask that are written out at once, about 20 bytes each with their distances."""


def run(tensors: Tensors, problem: AttentionProblem, group: HeadGroup) -> Result:
    """Return attention by one compiled FlexAttention kernel."""
    wants_lse = problem.has_sinks or bool(problem.aux & Aux.LSE)
    tracing = torch.compiler.is_compiling()
    kernel = _entry if tracing else _kernel(_facts(tensors, problem, wants_lse))
    try:
        output, lse = kernel(
            tensors.query,
            tensors.key,
            tensors.value,
            wants_lse=wants_lse,
            score_mod=_score_mod(tensors, problem),
            block_mask=_block_mask(tensors, problem),
            scale=problem.scale,
            enable_gqa=problem.group_size > 1,
        )
    except RuntimeError as error:
        # Inductor's own class: where no template fits, or none fits shared memory.
        if type(error).__name__ != "InductorError":
            raise
        first = str(error).splitlines()[0]
        raise ExecutorError(f"FlexAttention cannot be compiled for it: {first}") from error
    if tensors.sinks is not None:
        output, lse = _with_sinks(output, lse, tensors.sinks)
    return Result(output=output, lse=lse if problem.aux & Aux.LSE else None)


def _with_sinks(
    output: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and log-sum-exp with sinks in the denominator; blind rows stay 0 and -inf.

    Args:
        output: [B, Hq, Sq, Dv] without sinks.
        lse: [B, Hq, Sq] of it, fp32; -inf where a row sees no key.
        sinks: [Hq].
    """
    blind = lse == float("-inf")
    seen = lse.masked_fill(blind, 0.0)  # so that no gradient meets an infinity
    logits = sinks.float()[None, :, None]
    share = torch.sigmoid(seen - logits).masked_fill(blind, 0.0)
    output = (output.float() * share.unsqueeze(-1)).to(output.dtype)
    return output, torch.logaddexp(seen, logits).masked_fill(blind, float("-inf"))


def _facts(tensors: Tensors, problem: AttentionProblem, wants_lse: bool) -> tuple[object, ...]:
    """Return all that a compiled kernel depends on: what Dynamo guards, so that each is one graph.

    The numbers of one packing are not among it: its tensors are read when the kernel runs.
    """
    query, key, value = tensors.query, tensors.key, tensors.value
    return (
        *(_layout(item) for item in (query, key, value, tensors.mask, tensors.alibi_slopes)),
        (query is key, query is value, key is value),  # equal arguments become one input
        tensors.cu_seqlens_q is not None,
        problem.scale,
        problem.is_causal,
        problem.align,
        problem.window,
        problem.dilation,
        problem.softcap,
        problem.deterministic,
        wants_lse,
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_float32_matmul_precision(),
    )


def _layout(tensor: torch.Tensor | None) -> tuple[object, ...] | None:
    """Return what compiled code takes for granted of a tensor."""
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


@lru_cache(maxsize=_KEPT_KERNELS)
def _kernel(facts: tuple[object, ...]) -> Callable[..., tuple[torch.Tensor, Any]]:
    """Return a compiled entry for the calls of equal facts.

    Each has a code object of its own. Dynamo stops compiling one after 8 shapes, and would go on
    with FlexAttention's eager form, which writes out all scores and only warns. Its guards stay:
    without them a call took as long (113 and 133 microseconds forward, H100, PyTorch 2.11,
    2026-11).
    """
    del facts
    own = types.FunctionType(_entry.__code__.replace(co_name=f"{_entry.__name__}_"), globals())
    own.__kwdefaults__ = _entry.__kwdefaults__
    return torch.compile(own, dynamic=False, fullgraph=True)


def _entry(*args: Any, wants_lse: bool, **kwargs: Any) -> tuple[torch.Tensor, Any]:
    """Return FlexAttention's output, and its log-sum-exp or None."""
    from torch.nn.attention import flex_attention

    module: Any = flex_attention
    if not wants_lse:
        return module.flex_attention(*args, **kwargs), None
    if not hasattr(module, "AuxRequest"):  # before PyTorch 2.9
        output, lse = module.flex_attention(*args, return_lse=True, **kwargs)
        return output, lse
    output, aux = module.flex_attention(*args, return_aux=module.AuxRequest(lse=True), **kwargs)
    return output, aux.lse


def _score_mod(tensors: Tensors, problem: AttentionProblem) -> _ScoreMod | None:
    """Return the change of a score by softcap, ALiBi and an additive mask; None for none."""
    softcap, slopes, offset = problem.softcap, tensors.alibi_slopes, problem.offset
    mask = tensors.mask if tensors.mask is not None and tensors.mask.is_floating_point() else None
    if softcap == 0 and slopes is None and mask is None:
        return None
    if slopes is not None:
        slopes = slopes.float().expand(problem.batch, problem.num_heads).contiguous()
    if mask is not None:
        mask = mask.expand(problem.batch, problem.num_heads, problem.len_q, problem.len_k)
    _, _, position_q, position_k = _packing(tensors, problem)

    def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        if softcap > 0:
            score = softcap * torch.tanh(score / softcap)
        if slopes is not None:
            distance = i + offset - j if position_q is None else position_q[i] - position_k[j]
            score = score - slopes[b, h] * torch.abs(distance)
        if mask is not None:
            score = score + mask[b, h, i, j]
        return score

    return score_mod


def _mask_mod(tensors: Tensors, problem: AttentionProblem) -> _ScoreMod:
    """Return which keys are seen, by position, boolean mask and packed sequence."""
    boolean = _boolean(tensors)
    if boolean is not None:
        boolean = boolean.expand(problem.batch, problem.num_heads, problem.len_q, problem.len_k)
    left, right = problem.window
    right = 0 if problem.is_causal else right
    offset, dilation = problem.offset, problem.dilation
    sequence_q, sequence_k, position_q, position_k = _packing(tensors, problem)

    def mask_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        if sequence_q is None:
            distance = i + offset - j
            seen = distance == distance
        else:
            distance = position_q[i] - position_k[j]
            seen = sequence_q[i] == sequence_k[j]
        if right >= 0:
            seen = seen & (distance >= -right)
        if left >= 0:
            seen = seen & (distance <= left)
        if dilation > 1:
            seen = seen & (distance % dilation == 0)
        if boolean is not None:
            seen = seen & boolean[b, h, i, j]
        return seen

    return mask_mod


def _boolean(tensors: Tensors) -> torch.Tensor | None:
    """Return the mask if it is boolean."""
    mask = tensors.mask
    return mask if mask is not None and mask.dtype == torch.bool else None


def _packing(tensors: Tensors, problem: AttentionProblem) -> tuple[Any, Any, Any, Any]:
    """Return each query's and each key's packed sequence and place in it; Nones if not packed."""
    starts_q, starts_k = tensors.cu_seqlens_q, tensors.cu_seqlens_k
    if starts_q is None or starts_k is None:
        return None, None, None, None

    def made() -> tuple[Any, Any, Any, Any]:
        return packed_positions(starts_q, starts_k, problem)

    facts = ("packing", problem.len_q, problem.len_k, problem.align)
    return _kept(facts, (starts_q, starts_k), made)


_KEPT: OrderedDict[object, tuple[tuple[weakref.ref[torch.Tensor], ...], Any]] = OrderedDict()
_LOCK: Final = threading.Lock()


def _kept(
    facts: tuple[object, ...], sources: tuple[torch.Tensor, ...], make: Callable[[], _Value]
) -> _Value:
    """Return what ``make`` returns, made once while its sources live unchanged.

    A write to a source that PyTorch does not see is not noticed.

    Args:
        facts: what it depends on beside the sources' numbers.
        sources: the tensors that are read.
        make: makes the value, which must not hold the sources.
    """
    if torch.compiler.is_compiling() or any(source.is_inference() for source in sources):
        return make()
    key = (facts, tuple((id(source), source._version) for source in sources))
    with _LOCK:
        refs, value = _KEPT.get(key, ((), None))
        if value is not None and all(map(_is_of, refs, sources)):
            _KEPT.move_to_end(key)
            kept: _Value = value
            return kept
    with torch.inference_mode(False), torch.no_grad():
        made = make()
    with _LOCK:
        _KEPT[key] = (
            tuple(weakref.ref(source, lambda _: _KEPT.pop(key, None)) for source in sources),
            made,
        )
        while len(_KEPT) > _KEPT_VALUES:
            _KEPT.popitem(last=False)
    return made


def _is_of(ref: weakref.ref[torch.Tensor], source: torch.Tensor) -> bool:
    """Return whether a reference is to this very tensor."""
    return ref() is source


def _block_mask(tensors: Tensors, problem: AttentionProblem) -> Any:
    """Return the block mask, None if all is seen; without a boolean mask it is kept."""
    boolean, device = _boolean(tensors), tensors.query.device
    packed = tensors.cu_seqlens_q is not None
    if boolean is None and not problem.is_positional and not packed:
        return None
    batch, heads = (1, 1) if boolean is None else boolean.shape[:2]

    def made() -> Any:
        shape = (batch, heads, problem.len_q, problem.len_k)
        return made_block_mask(_mask_mod(tensors, problem), shape, device)

    if boolean is not None:
        return made()
    facts = (
        "blocks",
        problem.len_q,
        problem.len_k,
        problem.is_causal,
        problem.align,
        problem.window,
        problem.dilation,
        device,
    )
    starts = (tensors.cu_seqlens_q, tensors.cu_seqlens_k)
    return _kept(facts, tuple(item for item in starts if item is not None), made)


def made_block_mask(
    mask_mod: _ScoreMod, shape: tuple[int, int, int, int], device: torch.device
) -> Any:
    """Return what ``create_block_mask`` returns, made from some rows of blocks at a time.

    PyTorch's writes out all Sq x Sk decisions at once, 8 bytes each while it sums them up: 34 GB
    at 64K tokens.

    Args:
        mask_mod: whether query i of batch b and head h sees key j, for index tensors.
        shape: (B, H, Sq, Sk).
        device: where the mask is made.
    """
    from torch.nn.attention.flex_attention import BlockMask

    batch, heads, len_q, len_k = shape
    blocks_q, blocks_k = -(-len_q // _BLOCK), -(-len_k // _BLOCK)
    b = torch.arange(batch, device=device)[:, None, None, None]
    h = torch.arange(heads, device=device)[:, None, None]
    j = torch.arange(len_k, device=device)
    step = max(_MASK_ELEMENTS // (batch * heads * max(len_k, 1) * _BLOCK), 1)
    seen, whole = [], []
    for first in range(0, blocks_q, step):
        rows = range(first * _BLOCK, min((first + step) * _BLOCK, len_q))
        i = torch.arange(rows.start, rows.stop, device=device)[:, None]
        part = mask_mod(b, h, i, j).expand(batch, heads, len(rows), len_k)
        part = F.pad(part, (0, -len_k % _BLOCK, 0, -len(rows) % _BLOCK))
        tiles = part.unflatten(3, (-1, _BLOCK)).unflatten(2, (-1, _BLOCK))
        counts = tiles.sum(dim=(3, 5), dtype=torch.int32)
        whole.append(counts == _BLOCK * _BLOCK)
        seen.append((counts > 0) & ~whole[-1])
    partial, full = (_ordered(torch.cat(items, dim=2)) for items in (seen, whole))
    assert partial[1].shape[-1] == blocks_k
    return BlockMask.from_kv_blocks(
        *partial, *full, BLOCK_SIZE=_BLOCK, mask_mod=mask_mod, seq_lengths=(len_q, len_k)
    )


def _ordered(kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (how many blocks of keys each block of queries has, their numbers, kept first)."""
    order = torch.argsort(kept.int(), dim=-1, descending=True, stable=True)
    return kept.sum(-1, dtype=torch.int32), order.int()
