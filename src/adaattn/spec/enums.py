"""The words of the specification: formats, corners, masks, methods, outputs and features."""

import enum

__all__ = [
    "Align",
    "Aux",
    "Feature",
    "HeadTerm",
    "KVKind",
    "MaskKind",
    "Method",
    "Precision",
    "Variant",
    "Why",
]


class Precision(enum.IntEnum):
    """A number format, for storage or for the products of attention."""

    FP64 = 0
    FP32 = 1
    BF16 = 2
    FP16 = 3
    FP8_E4M3 = 4
    FP8_E5M2 = 5
    INT8 = 6
    INT4 = 7

    @property
    def bits(self) -> int:
        """Storage of one element, in bits."""
        # By number: torch.compile never ends where a member itself is the index.
        return (64, 32, 16, 16, 8, 8, 8, 4)[self.value]

    @property
    def unit_roundoff(self) -> float:
        """Largest relative error of rounding a number into this format.

        For the integer formats it is half a step relative to the largest magnitude.
        """
        return (2.0**-53, 2.0**-24, 2.0**-8, 2.0**-11, 2.0**-4, 2.0**-3, 1 / 254, 1 / 14)[self]

    def keeps(self, other: "Precision") -> bool:
        """Return whether this format holds every number of another: as many bits or more of each.

        Example:
            >>> Precision.FP32.keeps(Precision.BF16), Precision.BF16.keeps(Precision.FP16)
            (True, False)
        """
        return self is other or (self.value < other.value and self.value <= 1)

    @property
    def label(self) -> str:
        """The name people use, such as ``"bf16"``."""
        return self.name.lower()


class Align(enum.IntEnum):
    """Where query row i stands among the keys: at i, or at i + Sk - Sq."""

    TOP_LEFT = 0
    BOTTOM_RIGHT = 1


class MaskKind(enum.IntEnum):
    """The kind of ``attn_mask``: none, boolean (True = attend) or added to the scores."""

    NONE = 0
    BOOLEAN = 1
    ADDITIVE = 2


class Method(enum.IntEnum):
    """How attention is approximated. EXACT is the definition, up to rounding."""

    EXACT = 0
    LOW_RANK = 1
    BLOCK_SPARSE = 2


Variant = tuple[Method, Precision]
"""How a head was computed: by which method, in which number format."""


class HeadTerm(enum.IntFlag):
    """Which numbers of a call come from tensors, one for each query head."""

    NONE = 0
    SCALE = 1
    WINDOW = 2
    SOFTCAP = 4


class Aux(enum.IntFlag):
    """Outputs beside the attention result."""

    NONE = 0
    LSE = 1
    ROW_MAX = 2
    ENTROPY = 4
    WEIGHTS = 8
    DROPPED_MASS = 16


class Why(enum.Enum):
    """What became of a candidate; the sentence beside it is for people.

    Attributes:
        CHOSEN: it is in the plan.
        ELSEWHERE: it runs on another device, or is not installed.
        UNSUPPORTED: it lacks something that the call asks for.
        POLICY: the policy excludes it.
        MEMORY: it needs more than the memory budget.
        SLOWER: it brings no gain, by estimate at its best or by measurement.
        WAITING: it could bring one, and calls have not paid yet for a try, or for compiling it.
        UNMEASURED: its error cannot be measured, or is predicted to be too large to measure it.
        OVER_BUDGET: its measured error is larger than allowed.
    """

    CHOSEN = "chosen"
    ELSEWHERE = "elsewhere"
    UNSUPPORTED = "unsupported"
    POLICY = "policy"
    MEMORY = "memory"
    SLOWER = "slower"
    WAITING = "waiting"
    UNMEASURED = "unmeasured"
    OVER_BUDGET = "over budget"


class KVKind(enum.Enum):
    """How keys and values are stored. A capability lists those that it takes."""

    DENSE = "dense keys and values"
    PACKED = "packed sequences"


class Feature(enum.IntFlag):
    """What an executor may be asked to honour. A capability lists those that it does."""

    CAUSAL_TOP_LEFT = enum.auto()
    CAUSAL_BOTTOM_RIGHT = enum.auto()
    BOOLEAN_MASK = enum.auto()
    ADDITIVE_MASK = enum.auto()
    MASK_GRADIENT = enum.auto()
    MASKED_POSITIONS = enum.auto()
    WIDE_MASK = enum.auto()
    SCALE_SIGN = enum.auto()
    WINDOW = enum.auto()
    DILATION = enum.auto()
    SOFTCAP = enum.auto()
    SINKS = enum.auto()
    SINKS_GRADIENT = enum.auto()
    ALIBI = enum.auto()
    ALIBI_GRADIENT = enum.auto()
    DROPOUT = enum.auto()
    VALUE_DIM = enum.auto()
    EMPTY = enum.auto()
    BACKWARD = enum.auto()
    DETERMINISTIC_BACKWARD = enum.auto()
    LSE = enum.auto()
    LSE_GRADIENT = enum.auto()
    ROW_MAX = enum.auto()
    ENTROPY = enum.auto()
    WEIGHTS = enum.auto()
    BLOCK_LIST = enum.auto()
    DROPPED_MASS = enum.auto()
    BATCH_INVARIANT = enum.auto()
    HEAD_TERMS = enum.auto()
    HEAD_TERMS_GRADIENT = enum.auto()
