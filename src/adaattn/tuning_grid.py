"""Which problems `adaattn.tune` measures when none are given: the lists below, crossed.

Each list begins with what calls most often are. A problem comes the earlier, the nearer its
values are to the heads of their lists, so that a run cut short has measured the usual calls.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Any, Final

from adaattn.planning import simplify
from adaattn.spec import Align, AttentionProblem, Aux, MaskKind, Precision

__all__ = ["Asked", "default_grid"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One problem to measure.

    Args:
        problem: what.
        compiles: executors that compile for each length take part; 5 to 10 s for each problem.
    """

    problem: AttentionProblem
    compiles: bool = True


_BLOCK: Final = 128
"""Rows and keys of a listed block."""

_SHORTEST_LISTED: Final = 1024
"""Tokens below which a list of blocks has next to nothing to leave out."""

_ALIGNED_BYTES: Final = 16
"""What rows of a mask begin at multiples of, where TMA is to read them."""

_DOCUMENTS: Final = 4
"""Packed sequences of a problem, of equal lengths."""

_PACKED: Final = {"is_causal": True, "num_sequences": _DOCUMENTS, "packed_square": True}

_CLASSES: Final[dict[str, dict[str, Any]]] = {
    "causal": {"is_causal": True},
    "full": {},
    "narrow window": {"is_causal": True, "window": 8},
    "mask of keys": {"mask": MaskKind.BOOLEAN},
    "wide window": {"is_causal": True, "window": 2},
    "mask": {"mask": MaskKind.BOOLEAN},
    "alibi": {"is_causal": True, "has_alibi": True},
    "softcap": {"is_causal": True, "softcap": 30.0},
    "sinks": {"is_causal": True, "has_sinks": True},
    "dilation": {"is_causal": True, "dilation": 4},
    "packed": _PACKED,
    "blocks": {"is_causal": True, "listed": 8},
    "bias": {"mask": MaskKind.ADDITIVE},
    "unaligned mask": {"mask": MaskKind.BOOLEAN},
    "unaligned bias": {"mask": MaskKind.ADDITIVE},
    "bias of keys": {"mask": MaskKind.ADDITIVE},
    "thinner window": {"is_causal": True, "window": 128},
    "thinnest window": {"is_causal": True, "window": 512},
    "window both ways": {"window": 8},
    "thin window": {"is_causal": True, "window": 32},
    "thin window both ways": {"window": 32},
    "wide window both ways": {"window": 2},
    "few blocks": {"is_causal": True, "listed": 32},
    "all blocks": {"listed": 1},
    "statistics": {"is_causal": True, "aux": Aux.ENTROPY},
    "full statistics": {"aux": Aux.ENTROPY},
    "packed window": _PACKED | {"window": 8},
    "packed window with a softcap": _PACKED | {"window": 8, "softcap": 30.0},
}
"""Fields of each class; a window, and the listed blocks, are a share of the length."""

_MASKED: Final = tuple(name for name in _CLASSES if "window" in name or name == "packed")
_LISTED: Final = ("blocks", "few blocks", "all blocks")
_COMPILED: Final = (
    *("narrow window", "window both ways", "packed", "alibi", "softcap"),
    *("blocks", "all blocks"),
)
_SHORT: Final = (
    *("causal", "full", "mask of keys", "bias of keys", "mask", "bias"),
    *("alibi", "softcap", "sinks", "dilation"),
)
_DECODED: Final = ("causal", "mask of keys", "bias of keys")
_WIDE: Final = ("causal", "full")
_WIDE_FEATURES: Final = ("softcap", "sinks", "alibi", "narrow window", "mask", "bias")
_TRAINED: Final = ("causal", "full", *_MASKED)
_FEATURES: Final = ("alibi", "softcap", "sinks", "dilation", "mask of keys", "mask", "bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lists:
    """What is crossed: dtypes, D or D and Dv, (B, Hq), query heads for a key head, Sq and Sk."""

    precisions: tuple[Precision, ...]
    head_dims: tuple[int | tuple[int, int], ...]
    sizes: tuple[tuple[int, int], ...]
    groups: tuple[int, ...]
    lengths: tuple[int, ...]

    def __iter__(self) -> Iterator[tuple[float, tuple[Any, ...]]]:
        """Yield every choice with the sum of the places of its values."""
        crossed = (self.precisions, self.head_dims, self.sizes, self.groups, self.lengths)
        for choice in product(*(enumerate(values) for values in crossed)):
            yield sum(place for place, _ in choice), tuple(value for _, value in choice)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Grid:
    """The lists of one kind of device.

    Args:
        square: of prefill.
        masked: of what is a mask to SDPA, windows and packed sequences, in training too.
        wide: of head dimensions above 256, in training too.
        wide_features: of these with masks and changes of scores, in training too.
        training: of the rest where gradients are wanted.
        short: of a few tokens, with gradients too where its class has them.
        decode: of a single query; the lengths are of its keys.
        statistics: of prefill with the entropy of rows, which few executors know.
        unaligned: of masks whose rows begin at no multiples of 16 bytes.
        trained: classes of ``training``, and of ``masked``, with gradients.
        deterministic: classes of ``training`` with gradients that are the same each time, in 16
            bits: there are kernels that add them up in no fixed order.
        omitted: classes that are left out: one executor alone serves them.
        compiled_lengths: of the problems that executors which compile take part in.
        longest_bias: tokens up to which there is a bias, which is a matrix for each head.
    """

    square: _Lists
    masked: _Lists
    training: _Lists
    decode: _Lists
    statistics: tuple[_Lists, ...] = ()
    unaligned: tuple[_Lists, ...] = ()
    short: tuple[_Lists, ...] = ()
    wide: tuple[_Lists, ...] = ()
    wide_features: tuple[_Lists, ...] = ()
    trained: tuple[str, ...] = _TRAINED
    deterministic: tuple[str, ...] = ()
    omitted: tuple[str, ...] = ()
    compiled_lengths: tuple[int, ...] = ()
    longest_bias: int = 2048


_CPU: Final = _Lists(
    precisions=(Precision.FP32, Precision.BF16),
    head_dims=(64, 128),
    sizes=((1, 8),),
    groups=(1, 4),
    lengths=(512, 2048, 128, 1024, 4096),
)
_CUDA: Final = _Lists(
    precisions=(Precision.BF16, Precision.FP32),
    head_dims=(128, 64, 256, 512),
    sizes=((1, 32), (4, 32)),
    groups=(1, 4),
    lengths=(2048, 512, 8192, 128, 4096, 16384),
)
_GRIDS: Final = {
    "cpu": _Grid(
        square=_CPU,
        masked=replace(_CPU, lengths=(2048, 1024, 4096)),
        training=replace(_CPU, lengths=(512, 2048, 1024)),
        decode=replace(
            _CPU,
            sizes=((1, 8), (4, 32)),
            groups=(4, 8, 1),
            lengths=(2048, 8192, 512, 1024, 4096, 16384),
        ),
        omitted=(
            "sinks",
            "dilation",
            "window both ways",
            "thin window",
            "thin window both ways",
            "wide window both ways",
            "packed window",
            "packed window with a softcap",
        ),
    ),
    "cuda": _Grid(
        square=_CUDA,
        masked=_Lists(
            precisions=(Precision.BF16, Precision.FP32),
            head_dims=(128, 64, 256),
            sizes=((1, 32), (1, 4)),
            groups=(1, 4),
            lengths=(2048, 512, 8192, 128, 32768, 32, 4),
        ),
        training=replace(_CUDA, lengths=(2048, 512, 8192, 1024, 128)),
        short=(
            _Lists(
                precisions=(Precision.BF16, Precision.FP32),
                head_dims=(128, 64, 256),
                sizes=((1, 32), (1, 4)),
                groups=(1, 4),
                lengths=(32, 4),
            ),
            _Lists(
                precisions=(Precision.BF16, Precision.FP32),
                head_dims=(512,),
                sizes=((1, 32), (1, 4)),
                groups=(4,),
                lengths=(32, 4),
            ),
        ),
        wide=(
            _Lists(
                precisions=(Precision.BF16, Precision.FP32),
                head_dims=((576, 512), 1024),
                sizes=((1, 16),),
                groups=(1, 4),
                lengths=(2048, 8192, 512),
            ),
            _Lists(
                precisions=(Precision.BF16, Precision.FP32),
                head_dims=(2048, 4096, 8192, 512),
                sizes=((1, 4),),
                groups=(1,),
                lengths=(2048, 64, 8192, 16, 512, 128),
            ),
        ),
        wide_features=(
            _Lists(
                precisions=(Precision.BF16,),
                head_dims=(512, 2048),
                sizes=((1, 8),),
                groups=(1,),
                lengths=(2048, 8192, 512),
            ),
        ),
        decode=replace(_CUDA, groups=(4, 8, 1), lengths=(8192, 2048, 512, 1024, 4096, 16384)),
        statistics=(replace(_CUDA, head_dims=(128,), sizes=((1, 32),)),),
        unaligned=(
            replace(
                _CUDA,
                precisions=(Precision.BF16,),
                head_dims=(128, 64, 256),
                lengths=(2044, 508, 8188, 124, 4092),
            ),
        ),
        trained=(*_TRAINED, *_FEATURES),
        deterministic=("causal", "full"),
        compiled_lengths=(2048, 512, 8192, 32768),
        longest_bias=8192,
    ),
}


def default_grid(device_type: str) -> tuple[Asked, ...]:
    """Return the problems to measure on a kind of device, the most informative first.

    Example:
        >>> grid = default_grid("cpu")
        >>> grid[0].problem.len_q, grid[0].problem.is_causal
        (512, True)
    """
    grid = _GRIDS[device_type]
    found = [*_square(grid), *_decode(grid)]
    found.sort(key=lambda item: item[0])
    asked: dict[AttentionProblem, Asked] = {}
    for _, problem, compiles in found:
        plain = simplify(replace(problem, device_type=device_type))
        asked.setdefault(plain, Asked(problem=plain, compiles=compiles))
    return tuple(asked.values())


def _square(grid: _Grid) -> Iterator[tuple[float, AttentionProblem, bool]]:
    """Yield (how unusual, problem, whether to compile) class by class, then with gradients."""
    for name in _CLASSES:
        if name in grid.omitted:
            continue
        masked = name in (*_MASKED, *_LISTED)
        lists: Iterable[tuple[float, tuple[Any, ...]]] = grid.masked if masked else grid.square
        if name.endswith("statistics"):
            lists = chain.from_iterable(grid.statistics)
        elif name.startswith("unaligned"):
            lists = chain.from_iterable(grid.unaligned)
        for place, values in lists:
            problem = _problem(name, *values)
            too_long = name.endswith("bias") and problem.len_q > grid.longest_bias
            too_short = name in _LISTED and problem.len_q < _SHORTEST_LISTED
            if not (too_long or too_short):
                compiles = name in _COMPILED and _is_usual(values, grid)
                yield place + _class_place(name), problem, compiles
        if name in _COMPILED:
            for place, values in _long(grid):
                yield place + _class_place(name), _problem(name, *values), True
        seldom = (_SHORT, grid.short), (_WIDE, grid.wide), (_WIDE_FEATURES, grid.wide_features)
        for lists in chain.from_iterable(lists for names, lists in seldom if name in names):
            for place, values in lists:
                problem = _problem(name, *values)
                yield place + _class_place(name) + 1.0, problem, False
                if name in grid.trained:
                    training = replace(problem, requires_grad=True)
                    yield place + _class_place(name) + 1.5, training, False
        if name in grid.trained:
            for place, values in grid.masked if masked else grid.training:
                problem = replace(_problem(name, *values), requires_grad=True)
                yield place + _class_place(name) + 0.5, problem, False
                half = problem.precision is Precision.BF16
                if name in grid.deterministic and half and problem.head_dim <= 256:
                    again = replace(problem, deterministic=True)
                    yield place + _class_place(name) + 1.0, again, False


def _decode(grid: _Grid) -> Iterator[tuple[float, AttentionProblem, bool]]:
    """Yield the same for a single query at the last key."""
    for name in _DECODED:
        for place, values in grid.decode:
            problem = replace(_problem(name, *values), len_q=1, align=Align.BOTTOM_RIGHT)
            yield place + _class_place(name), problem, False


def _long(grid: _Grid) -> Iterator[tuple[float, tuple[Any, ...]]]:
    """Yield the usual problems of lengths at which those that compile are alone worth a look."""
    lists = grid.square
    rest = tuple(length for length in grid.compiled_lengths if length not in lists.lengths)
    usual = replace(
        lists,
        precisions=lists.precisions[:1],
        head_dims=lists.head_dims[:1],
        sizes=lists.sizes[:1],
        groups=lists.groups[:1],
        lengths=rest,
    )
    for place, values in usual:
        yield place + len(lists.lengths), values


def _is_usual(values: tuple[Any, ...], grid: _Grid) -> bool:
    """Return whether executors that compile take part: lists begin with the usual values."""
    *first, length = values
    lists = grid.square
    usual = (lists.precisions, lists.head_dims, lists.sizes, lists.groups)
    return first == [values[0] for values in usual] and length in grid.compiled_lengths


def _class_place(name: str) -> float:
    """Return how unusual a class is: the last counts as much as two steps elsewhere."""
    return 2.0 * list(_CLASSES).index(name) / len(_CLASSES)


def _problem(
    name: str,
    precision: Precision,
    dims: int | tuple[int, int],
    size: tuple[int, int],
    group: int,
    length: int,
) -> AttentionProblem:
    """Return the problem of a class and its sizes."""
    fields = dict(_CLASSES[name])
    head_dim, value_dim = (dims, dims) if isinstance(dims, int) else dims
    if "window" in fields:
        left = max(length // fields["window"] - 1, 0)
        fields["window"] = (left, -1 if fields.get("is_causal") else left)
    if "listed" in fields:
        most = max(length // (_BLOCK * fields.pop("listed")), 1)
        fields |= {"block_size": (_BLOCK, _BLOCK), "most_blocks": most}
    if "mask" in fields:
        shapes = {
            "keys": (size[0], 1, 1, length),
            "mask": (1, 1, length, length),
            "bias": (1, size[1], length, length),
        }
        fields["mask_shape"] = shapes[name.split()[-1]]
        number = 1 if fields["mask"] is MaskKind.BOOLEAN else precision.bits // 8
        has_rows = fields["mask_shape"][-2] > 1
        fields["mask_is_aligned"] = not (has_rows and length * number % _ALIGNED_BYTES)
    if "num_sequences" in fields:
        longest = length // _DOCUMENTS
        size = (1, size[0] * size[1])
        fields |= {"max_len_q": longest, "max_len_k": longest}
    return AttentionProblem(
        batch=size[0],
        num_heads=size[1],
        num_kv_heads=size[1] // group,
        len_q=length,
        len_k=length,
        head_dim=head_dim,
        value_dim=value_dim,
        precision=precision,
        scale=head_dim**-0.5,
        **fields,
    )
