"""Packages that may be missing."""

import importlib
import importlib.metadata
from typing import Any

from adaattn.errors import AssetError


def import_package(name: str) -> Any:
    """Return a module of an optional package.

    Args:
        name: such as ``"safetensors.torch"``.

    Raises:
        AssetError: it is not installed; says how to install it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package, hint = name.partition(".")[0], "run: pip install 'adaattn[hf]'"
        raise AssetError.got(package, "an installed package", error, hint) from error


def installed_version(name: str) -> str:
    """Return the version of a package, or "" where none is installed.

    Args:
        name: as pip knows it.
    """
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
