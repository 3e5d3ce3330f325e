"""Invented machines for planner tests: the facts of a card, from its datasheet.

Nothing here looks at the machine that runs the test. Rates are the published dense peaks,
bandwidth is the published one; a CPU's are clock times width, per the vendor's page.
"""

from typing import Final

from adaattn.errors import ArgumentError
from adaattn.spec import HardwareFacts, Precision, Rates

__all__ = ["fake_facts"]

_TERA = 1e12
_GIB = 1024**3
_MIB = 1024**2
_CUDA_LAUNCH_S = 5e-6
_CPU_LAUNCH_S = 2e-6

_FP64, _FP32, _BF16, _FP16 = Precision.FP64, Precision.FP32, Precision.BF16, Precision.FP16
_E4M3, _E5M2 = Precision.FP8_E4M3, Precision.FP8_E5M2
_INT8, _INT4 = Precision.INT8, Precision.INT4


def _facts(
    *,
    device: str,
    name: str,
    teraflops: dict[Precision, float],
    bandwidth_tb: float,
    memory_gib: int,
    processors: int,
    l2_mib: float,
    compute_capability: tuple[int, int] = (0, 0),
    has_tiles: bool = False,
    source: str,
) -> HardwareFacts:
    """Return the facts of one machine."""
    return HardwareFacts(
        device_type=device,
        name=name,
        compute_capability=compute_capability,
        memory_bytes=memory_gib * _GIB,
        num_processors=processors,
        l2_bytes=int(l2_mib * _MIB),
        instructions=tuple(teraflops),
        has_tiles=has_tiles,
        rates=Rates(
            flops=tuple((precision, rate * _TERA) for precision, rate in teraflops.items()),
            bandwidth=bandwidth_tb * _TERA,
            launch_s=_CUDA_LAUNCH_S if device == "cuda" else _CPU_LAUNCH_S,
            source=f"datasheet {source}",
        ),
    )


_MACHINES: Final = {
    "h200": _facts(
        device="cuda",
        name="NVIDIA H200",
        compute_capability=(9, 0),
        teraflops={_FP64: 67, _FP32: 67, _BF16: 989.5, _FP16: 989.5}
        | {_E4M3: 1979, _E5M2: 1979, _INT8: 1979},
        bandwidth_tb=4.8,
        memory_gib=141,
        processors=132,
        l2_mib=50,
        source="nvidia.com/en-us/data-center/h200",
    ),
    "a100": _facts(
        device="cuda",
        name="NVIDIA A100-SXM4-80GB",
        compute_capability=(8, 0),
        teraflops={_FP64: 19.5, _FP32: 19.5, _BF16: 312, _FP16: 312, _INT8: 624, _INT4: 1248},
        bandwidth_tb=2.039,
        memory_gib=80,
        processors=108,
        l2_mib=40,
        source="nvidia.com/en-us/data-center/a100",
    ),
    "l40s": _facts(
        device="cuda",
        name="NVIDIA L40S",
        compute_capability=(8, 9),
        teraflops={_FP64: 1.43, _FP32: 91.6, _BF16: 362, _FP16: 362}
        | {_E4M3: 733, _E5M2: 733, _INT8: 733, _INT4: 733},
        bandwidth_tb=0.864,
        memory_gib=48,
        processors=142,
        l2_mib=96,
        source="nvidia.com/en-us/data-center/l40s",
    ),
    "v100": _facts(
        device="cuda",
        name="Tesla V100-SXM2-32GB",
        compute_capability=(7, 0),
        teraflops={_FP64: 7.8, _FP32: 15.7, _FP16: 125},
        bandwidth_tb=0.9,
        memory_gib=32,
        processors=80,
        l2_mib=6,
        source="nvidia.com/en-gb/data-center/tesla-v100",
    ),
    "pascal": _facts(
        device="cuda",
        name="Tesla P40",
        compute_capability=(6, 1),
        teraflops={_FP64: 0.367, _FP32: 11.76, _INT8: 47},
        bandwidth_tb=0.346,
        memory_gib=24,
        processors=30,
        l2_mib=3,
        source="NVIDIA Tesla P40 GPU accelerator, PB-08338",
    ),
    # 8 cores at 3 GHz, two 8-wide fp32 multiply-adds a cycle, two channels of DDR4-3200.
    "cpu": _facts(
        device="cpu",
        name="8-core AVX2 desktop",
        teraflops={_FP64: 0.384, _FP32: 0.768},
        bandwidth_tb=0.0512,
        memory_gib=32,
        processors=8,
        l2_mib=32,
        source="clock times width",
    ),
    # 56 cores at 2 GHz, AMX: 2048 bf16 FLOP a core and cycle; eight channels of DDR5-4800.
    "cpu_amx": _facts(
        device="cpu",
        name="Intel Xeon Platinum 8480+",
        teraflops={_FP64: 3.58, _FP32: 7.17, _BF16: 229, _INT8: 459},
        bandwidth_tb=0.307,
        memory_gib=256,
        processors=56,
        l2_mib=105,
        has_tiles=True,
        source="clock times width",
    ),
}


def fake_facts(machine: str) -> HardwareFacts:
    """Return the facts of an invented machine.

    Args:
        machine: ``"h200"``, ``"a100"``, ``"l40s"``, ``"v100"``, ``"pascal"``, ``"cpu"`` or
            ``"cpu_amx"``.

    Raises:
        ArgumentError: there is no such machine.

    Example:
        >>> fake_facts("v100").compute_capability
        (7, 0)
    """
    try:
        return _MACHINES[machine]
    except KeyError:
        raise ArgumentError.got("machine", sorted(_MACHINES), repr(machine)) from None
