"""Measured rates: run the micro-benchmark, save what it found, load it again."""

import logging

import torch

from adaattn.hardware import saved_rates
from adaattn.hardware.benchmark import MEASURED, run_benchmark
from adaattn.hardware.probe import clear_cache, describe, resolve
from adaattn.spec import Rates

__all__ = ["load_rates", "measure_rates"]

_LOGGER = logging.getLogger("adaattn")


def measure_rates(device: torch.device | str | None = None) -> Rates:
    """Return what the device reaches, measured now, in about a second, and saved for later.

    The next `probe` of the device uses it, in this process and in later ones. On CUDA the first
    measurement of a process waits some seconds more for kernels to load. On a machine so
    busy that the numbers do not settle within a few seconds they are returned, with a warning
    in the log, and not saved.

    Args:
        device: as for `probe`.

    Raises:
        DeviceError: the device is neither a CPU nor a CUDA device that this process can see.

    Example:
        >>> from adaattn.hardware import load_rates, measure_rates
        >>> rates = load_rates("cpu") or measure_rates("cpu")
        >>> rates.bandwidth > 0
        True
    """
    chosen = resolve(device)
    facts = describe(chosen)
    rates = run_benchmark(chosen, facts)
    if rates.source == MEASURED:
        saved_rates.write(facts, rates)
        clear_cache()
    else:
        _LOGGER.warning(
            "the rates of %s did not settle and were not saved: measure again when less runs"
            " beside it",
            facts.name,
        )
    return rates


def load_rates(device: torch.device | str | None = None) -> Rates | None:
    """Return the rates measured earlier on this device, or None when there are none.

    They belong to the device's name and instructions, the version of torch and, on a CPU, the
    number of threads; a damaged file is logged and counts as none.

    Args:
        device: as for `probe`.

    Raises:
        DeviceError: as `measure_rates`.
    """
    return saved_rates.read(describe(device))
