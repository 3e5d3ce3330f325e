"""Few rows and keys of many columns: products are split over columns, so that a card fills.

Three kernels forward and six backward, each begun while the one before it ends. What lies between
the products is the softmax of `streamed`, of scores that are sums of parts. Nothing is added up by
atomics, and no memory has to be cleared: equal inputs give equal bits.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch

from adaattn.backends.allocation import output_like, unfilled
from adaattn.backends.autograd import drawn_seed
from adaattn.backends.common import with_dense_columns
from adaattn.backends.compiled_before import is_noted, note
from adaattn.backends.device.launch import Launch
from adaattn.backends.interface import Result, Tensors
from adaattn.backends.masks import as_bytes
from adaattn.backends.operators import Kept, trained
from adaattn.backends.own_kernels import check_untransformed, kept_by_problem, sinks_gradient
from adaattn.backends.streamed.arguments import Arguments, Beside
from adaattn.backends.streamed.capability import SMALL
from adaattn.backends.streamed.chunks import Chunk, pitch_of
from adaattn.backends.streamed.split import choose_splits, is_wide, partials, slices
from adaattn.backends.training import Differentiated, with_statistics
from adaattn.hardware import probe
from adaattn.spec import AttentionProblem, HardwareFacts

__all__ = ["CAPABILITIES", "KERNELS", "direct", "is_ready", "run"]

CAPABILITIES = (SMALL,)

_OVERLAPS_FROM: Final = (9, 0)
"""Compute capability of GPUs that launch a kernel before the one it waits for has ended."""

_ALIGNED_BYTES: Final = 16

_Optional = torch.Tensor | None
_Made = tuple[tuple[Launch, ...], tuple[int, ...]]


def is_ready(problem: AttentionProblem) -> bool:
    """Return whether this machine has compiled the kernels of a problem."""
    asked = trained(problem) if problem.wants_gradients else problem
    return is_noted(_known_by(asked))


def _known_by(problem: AttentionProblem) -> tuple[object, ...]:
    """Return what says, before there are tensors, which kernels a problem takes."""
    dims = problem.head_dim, problem.value_dim
    splits = tuple(choose_splits(problem, columns, 132) for columns in dims)
    return ("small", *splits, *Arguments(problem).known_by)


def _computed(problem: AttentionProblem, *given: Any, **others: Any) -> Result:
    """Return the output and the statistics that the problem asks for."""
    return with_statistics(_launcher(problem), problem, given, others)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """The launches of one layout, in their order, and the memory between them.

    Args:
        layout: what they follow from.
        launches: of the kernels.
        counts: parts that scores, and products with values, are sums of.
        weights: shape of weights and of gradients of scores.
    """

    layout: tuple[Any, ...]
    launches: tuple[Launch, ...]
    counts: tuple[int, ...]
    weights: tuple[int, int, int]


class _Launches:
    """The launches of a pass, worked out once for tensors that lie alike.

    Args:
        problem: of the calls, whose lengths are their own.
        make: returns launches and counts of a problem, for a device, tensors, and what is beside.
    """

    def __init__(self, problem: AttentionProblem, make: Callable[..., _Made]) -> None:
        self._problem = problem
        self._make = make
        self._prepared: _Prepared | None = None

    def of(self, read: tuple[torch.Tensor, ...], beside: Beside) -> _Prepared:
        """Return the launches for tensors, q and k first, that lie as these."""
        device = read[0].get_device()
        layout = (*((it.shape, it.stride()) for it in read), beside, device)
        prepared = self._prepared
        if prepared is None or prepared.layout != layout:
            batch, _, len_q, _ = read[0].shape
            own = replace(self._problem, batch=batch, len_q=len_q, len_k=read[1].shape[2])
            kind = own.device_type
            facts = probe(kind if device < 0 else f"{kind}:{device}")
            launches, counts = self._make(own, facts, read, beside)
            shape = (batch * own.num_kv_heads, own.group_size * len_q, pitch_of(_whole(own)))
            prepared = self._prepared = _Prepared(layout, launches, counts, shape)
        return prepared


class _Launcher:
    """The forward pass of one problem."""

    def __init__(self, problem: AttentionProblem) -> None:
        self._problem = problem
        self._launches = _Launches(problem, _forward)
        self._is_noted = False

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: _Optional = None,
        sinks: _Optional = None,
        slopes: _Optional = None,
        *unserved: None,
        statistics: tuple[_Optional, ...] = (None,) * 4,
        seed: _Optional = None,
        lse_rest: _Optional = None,
    ) -> torch.Tensor:
        """Return attention [B, Hq, Sq, Dv]; as the launcher of `streamed`."""
        check_untransformed(query, key, value)
        query, key, value = map(_readable, (query, key, value))
        output = output_like(query, value.shape[3])
        mask = as_bytes(mask)
        sinks, slopes = (None if it is None else with_dense_columns(it) for it in (sinks, slopes))
        if self._problem.dropout_p and seed is None:
            seed = drawn_seed(query)
        prepared = self._launches.of((query, key, value, output), Beside.of(mask, slopes, sinks))
        scores = _parts(query, prepared, 0)
        weights = unfilled(query, prepared.weights)
        first, softmax, last = prepared.launches
        first(query, key, scores)
        softmax(scores, weights, *statistics[:3], lse_rest, mask, sinks, slopes, seed)
        last(weights, value, output)
        # What a backward pass takes is compiled there.
        if query.is_cuda and not self._is_noted and not self._problem.wants_gradients:
            self._is_noted = True
            note(_known_by(self._problem))
        return output


def _forward(
    problem: AttentionProblem,
    facts: HardwareFacts,
    read: tuple[torch.Tensor, ...],
    beside: Beside,
) -> _Made:
    """Return the launches of a forward pass, and the parts of scores."""
    query, key, value, output = read
    overlaps = _overlaps(problem, facts)
    chunk = _whole(problem)
    pitch = pitch_of(chunk)
    splits = choose_splits(problem, problem.head_dim, facts.num_processors)
    launches = (
        partials(problem, query, key, pitch, splits, follows=False, overlaps=overlaps),
        Arguments(problem).softmax(chunk, beside, splits.count, is_chained=overlaps),
        slices(problem, value, output, pitch=pitch, overlaps=overlaps),
    )
    return launches, (splits.count,)


class _Backward:
    """The backward pass of one problem: all scores again, their gradients, three products."""

    def __init__(self, problem: AttentionProblem) -> None:
        self._problem = problem
        self._launches = _Launches(problem, _backward_launches)
        self._is_noted = False

    def __call__(
        self,
        tensors: Tensors,
        kept: Kept,
        upstream: torch.Tensor,
        lse_upstream: _Optional,
        wanted: frozenset[str],
    ) -> dict[str, torch.Tensor]:
        """Return the gradients that are wanted."""
        given = (tensors.query, tensors.key, tensors.value, upstream)
        query, key, value, upstream = map(_readable, given)
        found = {
            name: output_like(item, item.shape[3])
            for name, item in (("query", query), ("key", key), ("value", value))
        }
        mask = as_bytes(tensors.mask)
        slopes = None if tensors.alibi_slopes is None else with_dense_columns(tensors.alibi_slopes)
        if lse_upstream is not None:
            lse_upstream = lse_upstream.contiguous()
        read = (query, key, value, upstream, *found.values())
        prepared = self._launches.of(read, Beside.of(mask, slopes))
        scores, products = (_parts(query, prepared, place) for place in range(2))
        weights, changes = (unfilled(query, prepared.weights) for _ in range(2))
        delta = unfilled(kept.lse, kept.lse.shape)
        first, second, between, of_query, of_key, of_value = prepared.launches
        first(query, key, scores)
        second(upstream, value, products)
        rest = (kept.lse, delta, lse_upstream, kept.lse_rest, mask, slopes, kept.seed)
        between(scores, products, weights, changes, *rest)
        if "query" in wanted:
            of_query(changes, key, found["query"])
        if "key" in wanted:
            of_key(changes, query, found["key"])
        if "value" in wanted:
            of_value(weights, upstream, found["value"])
        if "sinks" in wanted:
            assert tensors.sinks is not None
            found["sinks"] = sinks_gradient(tensors.sinks, kept.lse, delta)
        if query.is_cuda and not self._is_noted and {"query", "key", "value"} <= wanted:
            self._is_noted = True
            note(_known_by(self._problem))
        return {name: found[name] for name in wanted}


def _backward_launches(
    problem: AttentionProblem,
    facts: HardwareFacts,
    read: tuple[torch.Tensor, ...],
    beside: Beside,
) -> _Made:
    """Return the launches of a backward pass, and the parts of scores and of products."""
    query, key, value, upstream, of_query, of_key, of_value = read
    overlaps = _overlaps(problem, facts)
    chunk = _whole(problem)
    pitch, scale = pitch_of(chunk), problem.scale
    splits, others = (
        choose_splits(problem, columns, facts.num_processors)
        for columns in (problem.head_dim, problem.value_dim)
    )
    counts = splits.count, others.count
    transposed = partial(slices, problem, pitch=pitch, is_transposed=True, overlaps=overlaps)
    launches = (
        partials(problem, query, key, pitch, splits, follows=False, overlaps=overlaps),
        partials(problem, upstream, value, pitch, others, follows=overlaps, overlaps=overlaps),
        Arguments(problem).changes(chunk, beside, counts, is_chained=overlaps, has_delta=False),
        slices(problem, key, of_query, pitch=pitch, scale=scale, overlaps=overlaps),
        transposed(query, of_key, scale=scale),
        transposed(upstream, of_value),
    )
    return launches, counts


_launcher, _backward = kept_by_problem(_Launcher), kept_by_problem(_Backward)
KERNELS: Final = Differentiated("small", _computed, _backward, _Launcher)
run, direct = KERNELS.run, KERNELS.direct


def _whole(problem: AttentionProblem) -> Chunk:
    """Return the chunk that all scores are."""
    planes = range(problem.batch * problem.num_kv_heads)
    return Chunk(planes, range(problem.len_q), range(problem.len_k))


def _parts(like: torch.Tensor, prepared: _Prepared, place: int) -> torch.Tensor:
    """Return memory of numbers that are sums of parts."""
    shape = (prepared.counts[place], *prepared.weights)
    return unfilled(like, shape, dtype=torch.float32)


def _overlaps(problem: AttentionProblem, facts: HardwareFacts) -> bool:
    """Return whether kernels may begin before those they wait for have ended."""
    # On AMD's GPUs the numbers are others.
    if torch.version.hip is not None or is_wide(problem, problem.len_k):
        return False
    return facts.compute_capability >= _OVERLAPS_FROM


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as kernels read it: dense columns, rows of 16-bit numbers aligned."""
    step = _ALIGNED_BYTES // tensor.element_size()
    odd = tensor.element_size() == 2 and any(size % step for size in tensor.stride()[:3])
    if tensor.stride(3) != 1 or odd:
        return tensor.contiguous()
    return tensor if tensor.data_ptr() % _ALIGNED_BYTES == 0 else tensor.clone()
