"""From a caller's arguments to canonical tensors and an `AttentionProblem`, or a typed error.

Every check of user input is here and made once; below this layer tensors are 4-D, heads
agree and numbers are in range.
"""

import contextlib
from dataclasses import dataclass
from typing import Any, Final

import torch

from adaattn._dtypes import precision_of
from adaattn._numbers import require_flag
from adaattn._settings import is_debugging
from adaattn.backends import Tensors
from adaattn.backends.block_list import BlockList
from adaattn.backends.head_terms import HeadTerms
from adaattn.call.arguments import Arguments, checked_numbers
from adaattn.call.canonical import canonical_mask, canonical_tensors, described
from adaattn.call.facts import SDPA_NAMES, packed_facts, sdpa_default, tensor_facts
from adaattn.call.packing import packed_bounds
from adaattn.errors import (
    ArgumentError,
    ArgumentTypeError,
    DeviceError,
    DTypeError,
    ShapeError,
    UnsupportedError,
)
from adaattn.planning import simplify
from adaattn.spec import Align, AttentionProblem, Aux

__all__ = ["Arguments", "Call", "as_autocast", "build_call", "without_autocast"]

_MAX_RANK: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One checked call.

    Args:
        tensors: canonical.
        problem: simplified.
        batch_shape: the leading dimensions of the result, heads included; () for 2-D input.
        is_as_given: q, k and v were canonical as they came.
    """

    tensors: Tensors
    problem: AttentionProblem
    batch_shape: tuple[int, ...]
    is_as_given: bool = False

    def restore(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a canonical [B, Hq, ...] tensor in the caller's leading dimensions."""
        if tensor.shape[:2] == self.batch_shape:
            return tensor
        return tensor.reshape((*self.batch_shape, *tensor.shape[2:]))


def build_call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    arguments: Arguments,
    aux: Aux = Aux.NONE,
) -> Call:
    """Return the checked call.

    Args:
        query: [..., Hq, Sq, D]; 2-D to 5-D.
        key: [..., Hkv, Sk, D].
        value: [..., Hkv, Sk, Dv].
        arguments: all else.
        aux: outputs wanted beside the result.

    Raises:
        ShapeError: ranks, sizes or heads do not fit.
        DTypeError: dtypes differ or are not floating point.
        DeviceError: tensors are on different devices.
        ArgumentError: a number is out of range, or two arguments contradict.
        ArgumentTypeError: an argument is of the wrong type.
        UnsupportedError: nested or sparse tensors.
    """
    _check_tensors(query, key, value)
    given = (query, key, value)
    query, key, value = (as_autocast(item, query.device.type) for item in (query, key, value))
    _check_dtypes(query, key, value)
    mask, is_causal, align = _causal_bias(arguments, query, key)
    query, key, value, batch_shape = canonical_tensors(query, key, value, arguments.enable_gqa)
    mask = canonical_mask(mask, query, batch_shape, key.shape[2])
    given_mask = mask
    if mask is not None and mask.dtype not in (torch.bool, query.dtype):
        # Kernels take the query's dtype; what is wider than 16 bits stays so, at least in fp32.
        mask = mask.to(torch.float64 if query.dtype == torch.float64 else torch.float32)
    sinks = _check_sinks(arguments.sinks, query)
    slopes = _check_slopes(arguments.alibi_slopes, query)
    terms = _check_head_terms(arguments.head_terms, query)
    window, dilation, softcap, scale, dropout_p = checked_numbers(arguments, query.shape[3])
    if terms is not None and terms.scale is not None:
        scale = 1.0
    starts_q, starts_k = arguments.cu_seqlens_q, arguments.cu_seqlens_k
    bounds_q, bounds_k = packed_bounds(starts_q, starts_k, query, key)
    tensors = Tensors.of(
        query,
        key,
        value,
        cu_seqlens_q=starts_q,
        cu_seqlens_k=starts_k,
        bounds_q=bounds_q,
        bounds_k=bounds_k,
        mask=mask,
        mask_given=arguments.attn_mask if mask is given_mask else None,
        sinks=sinks,
        alibi_slopes=slopes,
        blocks=_check_blocks(arguments, query, key, aux),
        head_terms=terms,
    )
    problem = AttentionProblem(
        **tensor_facts(tensors),
        **packed_facts(tensors, arguments.max_seqlen_q, arguments.max_seqlen_k),
        scale=scale,
        is_causal=is_causal,
        align=align,
        window=window,
        dilation=dilation,
        softcap=softcap,
        dropout_p=dropout_p,
        batch_invariant=_is_invariant(arguments, dropout_p),
        aux=aux,
        sdpa_default=sdpa_default(tensors, is_causal, scale, dropout_p),
    )
    return Call(
        tensors=tensors,
        problem=simplify(problem),
        batch_shape=batch_shape,
        is_as_given=mask is given_mask
        and (query is given[0] and key is given[1] and value is given[2]),
    )


def _check_tensors(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Refuse what is no tensor, nested, sparse, of the wrong rank, or on several devices."""
    for name, item in (("query", query), ("key", key), ("value", value)):
        if not isinstance(item, torch.Tensor):
            raise ArgumentTypeError.got(name, "a torch.Tensor", type(item).__name__)
        if item.is_nested:
            raise UnsupportedError(
                "AdaAttn",
                [f"{name} is a nested tensor; its layout hides the lengths that planning reads"],
                "Pass packed tensors [1, H, T, D] with cu_seqlens_q and cu_seqlens_k instead.",
            )
        _check_layout(name, item)
        if not 2 <= item.dim() <= _MAX_RANK:
            raise ShapeError.got(
                f"rank of {name}",
                "2 to 5 dimensions, [..., heads, length, dim]",
                f"{item.dim()} ({described(item)})",
            )
    if not query.device == key.device == value.device:
        got = f"{query.device}, {key.device}, {value.device}"
        raise DeviceError.got("query, key and value", "one device", got, "move them to one device")
    if query.device.type not in SDPA_NAMES:
        raise DeviceError.got("device", "'cpu' or 'cuda'", repr(str(query.device)))


def _check_layout(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor without strides."""
    if tensor.layout != torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        raise UnsupportedError(
            "AdaAttn",
            [f"{name} is a tensor of layout {layout}; kernels read strided ones"],
            f"Pass {name}.to_dense().",
        )


def _check_dtypes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Refuse tensors of several dtypes, or of one that attention does not take."""
    precision_of(query.dtype)
    if not query.dtype == key.dtype == value.dtype:
        got = f"{query.dtype}, {key.dtype}, {value.dtype}"
        raise DTypeError.got("query, key and value", "one dtype", got, "cast them to one dtype")


def without_autocast(device_type: str) -> contextlib.AbstractContextManager[object]:
    """Return a context in which products keep the precision that the plan gives them.

    The inputs were cast when they were checked; autocast would round the fp32 scores again.
    """
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


def as_autocast(tensor: Any, device_type: str) -> Any:
    """Return a tensor as autocast wants it, which is what SDPA does.

    fp64 stays as it is, and so do causal biases of ``torch.nn.attention`` and what is no tensor.
    """
    if not isinstance(tensor, torch.Tensor) or not torch.is_autocast_enabled(device_type):
        return tensor
    dtype = torch.get_autocast_dtype(device_type)
    is_kept = tensor.dtype in (dtype, torch.float64) or not tensor.is_floating_point()
    return tensor if is_kept or type(tensor).__name__ == "CausalBias" else tensor.to(dtype)


def _causal_bias(
    arguments: Arguments, query: torch.Tensor, key: torch.Tensor
) -> tuple[torch.Tensor | None, bool, Align]:
    """Return (mask, is_causal, align), a causal bias of torch.nn.attention turned into flags."""
    align = _align(arguments.align)
    mask = arguments.attn_mask
    for name in ("is_causal", "enable_gqa", "batch_invariant"):
        if not isinstance(flag := getattr(arguments, name), torch.SymBool):
            require_flag(name, flag)
    if mask is None:
        return None, bool(arguments.is_causal), align
    if not isinstance(mask, torch.Tensor):
        raise ArgumentTypeError.got("attn_mask", "None or a torch.Tensor", type(mask).__name__)
    _check_layout("attn_mask", mask)
    if arguments.is_causal:
        raise ArgumentError.got(
            "attn_mask with is_causal=True",
            "only one of them",
            "both",
            "fold the causal order into the mask, or drop the mask",
        )
    variant = getattr(mask, "variant", None)
    if variant is None or type(mask).__name__ != "CausalBias":
        return as_autocast(mask, query.device.type), False, align
    lengths = (getattr(mask, "seq_len_q", None), getattr(mask, "seq_len_kv", None))
    if lengths != (query.shape[-2], key.shape[-2]):
        raise ShapeError.got("causal bias", f"lengths {(query.shape[-2], key.shape[-2])}", lengths)
    corner = Align.BOTTOM_RIGHT if variant.name == "LOWER_RIGHT" else Align.TOP_LEFT
    return None, True, corner


def _is_invariant(arguments: Arguments, dropout_p: float) -> bool:
    """Return whether a sequence's result may not depend on the others."""
    if arguments.batch_invariant and dropout_p > 0:
        hint = "its random numbers are drawn for the whole batch"
        raise ArgumentError.got("dropout_p with batch_invariant=True", "0.0", dropout_p, hint)
    return bool(arguments.batch_invariant)


def _align(align: str | Align) -> Align:
    """Return the enum of a corner's name."""
    if isinstance(align, Align):
        return align
    named = {"top_left": Align.TOP_LEFT, "bottom_right": Align.BOTTOM_RIGHT}
    if isinstance(align, str) and align in named:
        return named[align]
    raise ArgumentError.got("align", "'top_left' or 'bottom_right'", repr(align))


def _check_sinks(sinks: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """Return the sinks, [Hq]."""
    if sinks is None:
        return None
    if not isinstance(sinks, torch.Tensor) or tuple(sinks.shape) != (query.shape[1],):
        raise ShapeError.got("sinks", f"a tensor [{query.shape[1]}]", described(sinks))
    _check_companion("sinks", sinks, query)
    return sinks


def _check_slopes(slopes: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """Return the ALiBi slopes as [B or 1, Hq]."""
    if slopes is None:
        return None
    batch, heads = query.shape[:2]
    shapes = ((heads,), (batch, heads))
    if not isinstance(slopes, torch.Tensor) or tuple(slopes.shape) not in shapes:
        raise ShapeError.got(
            "alibi_slopes", f"a tensor [{heads}] or [{batch}, {heads}]", described(slopes)
        )
    _check_companion("alibi_slopes", slopes, query)
    return slopes if slopes.dim() == 2 else slopes.unsqueeze(0)


def _check_head_terms(terms: HeadTerms | None, query: torch.Tensor) -> HeadTerms | None:
    """Return the numbers of each head, of the query's heads and on its device."""
    if terms is None:
        return None
    heads = query.shape[1]
    of_all = {"scale": "a number", "window": "(left, right)", "softcap": "a number"}
    for name, one in of_all.items():
        numbers = getattr(terms, name)
        if numbers is None:
            continue
        shape = (heads, 2) if name == "window" else (heads,)
        if tuple(numbers.shape) != shape:
            hint = f"what serves all heads is {one} without a tensor"
            expected = f"{one}, or a tensor {list(shape)}"
            raise ShapeError.got(name, expected, described(numbers), hint)
        if name != "window":
            _check_companion(name, numbers, query)
        elif numbers.dtype not in (torch.int32, torch.int64):
            hint = "use .to(torch.int32)"
            raise DTypeError.got("dtype of window", "int32 or int64", numbers.dtype, hint)
        elif numbers.device != query.device:
            raise DeviceError.got(name, f"device {query.device}", numbers.device)
    if is_debugging():
        terms.check()
    return terms


def _check_blocks(
    arguments: Arguments, query: torch.Tensor, key: torch.Tensor, aux: Aux
) -> BlockList | None:
    """Return the list of blocks, whose sizes are the call's."""
    blocks = arguments.blocks
    if blocks is None:
        # By numbers, as in `AttentionProblem.wants`.
        if aux.value & Aux.DROPPED_MASS.value:
            hint = "without a list of blocks nothing is dropped"
            raise ArgumentError.got("dropped_mass", "a call with blocks", "none", hint)
        return None
    if not isinstance(blocks, BlockList):
        hint = "BlockList.from_mask makes one of a boolean mask of blocks"
        raise ArgumentTypeError.got("blocks", "an adaattn.BlockList", type(blocks).__name__, hint)
    if arguments.cu_seqlens_q is not None:
        raise ArgumentError.got(
            "blocks with cu_seqlens_q", "only one of them", "both", "pad the batch"
        )
    if blocks.counts.device != query.device:
        raise DeviceError.got("blocks", f"device {query.device}", blocks.counts.device)
    batch, heads, len_q, _ = query.shape
    rows = -(-len_q // blocks.block_q)
    got = blocks.counts.shape
    if got[0] not in (1, batch) or got[1] not in (1, heads) or got[2] != rows:
        expected = f"[1 or {batch}, 1 or {heads}, {rows}] in blocks of {blocks.block_q} rows"
        raise ShapeError.got("counts of blocks", expected, list(got))
    there = -(-key.shape[2] // blocks.block_k)
    sizes = f"with {key.shape[2]} keys in blocks of {blocks.block_k}"
    if blocks.num_key_blocks not in (0, there):
        listed = blocks.num_key_blocks
        raise ShapeError.got("blocks of keys of a list", f"{there}, {sizes}", listed)
    needed = blocks.check() if is_debugging() else blocks.needed_blocks
    if needed > there:
        expected = f"below {there}, {sizes}"
        raise ArgumentError.got("indices of blocks", expected, needed - 1)
    return blocks


def _check_companion(name: str, tensor: torch.Tensor, query: torch.Tensor) -> None:
    """Refuse a small tensor that is sparse, not floating point or on another device."""
    _check_layout(name, tensor)
    if not tensor.is_floating_point():
        raise DTypeError.got(f"dtype of {name}", "floating point", tensor.dtype)
    if tensor.device != query.device:
        raise DeviceError.got(name, f"device {query.device}", tensor.device)
