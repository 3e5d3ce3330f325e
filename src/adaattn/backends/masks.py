"""Rows that a mask leaves without a key, found from the mask's own shape and known from then on.

Kernels differ on such rows: zeros, NaN, the mean of the values. Given a row that sees something
they agree, and its output is zeroed afterwards, gradients too. That takes passes over the mask
and the output, so what was found is kept by the mask's identity while it lives and is not
written to. On a GPU the host never waits for the answer: until it has arrived the rows are
set right whether there are any or not.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["known_sighted", "sighted"]


def sighted(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (mask, blind): rows that saw nothing see everything, and are marked in ``blind``.

    Args:
        mask: [..., Sq, Sk] boolean or additive; broadcast dimensions stay as they are.
    """
    if mask.dtype == torch.bool:
        blind = ~mask.any(-1, keepdim=True)
        return mask | blind, blind
    blind = ~(mask > float("-inf")).any(-1, keepdim=True)
    return mask.masked_fill(blind, 0.0), blind


def known_sighted(
    mask: torch.Tensor, given: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return what `sighted` returns; the mask as it is, and None, once it blinds no row for sure.

    Args:
        mask: 4-D, on a GPU.
        given: the tensor that the caller holds, of which ``mask`` is a view; None keeps nothing.
    """
    if given is None or not _can_be_known(given):
        return sighted(mask)
    found = _KNOWN.get(given)
    if found is None or found.version != given._version:
        if torch.cuda.is_current_stream_capturing():
            return sighted(mask)
        found = _KNOWN[given] = _look_at(mask, given._version)
    if found.has_blind is None and not torch.cuda.is_current_stream_capturing():
        found.has_blind = bool(found.answer) if found.arrived.query() else None
    if found.has_blind is False:
        return mask, None
    return found.sighted, found.blind


@dataclass(slots=True)
class _Known:
    """What is known of one mask."""

    version: int
    sighted: torch.Tensor
    blind: torch.Tensor
    answer: torch.Tensor
    arrived: torch.cuda.Event
    has_blind: bool | None = None


_KNOWN: Final = WeakTensorKeyDictionary()


def _can_be_known(given: torch.Tensor) -> bool:
    """Return whether a mask's numbers can be remembered by its identity."""
    if torch.compiler.is_compiling() or given.is_inference():
        return False
    wants_gradient = given.requires_grad and torch.is_grad_enabled()
    hidden = torch._C._functorch.is_functorch_wrapped_tensor(given)
    return type(given) is torch.Tensor and not wants_gradient and not hidden


def _look_at(mask: torch.Tensor, version: int) -> _Known:
    """Return a mask's blind rows; whether there are any is on its way to the host."""
    with torch.no_grad(), torch.inference_mode(False):
        seeing, blind = sighted(mask)
        answer = torch.empty((), dtype=torch.bool, pin_memory=True)
        answer.copy_(blind.any(), non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
    return _Known(version, seeing, blind, answer, arrived)
