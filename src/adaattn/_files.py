"""Files that are written whole or not at all."""

import secrets
from collections.abc import Callable
from pathlib import Path


def replace_file(target: Path, write: Callable[[Path], object]) -> None:
    """Put a file in the place of another once it is complete; a failure leaves nothing behind.

    Args:
        target: what is replaced, or made.
        write: called with the path to write, in the same folder.
    """
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        write(temporary)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
