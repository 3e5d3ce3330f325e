"""Cautious rates for a device that is not in the table of data sheets."""

from adaattn.hardware.datasheet import LAUNCH_S
from adaattn.spec import HardwareFacts, Precision, Rates

__all__ = ["default_rates"]


def default_rates(facts: HardwareFacts) -> Rates:
    """Return rates by the number of processors, and by generation on a GPU.

    Args:
        facts: the device; its rates are not read.
    """
    if facts.device_type == "cuda":
        return _default_gpu_rates(facts)
    return _default_cpu_rates(facts)


# FLOP per clock and multiprocessor (fp64, fp32, tensor fp16 with fp32 accumulation), and GB/s
# per multiprocessor, by compute capability; the lowest of each generation's cards.
_PER_PROCESSOR = {
    (12, 0): (4, 256, 512, 8),
    (10, 0): (128, 256, 8192, 40),
    (9, 0): (256, 256, 4096, 15),
    (8, 9): (4, 256, 512, 5),
    (8, 6): (4, 256, 512, 7),
    (8, 0): (128, 128, 2048, 14),
    (7, 5): (4, 128, 512, 7),
    (7, 0): (64, 128, 1024, 11),
    (0, 0): (4, 128, 0, 7),
}
_GPU_HZ = 1.2e9
"""Below the sustained clock of any card since Volta."""


def _default_gpu_rates(facts: HardwareFacts) -> Rates:
    generation = max(key for key in _PER_PROCESSOR if key <= facts.compute_capability)
    fp64, fp32, tensor, gigabytes = _PER_PROCESSOR[generation]
    per_clock = {Precision.FP64: fp64, Precision.FP32: fp32}
    for precision in facts.instructions:
        if precision not in per_clock:
            per_clock[precision] = tensor * 16 // precision.bits or fp32
    # Storage formats that the card computes through fp32.
    for precision in (Precision.BF16, Precision.FP16):
        per_clock.setdefault(precision, fp32)
    scale = facts.num_processors * _GPU_HZ
    return Rates(
        flops=tuple(sorted((p, float(clock) * scale) for p, clock in per_clock.items())),
        bandwidth=gigabytes * 1e9 * facts.num_processors,
        launch_s=LAUNCH_S,
        source=f"default of {_counted(facts.num_processors, 'multiprocessor')}",
    )


_CPU_FP32 = 4e10
"""FLOP/s of one thread: AVX2 at 2.5 GHz, half of its peak."""


def _default_cpu_rates(facts: HardwareFacts) -> Rates:
    threads = max(facts.num_processors, 1)
    fp32 = threads * _CPU_FP32
    native = set(facts.instructions)
    flops = {
        Precision.FP64: fp32 / 2,
        Precision.FP32: fp32,
        # Formats without instructions are converted at every use.
        Precision.BF16: fp32 * 2 if Precision.BF16 in native else fp32 / 4,
        Precision.FP16: fp32 * 2 if Precision.FP16 in native else fp32 / 4,
    }
    if Precision.INT8 in native:
        flops[Precision.INT8] = fp32 * 2
    return Rates(
        flops=tuple(sorted(flops.items())),
        # One thread cannot fill the memory bus; a desktop's two channels are full with two.
        bandwidth=1e10 * min(threads, 2),
        launch_s=LAUNCH_S,
        source=f"default of {_counted(threads, 'thread')}",
    )


def _counted(number: int, noun: str) -> str:
    """Return how many there are of something."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
