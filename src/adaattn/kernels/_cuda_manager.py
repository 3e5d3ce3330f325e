"""What one device is and offers to a kernel: a view of `adaattn.hardware.probe`."""

import threading
from typing import Any, ClassVar, Final

import torch

from adaattn import hardware
from adaattn._dtypes import precision_of
from adaattn._numbers import require_integer
from adaattn.attention.precision_mode import named_precision
from adaattn.errors import ArgumentError
from adaattn.hardware.probe import resolve
from adaattn.spec import HardwareFacts, Precision

_KIB: Final = 1 << 10

# Most shared memory that one thread block can have, after opting in: CUDA C++ Programming Guide,
# "Technical Specifications per Compute Capability". The last entry not above a device's capability
# counts; what is older than the first has 48 KiB.
_SHARED_MEMORY: Final = (
    ((5, 0), 48 * _KIB),
    ((7, 0), 96 * _KIB),
    ((7, 5), 64 * _KIB),
    ((8, 0), 163 * _KIB),
    ((8, 6), 99 * _KIB),
    ((8, 7), 163 * _KIB),
    ((8, 9), 99 * _KIB),
    ((9, 0), 227 * _KIB),
    ((12, 0), 99 * _KIB),
)

_LOCAL_DATA_SHARE: Final = 64 * _KIB
"""AMD's shared memory of a work group, whose device numbers are no compute capabilities: HIP
documentation, "Hardware features"."""

_MAX_THREADS: Final = 1024
"""Threads of a block, in every compute capability since 2.0 (the same table) and on AMD."""

_BLOCKS: Final = (16, 32, 64, 128)
"""Sides of a tile: 16 is the least that tensor cores take; past 128 registers run out."""

_TILES: Final = 5
"""A tile of q and two each of k and v: one in use while the next one is loaded."""

_SHARE: Final = 0.9
"""Of the free memory: the rest is left to fragmentation and to libraries' workspaces."""


class CUDAManager:
    """The process's one view of a device: ``CUDAManager(d) is CUDAManager(d)``.

    Works on a CPU too: then the compute capability is (0, 0), a block has one thread, and
    memory is the machine's.

    Args:
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``, as a string or a ``torch.device``; None is
            the current CUDA device where there is one, else the CPU.

    Raises:
        DeviceError: the device is neither a CPU nor a CUDA device that this process can see.

    Example:
        >>> manager = CUDAManager("cpu")
        >>> manager is CUDAManager("cpu"), manager.compute_capability
        (True, (0, 0))
    """

    device: torch.device
    _known: ClassVar[dict[torch.device, "CUDAManager"]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __new__(cls, device: torch.device | str | None = None) -> "CUDAManager":
        """Return the view of this device, made once."""
        chosen = resolve(device)
        with cls._lock:
            if chosen not in cls._known:
                made = super().__new__(cls)
                made.device = chosen
                cls._known[chosen] = made
            return cls._known[chosen]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy as the device's name, so that there is one view in each process."""
        return (type(self), (str(self.device),))

    def __repr__(self) -> str:
        """Return the device and its name."""
        return f"CUDAManager({str(self.device)!r}: {self.name})"

    @property
    def facts(self) -> HardwareFacts:
        """All that is known of the device: what planning reads."""
        return hardware.probe(self.device)

    @property
    def name(self) -> str:
        """The vendor's name of the device."""
        return self.facts.name

    @property
    def is_cuda(self) -> bool:
        """Whether it is a CUDA device."""
        return self.facts.device_type == "cuda"

    @property
    def compute_capability(self) -> tuple[int, int]:
        """CUDA's (major, minor); (0, 0) on a CPU."""
        return self.facts.compute_capability

    @property
    def num_processors(self) -> int:
        """Multiprocessors of a GPU, threads of a CPU."""
        return self.facts.num_processors

    @property
    def total_memory_bytes(self) -> int:
        """Memory of the device; 0 if unknown."""
        return self.facts.memory_bytes

    @property
    def free_memory_bytes(self) -> int | None:
        """Memory that can still be allocated; None where the system does not tell."""
        return hardware.free_memory_bytes(self.device)

    @property
    def max_threads_per_block(self) -> int:
        """Most threads of one block; 1 on a CPU."""
        return _MAX_THREADS if self.is_cuda else 1

    @property
    def block_memory_bytes(self) -> int:
        """Fast memory that a block's tiles share.

        Shared memory on a GPU, a thread's part of the last-level cache on a CPU; 0 if unknown.
        """
        if not self.is_cuda:
            return self.facts.l2_bytes // max(self.num_processors, 1)
        if torch.version.hip is not None:
            return _LOCAL_DATA_SHARE
        reached = [size for first, size in _SHARED_MEMORY if self.compute_capability >= first]
        return reached[-1] if reached else _SHARED_MEMORY[0][1]

    @property
    def supports_fp16(self) -> bool:
        """Whether products of fp16 are native."""
        return self.supports(Precision.FP16)

    @property
    def supports_bf16(self) -> bool:
        """Whether products of bf16 are native."""
        return self.supports(Precision.BF16)

    @property
    def supports_fp8(self) -> bool:
        """Whether products of fp8 are native."""
        return self.supports(Precision.FP8_E4M3)

    def supports(self, precision: Precision | str) -> bool:
        """Return whether the device computes products of a format natively.

        Args:
            precision: a `adaattn.Precision`, or ``"fp32"``, ``"bf16"``, ``"fp16"`` or ``"fp8"``.

        Raises:
            ArgumentError, ArgumentTypeError: no such format.
        """
        return named_precision(precision) in self.facts.instructions

    def optimal_block_size(self, head_dim: int, dtype: torch.dtype = torch.float16) -> int:
        """Return the side of an attention tile, in tokens.

        It is the largest power of two from 16 to 128 of which a tile of q and two each of k and
        v fit the block's memory; 16 where none fits, and 64 where that memory is unknown. A
        starting point for kernels; the executors of this package choose their own tiles.

        Args:
            head_dim: D.
            dtype: of q, k and v.

        Raises:
            ArgumentError: ``head_dim`` is less than 1.
            DTypeError: attention does not take the dtype.

        Example:
            >>> CUDAManager("cpu").optimal_block_size(64) in (16, 32, 64, 128)
            True
        """
        require_integer("head_dim", head_dim, least=1)
        row_bytes = _TILES * head_dim * precision_of(dtype, subject="the tile").bits // 8
        if not self.block_memory_bytes:
            return 64
        fitting = [side for side in _BLOCKS if side * row_bytes <= self.block_memory_bytes]
        return max(fitting, default=_BLOCKS[0])

    def memory_budget_bytes(self, share: float = _SHARE) -> int:
        """Return a share of the free memory, for `adaattn.Policy`'s ``memory_budget_bytes``.

        Args:
            share: in (0, 1]; of the total where the system does not tell what is free.

        Raises:
            ArgumentError: the share is out of range.
        """
        if not 0.0 < share <= 1.0:
            raise ArgumentError.got("share", "a number in (0, 1]", share)
        free = self.free_memory_bytes
        return int(share * (self.total_memory_bytes if free is None else free))
