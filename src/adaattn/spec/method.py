"""The methods with their parameters; `Method` is the tag by which policies name them."""

from dataclasses import dataclass
from typing import ClassVar, Final

from adaattn._numbers import require_integer, require_number
from adaattn.spec.enums import Method

__all__ = ["METHODS", "BlockSparse", "Exact", "HeadMethod", "LowRank"]


class _Whole:
    """A method that computes with every column."""

    __slots__ = ()

    def columns(self, head_dim: int, value_dim: int) -> tuple[int, int]:
        """Return the columns of the score product and of the value product."""
        return head_dim, value_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Exact(_Whole):
    """Attention as it is defined, up to rounding."""

    kind: ClassVar[Method] = Method.EXACT

    @property
    def label(self) -> str:
        """Nothing: it changes nothing."""
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """Attention with q, k and v projected to fewer columns.

    Args:
        rank: columns that q and k are projected to; 0 is all.
        value_rank: columns that v is projected to; 0 is all.

    Raises:
        ArgumentError: a rank is below 0.
        ArgumentTypeError: a rank is no integer.
    """

    kind: ClassVar[Method] = Method.LOW_RANK
    rank: int = 0
    value_rank: int = 0

    def __post_init__(self) -> None:
        """Refuse what is no number of columns."""
        require_integer("rank", self.rank, least=0)
        require_integer("value_rank", self.value_rank, least=0)

    def columns(self, head_dim: int, value_dim: int) -> tuple[int, int]:
        """Return the columns of the score product and of the value product."""
        return self.rank or head_dim, self.value_rank or value_dim

    @property
    def label(self) -> str:
        """The ranks, where q and k lose columns."""
        if not self.rank:
            return ""
        return f"rank={self.rank}" + (f",{self.value_rank}" if self.value_rank else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSparse(_Whole):
    """Attention over the blocks of keys that matter to a block of rows.

    Args:
        block_size: side of a block, in tokens; 0 where none is chosen yet.
        kept_mass: share of the pooled probability that the kept blocks of a row must reach.

    Raises:
        ArgumentError: a value is out of range.
        ArgumentTypeError: a value has another type.
    """

    kind: ClassVar[Method] = Method.BLOCK_SPARSE
    block_size: int = 0
    kept_mass: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what is no size of a block, and what is no share."""
        require_integer("block_size", self.block_size, least=0)
        require_number("kept_mass", self.kept_mass, least=0, most=1)

    @property
    def label(self) -> str:
        """The kept mass, where there are blocks."""
        return f"mass={self.kept_mass:g}" if self.block_size else ""


HeadMethod = Exact | LowRank | BlockSparse
"""How the attention of a head is computed: match on the type to read its parameters."""

METHODS: Final[dict[Method, type[Exact] | type[LowRank] | type[BlockSparse]]] = {
    found.kind: found for found in (Exact, LowRank, BlockSparse)
}
"""The class of each method."""
