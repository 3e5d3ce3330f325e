"""Attention under a real memory limit: who fails, and who does not.

On a GPU the limit is PyTorch's (``set_per_process_memory_fraction``), on a CPU the kernel's
(``RLIMIT_AS`` of a child process): an allocation beyond it fails there and then. The
limit counts what a call takes beside its inputs.

    python -m benchmarks.gpu.budget '[{"variant": "naive", ...}]'
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import adaattn
from adaattn.hardware import peak_memory
from adaattn.kernels.cuda_utils import memory_efficient_attention
from benchmarks.gpu.clock import free_unused, once
from benchmarks.gpu.rows import OK, OUT_OF_MEMORY, UNAVAILABLE, WRONG, Row, Settings, guarded, line
from benchmarks.gpu.tensors import (
    BACKWARD_FACTOR,
    Attention,
    Inputs,
    Sample,
    TensorCell,
    draw,
    naive,
    sdpa,
    softcapped,
)

__all__ = ["attempts", "run"]

_ROOT = Path(__file__).resolve().parents[2]

_PLANNED_SHARE = 0.5
"""Of the limit is what this library is told: allocators round up, and outputs count too."""

_CHILD_LIMIT_S = 240


def run(settings: Settings) -> list[Row]:
    """Return a row for each length, phase and variant."""
    sizes = _sizes(settings)
    cases = {
        "causal": ("naive", "F.sdpa", "adaattn", "memory_efficient_attention"),
        "causal, softcap 30": ("naive", "adaattn"),
    }
    if settings.quick:
        del cases["causal"]
    requests = []
    for semantics, variants in cases.items():
        for variant in variants:
            request = sizes | {"variant": variant, "semantics": semantics}
            if variant == "memory_efficient_attention":
                request |= {"lengths": _shortened(sizes["lengths"])}
            requests.append(request)
    rows: list[Row] = []
    # A process for each variant, whose memory no other one has used; in a quick run one for all.
    for part in [requests] if settings.quick else [[request] for request in requests]:
        found = _attempts_of(part) if settings.is_gpu else _in_child(part)
        rows += [Row(**values) for values in found]
        for values in found:
            settings.say(line(Row(**values)))
    order = list(dict.fromkeys((row.cell, row.phase) for row in rows))
    return sorted(rows, key=lambda row: order.index((row.cell, row.phase)))


def _sizes(settings: Settings) -> dict[str, Any]:
    """Return the part of a request that the device decides."""
    if settings.is_gpu:
        sizes = {"heads": 16, "dim": 128, "dtype": "bfloat16", "budget_bytes": 4 << 30}
        lengths = {"forward": [4096, 16384, 65536], "training": [4096, 16384]}
    else:
        sizes = {"heads": 8, "dim": 64, "dtype": "float32", "budget_bytes": 256 << 20}
        lengths = {"forward": [1024, 4096, 8192], "training": [1024, 4096]}
    if settings.quick:
        sizes |= {"heads": 4, "dim": 16, "budget_bytes": 48 << 20}
        lengths = {"forward": [256, 2048]}
    return sizes | {"lengths": lengths, "device": settings.device}


def _shortened(lengths: dict[str, list[int]]) -> dict[str, list[int]]:
    """Return the lengths without the last of each phase, where chunks would take a minute.

    Each chunk of a causal call reads another number of keys, for which cuDNN plans anew.
    """
    return {phase: values[:-1] or values for phase, values in lengths.items()}


def _attempts_of(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what `attempts` returns for several variants."""
    return [row for request in requests for row in attempts(request)]


def attempts(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the fields of a row for each length and phase of one variant, each under the limit.

    Args:
        request: variant, semantics, device, heads, dim, dtype, budget_bytes, and the lengths of
            each phase.
    """
    device, limit = request["device"], request["budget_bytes"]
    dtype = getattr(torch, request["dtype"])
    softcap = 30.0 if "softcap" in request["semantics"] else 0.0
    _warm(request, device, dtype)
    rows = []
    for phase, lengths in request["lengths"].items():
        training = phase == "training"
        for length in lengths:
            shape = (1, request["heads"], length, request["dim"])
            cell = TensorCell(name="", shape=shape, dtype=dtype)
            inputs = draw(cell, device, grad=training)
            exact = Sample(inputs, rows=8, softcap=softcap)
            row = {
                "suite": "memory",
                "cell": f"{_mib(limit)} MiB, S{length}, {request['semantics']}",
                "variant": request["variant"],
                "phase": phase,
                "dtype": request["dtype"],
            }
            found = _attempt(request, inputs, training, limit)
            row |= _judged(found, exact, dtype, limit)
            if ms := row.get("median_ms"):
                flops = cell.flops * (BACKWARD_FACTOR if training else 1.0)
                row |= {"tokens_per_s": 1e3 * length / ms, "tflops": flops / ms / 1e9}
            rows.append(row)
    return rows


def _attempt(request: dict[str, Any], inputs: Inputs, training: bool, limit: int) -> dict[str, Any]:
    """Return output (None where it failed), status, milliseconds and peak of one call."""
    device = request["device"]
    function = _function(request)
    gradient = torch.ones_like(inputs[0]) if training else None

    def run() -> torch.Tensor:
        if gradient is None:
            with torch.no_grad():
                return function(*inputs)
        output = function(*inputs)
        torch.autograd.grad(output, inputs, gradient)
        return output

    free_unused(device)
    peak = peak_memory(device)
    release = _limit(device, limit)
    try:
        with peak:
            output, status = guarded(run)
            if device == "cuda":
                torch.cuda.synchronize()
        took_ms = None
        if output is not None:
            took_ms, status = guarded(partial(once, run, 1, device))
    finally:
        release()
    return {"output": output, "status": status, "ms": took_ms, "peak_bytes": peak.added_bytes}


def _judged(found: dict[str, Any], exact: Sample, dtype: torch.dtype, limit: int) -> dict[str, Any]:
    """Return the fields of a row; no time on a wrong result."""
    row: dict[str, Any] = {"status": found["status"], "extra": {"limit_bytes": limit}}
    if found["status"] != OK:
        return row | {"note": "an allocation was refused"}
    error, mse = exact.error(found["output"])
    row |= {"mse": mse, "relative_error": error}
    allowed = 2 * exact.eager_error() + torch.finfo(dtype).eps
    if not error <= allowed:
        return row | {"status": WRONG, "note": f"relative error {error:.3g}"}
    return row | {
        "mean_ms": found["ms"],
        "std_ms": 0.0,
        "median_ms": found["ms"],
        "rounds": 1,
        "peak_bytes": found["peak_bytes"],
    }


def _function(request: dict[str, Any]) -> Attention:
    """Return the variant; this library's are told half of the limit."""
    told = int(_PLANNED_SHARE * request["budget_bytes"])
    softcap = 30.0 if "softcap" in request["semantics"] else None
    policy = adaattn.Policy(name="limited", memory_budget_bytes=told)
    ours = partial(
        adaattn.scaled_dot_product_attention, is_causal=True, softcap=softcap, policy=policy
    )
    chunked = partial(memory_efficient_attention, is_causal=True, memory_budget_bytes=told)
    functions: dict[str, Attention] = {
        "naive": softcapped if softcap else naive,
        "F.sdpa": sdpa,
        "adaattn": ours,
        "memory_efficient_attention": chunked,
    }
    return functions[request["variant"]]


def _warm(request: dict[str, Any], device: str, dtype: torch.dtype) -> None:
    """Load kernels and start threads, whose memory is no call's."""
    small = TensorCell(name="", shape=(1, request["heads"], 128, request["dim"]), dtype=dtype)
    for phase in request["lengths"]:
        inputs = draw(small, device, grad=phase == "training")
        output = _function(request)(*inputs)
        if phase == "training":
            output.sum().backward()


def _limit(device: str, limit: int) -> Callable[[], None]:
    """Allow this process so many bytes more than it has; return what ends the limit."""
    if device == "cuda":
        torch.cuda.synchronize()
        total = torch.cuda.mem_get_info()[1]
        share = (torch.cuda.memory_reserved() + limit) / total
        torch.cuda.set_per_process_memory_fraction(min(share, 1.0))
        return lambda: torch.cuda.set_per_process_memory_fraction(1.0)
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    allowed = pages * resource.getpagesize() + limit
    resource.setrlimit(resource.RLIMIT_AS, (allowed, hard))
    return lambda: resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _in_child(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what `_attempts_of` returns, from a process whose address space is limited."""
    names = ", ".join(request["variant"] for request in requests)
    row = {"suite": "memory", "cell": requests[0]["semantics"], "variant": names}
    if not sys.platform.startswith("linux"):
        note = "a limit on a process's memory needs Linux"
        return [row | {"status": UNAVAILABLE, "note": note}]
    package = Path(adaattn.__file__).resolve().parents[1]
    search = [str(_ROOT), str(package), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.budget", json.dumps(requests)],
        cwd=_ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(item for item in search if item)},
        capture_output=True,
        text=True,
        timeout=_CHILD_LIMIT_S,
        check=False,
    )
    if done.returncode == 0:
        found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
        return found
    if done.returncode < 0 or "bad_alloc" in done.stderr:
        note = f"the process was ended with status {done.returncode}"
        return [row | {"status": OUT_OF_MEMORY, "note": note}]
    raise RuntimeError(f"{names} failed under a limit:\n{done.stderr}")


def _mib(count: int) -> int:
    """Return bytes in MiB."""
    return math.ceil(count / 2**20)


if __name__ == "__main__":
    print(json.dumps(_attempts_of(json.loads(sys.argv[1]))))
