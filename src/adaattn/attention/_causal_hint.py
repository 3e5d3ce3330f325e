"""Whether a mask that comes with ``is_causal=True`` says nothing beyond it.

PyTorch's modules want both, so that kernels that know causal order can skip half of the work;
its flash kernels for GPUs take no mask at all. There the flag is a hint taken on trust; here
the numbers are compared.
"""

from typing import Final

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from adaattn.call.adapt import is_transformed

_KNOWN: Final = WeakTensorKeyDictionary()


def is_plain_causal(mask: torch.Tensor) -> bool:
    """Return whether an [L, S] mask hides exactly the keys ahead and adds nothing.

    The comparison reads the mask on the host. On a GPU that waits for the device, so it is
    made once while the tensor lives and its version stays: a write that PyTorch does not see
    is not noticed. Where the host cannot read, the answer is no, and the mask is used.

    Args:
        mask: True = masked, or added to the scores.
    """
    if not _is_readable(mask):
        return False
    return _remembered(mask) if mask.is_cuda else _compared(mask)


def _is_readable(mask: torch.Tensor) -> bool:
    """Return whether the host may read the numbers, and no gradient wants them used."""
    if torch.compiler.is_compiling() or is_transformed(mask):
        return False
    wants_gradient = mask.requires_grad and torch.is_grad_enabled()
    return type(mask) is torch.Tensor and mask.device.type in ("cpu", "cuda") and not wants_gradient


def _remembered(mask: torch.Tensor) -> bool:
    """Return the answer of an earlier call for the same numbers, or compare."""
    has_version = not mask.is_inference()
    version, answer = _KNOWN.get(mask, (-1, False)) if has_version else (-1, False)
    if has_version and version == mask._version:
        return bool(answer)
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    answer = _compared(mask)
    if has_version:
        _KNOWN[mask] = (mask._version, answer)
    return answer


def _compared(mask: torch.Tensor) -> bool:
    """Return what `is_plain_causal` returns, by comparing every number."""
    hidden = torch.ones_like(mask, dtype=torch.bool).triu(1)
    if mask.dtype == torch.bool:
        return torch.equal(mask, hidden)
    return torch.equal(mask, torch.zeros_like(mask).masked_fill(hidden, float("-inf")))
