"""Whether a result of a cell is right: sampled query rows of every head against float64.

The rule is that of `adaattn.testing`. A whole output must be finite, too. Gradients of each head
are held against those of ``F.scaled_dot_product_attention``, or of attention written out where it
lacks a word, in a wider dtype.
"""

import random
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F

from adaattn.backends.interface import Tensors
from adaattn.spec import MaskKind
from adaattn.testing import (
    assert_matches,
    attention,
    cast_tensors,
    head_errors,
    make_problem,
    num_summands,
)
from benchmarks.failures import FailedError
from benchmarks.ops.contestants import NAIVE, SDPA, Call, Gradients, naive
from benchmarks.ops.inputs import Inputs, peer_mask, seen
from benchmarks.ops.registry import Cell

__all__ = ["Exact"]

_COMPARED = 2**21
"""Elements of an output that are compared, on the host, at most."""

_SCORES = 2**25
"""Scores of the sampled rows of one batch entry at most, in float64."""

_LEAST_ROWS = 8

_NOT_FINITE = "wrong: expected finite numbers, got others"


@dataclass(slots=True)
class _Rows:
    """Sampled rows of the output, [B, Hq, R, Dv]: exact in float64, and eager PyTorch's."""

    exact: torch.Tensor
    eager: torch.Tensor


@dataclass(slots=True)
class Exact:
    """What a cell should give.

    Args:
        cell: what is computed.
        inputs: its tensors.
    """

    cell: Cell
    inputs: Inputs
    _known: dict[bool, Any] = field(default_factory=dict)
    _peer_errors: tuple[float, ...] = ()

    def held(self, name: str, call: Call) -> tuple[Call, float | None]:
        """Return a call, or what makes its gradients, with its relative error; None unchecked.

        Args:
            name: whose it is.
            call: of the cell's inputs.

        Raises:
            FailedError: the result is wrong.
        """
        if self.cell.backward:
            gradients = call.with_backward(self.inputs, is_alone=self.cell.is_alone)
            error = self.hold_gradients(name, call, gradients(), gradients)
            return replace(call, run=gradients), error
        output = call.run()
        return call, self.hold(name, call, output) if call.is_the_cell else None

    def hold(self, name: str, call: Call, output: torch.Tensor) -> float:
        """Return the relative error of a result.

        Args:
            name: whose it is.
            call: which may have taken a mask that is rounded, and is held against that.
            output: [B, Hq, Sq, Dv].

        Raises:
            FailedError: the result is wrong.
        """
        if not bool(output.isfinite().all()):
            raise FailedError(name, _NOT_FINITE)
        mask = call.mask if call.mask is not None and call.mask.is_floating_point() else None
        if (mask is not None) not in self._known:
            self._known[mask is not None] = self._rows(mask)
        rows = self._known[mask is not None]
        part = output.detach()[:, :, self._places()]
        problem = self._problem(with_mask=False)
        try:
            assert_matches(
                part, rows.exact, rows.eager, name="output", summands=num_summands(problem, part)
            )
        except AssertionError as error:
            raise FailedError(name, f"wrong: {error}") from error
        return float(head_errors(part, rows.exact).max())

    def _places(self) -> list[int]:
        """Return the query rows that are looked at: first ones, last ones, and some between."""
        batch, heads, _, len_q, len_k, _ = self.cell.shape
        most = min(_COMPARED // (batch * heads * self.cell.dim_v), _SCORES // (heads * len_k))
        count = max(most, _LEAST_ROWS)
        if count >= len_q:
            return list(range(len_q))
        ends = {0, 1, len_q - 2, len_q - 1}
        others = random.Random(len_q).sample(range(2, len_q - 2), count - len(ends))
        return sorted(ends | set(others))

    def _problem(self, *, with_mask: bool) -> Any:
        """Return the sampled rows of one batch entry as a problem."""
        _, heads, kv_heads, _, len_k, dim = self.cell.shape
        return make_problem(
            num_heads=heads,
            num_kv_heads=kv_heads,
            len_q=len(self._places()),
            len_k=len_k,
            head_dim=dim,
            value_dim=self.cell.dim_v,
            softcap=self.cell.given.softcap,
            has_sinks=self.cell.given.has_sinks,
            device_type=self.inputs.query.device.type,
            mask=MaskKind.ADDITIVE if with_mask else MaskKind.NONE,
        )

    def _rows(self, given: torch.Tensor | None) -> _Rows:
        """Return the sampled rows, one batch entry at a time, with the mask that was given."""
        places = self._places()
        mask = self._row_mask(places) if given is None else given[:, :, places].double()
        problem = self._problem(with_mask=mask is not None)
        found = []
        for entry in range(self.cell.shape[0]):
            query, key, value = (item.detach()[entry : entry + 1] for item in self.inputs.qkv)
            own = mask if mask is None or mask.shape[0] == 1 else mask[entry : entry + 1]
            part = Tensors.of(query[:, :, places], key, value, mask=own, sinks=self.inputs.sinks)
            exact = attention(cast_tensors(part, torch.float64), problem).output
            eager = attention(part, problem, compute_dtype=self.cell.dtype).output
            found.append((exact, eager))
        exacts, eagers = zip(*found, strict=True)
        return _Rows(exact=torch.cat(exacts), eager=torch.cat(eagers))

    def _row_mask(self, places: list[int]) -> torch.Tensor | None:
        """Return all that is added to the scores of some rows, float64; None for nothing."""
        cell, inputs = self.cell, self.inputs
        given, device = cell.given, inputs.query.device
        if not (given.is_causal or given.sdpa_needs_mask):
            return None
        rows = torch.tensor(places, device=device)[:, None]
        keys = torch.arange(cell.shape[4], device=device)
        visible = seen(cell, inputs)(rows, keys)[None, None]
        if inputs.listed is not None:
            visible = visible & inputs.listed_keys(places)
        added = torch.zeros(1, 1, 1, 1, dtype=torch.float64, device=device)
        if inputs.mask is not None:
            part = inputs.mask[:, :, places]
            if part.dtype is torch.bool:
                visible = visible & part
            else:
                added = part.double()
        if inputs.slopes is not None:
            added = added - inputs.slopes.double()[:, None, None] * (rows - keys).abs()
        return added.expand(-1, -1, len(places), cell.shape[4]).masked_fill(~visible, -torch.inf)

    def hold_gradients(
        self, name: str, call: Call, found: tuple[torch.Tensor, ...], again: Gradients
    ) -> float:
        """Return the largest relative error of a head in a gradient.

        Each gradient's is at most twice PyTorch's, and a rounding.

        Args:
            name: whose they are.
            call: they are the same each time if it is ordered.
            found: the gradients.
            again: makes them once more.

        Raises:
            FailedError: they are wrong.
        """
        if not all(bool(item.isfinite().all()) for item in found):
            raise FailedError(name, _NOT_FINITE)
        if call.is_ordered and not all(map(torch.equal, found, again())):
            raise FailedError(name, "wrong: expected the same gradients each time, got others")
        if False not in self._known:
            self._known[False] = _wide_gradients(self.cell, self.inputs)
        errors = tuple(
            float(head_errors(mine, exact).max())
            for mine, exact in zip(found, self._known[False], strict=True)
        )
        peer = NAIVE if self.cell.given.sdpa_lacks else SDPA
        if name == peer:
            self._peer_errors = errors
        if not self._peer_errors:
            raise FailedError(name, f"not checked: {peer} has no gradients to compare with")
        for which, error, its in zip(("q", "k", "v"), errors, self._peer_errors, strict=True):
            allowed = 2 * its + torch.finfo(self.cell.dtype).eps
            if not error <= allowed:
                text = f"wrong: relative error {error:.3g} of d{which}, allowed {allowed:.3g}"
                raise FailedError(name, text)
        return max(errors)


def _wide_gradients(cell: Cell, inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """Return the gradients in fp32 for 16-bit input and in fp64 for fp32."""
    dtype = torch.float64 if cell.dtype is torch.float32 else torch.float32
    query, key, value = (item.detach().to(dtype).requires_grad_() for item in inputs.qkv)
    assert inputs.gradient is not None
    wide = replace(
        inputs, query=query, key=key, value=value, gradient=inputs.gradient.to(dtype), made=[]
    )
    if cell.given.sdpa_lacks:
        return naive(cell, wide).with_backward(wide, is_alone=False)()
    group = query.shape[1] // key.shape[1]
    mask = peer_mask(cell, wide)
    options: dict[str, Any] = {"attn_mask": mask}
    if mask is None:
        options = {"is_causal": cell.given.is_causal}

    def run() -> torch.Tensor:
        repeated = (item.repeat_interleave(group, dim=1) for item in (key, value))
        return F.scaled_dot_product_attention(query, *repeated, **options)

    return Call(run=run).with_backward(wide, is_alone=False)()
