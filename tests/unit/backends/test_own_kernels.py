"""What executors with kernels of their own call a failure, and what they refuse."""

import importlib.metadata
import subprocess

import pytest
import torch

from adaattn.backends import own_kernels
from adaattn.errors import ExecutorError


@pytest.mark.parametrize(
    "error",
    [
        subprocess.CalledProcessError(1, "gcc"),
        PermissionError("read-only"),
        ImportError("libtriton"),
        RuntimeError("Failed to find C compiler"),
        ValueError("no such layout"),
    ],
    ids=repr,
)
def test_what_fails_while_a_kernel_is_compiled_is_one_error_that_names_it(error: Exception) -> None:
    kind = type(error).__name__
    with (
        pytest.raises(ExecutorError, match=f"the kernel cannot be compiled here: {kind}"),
        own_kernels.compiling("the kernel"),
    ):
        raise error


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("no room"),
        torch.AcceleratorError("illegal memory access"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    ],
    ids=repr,
)
def test_what_the_device_reports_is_not_taken_for_a_compiler_s_failure(error: Exception) -> None:
    with pytest.raises(type(error)), own_kernels.compiling("the kernel"):
        raise error


@pytest.mark.parametrize(
    ("version", "why"),
    [("3.2.0", "it needs Triton 3.6 or later, found 3.2.0"), ("3.6.0", ""), ("3.10.0+git1", "")],
)
def test_a_triton_that_is_too_old_is_a_reason(
    version: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    assert own_kernels.why_no_triton.__wrapped__() == why


@pytest.mark.parametrize(("hip", "why"), [(None, ""), ("6.2", "it is for NVIDIA GPUs")])
def test_a_rocm_gpu_is_none_for_instructions_of_nvidia(
    hip: str | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_kernels, "why_no_triton", lambda: "")
    monkeypatch.setattr(torch.version, "hip", hip)
    assert own_kernels.why_no_gluon() == why


def test_tensors_of_a_transform_are_refused() -> None:
    def attend(x: torch.Tensor) -> torch.Tensor:
        own_kernels.check_untransformed(x)
        return x

    attend(torch.ones(2))
    with pytest.raises(ExecutorError, match=r"torch\.func"):
        torch.func.vmap(attend)(torch.ones(2, 2))
