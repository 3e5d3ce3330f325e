"""The number formats that a caller may ask for by name, and calls made in them."""

import logging
from collections.abc import Callable
from typing import Any, Final

import torch

from adaattn import hardware
from adaattn._dtypes import precision_of, torch_dtype
from adaattn.backends import capabilities
from adaattn.call.describe import without_autocast
from adaattn.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from adaattn.spec import HardwareFacts, Precision

__all__ = [
    "MODES",
    "checked_mode",
    "in_precision",
    "named_precision",
    "why_not",
]

is_compiling = torch.compiler.is_compiling
_LOGGER = logging.getLogger("adaattn")

MODES: Final[dict[str, Precision | None]] = {
    "auto": None,
    "fp32": Precision.FP32,
    "bf16": Precision.BF16,
    "fp16": Precision.FP16,
    "fp8": Precision.FP8_E4M3,
}


def checked_mode(mode: str) -> str:
    """Return a precision mode that exists.

    Raises:
        ArgumentTypeError: it is no string.
        ArgumentError: there is none of that name.
    """
    if not isinstance(mode, str):
        raise ArgumentTypeError.got("precision_mode", "a string", repr(mode))
    if mode not in MODES:
        expected = ", ".join(repr(name) for name in MODES)
        raise ArgumentError.got("precision_mode", f"one of {expected}", repr(mode))
    return mode


def named_precision(precision: Precision | str) -> Precision:
    """Return the format that a caller names: a `Precision`, or a mode other than ``"auto"``.

    Raises:
        ArgumentTypeError: it is neither a string nor a `Precision`.
        ArgumentError: there is none of that name.
    """
    if isinstance(precision, Precision):
        return precision
    names = {name: item for name, item in MODES.items() if item is not None}
    expected = ", ".join(repr(name) for name in names)
    if not isinstance(precision, str):
        got = repr(precision)
        raise ArgumentTypeError.got("precision", f"a Precision or {expected}", got)
    if precision not in names:
        raise ArgumentError.got("precision", f"one of {expected}", repr(precision))
    return names[precision]


def in_precision(
    request: str,
    precision: Precision | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any],
) -> tuple[Any, str]:
    """Return what ``run`` gives in a format, and a note where the device gains nothing by it.

    Autocast is switched off meanwhile. The first tensor that ``run`` returns, or the only one, is
    cast back to the query's dtype; what is no tensor stays as it is. Where the inputs are not
    tensors of one dtype nothing is cast: the call says what is wrong.

    Args:
        request: what the caller asked for, as the note and the error name it.
        precision: the format; None leaves the call as it is.
        query: [..., D].
        key: [..., D].
        value: [..., Dv].
        run: makes the call.

    Raises:
        UnsupportedError: no executor computes in the format on this device.
    """
    if precision is None or not isinstance(query, torch.Tensor):
        return run(query, key, value), ""
    # What the device can do is read from the machine: a traced graph breaks here.
    check = torch.compiler.disable(_checked_format) if is_compiling() else _checked_format
    dtype, note = check(request, precision, query)
    inputs = (query, key, value)
    if len({getattr(item, "dtype", None) for item in inputs}) != 1 or query.is_nested:
        return run(*inputs), note
    with without_autocast(query.device.type):
        found = run(query.to(dtype), key.to(dtype), value.to(dtype))
    if isinstance(found, tuple):
        return (found[0].to(query.dtype), *found[1:]), note
    return found.to(query.dtype) if isinstance(found, torch.Tensor) else found, note


def _checked_format(
    request: str, precision: Precision, tensor: torch.Tensor
) -> tuple[torch.dtype, str]:
    """Return the dtype of a format that is computed in, and what the device says of it, or ""."""
    if precision is precision_of(tensor.dtype):
        return tensor.dtype, ""
    facts = hardware.probe(tensor.device)
    if not _is_computed_in(precision, facts):
        modes = [name for name, item in MODES.items() if item and _is_computed_in(item, facts)]
        expected = f"a format in which an executor computes here ({', '.join(map(repr, modes))})"
        hint = "Name one of these, or leave the format to the policy."
        raise UnsupportedError(request, [f"expected {expected}, got {precision.label}"], hint)
    if not (reason := why_not(precision, tensor.device)):
        return torch_dtype(precision), ""
    note = f"{request} is computed in as asked, though {reason}"
    _LOGGER.info("%s", note)
    return torch_dtype(precision), note


def why_not(precision: Precision, device: torch.device | str) -> str:
    """Return why a device gains nothing from a format, or no executor takes it; "" if neither."""
    facts = hardware.probe(device)
    if not _is_computed_in(precision, facts):
        return f"no executor of this version computes in {precision.label}"
    if precision not in facts.instructions:
        native = ", ".join(item.label for item in facts.instructions)
        return f"{facts.name or facts.device_type} computes {native} natively, not it"
    return ""


def _is_computed_in(precision: Precision, facts: HardwareFacts) -> bool:
    """Return whether an executor of this installation takes a format on such a device."""
    return any(
        precision in item.precisions
        and facts.device_type in item.device_types
        and not item.unavailable
        for item in capabilities()
    )
