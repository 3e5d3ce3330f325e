"""Sliding windows over a text, each token scored exactly once."""

from collections.abc import Iterator
from dataclasses import dataclass

from adaattn.errors import ArgumentError

__all__ = ["Window", "sliding_windows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One forward pass: tokens ``begin`` to ``end``, of which the last ``num_scored`` count.

    Args:
        begin: first token, an index into the text.
        end: one past the last.
        num_scored: how many of the last tokens are predicted and scored here.
    """

    begin: int
    end: int
    num_scored: int

    @property
    def first_scored(self) -> int:
        """Index in the text of the first scored token."""
        return self.end - self.num_scored


def sliding_windows(num_tokens: int, window: int, stride: int) -> Iterator[Window]:
    """Yield windows that score every token but the first exactly once.

    Args:
        num_tokens: length of the text, in tokens.
        window: most tokens in a window.
        stride: tokens by which windows advance, at most ``window - 1`` so that each scored
            token has something before it.

    Raises:
        ArgumentError: a length does not fit.

    Example:
        >>> [(w.begin, w.end, w.num_scored) for w in sliding_windows(10, 6, 3)]
        [(0, 6, 5), (3, 9, 3), (6, 10, 1)]
    """
    if num_tokens < 2:
        raise ArgumentError.got("tokens", "at least 2", num_tokens, "use a longer text")
    if window < 2:
        raise ArgumentError.got("window", "at least 2 tokens", window)
    if not 1 <= stride < window:
        raise ArgumentError.got("stride", f"1 to {window - 1} (window - 1)", stride)
    return _windows(num_tokens, window, stride)


def _windows(num_tokens: int, window: int, stride: int) -> Iterator[Window]:
    scored = 1
    begin = 0
    while scored < num_tokens:
        end = min(begin + window, num_tokens)
        yield Window(begin=begin, end=end, num_scored=end - scored)
        scored = end
        begin += stride
