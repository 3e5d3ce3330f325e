"""Scale, window and softcap of each query head, from tensors."""

from dataclasses import dataclass, replace
from typing import Final

import torch
from torch._subclasses.fake_tensor import FakeTensor

from adaattn.backends.masks import is_drawn
from adaattn.errors import ArgumentError
from adaattn.spec import HeadTerm

__all__ = ["HeadTerms"]

_KINDS: Final = tuple(HeadTerm(number) for number in range(8))
_INTEGERS: Final = (torch.int32, torch.int64)
_FLOATS: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_EXPECTED: Final = {
    "scale": "finite numbers",
    "window": "numbers of at least -1, which is unlimited",
    "softcap": "finite numbers of at least 0, which is none",
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadTerms:
    """The numbers that a call has for each head; None where one serves all heads.

    Numbers on a CPU are checked here; those on a GPU only where ``ADAATTN_DEBUG`` is set. There
    windows below -1 are unlimited, and a softcap of 0 or less, or NaN, is none.

    Args:
        scale: floating point [Hq], factors of the scores.
        window: int32 or int64 [Hq, 2], left and right; -1 is unlimited.
        softcap: floating point [Hq]; 0 is none.

    Raises:
        ArgumentError: a number is out of range.
    """

    scale: torch.Tensor | None = None
    window: torch.Tensor | None = None
    softcap: torch.Tensor | None = None

    @classmethod
    def given(
        cls,
        scale: torch.Tensor | None,
        window: torch.Tensor | None,
        softcap: torch.Tensor | None,
    ) -> "HeadTerms | None":
        """Return the numbers that there are, or None where there are none."""
        if scale is window is softcap is None:
            return None
        return cls(scale=scale, window=window, softcap=softcap)

    def __post_init__(self) -> None:
        """Refuse numbers that are out of range, where they can be read without waiting."""
        self.check(waits=False)

    def check(self, *, waits: bool = True) -> None:
        """Refuse numbers that are out of range; in a graph there are none yet.

        Args:
            waits: those on a GPU are read, too.

        Raises:
            ArgumentError: a number is out of range.
        """
        if torch.compiler.is_compiling():
            return
        for name, expected in _EXPECTED.items():
            numbers = getattr(self, name)
            if numbers is None or _is_hidden(numbers, waits):
                continue
            if numbers.dtype not in (_INTEGERS if name == "window" else _FLOATS):
                continue  # refused elsewhere
            wrong = ~numbers.isfinite()
            if name != "scale":
                wrong = wrong | (numbers < (-1 if name == "window" else 0))
            if bool(wrong.any()):
                got = numbers.detach()[wrong][0].item()
                raise ArgumentError.got(f"{name} of each head", expected, got)

    @property
    def kinds(self) -> HeadTerm:
        """Which there are."""
        has_window, has_softcap = self.window is not None, self.softcap is not None
        return _KINDS[(self.scale is not None) + 2 * has_window + 4 * has_softcap]

    def widened(self) -> "HeadTerms":
        """Return them in the dtypes that sums of gradients take, fp32 at least."""

        def wide(numbers: torch.Tensor | None) -> torch.Tensor | None:
            if numbers is None:
                return None
            return numbers.to(torch.promote_types(numbers.dtype, torch.float32))

        return replace(self, scale=wide(self.scale), softcap=wide(self.softcap))

    def of_heads(self, heads: torch.Tensor) -> "HeadTerms":
        """Return those of some query heads, by their numbers."""
        scale, window, softcap = (
            None if numbers is None else numbers.index_select(0, heads)
            for numbers in (self.scale, self.window, self.softcap)
        )
        return replace(self, scale=scale, window=window, softcap=softcap)


def _is_hidden(numbers: torch.Tensor, waits: bool) -> bool:
    """Return whether the host cannot, or may not, read the numbers of a tensor."""
    if numbers.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(numbers):
        return True
    if isinstance(numbers, FakeTensor) or is_drawn():
        return True
    return numbers.is_cuda and (not waits or torch.cuda.is_current_stream_capturing())
