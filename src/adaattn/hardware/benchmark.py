"""The micro-benchmark: products, copies, eager overhead and attention, in about a second.

On random data. Whatever else runs on the machine only ever adds time, and on a busy CPU it
multiplies a median by a thousand (a barrier waits out the scheduler's slice); so each
measurement counts with its fastest run, and rounds over all of them repeat until the fastest
runs stop improving. Rates that never settled say so in their source.

A kernel that the device or this build of torch does not support is left out, with a debug log.
On CUDA fp32 is measured in the mode in force (``torch.backends.cuda.matmul``), and attention
out of a warm cache except at decode, which reads several copies of K and V in turn.
"""

import contextlib
import functools
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F

from adaattn._dtypes import torch_dtype
from adaattn.hardware.workloads import FP8, HALF, product, sdpa_kernels
from adaattn.spec import HardwareFacts, Precision, Rates

__all__ = ["MEASURED", "run_benchmark"]

_LOGGER = logging.getLogger("adaattn")

MEASURED = "measured"
"""Source of rates that settled; others are not worth keeping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """How much work one device gets, so that all of it takes about a second.

    Args:
        first_matrix: side of the first product.
        last_matrix: side of the last: it doubles until a product takes ``product_s``.
        product_s: seconds.
        copy_bytes: size of the copied tensor.
        length: Sq = Sk of attention.
        heads: B*H of fused attention.
        math_heads: the same where the scores are stored.
        head_dims: D = Dv of attention.
        decode_length: Sk of decode.
        decode_copies: K and V pairs read in turn, together more than the last-level cache.
        budget_s: seconds spent on repeating one measurement in a round.
        patience_s: past this each measurement runs once a round, and the second round is the last.
    """

    first_matrix: int
    last_matrix: int
    product_s: float
    copy_bytes: int
    length: int
    heads: int
    math_heads: int
    head_dims: tuple[int, ...]
    decode_length: int
    decode_copies: int
    budget_s: float
    patience_s: float

    @property
    def most_numbers(self) -> int:
        """Elements of the largest random tensor."""
        attention = self.heads * self.length * max(self.head_dims)
        decode = _DECODE_KV_HEADS * self.decode_length * max(_DECODE_DIMS)
        return max(self.last_matrix**2, attention, decode)


_DECODE_HEADS = 32
_DECODE_KV_HEADS = 4
_DECODE_DIMS = (64, 128)
_MIN_REPEATS, _MAX_REPEATS = 3, 15
_TINY_CALLS = 20

_GROWING = 1.5
"""A product whose rate grows by this with its side is still bound by something else."""

_MAX_ROUNDS = 8
_TASKS = Path("/proc/self/task")

_CROWDED, _HOPELESS = 0.25, 0.5
"""Share of their time that the threads spent waiting for a processor. It is near 0 on an idle
machine and 0.65 with five times as many busy threads as cores, where the fastest fp32 product
took a thousand times too long in all rounds alike."""

_SETTLED_GAIN = 1.15
"""A measurement has settled when another round made it no faster than by this factor."""

_SETTLED_SHARE = 0.85
"""Share of the measurements that must have settled."""


def run_benchmark(device: torch.device, facts: HardwareFacts) -> Rates:
    """Return the rates of a device, measured now.

    Args:
        device: a CPU or a CUDA device with its index.
        facts: its description; the rates in it are not read.
    """
    bench = _Bench(device, _cuda_sizes(facts) if device.type == "cuda" else _cpu_sizes(facts))
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        for _ in range(_MAX_ROUNDS):
            before, start, queued = dict(bench.fastest), time.perf_counter(), _queued_seconds()
            rates = _round(bench, facts.instructions)
            running = (time.perf_counter() - start) * facts.num_processors
            crowding = (_queued_seconds() - queued) / running
            if crowding < _CROWDED and _settled(before, bench.fastest):
                return rates
            if bench.is_late() and (before or crowding > _HOPELESS):
                break
    return replace(rates, source=f"{MEASURED} on a busy machine")


def _queued_seconds() -> float:
    """Return how long this process's threads have waited for a processor; 0 if unknown."""
    total = 0
    for path in _TASKS.glob("*/schedstat"):
        # A thread may end between the listing and the reading.
        with contextlib.suppress(OSError, ValueError, IndexError):
            total += int(path.read_text().split()[1])
    return total * 1e-9


def _round(bench: "_Bench", instructions: tuple[Precision, ...]) -> Rates:
    flops = dict(bench.product_rates(instructions))
    bandwidth = bench.copy_bandwidth()
    efficiency = dict(bench.attention_shares(flops))
    efficiency.update(bench.decode_shares(flops, bandwidth))
    return Rates(
        flops=tuple(sorted(flops.items())),
        bandwidth=bandwidth,
        launch_s=bench.launch_seconds(),
        efficiency=tuple(sorted(efficiency.items())),
        source=MEASURED,
    )


def _settled(before: dict[str, float], after: dict[str, float]) -> bool:
    still = sum(before.get(label, 0.0) <= _SETTLED_GAIN * after[label] for label in after)
    return still >= _SETTLED_SHARE * len(after) and before.keys() == after.keys()


def _cpu_sizes(facts: HardwareFacts) -> _Sizes:
    # Servers report caches of hundreds of megabytes that many machines share: copying twice
    # that would take a second, and no part of attention is as large.
    copy_bytes = min(max(2 * facts.l2_bytes, 64 << 20), 128 << 20)
    heads = max(2, facts.num_processors)
    return _Sizes(
        first_matrix=128,
        last_matrix=2048,
        product_s=4e-3,
        copy_bytes=copy_bytes,
        length=1024,
        heads=heads,
        math_heads=heads,
        head_dims=(64, 128),
        decode_length=4096,
        decode_copies=1,
        budget_s=0.008,
        patience_s=3.0,
    )


def _cuda_sizes(facts: HardwareFacts) -> _Sizes:
    small = facts.memory_bytes < 12 << 30
    return _Sizes(
        first_matrix=1024,
        last_matrix=4096 if small else 8192,
        product_s=1e-3,
        copy_bytes=max(4 * facts.l2_bytes, 256 << 20),
        length=4096,
        heads=16,
        math_heads=4,
        head_dims=(64, 128, 256),
        decode_length=32768,
        decode_copies=4,
        budget_s=0.005,
        # The first round of a process waits 5 s for cuDNN to plan its kernels and for the
        # loading of the others (H200, torch 2.11); the later ones take 0.4 s.
        patience_s=15.0,
    )


class _Bench:
    """The measurements of one device; its numbers, sizes and fastest runs."""

    def __init__(self, device: torch.device, sizes: _Sizes) -> None:
        self._device = device
        self._sizes = sizes
        self.fastest: dict[str, float] = {}
        self._deadline = time.perf_counter() + sizes.patience_s
        # Normal numbers for every tensor, made once; the user's random state stays as it is.
        generator = torch.Generator(device).manual_seed(0)
        self._normal = torch.randn(sizes.most_numbers, device=device, generator=generator)
        self._next = 0

    def is_late(self) -> bool:
        """Return whether the measurement has taken longer than anybody should wait."""
        return time.perf_counter() > self._deadline

    def product_rates(
        self, instructions: tuple[Precision, ...]
    ) -> Iterator[tuple[Precision, float]]:
        """Yield FLOP/s of square matrix products for each precision that works.

        Formats without instructions are measured too: a processor may be fast without a flag
        that torch knows, and a slow rate is worth knowing.
        """
        sizes = self._sizes
        matrix = self._random(sizes.last_matrix, sizes.last_matrix)
        extra = (p for p in (*FP8, Precision.INT8) if p in instructions)
        for precision in (Precision.FP32, Precision.FP64, *HALF, *extra):
            best = 0.0
            side = sizes.first_matrix
            while side <= sizes.last_matrix:
                make = functools.partial(product, precision, matrix[:side, :side])
                seconds = self._seconds(f"product {precision.label} {side}", make)
                if seconds is None:
                    break
                rate = 2.0 * side**3 / seconds
                # A long product says enough, unless it was long for another reason than work.
                is_enough = seconds >= sizes.product_s and rate < _GROWING * best
                best = max(best, rate)
                if is_enough:
                    break
                side *= 2
            if best:
                yield precision, best

    def copy_bandwidth(self) -> float:
        """Return bytes read plus bytes written per second by a large copy."""
        count = self._sizes.copy_bytes // 4
        source = torch.ones(count, device=self._device)
        target = torch.empty_like(source)
        return 2.0 * source.nbytes / self._fastest("copy", lambda: target.copy_(source))

    def attention_shares(self, flops: dict[Precision, float]) -> Iterator[tuple[str, float]]:
        """Yield, by efficiency key, the share of the matrix rate that each SDPA kernel reaches."""
        sizes = self._sizes
        for precision, dim in itertools.product(self._precisions(flops), sizes.head_dims):
            for name, kernel in sdpa_kernels(self._device.type, precision).items():
                heads = sizes.math_heads if name == "sdpa.math" else sizes.heads
                label = f"{name}:{precision.label}:{dim}"
                shape = (1, heads, sizes.length, dim)
                make = functools.partial(self._attention, kernel, shape, precision)
                seconds = self._seconds(label, make)
                if seconds is not None:
                    work = 2.0 * sizes.length**2 * (dim + dim) * heads
                    yield label, work / seconds / flops[precision]

    def decode_shares(
        self, flops: dict[Precision, float], bandwidth: float
    ) -> Iterator[tuple[str, float]]:
        """Yield, by efficiency key, the share of the bandwidth at which decode reads K and V."""
        sizes = self._sizes
        for precision, dim in itertools.product(self._precisions(flops), _DECODE_DIMS):
            moved = 2.0 * _DECODE_KV_HEADS * sizes.decode_length * dim * precision.bits / 8
            for name in ("sdpa", "grouped"):
                label = f"decode.{name}:{precision.label}:{dim}"
                make = functools.partial(
                    self._decode, precision, dim, folds_group=name == "grouped"
                )
                seconds = self._seconds(label, make)
                if seconds is not None:
                    yield label, moved / seconds / bandwidth

    def launch_seconds(self) -> float:
        """Return the host's share of one small operation: half a product and half a softmax."""
        scores = self._random(4, 16, 16)

        def call() -> None:
            for _ in range(_TINY_CALLS):
                torch.softmax(torch.bmm(scores, scores), -1)

        # By the host's clock on every device: launching is the host's work.
        self._wait()
        return self._fastest("launch", call, once=_host_once) / (2 * _TINY_CALLS)

    def _precisions(self, flops: dict[Precision, float]) -> tuple[Precision, ...]:
        """Return the formats worth measuring attention in: conversions make others very slow."""
        least = 0.5 * flops.get(Precision.FP32, 0.0)
        return tuple(p for p in (Precision.FP32, *HALF) if flops.get(p, 0.0) > least)

    def _attention(
        self, kernel: Callable[..., object], shape: tuple[int, ...], precision: Precision
    ) -> Callable[[], object]:
        return functools.partial(
            kernel, *(self._random(*shape, precision=precision) for _ in range(3))
        )

    def _decode(self, precision: Precision, dim: int, *, folds_group: bool) -> Callable[[], object]:
        """Return a call that attends from a single position, with the next pair of K and V."""
        query = self._random(1, _DECODE_HEADS, 1, dim, precision=precision)
        if folds_group:
            query = query.view(1, _DECODE_KV_HEADS, -1, dim)
        shape = (1, _DECODE_KV_HEADS, self._sizes.decode_length, dim)
        copies = range(2 * self._sizes.decode_copies)
        tensors = [self._random(*shape, precision=precision) for _ in copies]
        turn = itertools.cycle(zip(tensors[::2], tensors[1::2], strict=True))
        return lambda: F.scaled_dot_product_attention(
            query, *next(turn), enable_gqa=not folds_group
        )

    def _random(self, *shape: int, precision: Precision = Precision.FP32) -> torch.Tensor:
        count = math.prod(shape)
        if self._next + count > self._normal.numel():
            self._next = 0
        values = self._normal[self._next : self._next + count].view(shape)
        self._next += count
        return values.to(torch_dtype(precision), copy=True)

    def _seconds(self, label: str, make: Callable[[], Callable[[], object]]) -> float | None:
        """Return the seconds of the call that ``make`` prepares; None if it cannot run."""
        try:
            return self._fastest(label, make())
        except RuntimeError as error:
            _LOGGER.debug("not measured: %s: %s", label, error)
            return None

    def _fastest(
        self,
        label: str,
        call: Callable[[], object],
        once: Callable[[Callable[[], object]], float] | None = None,
    ) -> float:
        """Return the fewest seconds that a call took, in this round or in an earlier one."""
        if once is None:
            once = self._cuda_once if self._device.type == "cuda" else _host_once
        known = self.fastest.get(label)
        if known is None or not self.is_late():
            once(call)
        samples = [once(call)]
        while not self.is_late() and (
            len(samples) < _MIN_REPEATS
            or (len(samples) < _MAX_REPEATS and sum(samples) < self._sizes.budget_s)
        ):
            samples.append(once(call))
        self.fastest[label] = max(min([*samples, known or math.inf]), 1e-9)
        return self.fastest[label]

    def _cuda_once(self, call: Callable[[], object]) -> float:
        """Return the seconds between two events of the stream around a call."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.device(self._device):
            start.record()
            call()
            end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _host_once(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
