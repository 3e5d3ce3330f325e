import pytest

from adaattn.errors import ArgumentError
from adaattn.evaluation.windows import sliding_windows


@pytest.mark.parametrize(
    ("num_tokens", "window", "stride"),
    [(2, 2, 1), (10, 6, 3), (8192, 2048, 1024), (100, 4096, 1), (101, 10, 9), (7, 3, 2)],
)
def test_each_token_but_the_first_is_scored_exactly_once(
    num_tokens: int, window: int, stride: int
) -> None:
    windows = list(sliding_windows(num_tokens, window, stride))
    scored = [token for w in windows for token in range(w.first_scored, w.end)]
    assert scored == list(range(1, num_tokens))
    assert all(w.begin < w.first_scored for w in windows)
    assert all(w.end - w.begin <= window for w in windows)


def test_after_the_first_window_scored_tokens_have_at_least_window_minus_stride_context() -> None:
    for w in list(sliding_windows(8192, 2048, 1024))[1:]:
        assert w.first_scored - w.begin >= 2048 - 1024


@pytest.mark.parametrize(
    ("num_tokens", "window", "stride", "message"),
    [
        (1, 8, 4, "tokens: expected at least 2, got 1"),
        (10, 1, 1, "window: expected at least 2 tokens, got 1"),
        (10, 4, 4, r"stride: expected 1 to 3 \(window - 1\), got 4"),
        (10, 4, 0, "stride: expected 1 to 3"),
    ],
)
def test_impossible_lengths_are_refused(
    num_tokens: int, window: int, stride: int, message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        sliding_windows(num_tokens, window, stride)
