"""Random attention problems of `benchmarks.regret`: what they are, and how they are drawn."""

import enum
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

__all__ = ["FUNCTIONS", "Kind", "Problem", "draw", "kinds"]


_Key = TypeVar("_Key", str, int)


class Kind(enum.Enum):
    """What is asked for beside q, k and v."""

    PLAIN = "plain"
    CAUSAL = "causal"
    MASK = "mask"
    BIAS = "bias"
    PADDING = "padding"
    PADDING_BIAS = "padding bias"
    CAUSAL_WINDOW = "causal window"
    WINDOW = "window"
    ALIBI = "alibi causal"
    PACKED = "packed causal"
    SINKS = "sinks causal"
    SOFTCAP = "softcap causal"
    DILATED = "dilated causal"
    MIX = "mix causal"


_KINDS = {
    "function": (
        *(Kind.PLAIN, Kind.CAUSAL, Kind.MASK, Kind.BIAS, Kind.PADDING, Kind.PADDING_BIAS),
        *(Kind.CAUSAL_WINDOW, Kind.WINDOW, Kind.ALIBI, Kind.PACKED),
    ),
    "written": (Kind.SINKS, Kind.SOFTCAP, Kind.DILATED, Kind.MIX),
    "cache": (
        *(Kind.CAUSAL, Kind.MASK, Kind.CAUSAL_WINDOW, Kind.ALIBI),
        *(Kind.SINKS, Kind.SOFTCAP, Kind.MIX),
    ),
    "module": (Kind.PLAIN, Kind.CAUSAL, Kind.PADDING, Kind.CAUSAL_WINDOW, Kind.WINDOW),
    "transformers": (Kind.CAUSAL, Kind.PADDING),
    "generation": (Kind.CAUSAL, Kind.PADDING),
}
FUNCTIONS = ("function", "written", "cache")
"""Ways of drawing calls of the function itself."""

_INFERENCE = ("transformers", "generation", "cache")
_SOFTCAPS = (10.0, 30.0, 50.0)
_DILATIONS = (2, 3, 4, 8)
_BEYOND_MASKS = {Kind.SINKS, Kind.SOFTCAP, Kind.DILATED, Kind.MIX}
_PADDED = {Kind.PADDING, Kind.PADDING_BIAS}
_MASKED = {Kind.MASK, Kind.BIAS} | _PADDED
_WITH_CROSS = {Kind.PLAIN} | _MASKED
_DIMS = {32: 1, 48: 1, 64: 4, 80: 1, 96: 1, 128: 4, 192: 1, 256: 2, 512: 1}
_GROUPS = {1: 4, 2: 1, 4: 2, 8: 1}
_DTYPES = {
    "cpu": {"float32": 4, "bfloat16": 1},
    "cuda": {"bfloat16": 7, "float16": 2, "float32": 1},
}
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One attention call.

    Args:
        index: its place among those drawn; seeds its tensors.
        kind: what is asked for.
        dtype: name of the dtype of q, k and v.
        batch: B.
        heads: H of the query.
        kv_heads: heads of key and value, a divisor of ``heads``.
        len_q: Sq, all documents together when packed.
        len_k: Sk.
        dim: D.
        training: forward and backward pass, with gradients of q, k and v.
        transposed: q, k and v are views of [B, S, H, D].
        mask_shape: of a mask or bias; () without one.
        hidden_rows: leading query rows that a mask hides every key from.
        window: tokens to each side that are seen; 0 without a window.
        dilation: every so many keys are seen.
        softcap: of the scores; 0 without one.
        has_sinks: a logit of each head joins the denominator.
        lengths: tokens of each packed document; () when not packed.
    """

    index: int
    kind: Kind
    dtype: str
    batch: int
    heads: int
    kv_heads: int
    len_q: int
    len_k: int
    dim: int
    training: bool = False
    transposed: bool = False
    mask_shape: tuple[int, ...] = ()
    hidden_rows: int = 0
    window: int = 0
    dilation: int = 1
    softcap: float = 0.0
    has_sinks: bool = False
    lengths: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """What tables call it."""
        words = [f"{self.index:03d} {self.kind.value} {self.dtype}"]
        words.append(f"B{self.batch} H{self.heads}/{self.kv_heads}")
        words.append(f"Sq{self.len_q} Sk{self.len_k} D{self.dim}")
        for shown, word in (
            (self.mask_shape, "x".join(map(str, self.mask_shape))),
            (self.window, f"+-{self.window}"),
            (self.dilation > 1, f"every {self.dilation}"),
            (self.softcap, f"softcap {self.softcap:g}"),
            (self.has_sinks, "sinks"),
            (self.lengths, f"{len(self.lengths)} documents"),
            (self.hidden_rows, f"{self.hidden_rows} rows hidden"),
            (self.training, "training"),
            (self.transposed, "transposed"),
        ):
            if shown:
                words.append(word)
        return " ".join(words)

    @property
    def scores(self) -> int:
        """B H Sq Sk."""
        return self.batch * self.heads * self.len_q * self.len_k

    @property
    def flops(self) -> float:
        """4 B H Sq Sk D of the forward pass, 3.5 times that in training; nothing is left out."""
        return 4.0 * self.scores * self.dim * (3.5 if self.training else 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limits:
    """The largest problems of a device: a call should take 20 ms on a GPU, 60 ms on a CPU.

    Args:
        shortest: of the lengths.
        longest: of the lengths.
        scores: B H Sq Sk.
        gflop: in 16 bits on a GPU, in fp32 on a CPU; the other dtypes are given an eighth.
        elements: of a query or key tensor.
        mask_bytes: of the mask that PyTorch's function needs.
        width: H D of a layer, whose projections count too; 0 where there is none.
        heads: the most of a query.
        batch: the most sequences.
    """

    shortest: int
    longest: int
    scores: int
    gflop: float
    elements: int
    mask_bytes: int
    width: int = 0
    heads: int = 32
    batch: int = 8


_LIMITS = {
    "cpu": _Limits(
        shortest=16, longest=2048, scores=2**24, gflop=2.5, elements=2**23, mask_bytes=2**27
    ),
    "cuda": _Limits(
        shortest=1, longest=8192, scores=2**30, gflop=1200, elements=2**28, mask_bytes=2**30
    ),
}
_LAYER = {
    "cpu": {"scores": 2**24, "elements": 2**23, "width": 1024},
    "cuda": {"scores": 2**28, "elements": 2**24, "width": 2048},
}
"""Limits through a layer, whose whole output is checked in float64."""


def kinds(through: str) -> tuple[Kind, ...]:
    """Return the kinds that are drawn for the function, the module or a Transformers model.

    ``"written"`` are calls of the function that PyTorch's has no word for, so that its users write
    attention out; ``"cache"`` those whose queries are the last tokens of the keys.
    """
    return _KINDS[through]


def draw(
    count: int,
    *,
    seed: int,
    device: str,
    through: str = "function",
    longest: int | None = None,
    few_heads: bool = False,
) -> list[Problem]:
    """Return problems that depend on these arguments alone; every kind comes equally often.

    Args:
        count: how many.
        seed: of Python's generator.
        device: ``"cpu"`` or ``"cuda"``, for dtypes and sizes.
        through: ``"function"``, ``"written"``, ``"cache"``, ``"module"``, ``"transformers"``, or
            ``"generation"``: one query over all keys but the last, which is its own.
        longest: the greatest length; None is that of the device.
        few_heads: one sequence, and at most four heads: seldom drawn otherwise, and no work for
            all processors.
    """
    source = random.Random(seed)
    limits = _LIMITS[device]
    if longest is not None:
        shortest = min(limits.shortest, longest)
        limits = replace(limits, longest=longest, shortest=shortest)
    if through not in FUNCTIONS:
        limits = replace(limits, **_LAYER[device])
    if few_heads:
        limits = replace(limits, heads=4, batch=1)
    order: list[Kind] = []
    found = []
    for index in range(count):
        if not order:
            order = list(kinds(through))
            source.shuffle(order)
        found.append(_problem(source, index, order.pop(), device, through, limits))
    return found


def _problem(
    source: random.Random, index: int, kind: Kind, device: str, through: str, limits: _Limits
) -> Problem:
    """Return one problem of a kind."""
    group = min(_weighted(source, _GROUPS), limits.heads)
    kv_heads = _between(source, 1, limits.heads // group)
    len_q, len_k = _lengths(source, kind, through, limits)
    is_function = through in FUNCTIONS
    drawn = Problem(
        index=index,
        kind=kind,
        dtype=_weighted(source, _DTYPES[device]),
        batch=1 if kind is Kind.PACKED else source.randint(1, limits.batch),
        heads=group * kv_heads,
        kv_heads=kv_heads,
        len_q=len_q,
        len_k=len_k,
        dim=_weighted(source, _DIMS),
        training=through not in _INFERENCE and len_q > 1 and source.random() < 1 / 3,
        transposed=is_function and source.random() < 1 / 3,
    )
    made = _shrunk(drawn, device, limits)
    if through == "generation":
        made = replace(made, len_q=1)
    elif through == "cache":  # keys may have been shortened
        made = replace(made, len_q=min(made.len_q, max(made.len_k // 2, 1)))
    if kind in (Kind.WINDOW, Kind.CAUSAL_WINDOW):
        return replace(made, window=_between(source, 1, max(made.len_k // 2, 1)))
    if kind is Kind.PACKED:
        return replace(made, lengths=_documents(source, made.len_q))
    if kind in _BEYOND_MASKS:
        return _beyond_masks(source, made)
    if kind not in _MASKED:
        return made
    shape = _mask_shape(source, made, limits)
    hides = shape[-2] > 1 and source.random() < 0.2
    return replace(made, mask_shape=shape, hidden_rows=source.randint(1, 3) if hides else 0)


def _beyond_masks(source: random.Random, problem: Problem) -> Problem:
    """Return the problem with what its kind asks for; a mix has two of three, or all."""
    if problem.kind is Kind.DILATED:
        return replace(problem, dilation=source.choice(_DILATIONS))
    asked = {problem.kind}
    if problem.kind is Kind.MIX:
        others = (Kind.SINKS, Kind.SOFTCAP, Kind.CAUSAL_WINDOW)
        asked = set(source.sample(others, source.choice((2, 2, 3))))
    window = _between(source, 1, max(problem.len_k // 2, 1))
    return replace(
        problem,
        window=window if Kind.CAUSAL_WINDOW in asked else 0,
        softcap=source.choice(_SOFTCAPS) if Kind.SOFTCAP in asked else 0.0,
        has_sinks=Kind.SINKS in asked,
    )


def _lengths(source: random.Random, kind: Kind, through: str, limits: _Limits) -> tuple[int, int]:
    """Return (Sq, Sk): equal, apart where the kind may be, or one query and many keys.

    Behind a cache: one query, up to 16, or up to half as many as keys.
    """
    if through == "cache":
        keys = _between(source, max(limits.longest // 64, 2), limits.longest)
        most = source.choice((1, min(keys, 16), max(keys // 2, 1)))
        return _between(source, 1, most), keys
    length = _between(source, limits.shortest, limits.longest)
    form = source.choice(("self", "self", "cross", "decode"))
    if through != "function" or kind not in _WITH_CROSS or form == "self":
        return length, length
    if form == "cross":
        return length, _between(source, limits.shortest, limits.longest)
    return 1, _between(source, max(limits.longest // 8, 1), limits.longest)


def _shrunk(problem: Problem, device: str, limits: _Limits) -> Problem:
    """Return the problem with fewer entries and heads, then tokens, until it fits."""
    group = problem.heads // problem.kv_heads
    while not _fits(problem, device, limits):
        if problem.batch > 1:
            problem = replace(problem, batch=problem.batch // 2)
        elif problem.kv_heads > 1:
            fewer = problem.kv_heads // 2
            problem = replace(problem, kv_heads=fewer, heads=fewer * group)
        elif problem.heads > 1:
            problem = replace(problem, heads=problem.heads // 2)
        elif problem.len_q == problem.len_k:
            half = problem.len_q // 2
            problem = replace(problem, len_q=half, len_k=half)
        else:
            longer = "len_q" if problem.len_q > problem.len_k else "len_k"
            problem = replace(problem, **{longer: getattr(problem, longer) // 2})
    return problem


def _fits(problem: Problem, device: str, limits: _Limits) -> bool:
    """Return whether a problem is within the limits of its device."""
    usual = problem.dtype == "float32" if device == "cpu" else problem.dtype != "float32"
    elements = problem.batch * problem.heads * max(problem.len_q, problem.len_k) * problem.dim
    slopes = problem.heads if problem.kind is Kind.ALIBI else 1
    mask_bytes = slopes * problem.len_q * problem.len_k * _ITEM_BYTES[problem.dtype]
    flops, width = problem.flops, problem.heads * problem.dim
    if limits.width:
        tokens = problem.batch * problem.len_q
        flops += 8.0 * tokens * width**2 * (3 if problem.training else 1)
    return (
        (not limits.width or width <= limits.width)
        and problem.scores <= limits.scores
        and flops <= 1e9 * limits.gflop * (1 if usual else 1 / 8)
        and elements <= limits.elements
        and mask_bytes <= limits.mask_bytes
    )


def _mask_shape(source: random.Random, problem: Problem, limits: _Limits) -> tuple[int, ...]:
    """Return the shape of a mask, one of those that fit the memory."""
    batch, heads, rows, keys = problem.batch, problem.heads, problem.len_q, problem.len_k
    if problem.kind in _PADDED:
        return (batch, 1, 1, keys)
    shapes = [(rows, keys), (batch, 1, rows, keys), (batch, heads, rows, keys)]
    item = _ITEM_BYTES[problem.dtype] if problem.kind is Kind.BIAS else 1
    return source.choice([s for s in shapes if math.prod(s) * item <= limits.mask_bytes])


def _documents(source: random.Random, tokens: int) -> tuple[int, ...]:
    """Return the lengths of one to eight documents that fill the tokens."""
    cuts = sorted(source.sample(range(1, tokens), min(source.randint(0, 7), tokens - 1)))
    return tuple(end - start for start, end in zip([0, *cuts], [*cuts, tokens], strict=True))


def _between(source: random.Random, low: int, high: int) -> int:
    """Return a whole number whose logarithm is uniform."""
    return round(math.exp(source.uniform(math.log(low), math.log(max(low, high)))))


def _weighted(source: random.Random, weights: Mapping[_Key, int]) -> _Key:
    """Return a key, drawn by its weight."""
    return source.choices(tuple(weights), tuple(weights.values()))[0]
