"""Simplification keeps exactly the keys that each row sees, and uses fewer features."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaattn.planning import simplify
from adaattn.spec import Align, AttentionProblem
from adaattn.testing import make_problem

LENGTHS = st.integers(0, 6)
EDGES = st.integers(-1, 8)
PATTERNS = st.fixed_dictionaries(
    {
        "is_causal": st.booleans(),
        "align": st.sampled_from(Align),
        "window": st.tuples(EDGES, EDGES),
        "dilation": st.integers(1, 4),
        "has_alibi": st.booleans(),
    }
)


def _distances(problem: AttentionProblem, len_q: int, len_k: int) -> dict[tuple[int, int], int]:
    """The distance p - j of each visible pair, straight from the definition of each feature."""
    left, right = problem.window
    seen = {}
    for row in range(len_q):
        position = row + (len_k - len_q if problem.align is Align.BOTTOM_RIGHT else 0)
        for key in range(len_k):
            distance = position - key
            hidden = (
                (problem.is_causal and key > position)
                or (left >= 0 and key < position - left)
                or (right >= 0 and key > position + right)
                or distance % problem.dilation != 0
            )
            if not hidden:
                seen[row, key] = distance
    return seen


def _assert_same_keys(
    before: AttentionProblem, after: AttentionProblem, len_q: int, len_k: int
) -> None:
    wanted, got = _distances(before, len_q, len_k), _distances(after, len_q, len_k)
    assert wanted.keys() == got.keys()
    if before.has_alibi:
        assert wanted == got


@settings(max_examples=600, deadline=None)
@given(len_q=LENGTHS, len_k=LENGTHS, pattern=PATTERNS)
def test_each_row_sees_the_same_keys_as_before(
    len_q: int, len_k: int, pattern: dict[str, object]
) -> None:
    before = make_problem(len_q=len_q, len_k=len_k, **pattern)
    after = simplify(before)
    _assert_same_keys(before, after, len_q, len_k)
    untouched = ("is_causal", "window", "dilation", "align")
    kept = {name: getattr(before, name) for name in untouched}
    assert replace(after, **kept) == before, "a field that has nothing to do with it changed"


@settings(max_examples=400, deadline=None)
@given(lengths=st.lists(st.tuples(LENGTHS, LENGTHS), min_size=1, max_size=3), pattern=PATTERNS)
def test_each_packed_sequence_sees_the_same_keys_as_before(
    lengths: list[tuple[int, int]], pattern: dict[str, object]
) -> None:
    before = make_problem(
        lengths_q=[q for q, _ in lengths], lengths_k=[k for _, k in lengths], **pattern
    )
    after = simplify(before)
    for len_q, len_k in lengths:
        _assert_same_keys(before, after, len_q, len_k)


@settings(max_examples=200, deadline=None)
@given(len_q=LENGTHS, len_k=LENGTHS, pattern=PATTERNS)
def test_a_simplified_problem_has_nothing_left_to_simplify(
    len_q: int, len_k: int, pattern: dict[str, object]
) -> None:
    once = simplify(make_problem(len_q=len_q, len_k=len_k, **pattern))
    assert simplify(once) == once


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ({"len_q": 8, "window": (3, 0)}, {"is_causal": True, "window": (3, -1)}),
        ({"len_q": 8, "window": (8, 8)}, {"window": (-1, -1)}),
        ({"len_q": 8, "window": (7, 9), "is_causal": True}, {"window": (7, -1)}),
        ({"len_q": 8, "len_k": 20, "window": (19, -1)}, {"window": (19, -1)}),
        ({"len_q": 8, "len_k": 20, "window": (20, -1)}, {"window": (-1, -1)}),
        ({"len_q": 8, "is_causal": True, "align": Align.BOTTOM_RIGHT}, {"align": Align.TOP_LEFT}),
        ({"len_q": 8, "len_k": 9, "align": Align.BOTTOM_RIGHT}, {"align": Align.TOP_LEFT}),
        (
            {"len_q": 1, "len_k": 9, "is_causal": True, "align": Align.BOTTOM_RIGHT},
            {"is_causal": False, "align": Align.TOP_LEFT},
        ),
        ({"len_q": 5, "len_k": 1, "is_causal": True}, {"is_causal": False}),
        (
            {"len_q": 5, "len_k": 1, "is_causal": True, "align": Align.BOTTOM_RIGHT},
            {"is_causal": True, "align": Align.BOTTOM_RIGHT},
        ),
        (
            {"len_q": 1, "len_k": 9, "window": (4, 0), "align": Align.BOTTOM_RIGHT},
            {"window": (4, -1), "is_causal": False, "align": Align.BOTTOM_RIGHT},
        ),
        (
            {"len_q": 1, "len_k": 9, "is_causal": True, "align": Align.BOTTOM_RIGHT}
            | {"has_alibi": True},
            {"is_causal": False, "align": Align.BOTTOM_RIGHT},
        ),
        ({"len_q": 1, "dilation": 3}, {"dilation": 1}),
        (
            {"lengths_q": (3, 5), "is_causal": True, "align": Align.BOTTOM_RIGHT},
            {"align": Align.TOP_LEFT},
        ),
        (
            {"lengths_q": (1, 1), "lengths_k": (3, 5), "is_causal": True}
            | {"align": Align.BOTTOM_RIGHT},
            {"is_causal": True, "align": Align.BOTTOM_RIGHT},
        ),
        ({"lengths_q": (3, 5), "window": (5, -1)}, {"window": (-1, -1)}),
        ({"lengths_q": (3, 5), "window": (4, -1)}, {"window": (4, -1)}),
        # The longest sequence may not matter to the others.
        ({"lengths_q": (3, 5), "window": (9, 9), "dilation": 2, "batch_invariant": True}, {}),
        (
            {"lengths_q": (1, 1), "align": Align.BOTTOM_RIGHT, "dilation": 3}
            | {"is_causal": True, "batch_invariant": True},
            {},
        ),
        (
            {"lengths_q": (3, 5), "window": (9, 0), "batch_invariant": True},
            {"window": (9, -1), "is_causal": True},
        ),
        ({"window": (9, 9), "batch_invariant": True}, {"window": (-1, -1)}),
        # But an edge that no sequence reaches hides nothing, and is no int32 beside a position.
        (
            {"lengths_q": (3, 5), "window": (2**30 - 1, 2**31 - 1), "batch_invariant": True},
            {"window": (2**30 - 1, -1)},
        ),
        (
            {"lengths_q": (3, 5), "window": (2**63 - 1, 4), "batch_invariant": True},
            {"window": (-1, 4)},
        ),
    ],
)
def test_what_hides_nothing_is_dropped_and_what_hides_something_stays(
    before: dict[str, object], expected: dict[str, object]
) -> None:
    problem = make_problem(**before)
    assert simplify(problem) == replace(problem, **expected)


def test_a_problem_in_plain_words_is_returned_as_it_is() -> None:
    problem = make_problem(len_q=8, is_causal=True, window=(3, -1), dilation=2)
    assert simplify(problem) is problem
