"""The only reader of environment variables."""

import os
from pathlib import Path

__all__ = ["cache_folder"]


def cache_folder() -> Path:
    """Return the folder for converted models and measured times (not created here).

    ``ADAATTN_CACHE`` names it; else ``XDG_CACHE_HOME/adaattn``; else ``~/.cache/adaattn``.
    """
    if named := os.environ.get("ADAATTN_CACHE"):
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "adaattn"
