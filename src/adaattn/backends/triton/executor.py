"""Runs the portable kernels: what is compiled for a problem, and what each call brings."""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch

from adaattn.backends.allocation import adjacent, output_layout, unfilled
from adaattn.backends.autograd import drawn_seed
from adaattn.backends.block_list import BlockList, list_strides
from adaattn.backends.common import with_dense_columns
from adaattn.backends.compiled_before import is_noted, note
from adaattn.backends.device.launch import Launch
from adaattn.backends.head_terms import HeadTerms
from adaattn.backends.interface import STATISTICS, Result
from adaattn.backends.masks import as_bytes, with_rank
from adaattn.backends.operators import trained
from adaattn.backends.own_kernels import check_untransformed, kept_by_problem
from adaattn.backends.training import Differentiated, with_statistics
from adaattn.backends.triton.arguments import Arguments, MaskLayout, at_multiples, in_halves
from adaattn.backends.triton.gradient_launch import GradientArguments
from adaattn.backends.triton.gradients import backward_of
from adaattn.backends.triton.launch import COPIED_BYTES, lift_sizes
from adaattn.hardware import probe
from adaattn.spec import AttentionProblem, Aux

__all__ = ["KERNELS", "direct", "is_ready", "run"]

_OVERLAPS_FROM: Final = (9, 0)
"""Compute capability of GPUs that launch a kernel before the one it waits for has ended."""

_Optionals = tuple[torch.Tensor | None, ...]
_Sizes = tuple[int, ...]
_Lying = tuple[_Sizes, _Sizes]
"""Shape and strides."""

_NO_STATISTICS: Final = (None,) * len(STATISTICS)


def _computed(problem: AttentionProblem, *given: Any, **others: Any) -> Result:
    """Return the output and the statistics that the problem asks for."""
    return with_statistics(_launcher(problem), problem, given, others)


def is_ready(problem: AttentionProblem) -> bool:
    """Return whether this machine has compiled the kernels of a problem."""
    if problem.wants_gradients:
        return is_noted(GradientArguments(trained(problem)).known_by)
    return is_noted(Arguments(problem).known_by)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """The launches of one call, for tensors that lie as those of its first.

    Args:
        layout: what they follow from.
        output: shape and strides of the result.
        forward: the kernel.
        halve: what takes keys, and values, apart.
        combine: adds up the splits of the keys; None where they are not split.
        parts: shapes and strides of what is added up: outputs [splits, B, Hq, Sq, Dv], and
            [splits, B, Hq, Sq] their sums, maxima, and, for the entropy, products.
    """

    layout: tuple[Any, ...]
    output: _Lying
    forward: Launch
    halve: tuple[Launch, ...] = ()
    combine: Launch | None = None
    parts: tuple[_Lying | None, ...] = ()


class _Beside(NamedTuple):
    """What stands beside q, k and v, as the kernels read it.

    Args:
        layout: of the mask; the stride of slopes, the number of packed sequences, the shape of a
            list of blocks, and dtypes.
        tensors: mask, sinks, slopes, starts of sequences.
        lists: counts and indices of blocks.
        numbers: scale, window and softcap of heads.
    """

    layout: tuple[Any, ...]
    tensors: _Optionals
    lists: _Optionals
    numbers: _Optionals


_NOTHING: Final = _Beside((MaskLayout(), 0, 0, None, ()), (None,) * 5, (None,) * 2, (None,) * 3)


def _beside(
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
    starts: _Optionals,
    blocks: BlockList | None,
    head_terms: HeadTerms | None,
) -> _Beside:
    """Return what stands beside q, k and v, made readable."""
    seen = MaskLayout()
    if mask is not None:
        mask = with_rank(mask, 4)
        seen = MaskLayout.of(mask)
        mask = as_bytes(mask)
    if sinks is not None:
        sinks = with_dense_columns(sinks)
    slope_stride = 0
    if slopes is not None:
        slopes = with_dense_columns(slopes)
        by_batch = slopes.dim() == 2 and slopes.shape[0] > 1
        slope_stride = slopes.stride(0) if by_batch else 0
    numbers: _Optionals = (None, None, None)
    if head_terms is not None:
        given = (head_terms.scale, head_terms.window, head_terms.softcap)
        numbers = tuple(None if it is None else it.contiguous() for it in given)
    sequences = 0 if starts[0] is None else starts[0].shape[0] - 1
    listed = None if blocks is None else blocks.indices.shape
    dtypes = tuple(None if it is None else it.dtype for it in (sinks, slopes, *numbers))
    return _Beside(
        layout=(seen, slope_stride, sequences, listed, dtypes),
        tensors=(mask, sinks, slopes, *starts),
        lists=(None, None) if blocks is None else (blocks.counts, blocks.indices),
        numbers=numbers,
    )


class _Launcher:
    """Launches the kernels of one problem; lengths and strides are those of each call."""

    def __init__(self, problem: AttentionProblem) -> None:
        self._problem = problem
        self._arguments = Arguments(problem)
        self._prepared: _Prepared | None = None
        self._is_noted = False

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        slopes: torch.Tensor | None = None,
        starts_q: torch.Tensor | None = None,
        starts_k: torch.Tensor | None = None,
        blocks: BlockList | None = None,
        head_terms: HeadTerms | None = None,
        *,
        statistics: tuple[torch.Tensor | None, ...] = _NO_STATISTICS,
        seed: torch.Tensor | None = None,
        lse_rest: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return attention [B, Hq, Sq, Dv].

        Args:
            query: [B, Hq, Sq, D], and so on as in `Tensors`.
            key: likewise.
            value: likewise.
            mask: of up to four dimensions.
            sinks: likewise.
            slopes: likewise, or [Hq].
            starts_q: likewise.
            starts_k: likewise.
            blocks: likewise.
            head_terms: likewise.
            statistics: fp32 [B, Hq, Sq] each, written where given, in the order of `STATISTICS`, as
                the problem asks for them.
            seed: int64 [1], of dropout; None draws one.
            lse_rest: fp32 [B, Hq, Sq], written where given: what rounding takes from the
                log-sum-exp.
        """
        problem = self._problem
        check_untransformed(query, key, value)
        lse = statistics[0]
        if lse is not None and problem.num_sequences and problem.wants_gradients:
            # Tokens of no sequence are not written, and are not to count in sums over rows.
            lse.fill_(-torch.inf)
        if self._arguments.are_copied:
            query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        if (query.data_ptr() | key.data_ptr() | value.data_ptr()) % COPIED_BYTES:
            query, key, value = map(at_multiples, (query, key, value))
        beside = _NOTHING
        is_plain = mask is sinks is slopes is starts_q is None
        if not (is_plain and blocks is None and head_terms is None):
            beside = _beside(mask, sinks, slopes, (starts_q, starts_k), blocks, head_terms)
        layout = (
            *(query.shape, query.stride(), key.shape, key.stride(), value.stride()),
            *(key.get_device(), beside.layout),
        )
        prepared = self._prepared
        if prepared is None or prepared.layout != layout:
            lying = output_layout(query, problem.value_dim)
            prepared = self._prepared = self._prepare(lying, *layout)
        output = unfilled(query, *prepared.output)
        lifts = None
        if prepared.halve:
            key, value, lifts = _halved(prepared, key, value)
        if problem.dropout_p and seed is None:
            seed = drawn_seed(query)
        rest = (*beside.tensors, seed, lifts, *beside.lists, statistics[3])
        rest = (*rest, *beside.numbers, lse_rest)
        statistics = statistics[:3]
        if prepared.combine is None:
            prepared.forward(query, key, value, output, *statistics, *rest)
        else:
            parts, sums, maxima, products = (
                None if part is None else unfilled(query, *part, torch.float32)
                for part in prepared.parts
            )
            prepared.forward(query, key, value, parts, sums, maxima, products, *rest[:-1], None)
            read = parts, sums, maxima, products, beside.tensors[1]
            prepared.combine(output, *statistics, *read, lse_rest)
        if query.is_cuda and not self._is_noted:
            self._is_noted = True
            note(self._arguments.known_by)
        return output

    def _prepare(self, output: _Lying, *layout: Any) -> _Prepared:
        """Return the launches for tensors of a layout, and of the output that lies so."""
        arguments = self._arguments
        query_shape, query_strides, key_shape, key_strides, value_strides, *rest = layout
        output_strides = output[1]
        device, (seen, slope_stride, sequences, lists, _) = rest
        batch, heads, len_q, _ = query_shape
        _, kv_heads, len_k, _ = key_shape
        programs, tiles = arguments.programs(batch, heads, len_q, sequences)
        kind = self._problem.device_type
        facts = probe(kind if device < 0 else f"{kind}:{device}")
        splits, split_keys = arguments.splits(programs, len_q, len_k, facts.num_processors)
        halve: tuple[Launch, ...] = ()
        if arguments.is_halved:
            halve = tuple(
                arguments.halve(strides, batch, kv_heads, len_k, columns, arguments.given_align)
                for strides, columns in (
                    (key_strides, self._problem.head_dim),
                    (value_strides, self._problem.value_dim),
                )
            )
            key_strides, value_strides = arguments.halved_strides(kv_heads, len_k)
        strides = (
            *(*query_strides[:3], *key_strides[:3], *value_strides[:3], *output_strides[:3]),
            *(*seen.strides, slope_stride),
        )
        sizes = (heads, len_q, len_k)
        counts = (sequences, tiles, split_keys, batch * kv_heads)
        listed = (0, 0, 0) if lists is None else (*list_strides(lists), lists[-1])
        # On AMD's GPUs the numbers are others.
        overlaps = torch.version.hip is None and facts.compute_capability >= _OVERLAPS_FROM
        forward = arguments.forward(
            (programs, splits, 1), strides, sizes, counts, seen, listed, overlaps=overlaps
        )
        combine = None
        if splits > 1:
            combine = arguments.combine(
                output_strides, splits, batch, heads, len_q, overlaps=overlaps
            )
        of_rows = splits, batch, heads, len_q
        whole = *of_rows, self._problem.value_dim
        rows = of_rows, adjacent(of_rows)
        products = rows if self._problem.wants(Aux.ENTROPY) else None
        return _Prepared(
            layout=layout,
            output=output,
            forward=forward,
            halve=halve,
            combine=combine,
            parts=((whole, adjacent(whole)), rows, rows, products),
        )


_launcher = kept_by_problem(_Launcher)
KERNELS: Final = Differentiated("triton", _computed, backward_of, _Launcher)
run, direct = KERNELS.run, KERNELS.direct


def _halved(
    prepared: _Prepared, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return keys and values as sums of two fp16 numbers, and the powers of two that undo scales.

    Returns:
        Both as fp16 [2, B, Hkv, Sk, D], high halves first, D in steps of 8; and the powers of keys,
        of values, and the bounds of both in one fp32 tensor.
    """
    batch, heads, rows, _ = key.shape
    num_lifts, num_bounds = lift_sizes(batch * heads, rows)
    lifts = unfilled(key, (2 * (num_lifts + num_bounds),))
    of_keys, of_values = prepared.halve
    bounds = lifts[2 * num_lifts :]
    key = in_halves(of_keys, key, lifts, bounds)
    value = in_halves(of_values, value, lifts[num_lifts:], bounds[num_bounds:])
    return key, value, lifts
