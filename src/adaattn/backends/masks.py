"""Boolean masks as numbers, kept while the mask lives and is not written to.

cuDNN gives the mean of all values, and NaN gradients, to a row that a boolean mask leaves
without a key; PyTorch hands it -1e38 there, not -inf. With -inf as numbers every kernel of
PyTorch gives zeros (H200, PyTorch 2.11, cuDNN 9.19, 2026-11), and converts nothing itself.
"""

from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = [
    "PLAIN_TENSORS",
    "additive_mask",
    "aligned_bias",
    "as_bytes",
    "broadcast_strides",
    "is_drawn",
    "kept_beside",
    "kept_bias",
    "may_keep",
    "stored_columns",
    "stream_of",
    "with_rank",
]

PLAIN_TENSORS: Final = frozenset((torch.Tensor, torch.nn.Parameter))
"""Types that are no subclass with a mind of its own."""

_Made = TypeVar("_Made", bound=torch.Tensor | tuple[torch.Tensor, ...])

_modes_in_use = torch._C._len_torch_dispatch_stack
_PROXY: Final = torch._C._TorchDispatchModeKey.PROXY


def additive_mask(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Return a mask as numbers added to the scores, booleans in ``dtype``; None stays None."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return mask.new_full(mask.shape, float("-inf"), dtype=dtype).masked_fill_(mask, 0.0)


def as_bytes(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return a mask as Triton's kernels read it: a view of booleans as bytes; numbers stay."""
    return mask.view(torch.uint8) if mask is not None and mask.dtype == torch.bool else mask


def kept_bias(mask: torch.Tensor, given: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Return `additive_mask` of a mask in its own shape, made once for the caller's tensor.

    Args:
        mask: 4-D, broadcast dimensions unexpanded.
        given: the tensor that the caller holds, of which ``mask`` is a view; None keeps nothing.
        dtype: of the query.
    """
    if mask.dtype != torch.bool:
        return mask
    if given is None:
        return aligned_bias(mask, dtype)
    return kept_beside(given, ("bias", mask.shape, dtype), lambda: aligned_bias(mask, dtype))


def kept_beside(
    given: torch.Tensor, facts: tuple[object, ...], make: Callable[[], _Made], *, most: int = 1
) -> _Made:
    """Return what is made of a caller's tensor, made once while that lives unchanged.

    A write that PyTorch does not count is not noticed: through ``.data``, by a kernel of one's own,
    or by the replay of a CUDA graph. ``torch.autograd.graph.increment_version(given)`` tells of it.

    Args:
        given: the tensor.
        facts: what it depends on beside the tensor's numbers, their kind first.
        make: makes it, one tensor or several; what it returns must not hold the tensor.
        most: of a kind that are kept, the newest ones.
    """
    if given.is_inference() or not may_keep(given):
        return make()
    state = (given._version, given.data_ptr(), stream_of(given))
    found: _Made | None = _kept_at(given, state).get(facts)
    if found is not None:
        return found
    # Leaving inference mode would turn gradients on: what is kept has no graph.
    with torch.inference_mode(False), torch.no_grad():
        made = make()
    parts = made if isinstance(made, tuple) else (made,)
    if all(type(part) is torch.Tensor for part in parts):  # else a mode's, fake ones for instance
        kept = _kept_at(given, state)  # making it may have kept something else
        alike = [other for other in kept if other[0] == facts[0]]
        gone = alike[: max(len(alike) - most + 1, 0)]
        others = {other: item for other, item in kept.items() if other not in gone}
        _KNOWN[given] = (state, {**others, facts: made})
    return made


def _kept_at(given: torch.Tensor, state: tuple[object, ...]) -> dict[tuple[object, ...], Any]:
    """Return what is kept beside a tensor by its facts; nothing of another state."""
    before, known = _KNOWN.get(given) or (state, {})
    return known if before == state else {}


_KNOWN: Final[Any] = WeakTensorKeyDictionary()


def stored_columns(mask: torch.Tensor, len_k: int) -> torch.Tensor:
    """Return a mask with a column for each key, its storage read from a multiple of 16 bytes on.

    Kernels for GPUs refuse any other, or misread it and say nothing.
    """
    if mask.shape[-1] == 1 < len_k:
        return mask.expand(*mask.shape[:-1], len_k).contiguous()
    return mask if mask.storage_offset() * mask.element_size() % 16 == 0 else mask.clone()


def with_rank(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """Return the tensor with leading dimensions of size 1 up to ``rank``."""
    missing = rank - tensor.dim()
    return tensor[(None,) * missing] if missing > 0 else tensor


def broadcast_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return a tensor's strides, 0 where it is broadcast."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return tuple(0 if size == 1 else step for size, step in sizes)


def stream_of(tensor: torch.Tensor) -> int:
    """Return the stream on which a tensor's device computes now; 0 on a CPU."""
    if not tensor.is_cuda:
        return 0
    found: int = torch._C._cuda_getCurrentRawStream(tensor.get_device())
    return found


def aligned_bias(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `additive_mask`, on a GPU in rows that begin at multiples of 16 bytes for kernels."""
    columns = mask.shape[-1]
    missing = -columns % 8 if mask.is_cuda else 0
    if mask.dtype != torch.bool:
        return torch.nn.functional.pad(mask, (0, missing))[..., :columns] if missing else mask
    shape = (*mask.shape[:-1], columns + missing)
    hidden = mask.new_full(shape, float("-inf"), dtype=dtype)
    return hidden[..., :columns].masked_fill_(mask, 0.0)


def is_drawn() -> bool:
    """Return whether a graph is made of the operators that run, as `make_fx` does."""
    return _modes_in_use() > 0 and torch._C._get_dispatch_mode(_PROXY) is not None


def may_keep(tensor: torch.Tensor) -> bool:
    """Return whether what is made now stays valid and has no derivative of its own.

    Nothing does that a trace, a transform, forward-mode differentiation or the capture of a CUDA
    graph sees.
    """
    if is_compiling() or torch._C._is_tracing() or peek_interpreter_stack() is not None:
        return False
    if forward_ad._current_level >= 0 or type(tensor) not in PLAIN_TENSORS:
        return False
    if is_drawn():  # the graph would hold this call's numbers
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())
