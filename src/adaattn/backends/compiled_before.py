"""What this machine has compiled before, so that it costs nothing now.

Triton keeps compiled kernels on disk and cannot be asked cheaply which. An empty file beside the
timing tables notes each, named by what it depends on and by versions.
"""

import hashlib
import logging
from functools import lru_cache
from pathlib import Path
from typing import Final

import torch

from adaattn import __version__
from adaattn._packages import installed_version
from adaattn._settings import cache_folder
from adaattn.hardware import probe

__all__ = ["is_noted", "note", "num_noted"]

_LOGGER = logging.getLogger("adaattn")
_NOTED: Final[set[str]] = set()
"""Of this process: found or made."""


def note(kernel: object) -> None:
    """Note that a kernel is compiled; a folder that cannot be written to is logged.

    Args:
        kernel: what it depends on; equal kernels print alike.
    """
    name = _name(kernel)
    if name in _NOTED:
        return
    _NOTED.add(name)
    path = _folder() / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        _LOGGER.warning("that a kernel is compiled cannot be noted in %s: %s", path.parent, error)


def is_noted(kernel: object) -> bool:
    """Return whether a kernel was compiled on this machine before."""
    name = _name(kernel)
    if name not in _NOTED and (_folder() / name).exists():
        _NOTED.add(name)
    return name in _NOTED


def num_noted() -> int:
    """Return how many kernels this process knows to be compiled: it grows when one is."""
    return len(_NOTED)


def _folder() -> Path:
    """Return where notes are."""
    return cache_folder() / "compiled"


def _name(kernel: object) -> str:
    """Return the name of a kernel's note."""
    return hashlib.sha256(f"{kernel!r} {_card()} {_versions()}".encode()).hexdigest()[:24]


def _card() -> str:
    """Return what kernels are compiled for: the generation of the current device."""
    return str(probe().compute_capability)


@lru_cache(maxsize=1)
def _versions() -> str:
    """Return the versions of all that a kernel is made with."""
    return f"{__version__} {torch.__version__} {installed_version('triton') or 'none'}"
