"""From a caller's arguments to canonical tensors and an `AttentionProblem`, or a typed error.

Every check of user input is here and made once; below this layer tensors are 4-D, heads
agree and numbers are in range.
"""

import math
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from adaattn._dtypes import precision_of
from adaattn.backends import Tensors
from adaattn.errors import (
    ArgumentError,
    ArgumentTypeError,
    DeviceError,
    DTypeError,
    ShapeError,
    UnsupportedError,
    expected_got,
)
from adaattn.planning import simplify
from adaattn.spec import Align, AttentionProblem, Aux, MaskKind

__all__ = ["Arguments", "Call", "allowed_sdpa_kernels", "build_call"]

_SDPA_NAMES: Final = {
    "cpu": {0: "sdpa.math", 1: "sdpa.flash"},
    "cuda": {0: "sdpa.math", 1: "sdpa.flash2", 2: "sdpa.efficient", 3: "sdpa.cudnn"},
}
_MAX_RANK: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The arguments of the public call that say what is to be computed."""

    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    align: str | Align = "top_left"
    window: Sequence[int] = (-1, -1)
    dilation: int = 1
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One checked call.

    Args:
        tensors: canonical.
        problem: simplified.
        batch_shape: the leading dimensions of the result, heads included; () for 2-D input.
    """

    tensors: Tensors
    problem: AttentionProblem
    batch_shape: tuple[int, ...]

    def restore(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a canonical [B, Hq, ...] tensor in the caller's leading dimensions."""
        if tensor.shape[:2] == self.batch_shape:
            return tensor
        return tensor.reshape(*self.batch_shape, *tensor.shape[2:])


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
        UnsupportedError: nested tensors.
    """
    _check_tensors(query, key, value)
    query, key, value = _autocast(query, key, value)
    mask, is_causal, align = _causal_bias(arguments, query, key)
    query, key, value, batch_shape = _canonical(query, key, value, arguments.enable_gqa)
    batch, heads, len_q, head_dim = query.shape
    len_k = key.shape[2]
    mask = _canonical_mask(mask, query, batch_shape, len_k)
    sinks = _check_sinks(arguments.sinks, query)
    slopes = _check_slopes(arguments.alibi_slopes, query)
    window, dilation, softcap, scale, dropout_p = _check_numbers(arguments, head_dim)
    bounds_q, bounds_k = _check_packed(arguments, query, key)
    tensors = Tensors(
        query=query,
        key=key,
        value=value,
        mask=mask,
        sinks=sinks,
        alibi_slopes=slopes,
        cu_seqlens_q=arguments.cu_seqlens_q,
        cu_seqlens_k=arguments.cu_seqlens_k,
        bounds_q=bounds_q,
        bounds_k=bounds_k,
    )
    lengths_q, lengths_k = _lengths(bounds_q), _lengths(bounds_k)
    grad = torch.is_grad_enabled()
    involved = [item for item in (query, key, value, mask, sinks, slopes) if item is not None]
    problem = AttentionProblem(
        batch=batch,
        num_heads=heads,
        num_kv_heads=key.shape[1],
        len_q=len_q,
        len_k=len_k,
        head_dim=head_dim,
        value_dim=value.shape[3],
        precision=precision_of(query.dtype),
        device_type=query.device.type,
        scale=scale,
        is_causal=is_causal,
        align=align,
        window=window,
        dilation=dilation,
        mask=_mask_kind(mask),
        mask_shape=() if mask is None else tuple(mask.shape),
        mask_requires_grad=grad and mask is not None and mask.requires_grad,
        softcap=softcap,
        has_sinks=sinks is not None,
        sinks_require_grad=grad and sinks is not None and sinks.requires_grad,
        has_alibi=slopes is not None,
        alibi_requires_grad=grad and slopes is not None and slopes.requires_grad,
        dropout_p=dropout_p,
        num_sequences=len(lengths_q),
        max_len_q=max(lengths_q, default=0),
        max_len_k=max(lengths_k, default=0),
        packed_square=bool(lengths_q) and bounds_q == bounds_k,
        attended_pairs=sum(a * b for a, b in zip(lengths_q, lengths_k, strict=True)),
        requires_grad=grad and any(item.requires_grad for item in involved),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        aux=aux,
        allowed_sdpa=allowed_sdpa_kernels(query.device.type),
        sdpa_default=_sdpa_default(tensors, is_causal, scale, dropout_p),
    )
    return Call(tensors=tensors, problem=simplify(problem), batch_shape=batch_shape)


def allowed_sdpa_kernels(device_type: str) -> tuple[str, ...] | None:
    """Return the SDPA kernels that an ambient ``sdpa_kernel`` leaves; None when it leaves all.

    A traced call has its plan already, and no view of the context: None there too.
    """
    if torch.compiler.is_compiling():
        return None
    cuda = torch.backends.cuda
    enabled = {
        0: cuda.math_sdp_enabled(),
        1: cuda.flash_sdp_enabled(),
        2: cuda.mem_efficient_sdp_enabled(),
        3: cuda.cudnn_sdp_enabled(),
    }
    if all(enabled.values()):
        return None
    names = _SDPA_NAMES.get(device_type, {})
    return tuple(names[number] for number, on in enabled.items() if on and number in names)


def _check_tensors(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Refuse what is no tensor, nested, on several devices, or of several dtypes."""
    for name, item in (("query", query), ("key", key), ("value", value)):
        if not isinstance(item, torch.Tensor):
            raise ArgumentTypeError(expected_got(name, "a torch.Tensor", type(item).__name__))
        if item.is_nested:
            raise UnsupportedError(
                "AdaAttn",
                [f"{name} is a nested tensor; its layout hides the lengths that planning reads"],
                "Pass packed tensors [1, H, T, D] with cu_seqlens_q and cu_seqlens_k instead.",
            )
        if not 2 <= item.dim() <= _MAX_RANK:
            raise ShapeError(
                expected_got(
                    f"rank of {name}",
                    "2 to 5 dimensions, [..., heads, length, dim]",
                    f"{item.dim()} ({_shape(item)})",
                )
            )
    if not query.device == key.device == value.device:
        got = f"{query.device}, {key.device}, {value.device}"
        raise DeviceError(
            expected_got("query, key and value", "one device", got, "move them to one device")
        )
    precision_of(query.dtype)
    if not query.dtype == key.dtype == value.dtype:
        got = f"{query.dtype}, {key.dtype}, {value.dtype}"
        raise DTypeError(
            expected_got("query, key and value", "one dtype", got, "cast them to one dtype")
        )


def _autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors as autocast wants them, which is what SDPA does."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind) or tensors[0].dtype == torch.float64:
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(tensor.to(dtype) for tensor in tensors)


def _causal_bias(
    arguments: Arguments, query: torch.Tensor, key: torch.Tensor
) -> tuple[torch.Tensor | None, bool, Align]:
    """Return (mask, is_causal, align), a causal bias of torch.nn.attention turned into flags."""
    align = _align(arguments.align)
    mask = arguments.attn_mask
    if mask is None:
        return None, bool(arguments.is_causal), align
    if not isinstance(mask, torch.Tensor):
        raise ArgumentTypeError(
            expected_got("attn_mask", "None or a torch.Tensor", type(mask).__name__)
        )
    if arguments.is_causal:
        raise ArgumentError(
            expected_got(
                "attn_mask with is_causal=True",
                "only one of them",
                "both",
                "fold the causal order into the mask, or drop the mask",
            )
        )
    variant = getattr(mask, "variant", None)
    if variant is None or type(mask).__name__ != "CausalBias":
        return mask, False, align
    lengths = (getattr(mask, "seq_len_q", None), getattr(mask, "seq_len_kv", None))
    if lengths != (query.shape[-2], key.shape[-2]):
        raise ShapeError(
            expected_got("causal bias", f"lengths {(query.shape[-2], key.shape[-2])}", lengths)
        )
    corner = Align.BOTTOM_RIGHT if variant.name == "LOWER_RIGHT" else Align.TOP_LEFT
    return None, True, corner


def _align(align: str | Align) -> Align:
    """Return the enum of a corner's name."""
    if isinstance(align, Align):
        return align
    if align == "top_left":
        return Align.TOP_LEFT
    if align == "bottom_right":
        return Align.BOTTOM_RIGHT
    raise ArgumentError(expected_got("align", "'top_left' or 'bottom_right'", repr(align)))


def _canonical(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """Return q, k and v as [B, H, S, D], and the leading dimensions of the result."""
    rank = max(query.dim(), key.dim(), value.dim())
    query, key, value = (_with_rank(item, max(rank, 4)) for item in (query, key, value))
    _check_sizes(query, key, value)
    heads, kv_heads = query.shape[-3], key.shape[-3]
    if value.shape[-3] != kv_heads:
        if enable_gqa or 1 not in (kv_heads, value.shape[-3]):
            raise ShapeError(
                expected_got("heads of key and value", "the same", f"{kv_heads}, {value.shape[-3]}")
            )
        kv_heads = max(kv_heads, value.shape[-3])
    if heads != kv_heads:
        heads = _check_heads(heads, kv_heads, enable_gqa)
    try:
        batch = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    except RuntimeError as error:
        shapes = f"{_shape(query)}, {_shape(key)}, {_shape(value)}"
        raise ShapeError(
            expected_got("leading dimensions", "sizes that broadcast", shapes)
        ) from error
    query = _flat(query, batch, heads)
    key, value = _flat(key, batch, kv_heads), _flat(value, batch, kv_heads)
    leading = (*batch, heads)
    return query, key, value, leading[len(leading) - (rank - 2) :]


def _with_rank(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """Return the tensor with leading dimensions of size 1 up to ``rank``."""
    missing = rank - tensor.dim()
    return tensor[(None,) * missing] if missing else tensor


def _check_sizes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Refuse different head dimensions of q and k, and different lengths of k and v."""
    if query.shape[-1] != key.shape[-1]:
        raise ShapeError(
            expected_got(
                "head dimension of key", f"{query.shape[-1]} as in query", key.shape[-1]
            )
        )
    if query.shape[-1] == 0:
        raise ShapeError(expected_got("head dimension", "at least 1", 0))
    if key.shape[-2] != value.shape[-2]:
        raise ShapeError(
            expected_got("length of value", f"{key.shape[-2]} as in key", value.shape[-2])
        )


def _check_heads(heads: int, kv_heads: int, enable_gqa: bool) -> int:
    """Return the heads of the result when q and k differ in theirs."""
    if enable_gqa:
        if kv_heads == 0 or heads % kv_heads:
            raise ShapeError(
                expected_got(
                    "query heads with enable_gqa=True", f"a multiple of {kv_heads}", heads
                )
            )
        return heads
    if kv_heads == 1:
        return heads
    if heads == 1:
        return kv_heads
    hint = "pass enable_gqa=True" if kv_heads and heads % kv_heads == 0 else "use equal heads"
    raise ShapeError(expected_got("heads of query and key", "the same", f"{heads}, {kv_heads}", hint))


def _flat(tensor: torch.Tensor, batch: torch.Size, heads: int) -> torch.Tensor:
    """Return [B, H, S, X] with the leading dimensions broadcast and flattened."""
    shape = (*batch, heads, *tensor.shape[-2:])
    if tensor.shape != shape:
        tensor = tensor.expand(shape)
    return tensor if len(batch) == 1 else tensor.reshape(math.prod(batch), *shape[-3:])


def _canonical_mask(
    mask: torch.Tensor | None, query: torch.Tensor, leading: tuple[int, ...], len_k: int
) -> torch.Tensor | None:
    """Return the mask as 4-D, each size 1 or full."""
    if mask is None:
        return None
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise DTypeError(
            expected_got("dtype of attn_mask", "bool or floating point", mask.dtype, "cast it")
        )
    if mask.device != query.device:
        raise DeviceError(expected_got("attn_mask", f"device {query.device}", mask.device))
    batch, heads, len_q, _ = query.shape
    full = (*leading, len_q, len_k)
    try:
        fits = mask.dim() >= 1 and torch.broadcast_shapes(mask.shape, full) == torch.Size(full)
    except RuntimeError:
        fits = False
    if not fits:
        raise ShapeError(
            expected_got(
                "attn_mask", f"a shape that broadcasts to {list(full)}", _shape(mask)
            )
        )
    mask = _with_rank(mask, max(len(full), 4))
    if mask.dim() == 4:
        return mask
    if math.prod(mask.shape[:-3]) == 1:
        return mask.reshape(1, *mask.shape[-3:])
    return mask.expand(*leading[:-1], *mask.shape[-3:]).reshape(batch, *mask.shape[-3:])


def _mask_kind(mask: torch.Tensor | None) -> MaskKind:
    """Return the kind of a mask."""
    if mask is None:
        return MaskKind.NONE
    return MaskKind.BOOLEAN if mask.dtype == torch.bool else MaskKind.ADDITIVE


def _check_sinks(sinks: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """Return the sinks, [Hq]."""
    if sinks is None:
        return None
    if not isinstance(sinks, torch.Tensor) or tuple(sinks.shape) != (query.shape[1],):
        raise ShapeError(
            expected_got("sinks", f"a tensor [{query.shape[1]}]", _shape(sinks))
        )
    _check_companion("sinks", sinks, query)
    return sinks


def _check_slopes(slopes: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """Return the ALiBi slopes as [B or 1, Hq]."""
    if slopes is None:
        return None
    batch, heads = query.shape[:2]
    shapes = ((heads,), (batch, heads))
    if not isinstance(slopes, torch.Tensor) or tuple(slopes.shape) not in shapes:
        raise ShapeError(
            expected_got("alibi_slopes", f"a tensor [{heads}] or [{batch}, {heads}]", _shape(slopes))
        )
    _check_companion("alibi_slopes", slopes, query)
    return slopes if slopes.dim() == 2 else slopes.unsqueeze(0)


def _check_companion(name: str, tensor: torch.Tensor, query: torch.Tensor) -> None:
    """Refuse a small tensor that is not floating point or on another device."""
    if not tensor.is_floating_point():
        raise DTypeError(expected_got(f"dtype of {name}", "floating point", tensor.dtype))
    if tensor.device != query.device:
        raise DeviceError(expected_got(name, f"device {query.device}", tensor.device))


def _check_numbers(
    arguments: Arguments, head_dim: int
) -> tuple[tuple[int, int], int, float, float, float]:
    """Return (window, dilation, softcap, scale, dropout_p), each in range."""
    window = tuple(arguments.window)
    if len(window) != 2 or not all(_is_int(edge) and edge >= -1 for edge in window):
        raise ArgumentError(
            expected_got("window", "(left, right), each at least -1", arguments.window)
        )
    if not _is_int(arguments.dilation) or arguments.dilation < 1:
        raise ArgumentError(expected_got("dilation", "an integer of at least 1", arguments.dilation))
    softcap = 0.0 if arguments.softcap is None else float(arguments.softcap)
    if not (math.isfinite(softcap) and softcap >= 0):
        raise ArgumentError(
            expected_got("softcap", "None or a finite number of at least 0", arguments.softcap)
        )
    scale = 1 / math.sqrt(head_dim) if arguments.scale is None else float(arguments.scale)
    if not math.isfinite(scale):
        raise ArgumentError(expected_got("scale", "None or a finite number", arguments.scale))
    dropout_p = float(arguments.dropout_p)
    if not 0.0 <= dropout_p <= 1.0:
        raise ArgumentError(
            expected_got(
                "dropout_p", "a probability in [0, 1]", arguments.dropout_p, "0 turns it off"
            )
        )
    left, right = window
    return (left, right), arguments.dilation, softcap, scale, dropout_p


def _is_int(value: object) -> bool:
    """Return whether a value is an integer and no boolean."""
    return isinstance(value, int) and not isinstance(value, bool)


def _check_packed(
    arguments: Arguments, query: torch.Tensor, key: torch.Tensor
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the packed bounds of queries and keys on the host; empty when not packed."""
    starts_q, starts_k = arguments.cu_seqlens_q, arguments.cu_seqlens_k
    if starts_q is None and starts_k is None:
        return (), ()
    if starts_q is None or starts_k is None:
        raise ArgumentError(
            expected_got("cu_seqlens_q and cu_seqlens_k", "both or neither", "one of them")
        )
    if query.shape[0] != 1:
        raise ShapeError(
            expected_got("packed tensors", "[1, H, T, D]", f"batch {query.shape[0]}")
        )
    bounds_q = _bounds("cu_seqlens_q", starts_q, query.shape[2], query.device)
    bounds_k = _bounds("cu_seqlens_k", starts_k, key.shape[2], query.device)
    if len(bounds_q) != len(bounds_k):
        raise ShapeError(
            expected_got(
                "cu_seqlens_k", f"{len(bounds_q)} entries as cu_seqlens_q", len(bounds_k)
            )
        )
    return bounds_q, bounds_k


_HOST_BOUNDS: OrderedDict[int, tuple[weakref.ref[torch.Tensor], int, tuple[int, ...]]] = (
    OrderedDict()
)
_KEPT_BOUNDS: Final = 16


def _host_values(starts: torch.Tensor) -> tuple[int, ...]:
    """Return a tensor's numbers on the host; read once while the tensor lives unchanged."""
    known = _HOST_BOUNDS.get(id(starts))
    if known is not None and known[0]() is starts and known[1] == starts._version:
        return known[2]
    values = tuple(starts.tolist())
    _HOST_BOUNDS[id(starts)] = (weakref.ref(starts), starts._version, values)
    while len(_HOST_BOUNDS) > _KEPT_BOUNDS:
        _HOST_BOUNDS.popitem(last=False)
    return values


def _bounds(
    name: str, starts: torch.Tensor, length: int, device: torch.device
) -> tuple[int, ...]:
    """Return the bounds on the host, checked."""
    if not isinstance(starts, torch.Tensor) or starts.dtype != torch.int32 or starts.dim() != 1:
        raise DTypeError(expected_got(name, "an int32 tensor [N + 1]", _shape(starts)))
    if starts.device != device:
        raise DeviceError(expected_got(name, f"device {device}", starts.device))
    bounds = _host_values(starts)
    rising = all(a <= b for a, b in zip(bounds, bounds[1:], strict=False))
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != length or not rising:
        raise ArgumentError(
            expected_got(name, f"rising numbers from 0 to {length}", list(bounds)[:8])
        )
    return bounds


def _lengths(bounds: tuple[int, ...]) -> list[int]:
    """Return the length of each packed sequence."""
    return [b - a for a, b in zip(bounds, bounds[1:], strict=False)]


def _sdpa_default(
    tensors: Tensors, is_causal: bool, scale: float, dropout_p: float
) -> str:
    """Return the kernel that SDPA would choose for the plain part of the call; "" if unknown."""
    if torch.compiler.is_compiling() or tensors.query.device.type not in _SDPA_NAMES:
        return ""
    try:
        number = torch._fused_sdp_choice(
            tensors.query,
            tensors.key,
            tensors.value,
            tensors.mask,
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=tensors.query.shape[1] != tensors.key.shape[1],
        )
    except (RuntimeError, NotImplementedError):
        return ""
    return _SDPA_NAMES[tensors.query.device.type].get(int(number), "")


def _shape(value: object) -> str:
    """Return a tensor's dtype and shape, or the type of anything else."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return type(value).__name__
