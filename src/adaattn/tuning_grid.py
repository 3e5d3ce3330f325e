"""Which problems `adaattn.tune` measures when none are given: the lists below, crossed.

Each list begins with what calls most often are. A problem comes the earlier, the nearer its
values are to the heads of their lists, so that a run cut short has measured the usual calls.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final

from adaattn.planning import simplify
from adaattn.spec import Align, AttentionProblem, MaskKind, Precision

__all__ = ["Asked", "default_grid"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One problem to measure.

    Args:
        problem: what.
        compiles: executors that compile take part; they take 5 to 10 s for each problem.
    """

    problem: AttentionProblem
    compiles: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lists:
    """What is crossed for one kind of device.

    Args:
        precisions: dtypes.
        head_dims: D.
        sizes: (B, Hq).
        groups: query heads for each key head.
        lengths: Sq and Sk.
        window_lengths: the same under a window.
        decode_groups: of a single query.
        decode_keys: Sk of a single query.
        training_lengths: Sq and Sk where gradients are wanted.
        compiled_lengths: of the problems that executors which compile take part in.
    """

    precisions: tuple[Precision, ...]
    head_dims: tuple[int, ...]
    sizes: tuple[tuple[int, int], ...]
    groups: tuple[int, ...]
    lengths: tuple[int, ...]
    window_lengths: tuple[int, ...]
    decode_groups: tuple[int, ...]
    decode_keys: tuple[int, ...]
    training_lengths: tuple[int, ...]
    compiled_lengths: tuple[int, ...] = ()


_LISTS: Final = {
    "cpu": _Lists(
        precisions=(Precision.FP32, Precision.BF16),
        head_dims=(64, 128),
        sizes=((1, 8),),
        groups=(1, 4),
        lengths=(512, 2048, 128, 1024, 4096),
        window_lengths=(2048, 1024, 4096),
        decode_groups=(4, 8, 1),
        decode_keys=(2048, 8192, 512, 1024, 4096, 16384),
        training_lengths=(512, 2048, 1024),
    ),
    "cuda": _Lists(
        precisions=(Precision.BF16, Precision.FP32),
        head_dims=(128, 64, 256, 512),
        sizes=((1, 32), (4, 32)),
        groups=(1, 4),
        lengths=(2048, 512, 8192, 128),
        window_lengths=(2048, 512, 8192),
        decode_groups=(4, 8, 1),
        decode_keys=(8192, 2048, 512, 1024, 4096, 16384),
        training_lengths=(2048, 512, 1024),
        compiled_lengths=(2048, 512, 8192),
    ),
}

_LONGEST_BIAS: Final = 2048
"""A bias has a matrix for each head."""

_DOCUMENTS: Final = 4
"""Packed sequences of a problem, of equal lengths."""

_CLASSES: Final[dict[str, dict[str, Any]]] = {
    "causal": {"is_causal": True},
    "full": {},
    "narrow window": {"is_causal": True, "window": 8},
    "mask of keys": {"mask": MaskKind.BOOLEAN},
    "wide window": {"is_causal": True, "window": 2},
    "mask": {"mask": MaskKind.BOOLEAN},
    "alibi": {"is_causal": True, "has_alibi": True},
    "softcap": {"is_causal": True, "softcap": 30.0},
    "packed": {"is_causal": True, "num_sequences": _DOCUMENTS, "packed_square": True},
    "bias": {"mask": MaskKind.ADDITIVE},
}
"""Fields of each class; a window is a share of the length."""

_TRAINED: Final = ("causal", "full", "narrow window")


def default_grid(device_type: str) -> tuple[Asked, ...]:
    """Return the problems to measure on a kind of device, the most informative first.

    Example:
        >>> grid = default_grid("cpu")
        >>> grid[0].problem.len_q, grid[0].problem.is_causal
        (512, True)
    """
    lists = _LISTS[device_type]
    found = [*_square(lists), *_training(lists), *_decode(lists)]
    found.sort(key=lambda item: item[0])
    return tuple(
        Asked(
            problem=simplify(replace(problem, device_type=device_type)),
            compiles=_compiles(problem, lists),
        )
        for _, problem in found
    )


def _square(lists: _Lists) -> Iterator[tuple[float, AttentionProblem]]:
    """Yield (how unusual, problem) of prefill, class by class."""
    for name in _CLASSES:
        lengths = lists.window_lengths if "window" in name else lists.lengths
        for place, values in _crossed(lists, lists.groups, lengths):
            problem = _problem(name, *values)
            fits = name != "bias" or problem.len_q <= _LONGEST_BIAS
            if fits and not (problem.num_sequences and problem.max_len_q < 128):
                yield place + _class_place(name), problem


def _training(lists: _Lists) -> Iterator[tuple[float, AttentionProblem]]:
    """Yield the same where gradients are wanted."""
    for name in _TRAINED:
        for place, values in _crossed(lists, lists.groups, lists.training_lengths):
            problem = replace(_problem(name, *values), requires_grad=True)
            yield place + _class_place(name) + 0.5, problem


def _decode(lists: _Lists) -> Iterator[tuple[float, AttentionProblem]]:
    """Yield the same for a single query at the last key."""
    for place, values in _crossed(lists, lists.decode_groups, lists.decode_keys):
        problem = replace(_problem("causal", *values), len_q=1, align=Align.BOTTOM_RIGHT)
        yield place, problem


def _crossed(
    lists: _Lists, groups: tuple[int, ...], lengths: tuple[int, ...]
) -> Iterator[tuple[float, tuple[Any, ...]]]:
    """Yield every choice from the lists with the sum of the places of its values."""
    crossed = (lists.precisions, lists.head_dims, lists.sizes, groups, lengths)
    for choice in product(*(enumerate(values) for values in crossed)):
        yield sum(place for place, _ in choice), tuple(value for _, value in choice)


def _class_place(name: str) -> float:
    """Return how unusual a class is: the last counts as much as two steps elsewhere."""
    return 2.0 * list(_CLASSES).index(name) / len(_CLASSES)


def _problem(
    name: str,
    precision: Precision,
    head_dim: int,
    size: tuple[int, int],
    group: int,
    length: int,
) -> AttentionProblem:
    """Return the problem of a class and its sizes."""
    fields = dict(_CLASSES[name])
    if "window" in fields:
        fields["window"] = (length // fields["window"] - 1, -1)
    if "mask" in fields:
        shapes = {
            "mask of keys": (size[0], 1, 1, length),
            "mask": (1, 1, length, length),
            "bias": (1, size[1], length, length),
        }
        fields["mask_shape"] = shapes[name]
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
        value_dim=head_dim,
        precision=precision,
        scale=head_dim**-0.5,
        **fields,
    )


def _compiles(problem: AttentionProblem, lists: _Lists) -> bool:
    """Return whether executors that compile take part: about 30 problems that SDPA lacks."""
    usual = (lists.precisions[0], lists.sizes[0], lists.groups[0])
    size = (problem.batch, problem.num_heads)
    if problem.num_sequences:
        size = lists.sizes[0] if problem.num_heads == lists.sizes[0][1] else size
    lacking = problem.window != (-1, -1) or problem.has_alibi or problem.softcap > 0
    lacking = (lacking or problem.num_sequences > 0) and not problem.requires_grad
    return (
        lacking
        and (problem.precision, size, problem.group_size) == usual
        and problem.head_dim in lists.head_dims[:2]
        and problem.len_q in lists.compiled_lengths
    )
