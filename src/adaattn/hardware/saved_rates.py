"""The measured rates on disk: one JSON file for each device, torch version and thread count.

A file that cannot be read, is damaged, or belongs to another device is logged and treated as
absent; one that cannot be written is logged. Neither stops a call.
"""

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import torch

from adaattn._settings import cache_folder
from adaattn.spec import HardwareFacts, Precision, Rates

__all__ = ["delete_all", "path_of", "read", "write"]

_LOGGER = logging.getLogger("adaattn")

_FORMAT = 1
"""Raised when what is measured changes its meaning, which makes older files foreign."""


def path_of(facts: HardwareFacts) -> Path:
    """Return where the rates of a device are saved, whether they are or not."""
    key = json.dumps(_key(facts), sort_keys=True)
    slug = re.sub(r"[^a-z0-9]+", "-", facts.name.lower()).strip("-")[:40] or "device"
    return _folder() / f"{slug}-{hashlib.sha256(key.encode()).hexdigest()[:12]}.json"


def read(facts: HardwareFacts) -> Rates | None:
    """Return the saved rates of a device, or None when there are none to trust."""
    path = path_of(facts)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["key"] != _key(facts):
            raise ValueError(f"it belongs to {data['key']}")
        return _decode(data["rates"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _LOGGER.warning("ignored the measured rates in %s: %s; measure again", path, error)
        return None


def write(facts: HardwareFacts, rates: Rates) -> bool:
    """Return whether the rates were saved; the file is whole or not there at all."""
    path = path_of(facts)
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({"key": _key(facts), "rates": _encode(rates)}, file, indent=1)
        os.replace(temporary, path)
    except OSError as error:
        _LOGGER.warning("could not save the measured rates to %s: %s", path, error)
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        return False
    return True


def delete_all() -> None:
    """Delete the saved rates of every device."""
    for path in _folder().glob("*.json"):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            _LOGGER.warning("could not delete %s: %s", path, error)


def _folder() -> Path:
    return cache_folder() / "rates"


def _key(facts: HardwareFacts) -> dict[str, Any]:
    """Return what the rates depend on, as JSON values.

    The instructions are part of it because virtual machines give different processors one name.
    """
    return {
        "format": _FORMAT,
        "device_type": facts.device_type,
        "name": facts.name,
        "num_processors": facts.num_processors,
        "instructions": [precision.label for precision in facts.instructions],
        "torch": torch.__version__,
    }


def _encode(rates: Rates) -> dict[str, Any]:
    return {
        "flops": {precision.label: flops for precision, flops in rates.flops},
        "bandwidth": rates.bandwidth,
        "launch_s": rates.launch_s,
        "efficiency": dict(rates.efficiency),
        "source": rates.source,
    }


def _decode(data: dict[str, Any]) -> Rates:
    """Return the rates that `_encode` wrote; anything else is an error of some kind."""
    return Rates(
        flops=tuple(
            (Precision[label.upper()], _positive(flops)) for label, flops in data["flops"].items()
        ),
        bandwidth=_positive(data["bandwidth"]),
        launch_s=_positive(data["launch_s"]),
        efficiency=tuple(
            (_efficiency_key(key), _positive(share)) for key, share in data["efficiency"].items()
        ),
        source=str(data["source"]),
    )


def _positive(value: Any) -> float:
    number = float(value)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"expected a positive number, got {value!r}")
    return number


def _efficiency_key(key: str) -> str:
    """Return a "capability:precision:head_dim" key, checked to be one."""
    _, precision, head_dim = key.split(":")
    if precision.upper() not in Precision.__members__ or int(head_dim) <= 0:
        raise ValueError(f"expected a capability, a precision and a head dimension, got {key!r}")
    return key
