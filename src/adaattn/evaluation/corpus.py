"""Texts to evaluate on: one shipped with the package, or any UTF-8 file."""

from importlib import resources
from pathlib import Path

from adaattn.errors import AssetError

__all__ = ["SHIPPED_TEXTS", "load_text"]

SHIPPED_TEXTS = ("opticks",)
"""Names that need no file: ``opticks`` is Newton's, in the public domain."""


def load_text(name: str) -> str:
    """Return a text by its shipped name or its path.

    Args:
        name: one of `SHIPPED_TEXTS`, or the path of a UTF-8 file.

    Raises:
        AssetError: there is no such text, or it is not UTF-8, or it is empty.

    Example:
        >>> load_text("opticks")[:7]
        'OPTICKS'
    """
    try:
        if name in SHIPPED_TEXTS:
            shipped = resources.files("adaattn.evaluation.texts") / f"{name}.txt"
            text = shipped.read_text(encoding="utf-8")
        else:
            text = Path(name).expanduser().read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise AssetError.got(f"text {name!r}", "a UTF-8 file", error) from error
    except OSError as error:
        raise AssetError.got(
            f"text {name!r}",
            f"one of {', '.join(SHIPPED_TEXTS)}, or a readable file",
            error.strerror or repr(error),
            "check the path",
        ) from error
    if not text.strip():
        raise AssetError.got(f"text {name!r}", "some words", "an empty file")
    return text
