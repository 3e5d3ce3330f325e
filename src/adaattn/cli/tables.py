"""Files of measured times, as the commands find them: read, made room for, or set aside."""

import itertools
import json
from pathlib import Path

from adaattn.errors import AssetError, TableError
from adaattn.hardware.tables import own_path, read_table
from adaattn.spec import HardwareFacts, TimingTable

__all__ = ["make_room", "read"]

_HINT = "measure again with adaattn tune"


def read(path: Path, facts: HardwareFacts) -> TimingTable:
    """Return the table of a file, for a device.

    Raises:
        TableError: as `read_table`, and in plain words what is wrong with a damaged file.
    """
    try:
        return read_table(path, facts)
    except TableError as error:
        if error.__cause__ is None or isinstance(error.__cause__, OSError):
            raise
        wanted = "a table that adaattn tune wrote"
        raise TableError.got(f"timing table {path}", wanted, _damage(path), _HINT) from error


def _damage(path: Path) -> str:
    """Return what stands in a file that is no table."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        return "a file that is no text"
    except json.JSONDecodeError as error:
        return f"text that is no JSON from line {error.lineno} on" if error.doc else "an empty file"
    except RecursionError:
        data = None
    is_table = isinstance(data, dict) and {"format", "cells"} <= data.keys()
    return "one with damaged entries" if is_table else "JSON of another kind"


def make_room(facts: HardwareFacts) -> str:
    """Make sure that this machine's own times can be kept, and that none are written over.

    Returns:
        where an own table went that cannot be read, and what is wrong with it; "" without one.

    Raises:
        AssetError: there can be no such file.
    """
    own = own_path(facts)
    try:
        own.parent.mkdir(parents=True, exist_ok=True)
        if not own.exists():
            return ""
        read(own, facts)
    except OSError as error:
        wanted, hint = "one that can be made", "set ADAATTN_CACHE to another, or use --out"
        raise AssetError.got(f"folder {own.parent}", wanted, error.strerror, hint) from error
    except TableError as error:
        names = (own.with_suffix(f".damaged-{number}") for number in itertools.count(1))
        kept = next(name for name in names if not name.exists())
        own.replace(kept)
        return f"{error}; it is kept as {kept}"
    return ""
