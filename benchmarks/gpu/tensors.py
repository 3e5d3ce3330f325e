"""Functions of q, k and v, [B, H, S, D]: inputs, the one gate before a time, and timing."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import adaattn
from benchmarks.gpu.clock import peak_bytes, timed
from benchmarks.gpu.rows import OK, WRONG, Row, Settings, guarded, line

__all__ = [
    "BACKWARD_FACTOR",
    "Inputs",
    "Sample",
    "TensorCell",
    "draw",
    "naive",
    "ours",
    "run_tensors",
    "sdpa",
    "softcapped",
]

BACKWARD_FACTOR = 3.5
"""FLOPs of forward and backward over those of forward: seven products for two, the scores again."""

Inputs = tuple[torch.Tensor, ...]
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorCell:
    """The sizes of one causal attention call.

    Args:
        name: shown in tables.
        shape: (B, H, S, D) of q, k and v.
        dtype: of q, k and v.
        axis: what grows from cell to cell, if anything.
    """

    name: str
    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    axis: str = ""

    @property
    def flops(self) -> float:
        """2 B H S^2 D: causal order hides half of the scores."""
        batch, heads, length, dim = self.shape
        return 2.0 * batch * heads * length**2 * dim


def draw(cell: TensorCell, device: str, *, grad: bool = False) -> Inputs:
    """Return normal q, k and v in fp32, then rounded to the cell's dtype."""
    generator = torch.Generator(device).manual_seed(7)
    made = [torch.randn(cell.shape, generator=generator, device=device) for _ in range(3)]
    return tuple(item.to(cell.dtype).requires_grad_(grad) for item in made)


def naive(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return causal attention as people write it."""
    return _written(query, key, value, 0.0)


def softcapped(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return causal attention with a softcap of 30, as people write it."""
    return _written(query, key, value, 30.0)


def sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return causal attention by PyTorch's function."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def ours(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return causal attention by this library's function."""
    found: torch.Tensor = adaattn.scaled_dot_product_attention(query, key, value, is_causal=True)
    return found


def run_tensors(
    cell: TensorCell,
    functions: dict[str, Attention],
    settings: Settings,
    base: dict[str, Any],
    *,
    inputs: dict[str, Inputs] | None = None,
    training: bool = False,
    peer: str = "",
) -> list[Row]:
    """Return a row for each function of one cell: checked first, then timed in turn.

    Right is an error, on sampled rows in float64, of at most twice that of
    ``F.scaled_dot_product_attention`` in the same dtype, plus one rounding; in training that
    of the gradients of two heads too.

    Args:
        cell: the sizes.
        functions: causal attention, by name.
        settings: of the run.
        base: fields of every row.
        inputs: q, k and v of each function where they are not the same rounded ones.
        training: time forward and backward.
        peer: whose time the others' is compared with.
    """
    drawn = draw(cell, settings.device, grad=training)
    given = {name: drawn for name in functions} | (inputs or {})
    base = base | {"cell": cell.name, "phase": "training" if training else "forward"}
    sample = Sample(draw(replace(cell, dtype=torch.float32), settings.device) if inputs else drawn)
    allowed: dict[torch.dtype, float] = {}
    rows: dict[str, dict[str, Any]] = {}
    runs: dict[str, Callable[[], Any]] = {}
    for name, function in functions.items():
        dtype = given[name][0].dtype
        if dtype not in allowed:
            allowed[dtype] = 2 * sample.error(sdpa(*given[name]))[0] + torch.finfo(dtype).eps
        exact = _HeadGradients(given[name]) if training else None
        rows[name] = base | {"variant": name, "dtype": str(dtype).removeprefix("torch.")}
        run = partial(function, *given[name])
        rows[name] |= _checked(run, sample, allowed[dtype])
        if exact is not None and rows[name]["status"] == OK:
            rows[name] |= exact.judged(run)
        rows[name]["extra"] = rows[name].get("extra", {}) | {
            "shape": cell.shape,
            "axis": cell.axis,
        }
        if rows[name]["status"] == OK:
            run = _call(function, given[name], training)
            peak, rows[name]["status"] = guarded(partial(peak_bytes, run, settings.device))
            rows[name]["peak_bytes"] = peak
        if rows[name]["status"] == OK:
            runs[name] = run
    timings = timed(runs, settings)
    flops = cell.flops * (BACKWARD_FACTOR if training else 1.0)
    for name, timing in timings.items():
        median = timing["median_ms"]
        rows[name] |= timing | {
            "tokens_per_s": 1e3 * cell.shape[0] * cell.shape[2] / median,
            "tflops": flops / median / 1e9,
            "utilisation_percent": settings.utilisation(runs[name]),
            "speedup": timings[peer]["median_ms"] / median if peer in timings else None,
        }
    found = [Row(**values) for values in rows.values()]
    for row in found:
        settings.say(line(row))
    return found


def _checked(run: Callable[[], torch.Tensor], sample: "Sample", allowed: float) -> dict[str, Any]:
    """Return the fields that say whether a function is right."""
    output, status = guarded(run)
    if output is None:
        return {"status": status}
    error, mse = sample.error(output)
    found = {"relative_error": error, "mse": mse, "extra": {"allowed_error": allowed}}
    if error <= allowed:
        return found | {"status": OK}
    why = f"relative error {error:.3g}, allowed {allowed:.3g}"
    return found | {"status": WRONG, "note": why}


class _HeadGradients:
    """Exact gradients of the first two heads of the first batch entry: heads are independent."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.exact = self._of(naive, torch.float64)
        self.eager_error = self._error(self._of(naive, inputs[0].dtype))

    def judged(self, run: Callable[[], torch.Tensor]) -> dict[str, Any]:
        """Return the fields of a row that say whether a function's gradients are right."""
        found, status = guarded(lambda: self._gradients(run(), self.inputs))
        if found is None:
            return {"status": status}
        error = self._error([item[:1, :2] for item in found])
        allowed = 2 * self.eager_error + torch.finfo(self.inputs[0].dtype).eps
        if error <= allowed:
            return {"status": OK}
        note = f"relative error of gradients {error:.3g}, allowed {allowed:.3g}"
        return {"status": WRONG, "note": note}

    def _of(self, function: Attention, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return the gradients of the two heads, computed in a dtype."""
        part = [item.detach()[:1, :2].to(dtype).requires_grad_() for item in self.inputs]
        return self._gradients(function(*part), part)

    def _gradients(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the gradients from a fixed random output gradient."""
        shape = self.inputs[0].shape
        generator = torch.Generator(output.device).manual_seed(3)
        drawn = torch.randn(shape, generator=generator, device=output.device)
        # Every dtype starts from the same rounded numbers, else the oracle has another task.
        upstream = drawn.to(self.inputs[0].dtype)[: output.shape[0], : output.shape[1]]
        return list(torch.autograd.grad(output, inputs, upstream.to(output.dtype)))

    def _error(self, found: Sequence[torch.Tensor]) -> float:
        """Return the relative Frobenius error of all three gradients together."""
        pairs = list(zip(found, self.exact, strict=True))
        lost = sum(float((one.double() - exact).square().sum()) for one, exact in pairs)
        size = sum(float(exact.square().sum()) for _, exact in pairs)
        return math.sqrt(lost / size)


class Sample:
    """Exact causal rows of a call, against which outputs are held.

    Args:
        inputs: q, k and v.
        rows: how many query rows, spread over all.
        softcap: of the scores; 0 is none.
    """

    def __init__(self, inputs: Inputs, rows: int = 64, softcap: float = 0.0) -> None:
        length = inputs[0].shape[2]
        self.inputs = inputs
        self.softcap = softcap
        self.rows = torch.linspace(0, length - 1, min(rows, length)).long().to(inputs[0].device)
        self.exact = self._attended(torch.float64)

    def eager_error(self) -> float:
        """Return the relative error of the same products in the dtype of the inputs."""
        eager = self._attended(self.inputs[0].dtype).double()
        return float((eager - self.exact).norm() / self.exact.norm())

    def _attended(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the sampled rows computed in a dtype."""
        query, key, value = (item.detach() for item in self.inputs)
        hidden = torch.arange(query.shape[2], device=query.device) > self.rows[:, None]
        heads = []
        for head in range(query.shape[1]):  # one at a time: float64 copies of k are large
            picked = query[:, head, self.rows].to(dtype)
            scores = picked @ key[:, head].to(dtype).mT / math.sqrt(query.shape[-1])
            if self.softcap:
                scores = self.softcap * torch.tanh(scores / self.softcap)
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            heads.append(weights @ value[:, head].to(dtype))
        return torch.stack(heads, dim=1)

    def error(self, output: torch.Tensor) -> tuple[float, float]:
        """Return (relative Frobenius error, mean squared error) of the sampled rows."""
        difference = output.detach()[:, :, self.rows].double() - self.exact
        return float(difference.norm() / self.exact.norm()), float(difference.square().mean())


def _call(function: Attention, inputs: Inputs, training: bool) -> Callable[[], Any]:
    """Return the call to be timed, with its backward pass in training."""
    if not training:

        def forward() -> torch.Tensor:
            with torch.no_grad():
                return function(*inputs)

        return forward
    gradient = torch.ones_like(inputs[0])
    return lambda: torch.autograd.grad(function(*inputs), inputs, gradient)


def _written(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, softcap: float
) -> torch.Tensor:
    """Return causal attention from its scores."""
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    length = query.shape[2]
    hidden = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    return torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1) @ value
