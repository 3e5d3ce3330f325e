"""The only reader of environment variables.

``ADAATTN_CACHE`` names the folder of the cache; ``ADAATTN_DEBUG=1`` checks what only a wait for the
GPU can check; ``CUBLAS_WORKSPACE_CONFIG`` is read as PyTorch does.
"""

import os
from pathlib import Path

from adaattn.errors import ArgumentError


def cache_folder() -> Path:
    """Return the folder for converted models and measured times (not created here).

    ``ADAATTN_CACHE`` names it; else ``XDG_CACHE_HOME/adaattn``; else ``~/.cache/adaattn``.
    """
    if named := os.environ.get("ADAATTN_CACHE"):
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "adaattn"


def has_fixed_workspace() -> bool:
    """Return whether PyTorch takes cuBLAS's products to be the same each time."""
    return os.environ.get("CUBLAS_WORKSPACE_CONFIG") in (":4096:8", ":16:8")


def is_debugging() -> bool:
    """Return whether calls check what only a wait for the GPU can check: ``ADAATTN_DEBUG`` is 1.

    Raises:
        ArgumentError: it is neither 0 nor 1.
    """
    value = os.environ.get("ADAATTN_DEBUG") or "0"
    if value not in ("0", "1"):
        raise ArgumentError.got("ADAATTN_DEBUG", "0 or 1", repr(value))
    return value == "1"
