"""The number formats that a caller may ask for by name, and what a device makes of the wish."""

import logging
from collections.abc import Callable
from typing import Any, Final

import torch

from adaattn import hardware
from adaattn._dtypes import precision_of, torch_dtype
from adaattn.backends import capabilities
from adaattn.call.describe import without_autocast
from adaattn.errors import ArgumentError, ArgumentTypeError
from adaattn.spec import Precision

__all__ = ["MODES", "cast_call", "checked_mode", "in_mode", "named_precision", "why_not"]

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


def in_mode(
    mode: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any],
) -> tuple[Any, str]:
    """Return what ``run`` gives in the format of a mode, and why not in that format, or "".

    Args:
        mode: checked.
        query: [..., D]; its dtype is kept where the device lacks the mode.
        key: [..., D].
        value: [..., Dv].
        run: makes the call.
    """
    if mode == "auto" or not isinstance(query, torch.Tensor):
        return run(query, key, value), ""
    # What the device can do is read from the machine: a traced graph breaks here.
    ask = torch.compiler.disable(_mode_dtype) if is_compiling() else _mode_dtype
    dtype, note = ask(mode, query)
    if note:
        _LOGGER.info("%s", note)
        return run(query, key, value), note
    return cast_call(dtype, query, key, value, run), ""


def cast_call(
    dtype: torch.dtype,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any],
) -> Any:
    """Return what ``run`` gives for inputs in another dtype, autocast switched off.

    The first tensor that it returns, or the only one, is cast back to the query's dtype. Where
    the inputs are not tensors of one dtype nothing is cast: the call says what is wrong.
    """
    inputs = (query, key, value)
    if len({getattr(item, "dtype", None) for item in inputs}) != 1 or query.is_nested:
        return run(*inputs)
    with without_autocast(query.device.type):
        found = run(query.to(dtype), key.to(dtype), value.to(dtype))
    if isinstance(found, tuple):
        return (found[0].to(query.dtype), *found[1:])
    return found.to(query.dtype)


def _mode_dtype(mode: str, tensor: torch.Tensor) -> tuple[torch.dtype, str]:
    """Return the dtype in which a call is made, and why it is not the one of the mode, or ""."""
    precision = MODES[mode]
    assert precision is not None
    if precision is precision_of(tensor.dtype):
        return tensor.dtype, ""
    if refusal := why_not(precision, tensor.device):
        return tensor.dtype, f"precision_mode {mode!r}: {refusal}; {tensor.dtype} is kept"
    return torch_dtype(precision), ""


def why_not(precision: Precision, device: torch.device | str) -> str:
    """Return why a device gains nothing from a format, or no executor takes it; "" if neither."""
    facts = hardware.probe(device)
    if precision not in facts.instructions:
        native = ", ".join(item.label for item in facts.instructions)
        return f"{facts.name or facts.device_type} computes {native} natively, not it"
    if not any(precision in item.precisions for item in capabilities()):
        return f"no executor of this version computes in {precision.label}"
    return ""
