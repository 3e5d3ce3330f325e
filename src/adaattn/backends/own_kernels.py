"""What executors with kernels of their own share: what they need, refuse, and call a failure."""

import importlib
import importlib.util
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Final, TypeVar

import torch
from torch.autograd import forward_ad

from adaattn._packages import installed_version
from adaattn.errors import ExecutorError
from adaattn.hardware import on_clear

if TYPE_CHECKING:
    from functools import _lru_cache_wrapper

__all__ = [
    "check_untransformed",
    "compiling",
    "kept_by_problem",
    "meets_transforms",
    "sees_no_transforms",
    "sinks_gradient",
    "why_no_gluon",
    "why_no_triton",
]

_T = TypeVar("_T")

_KEPT: Final = 1024
_OLDEST: Final = (3, 6)
_transforms = torch._C._functorch.peek_interpreter_stack
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


@lru_cache(maxsize=1)
def why_no_triton() -> str:
    """Return why kernels cannot be compiled in this installation, or ""."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if not (version := installed_version("triton")):
        return ""  # unpacked beside the installation: somebody knows
    found = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    oldest = ".".join(map(str, _OLDEST))
    return f"it needs Triton {oldest} or later, found {version}" if found < _OLDEST else ""


def why_no_gluon() -> str:
    """Return why kernels with NVIDIA's own instructions cannot be compiled here, or "".

    ROCm tells of some GPUs that their compute capability is 9.0.
    """
    return why_no_triton() or ("it is for NVIDIA GPUs" if torch.version.hip is not None else "")


def kept_by_problem(make: Callable[..., _T]) -> "_lru_cache_wrapper[_T]":
    """Return what makes something of a problem, once until `hardware.clear_cache`."""
    kept = lru_cache(maxsize=_KEPT)(make)
    on_clear(kept.cache_clear)
    return kept


def check_untransformed(*tensors: torch.Tensor) -> None:
    """Refuse what a kernel sees no numbers of, or would lose the tangents of.

    Raises:
        ExecutorError: a tensor belongs to a transform of ``torch.func`` that is under way, or
            forward-mode differentiation is.
    """
    if forward_ad._current_level < 0 and _transforms() is None:
        return
    if forward_ad._current_level >= 0 or any(map(_is_wrapped, tensors)):
        raise ExecutorError("its kernels have no rule for torch.func and forward-mode derivatives")


def sees_no_transforms(*tensors: torch.Tensor | None) -> bool:
    """Return whether no transform is under way, nor forward-mode, nor a tensor left from one.

    `check_untransformed` lets tensors pass that the transform under way does not see.
    """
    return forward_ad._current_level < 0 and not meets_transforms(tensors)


def meets_transforms(tensors: Iterable[torch.Tensor | None]) -> bool:
    """Return whether a transform of ``torch.func`` is under way, or a tensor is left from one."""
    if _transforms() is not None:
        return True
    return any(item is not None and _is_wrapped(item) for item in tensors)


def sinks_gradient(sinks: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """Return the gradient of sinks, whose value is 0: [Hq].

    Args:
        sinks: [Hq].
        lse: log-sum-exp of rows, fp32 [B, Hq, Sq]; -inf of those that see nothing, nor the sink.
        delta: of each row the sum of the products of its output and its gradient, less the gradient
            of its log-sum-exp.
    """
    weights = torch.exp(sinks.float()[:, None] - lse)
    weights = weights.masked_fill(lse == -torch.inf, 0.0)
    return -(weights * delta).sum((0, 2)).to(sinks.dtype)


@contextmanager
def compiling(kernel: str) -> Iterator[None]:
    """Turn what fails while a kernel is compiled into one error; the device's own pass.

    Args:
        kernel: what the message calls it.

    Raises:
        ExecutorError: it cannot be compiled here.
    """
    failed: type[Exception] = ImportError
    with suppress(ImportError):
        failed = importlib.import_module("triton.errors").TritonError
    try:
        yield
    except (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError)):
        raise
    except (
        *(failed, RuntimeError, ImportError, AttributeError, TypeError, ValueError, OSError),
        subprocess.SubprocessError,
    ) as error:
        text = str(error).strip()
        if "Triton Error [CUDA]" in text or "CUDA error" in text:
            raise
        reason = f"{type(error).__name__} {text.partition(chr(10))[0]}"
        raise ExecutorError(f"{kernel} cannot be compiled here: {reason}") from error
