"""Tables of measured times: those shipped in the folder beside this file, and this machine's own.

A file that is damaged, of another format or for other hardware is logged once and counts as
none; `read_table`, which somebody asked for, raises instead. Own files are kept for each device,
thread count and version of torch; a shipped table serves the devices that are alike.
"""

import contextlib
import datetime
import hashlib
import json
import logging
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import torch

from adaattn import __version__
from adaattn._files import replace_file
from adaattn._packages import installed_version
from adaattn._settings import cache_folder
from adaattn.errors import TableError
from adaattn.hardware.datasheet import find_datasheet
from adaattn.spec import Cell, HardwareFacts, Precision, TimingTable

__all__ = ["own_path", "read_table", "save", "stamped", "table_text", "timings_of"]

_LOGGER = logging.getLogger("adaattn")
_SHIPPED: Final = Path(__file__).parent / "tables"
_PACKAGE: Final = Path(__file__).parents[1]
_DRIVER: Final = Path("/proc/driver/nvidia/version")

_FORMAT: Final = 2
"""Raised when what is measured changes its meaning."""

_ALIKE: Final = 2
"""Thread counts of a CPU within this factor share a table."""

_SAME_CHIP: Final = (frozenset({"H100 SXM", "H200"}),)
"""Cards that differ in their memory alone. Of 1272 places in cells of both that other executors
take from PyTorch's by times of the H200, 39 are lost on the H100, and of 1275 the other way 25. By
the device's time it is 4 of 1466 and 5 of 1475; the rest is the host's, which differs from run to
run and was made shorter after the H100's table."""

_HERE: Final = "measured here"

_DAMAGES: Final = (
    *(LookupError, TypeError, AttributeError, ValueError),
    *(ArithmeticError, RecursionError),
)
"""What reading a damaged file may raise: sizes beyond a float, and endless lists, too."""


def timings_of(facts: HardwareFacts) -> TimingTable | None:
    """Return the measured times for a device, or None where there are none.

    The shipped table of such a device, with the cells that were measured on this machine in the
    place of its own. What it has no times of goes by the table of a card of the same chip.

    Args:
        facts: the device; neither rates nor timings are read.
    """
    shipped, own = _shipped_path(facts), own_path(facts)
    tables = [_trusted(path, facts) for path in (shipped, own) if path is not None]
    known = [table for table in tables if table is not None]
    if not known:
        return None
    table = known[0]
    if len(known) == 2:
        source = f"{known[1].source} and {table.source}"
        table = replace(table.merged(known[1]), source=source)
    for like in _of_the_same_chip(facts):
        path = _shipped_path(like)
        other = None if path is None else _trusted(path, like)
        table = table if other is None else table.completed(other)
    return table


def own_path(facts: HardwareFacts) -> Path:
    """Return where this machine keeps its own times of a device, whether it has any or not."""
    key = json.dumps([_hardware(facts), facts.name, torch.__version__], sort_keys=True)
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    return cache_folder() / "timings" / f"{_slug(facts.name)[:40] or 'device'}-{digest}.json"


def read_table(path: Path, facts: HardwareFacts) -> TimingTable:
    """Return the table of a file, for a device.

    Raises:
        TableError: it cannot be read, is damaged, of a later format, or for other hardware.
    """
    subject, hint = f"timing table {path}", "measure again with adaattn.tune() or adaattn tune"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        version = data["format"]
        if version == _FORMAT:
            source = _HERE if path == own_path(facts) else f"table of {data['device']}"
            table = TimingTable.from_dict(data, source)
            other = _why_other(data["hardware"], table.device, facts)
    except OSError as error:
        raise TableError.got(subject, "a readable file", error.strerror, hint) from error
    except _DAMAGES as error:
        wrote = "what adaattn.tune wrote"
        raise TableError.got(subject, wrote, repr(error), hint) from error
    if version != _FORMAT:
        raise TableError.got(subject, f"format {_FORMAT}", f"format {version}", hint)
    if other:
        raise TableError.got(f"device of {subject}", *other, hint)
    return table


def save(facts: HardwareFacts, table: TimingTable) -> bool:
    """Return whether the cells of a table were put among this machine's own.

    The file is whole or not there at all; a failure is logged.
    """
    path = own_path(facts)
    known = _trusted(path, facts)
    text = table_text(facts, table if known is None else known.merged(table))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    except OSError as error:
        _LOGGER.warning("could not save the measured times to %s: %s", path, error)
        return False
    return True


def stamped(facts: HardwareFacts, cells: Iterable[Cell]) -> TimingTable:
    """Return a table of cells that were measured on this device now."""
    by_class: dict[str, tuple[Cell, ...]] = {}
    for cell in cells:
        own = replace(cell, source=_HERE)
        by_class[cell.problem_class] = (*by_class.get(cell.problem_class, ()), own)
    return TimingTable(
        source=_HERE,
        device=facts.name,
        versions=_versions(facts),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        commit=_commit(),
        cells=by_class,
    )


def table_text(facts: HardwareFacts, table: TimingTable) -> str:
    """Return the file of a table: JSON, a cell on a line."""
    header: dict[str, Any] = {"format": _FORMAT, "hardware": _hardware(facts), **table.to_dict()}
    classes = [
        f"{json.dumps(name)}: [\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]"
        for name, rows in header.pop("cells").items()
    ]
    head = json.dumps(header, indent=1).removesuffix("\n}")
    return head + ',\n "cells": {\n' + ",\n".join(classes) + "\n }\n}\n"


def _trusted(path: Path, facts: HardwareFacts) -> TimingTable | None:
    """Return the table of a file, or None where there is none to trust."""
    if not path.exists():
        return None
    try:
        return read_table(path, facts)
    except TableError as error:
        _warn_once(f"ignored: {error}")
        return None


@lru_cache(maxsize=64)
def _warn_once(message: str) -> None:
    """Log a warning that this process has not logged yet."""
    _LOGGER.warning("%s", message)


def _of_the_same_chip(facts: HardwareFacts) -> list[HardwareFacts]:
    """Return the other cards of `_SAME_CHIP`."""
    sheet = find_datasheet(facts.name) if facts.device_type == "cuda" else None
    own = "" if sheet is None else sheet.card
    cards = {card for chip in _SAME_CHIP if own in chip for card in chip - {own}}
    return [replace(facts, name=card) for card in sorted(cards)]


def _shipped_path(facts: HardwareFacts) -> Path | None:
    """Return the shipped table whose name fits the device; its contents are checked later."""
    if facts.device_type == "cuda":
        sheet = find_datasheet(facts.name)
        path = _SHIPPED / f"cuda-{_slug(sheet.card)}.json" if sheet else None
        return path if path and path.exists() else None
    near: dict[float, Path] = {}
    for path in sorted(_SHIPPED.glob(f"cpu-*-cores-{_slug(_instruction_set(facts))}.json")):
        cores = path.name.split("-")[1]
        if cores.isdecimal() and int(cores) > 0:
            near.setdefault(_factor(int(cores), facts.num_processors), path)
    best = min(near, default=float("inf"))
    return near[best] if best <= _ALIKE else None


def _why_other(
    hardware: dict[str, Any], device: str, facts: HardwareFacts
) -> tuple[str, str] | None:
    """Return (the device wanted, the device of the table) where they differ; None if alike."""
    own = _hardware(facts)
    if hardware["device_type"] == own["device_type"] == "cuda":
        sheet = find_datasheet(facts.name)
        same_card = sheet is not None and sheet is find_datasheet(device)
        return None if same_card or device == facts.name else (facts.name, device)
    alike = all(hardware.get(name) == own[name] for name in own if name != "num_processors")
    threads = int(hardware.get("num_processors", 0))
    if alike and threads > 0 and _factor(threads, facts.num_processors) <= _ALIKE:
        return None
    return _in_words(facts.name, own), _in_words(device, hardware)


def _in_words(name: str, hardware: dict[str, Any]) -> str:
    """Return a device and what its table depends on."""
    return f"{name} ({', '.join(f'{key} {value}' for key, value in hardware.items())})"


def _factor(first: int, second: int) -> float:
    """Return how many times the larger number is the smaller one."""
    return max(first, second) / max(min(first, second), 1)


def _hardware(facts: HardwareFacts) -> dict[str, Any]:
    """Return what decides whether a table serves a device, beside its name, as JSON values.

    A CPU that multiplies bf16 by itself and one that converts rank their executors differently.
    """
    if facts.device_type == "cuda":
        return {"device_type": "cuda"}
    return {
        "device_type": facts.device_type,
        "instruction_set": _instruction_set(facts),
        "native_bf16": Precision.BF16 in facts.instructions,
        "num_processors": facts.num_processors,
    }


def _instruction_set(facts: HardwareFacts) -> str:
    """Return what PyTorch's kernels for this CPU are compiled for, such as ``"AVX512 AMX"``."""
    return torch.backends.cpu.get_cpu_capability() + " AMX" * facts.has_tiles


def _slug(name: str) -> str:
    """Return a name for a file."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _versions(facts: HardwareFacts) -> dict[str, str]:
    """Return the versions that times may depend on, those that are there."""
    found = {"adaattn": __version__, "torch": torch.__version__}
    if facts.device_type == "cuda":
        with contextlib.suppress(OSError):
            driver = re.search(r"\s(\d+\.[\d.]+)\s", _DRIVER.read_text(encoding="utf-8"))
            found["driver"] = driver[1] if driver else ""
        found["triton"] = installed_version("triton")
        found["cuda"] = torch.version.cuda or ""
        found["cudnn"] = str(torch.backends.cudnn.version() or "")
    return {name: version for name, version in found.items() if version}


def _commit() -> str:
    """Return the commit of this code, with ``+`` if it was changed since; "" if unknown."""
    # Of the package's own files: an installed package may lie in somebody else's repository.
    commit = _git("log", "-1", "--format=%H")
    return commit + ("+" if commit and _git("status", "--porcelain") else "")


def _git(*arguments: str) -> str:
    """Return what git says of the package's files; "" where it is no checkout, or without git."""
    command = [shutil.which("git") or "git", "-C", str(_PACKAGE), *arguments, "--", "."]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
