"""``adaattn info``: hardware, versions and executors, even where half of it is broken."""

import os
import platform
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from adaattn._packages import installed_version
from adaattn.cli.console import STDOUT, check_outputs, write_json

__all__ = ["collect", "run_info"]

_PACKAGES = ("torch", "triton", "transformers", "safetensors", "gguf", "typer", "rich")


def run_info(*, json_path: str | None) -> None:
    """Print every section; one that fails prints its error instead.

    Args:
        json_path: where to write JSON instead; ``-`` is stdout, None prints text.
    """
    check_outputs(json_path)
    found = collect()
    if json_path is not None:
        write_json(json_path, found)
    if json_path != STDOUT:
        for name, section in found.items():
            print(f"{name}:")
            _print(section, indent=2)


def collect() -> dict[str, Any]:
    """Return every section by name; a failing one holds ``{"error": ...}``."""
    sections: dict[str, Callable[[], Any]] = {
        "adaattn": _adaattn,
        "versions": _versions,
        "cuda": _cuda,
        "devices": _devices,
        "executors": _executors,
    }
    return {name: _guarded(section) for name, section in sections.items()}


def _guarded(section: Callable[[], Any]) -> Any:
    try:
        return section()
    except Exception as error:  # noqa: BLE001 - a broken part is what this command reports
        return {"error": _sentence(error)}


def _sentence(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _adaattn() -> dict[str, str]:
    import adaattn
    from adaattn._settings import cache_folder

    return {
        "version": adaattn.__version__,
        "folder": os.path.dirname(str(adaattn.__file__)),
        "cache": str(cache_folder()),
    }


def _versions() -> dict[str, str]:
    packages = {name: installed_version(name) or "not installed" for name in _PACKAGES}
    return {"python": sys.version.split()[0], "platform": platform.platform(), **packages}


def _cuda() -> dict[str, Any]:
    import torch

    cudnn = torch.backends.cudnn
    return {
        "built with CUDA": torch.version.cuda or "none",
        "cuDNN": cudnn.version() if cudnn.is_available() else "none",
        "CUDA devices": torch.cuda.device_count(),
    }


def _devices() -> dict[str, Any]:
    import torch

    names = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    return {name: _guarded(partial(_device, name)) for name in names}


def _device(name: str) -> dict[str, Any]:
    from adaattn.hardware import probe

    facts = probe(name)
    return {
        "name": facts.name,
        "compute capability": ".".join(map(str, facts.compute_capability)),
        "memory GB": round(facts.memory_bytes / 1e9, 1),
        "processors": facts.num_processors,
        "last-level cache MB": round(facts.l2_bytes / 1e6, 1),
        "native formats": [precision.label for precision in facts.instructions],
        "TFLOP/s": {
            precision.label: round(rate / 1e12, 3) for precision, rate in facts.rates.flops
        },
        "bandwidth GB/s": round(facts.rates.bandwidth / 1e9, 1),
        "launch us": round(facts.rates.launch_s * 1e6, 1),
        "rates": facts.rates.source,
        "measured times": _timings(facts.timings),
    }


def _timings(table: Any) -> dict[str, Any] | str:
    """Return which table of measured times decides on a device, or how to get one."""
    if table is None:
        return "none: adaattn tune measures one"
    cells = sum(map(len, table.cells.values()))
    return {"source": table.source, "date": table.date, "cells": cells}


def _executors() -> dict[str, Any]:
    import torch

    from adaattn.backends import capabilities

    devices = ["cpu", *(["cuda:0"] if torch.cuda.device_count() else [])]
    return {
        name: {
            capability.name: _guarded(partial(_available, capability, name))
            for capability in capabilities()
        }
        for name in devices
    }


def _available(capability: Any, device: str) -> str:
    """Return "available", or why an executor can serve no call here, few rows or many columns."""
    from adaattn.hardware import probe
    from adaattn.planning import reasons
    from adaattn.spec import AttentionProblem, Precision

    facts = probe(device)
    precision = next(p for p in reversed(Precision) if p in capability.precisions)
    problems = [
        AttentionProblem(
            batch=1,
            num_heads=capability.min_group_size,
            num_kv_heads=1,
            len_q=rows,
            len_k=64,
            head_dim=dim,
            value_dim=dim,
            precision=precision,
            device_type=facts.device_type,
            scale=dim**-0.5,
        )
        for rows, dim in ((1, 64), (64, 64), (64, 512))
    ]
    fewest = min((reasons(capability, problem, facts) for problem in problems), key=len)
    return "; ".join(fewest) or "available"


def _print(value: Any, indent: int) -> None:
    margin = " " * indent
    width = max((len(str(key)) for key in value), default=0)
    for key, item in value.items():
        if isinstance(item, dict) and not all(isinstance(v, int | float) for v in item.values()):
            print(f"{margin}{key}:")
            _print(item, indent + 2)
            continue
        if isinstance(item, dict):
            item = ", ".join(f"{name} {number}" for name, number in item.items())
        elif isinstance(item, list):
            item = ", ".join(map(str, item))
        print(f"{margin}{key:<{width}}  {item}")
