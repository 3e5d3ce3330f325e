"""One result, what it may be instead of a number, and the gate before every number."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

__all__ = [
    "OK",
    "OUT_OF_MEMORY",
    "UNAVAILABLE",
    "WRONG",
    "Row",
    "Settings",
    "guarded",
    "is_out_of_memory",
    "line",
]

OK = "ok"
OUT_OF_MEMORY = "out of memory"
UNAVAILABLE = "not available"
WRONG = "wrong result"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a suite is run.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        quick: small sizes and few rounds, to see that everything runs.
        rounds: interleaved rounds of each timing.
        round_ms: how long a function is repeated in a round.
        limit_s: seconds that the rounds of one cell may take together; fewer are run then.
        say: prints progress.
        utilisation: percent of the time that the GPU computes while a function is repeated.
    """

    device: str
    quick: bool = False
    rounds: int = 9
    round_ms: float = 20.0
    limit_s: float = 8.0
    say: Callable[[str], None] = print
    utilisation: Callable[[Callable[[], Any]], float | None] = lambda function: None

    @property
    def is_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device == "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One function in one cell.

    Args:
        suite: which suite.
        cell: the sizes, by name.
        variant: the function.
        phase: ``"forward"`` or ``"training"`` (forward and backward).
        dtype: of the inputs.
        status: OK, or why there are no numbers.
        mean_ms: mean time of one call over the rounds.
        std_ms: standard deviation over the rounds.
        median_ms: median over the rounds.
        rounds: how many.
        peak_bytes: memory that one call adds at its peak; None if unknown.
        mse: mean squared error against the wider reference.
        relative_error: relative Frobenius error against it.
        tokens_per_s: query tokens per second, from the median.
        tflops: achieved TFLOP/s, from the median and the stated FLOP formula.
        utilisation_percent: share of time that the GPU computed; None if unknown.
        speedup: over the suite's peer in the same cell and phase; None if there is none.
        note: what was chosen, or the reason for the status.
        extra: numbers of this suite alone.
    """

    suite: str
    cell: str
    variant: str
    phase: str = "forward"
    dtype: str = ""
    status: str = OK
    mean_ms: float | None = None
    std_ms: float | None = None
    median_ms: float | None = None
    rounds: int = 0
    peak_bytes: int | None = None
    mse: float | None = None
    relative_error: float | None = None
    tokens_per_s: float | None = None
    tflops: float | None = None
    utilisation_percent: float | None = None
    speedup: float | None = None
    note: str = ""
    extra: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; what is not finite becomes None."""
        return {name: _plain(value) for name, value in asdict(self).items()}


def _plain(value: Any) -> Any:
    """Return a value that JSON can hold."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory could not be had."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    words = str(error).lower()
    return "can't allocate memory" in words or "not enough memory" in words


def guarded(function: Callable[[], Any]) -> tuple[Any, str]:
    """Return (result, OK), or (None, OUT_OF_MEMORY); any other error is raised."""
    try:
        return function(), OK
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None, OUT_OF_MEMORY


def line(row: Row) -> str:
    """Return a row as a line of progress."""
    shown = row.status if row.median_ms is None else f"{row.median_ms:9.3f} ms"
    return f"  {row.cell:<28} {row.phase:<9} {row.variant:<28} {shown}  {row.note}".rstrip()
