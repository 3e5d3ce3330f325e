"""The frozen values that planning reads and writes. No tensors, no logic but validation.

Shape legend, used throughout the package: ``B`` batch, ``Hq`` query heads, ``Hkv``
key and value heads, ``Sq`` query length, ``Sk`` key length, ``D`` head dimension of
queries and keys, ``Dv`` head dimension of values.

Every value here can be printed, compared, hashed, pickled, and sent to other ranks.
"""

import enum
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from adaattn.errors import ArgumentError, PolicyError, expected_got

__all__ = [
    "Align",
    "AttentionProblem",
    "Aux",
    "Capability",
    "Cost",
    "Decision",
    "Feature",
    "HardwareFacts",
    "HeadGroup",
    "MaskKind",
    "Method",
    "Plan",
    "Policy",
    "Precision",
    "Rates",
    "TensorStats",
    "TraceEntry",
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
        return (64, 32, 16, 16, 8, 8, 8, 4)[self]

    @property
    def unit_roundoff(self) -> float:
        """Largest relative error of rounding a number into this format.

        For the integer formats it is half a step relative to the largest magnitude.
        """
        return (2.0**-53, 2.0**-24, 2.0**-9, 2.0**-12, 2.0**-4, 2.0**-3, 1 / 254, 1 / 14)[self]

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


class Aux(enum.IntFlag):
    """Outputs beside the attention result."""

    NONE = 0
    LSE = 1
    ROW_MAX = 2
    ENTROPY = 4
    WEIGHTS = 8


class Feature(enum.IntFlag):
    """What an executor may be asked to honour. A capability lists those that it does."""

    CAUSAL_TOP_LEFT = enum.auto()
    CAUSAL_BOTTOM_RIGHT = enum.auto()
    BOOLEAN_MASK = enum.auto()
    ADDITIVE_MASK = enum.auto()
    MASK_GRADIENT = enum.auto()
    MASKED_POSITIONS = enum.auto()
    WINDOW = enum.auto()
    DILATION = enum.auto()
    SOFTCAP = enum.auto()
    SINKS = enum.auto()
    SINKS_GRADIENT = enum.auto()
    ALIBI = enum.auto()
    ALIBI_GRADIENT = enum.auto()
    DROPOUT = enum.auto()
    PACKED = enum.auto()
    VALUE_DIM = enum.auto()
    BACKWARD = enum.auto()
    DETERMINISTIC_BACKWARD = enum.auto()
    LSE = enum.auto()
    ROW_MAX = enum.auto()
    ENTROPY = enum.auto()
    WEIGHTS = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionProblem:
    """Everything static about one attention call.

    Args:
        batch: B, the product of all leading dimensions.
        num_heads: Hq.
        num_kv_heads: Hkv; divides Hq.
        len_q: Sq (all tokens together when packed).
        len_k: Sk.
        head_dim: D.
        value_dim: Dv.
        precision: dtype of q, k and v.
        device_type: ``"cpu"`` or ``"cuda"``.
        scale: factor of the scores.
        is_causal: key j is seen from position p only if j <= p.
        align: where the positions p count from.
        window: ``(left, right)``; key j is seen when p - left <= j <= p + right; -1 is unlimited.
        dilation: only keys with (p - j) divisible by it are seen; 1 sees all.
        mask: kind of ``attn_mask``.
        mask_shape: its shape, broadcastable to [B, Hq, Sq, Sk].
        mask_requires_grad: a gradient is wanted for an additive mask.
        softcap: c in c*tanh(s/c); 0 is none.
        has_sinks: learned logits join the denominator.
        sinks_require_grad: a gradient is wanted for them.
        has_alibi: ALiBi slopes are given.
        alibi_requires_grad: a gradient is wanted for them.
        dropout_p: probability of dropping a weight.
        num_sequences: N packed sequences; 0 when not packed.
        max_len_q: longest packed query sequence.
        max_len_k: longest packed key sequence.
        packed_square: every packed sequence has as many queries as keys.
        attended_pairs: (query, key) pairs of packed sequences, causality left out; 0 if not packed.
        requires_grad: a gradient is wanted for q, k or v.
        deterministic: PyTorch was asked for deterministic algorithms.
        aux: outputs wanted beside the result.
        allowed_sdpa: SDPA kernels that an ambient ``sdpa_kernel`` leaves enabled; None is all.
        sdpa_default: the kernel that ``F.scaled_dot_product_attention`` itself would use; "" if unknown.
    """

    batch: int
    num_heads: int
    num_kv_heads: int
    len_q: int
    len_k: int
    head_dim: int
    value_dim: int
    precision: Precision = Precision.FP32
    device_type: str = "cpu"
    scale: float = 1.0
    is_causal: bool = False
    align: Align = Align.TOP_LEFT
    window: tuple[int, int] = (-1, -1)
    dilation: int = 1
    mask: MaskKind = MaskKind.NONE
    mask_shape: tuple[int, ...] = ()
    mask_requires_grad: bool = False
    softcap: float = 0.0
    has_sinks: bool = False
    sinks_require_grad: bool = False
    has_alibi: bool = False
    alibi_requires_grad: bool = False
    dropout_p: float = 0.0
    num_sequences: int = 0
    max_len_q: int = 0
    max_len_k: int = 0
    packed_square: bool = False
    attended_pairs: int = 0
    requires_grad: bool = False
    deterministic: bool = False
    aux: Aux = Aux.NONE
    allowed_sdpa: tuple[str, ...] | None = None
    sdpa_default: str = ""

    @property
    def group_size(self) -> int:
        """Query heads that share one key and value head."""
        return self.num_heads // max(self.num_kv_heads, 1)

    @property
    def offset(self) -> int:
        """Key position of query row 0."""
        return self.len_k - self.len_q if self.align is Align.BOTTOM_RIGHT else 0

    @property
    def is_positional(self) -> bool:
        """True when which keys are seen depends on positions."""
        return self.is_causal or self.window != (-1, -1) or self.dilation > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStats:
    """Numbers measured from q, k and v, as host values. One entry per query head.

    Args:
        sampled_rows: query rows per head that the estimates rest on.
        finite: q, k and v hold neither NaN nor infinity.
        max_magnitude: largest absolute element of q, k and v.
        precision_errors: for each precision below the input's own, the relative Frobenius error of
            each head's sampled output rows.
        entropy_bits: mean entropy of the sampled rows' weights, in bits.
        effective_rank: exp of the entropy of K's normalised singular values.
        low_rank_errors: for each (rank, value_rank) the relative Frobenius error of each
            head's sampled output rows.
        block_sparse: for each kept-mass target ``(mass, densities, errors)``, per head: the
            fraction of blocks kept and the error of the sampled output rows.
        measure_ms: what the measurement cost.
    """

    sampled_rows: int = 0
    finite: bool = True
    max_magnitude: float = 0.0
    precision_errors: tuple[tuple[Precision, tuple[float, ...]], ...] = ()
    entropy_bits: tuple[float, ...] = ()
    effective_rank: tuple[float, ...] = ()
    low_rank_errors: tuple[tuple[tuple[int, int], tuple[float, ...]], ...] = ()
    block_sparse: tuple[tuple[float, tuple[float, ...], tuple[float, ...]], ...] = ()
    measure_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a device can do in a second.

    Args:
        flops: achievable matrix-product rate for each precision, in FLOP/s.
        bandwidth: bytes read plus bytes written per second from main device memory.
        launch_s: seconds of overhead of one eager operation.
        efficiency: share of the matrix rate that an executor reaches on compute-bound
            attention, by key ``"capability:precision:head_dim"``, or ``"capability:precision"``,
            or ``"capability"``; the most specific wins.
        source: where the numbers are from: "measured", "datasheet ..." or "default".
    """

    flops: tuple[tuple[Precision, float], ...] = ()
    bandwidth: float = 0.0
    launch_s: float = 0.0
    efficiency: tuple[tuple[str, float], ...] = ()
    source: str = "default"

    def flops_of(self, precision: Precision) -> float:
        """Return the rate of one precision in FLOP/s; 0 when the device lacks it."""
        return dict(self.flops).get(precision, 0.0)

    def efficiency_of(
        self, capability: str, precision: Precision, head_dim: int, default: float
    ) -> float:
        """Return the most specific efficiency known, the nearest head dimension first."""
        table = dict(self.efficiency)
        prefix = f"{capability}:{precision.label}"
        dims = [int(key.rsplit(":", 1)[1]) for key in table if key.startswith(prefix + ":")]
        if dims:
            nearest = min(dims, key=lambda dim: (abs(math.log2(dim / max(head_dim, 1))), dim))
            return table[f"{prefix}:{nearest}"]
        return table.get(prefix, table.get(capability, default))


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareFacts:
    """What is known of one device. Made by ``hardware.probe`` or invented by a test.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``.
        name: the vendor's name of the device.
        compute_capability: CUDA's (major, minor); (0, 0) on a CPU.
        memory_bytes: total memory of the device.
        num_processors: multiprocessors of a GPU, threads of a CPU.
        l2_bytes: last-level cache.
        instructions: number formats whose products the device computes natively.
        rates: what it can do in a second.
    """

    device_type: str
    name: str = ""
    compute_capability: tuple[int, int] = (0, 0)
    memory_bytes: int = 0
    num_processors: int = 1
    l2_bytes: int = 0
    instructions: tuple[Precision, ...] = (Precision.FP64, Precision.FP32)
    rates: Rates = field(default_factory=Rates)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """What one executor can do, as data.

    Args:
        name: unique name, such as ``"sdpa.flash"``.
        backend: the module that executes it, such as ``"sdpa"``.
        method: exact, or which approximation.
        device_types: devices it runs on.
        precisions: dtypes that it takes.
        features: what it honours.
        max_head_dim: largest D and Dv; 0 is unlimited.
        min_compute_capability: on CUDA.
        min_group_size: least query heads per key and value head (a grouped decode needs 2).
        max_len_q: most query rows (a decode kernel takes few); 0 is unlimited.
        skips_hidden: keys hidden by causality or windows cost nothing.
        materialises_scores: allocates all Sq x Sk scores.
        expands_kv: copies k and v for each query head of a group.
        is_fused: one kernel with online softmax; counted as "flash" in statistics.
        efficiency: share of the matrix rate reached, when nothing was measured.
        num_launches: eager operations per call.
        unavailable: why this installation cannot run it at all; "" if it can.
    """

    name: str
    backend: str
    method: Method = Method.EXACT
    device_types: tuple[str, ...] = ("cpu", "cuda")
    precisions: tuple[Precision, ...] = (
        Precision.FP64,
        Precision.FP32,
        Precision.BF16,
        Precision.FP16,
    )
    features: Feature = Feature(0)
    max_head_dim: int = 0
    min_compute_capability: tuple[int, int] = (0, 0)
    min_group_size: int = 1
    max_len_q: int = 0
    skips_hidden: bool = False
    materialises_scores: bool = False
    expands_kv: bool = False
    is_fused: bool = False
    efficiency: float = 0.5
    num_launches: int = 1
    unavailable: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What quality and memory the user can afford.

    Args:
        name: shown in traces and events.
        error_budget: allowed relative Frobenius error of each head's output; 0 is the exact
            path, at the input's dtype.
        memory_budget_bytes: most workspace a call may take beside its inputs and its output;
            None is what the device has.
        methods: approximations that may be used.
        precisions: precisions that products may be computed in, beside the input's own.
        audit_rows: query rows per head checked against exact attention whenever an
            approximation ran; 0 never checks.
        head_budgets: ``((layer, head, error_budget), ...)`` from calibration, over ``error_budget``.
        provenance: where a calibrated policy comes from.

    Raises:
        ArgumentError: a value is out of range.
    """

    name: str = "custom"
    error_budget: float = 0.0
    memory_budget_bytes: int | None = None
    methods: tuple[Method, ...] = (Method.EXACT, Method.LOW_RANK, Method.BLOCK_SPARSE)
    precisions: tuple[Precision, ...] = (Precision.FP32, Precision.BF16, Precision.FP16)
    audit_rows: int = 32
    head_budgets: tuple[tuple[int, int, float], ...] = ()
    provenance: str = ""

    def __post_init__(self) -> None:
        """Refuse values that no plan could honour."""
        if not (math.isfinite(self.error_budget) and 0.0 <= self.error_budget < 1.0):
            raise ArgumentError(
                expected_got("error_budget", "a number in [0, 1)", self.error_budget)
            )
        if self.memory_budget_bytes is not None and self.memory_budget_bytes < 0:
            raise ArgumentError(
                expected_got("memory_budget_bytes", "None or at least 0", self.memory_budget_bytes)
            )
        if self.audit_rows < 0:
            raise ArgumentError(expected_got("audit_rows", "at least 0", self.audit_rows))
        if Method.EXACT not in self.methods:
            raise ArgumentError(
                expected_got("methods", "a tuple with Method.EXACT in it", self.methods)
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the policy as plain JSON values."""
        data = asdict(self)
        data["methods"] = [method.name.lower() for method in self.methods]
        data["precisions"] = [precision.label for precision in self.precisions]
        data["head_budgets"] = [list(entry) for entry in self.head_budgets]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Policy":
        """Return the policy that ``to_dict`` wrote.

        Raises:
            PolicyError: a key is unknown or a value does not fit.
        """
        known = {item.name for item in fields(cls)}
        if unknown := sorted(set(data) - known):
            raise PolicyError(expected_got("policy keys", sorted(known), unknown))
        values = dict(data)
        try:
            if "methods" in values:
                values["methods"] = tuple(Method[name.upper()] for name in values["methods"])
            if "precisions" in values:
                values["precisions"] = tuple(Precision[n.upper()] for n in values["precisions"])
            if "head_budgets" in values:
                values["head_budgets"] = tuple(
                    (int(layer), int(head), float(budget))
                    for layer, head, budget in values["head_budgets"]
                )
            return cls(**values)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise PolicyError(
                expected_got("policy values", "those of adaattn.Policy", repr(error))
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadGroup:
    """One way of computing attention, for some of the heads.

    Args:
        capability: name of the executor's capability.
        heads: the query heads; empty means all.
        method: exact, or which approximation.
        precision: number format of the products.
        rank: columns that q and k are projected to; 0 is all.
        value_rank: columns that v is projected to; 0 is all.
        block_size: side of a sparse block, in tokens.
        kept_mass: share of the pooled probability that the kept blocks of a row must reach.
        chunk_rows: query rows computed at once; 0 is all.
    """

    capability: str
    heads: tuple[int, ...] = ()
    method: Method = Method.EXACT
    precision: Precision = Precision.FP32
    rank: int = 0
    value_rank: int = 0
    block_size: int = 0
    kept_mass: float = 1.0
    chunk_rows: int = 0

    @property
    def label(self) -> str:
        """A short name for tables: the executor and what it changes."""
        parts = [f"{self.capability}/{self.precision.label}"]
        if self.method is Method.LOW_RANK:
            parts.append(f"rank={self.rank}" + (f",{self.value_rank}" if self.value_rank else ""))
        if self.method is Method.BLOCK_SPARSE:
            parts.append(f"mass={self.kept_mass:g}")
        return " ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run: one group for all heads, or several that share them out.

    Args:
        groups: every query head is in exactly one of them.
        num_heads: Hq that the plan was made for.
        error_budget: what the policy allowed.
        audit_rows: rows per head to check after an approximation.
        estimated_ms: predicted time of the call.
        workspace_bytes: predicted memory beside inputs and output.
    """

    groups: tuple[HeadGroup, ...]
    num_heads: int
    error_budget: float = 0.0
    audit_rows: int = 0
    estimated_ms: float = 0.0
    workspace_bytes: int = 0

    def __post_init__(self) -> None:
        """Check that the groups cover each head once."""
        if not self.groups:
            raise ArgumentError(expected_got("plan groups", "at least one", "none"))
        if len(self.groups) == 1 and not self.groups[0].heads:
            return
        heads = sorted(head for group in self.groups for head in group.heads)
        if heads != list(range(self.num_heads)):
            raise ArgumentError(
                expected_got("plan heads", f"each of 0..{self.num_heads - 1} once", heads)
            )

    @property
    def is_exact(self) -> bool:
        """True when no group approximates (its precision is checked against the input apart)."""
        return all(group.method is Method.EXACT for group in self.groups)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain JSON values."""
        data = asdict(self)
        data["groups"] = [
            {
                **asdict(group),
                "heads": list(group.heads),
                "method": group.method.name.lower(),
                "precision": group.precision.label,
            }
            for group in self.groups
        ]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Plan":
        """Return the plan that ``to_dict`` wrote.

        Raises:
            ArgumentError: a key is unknown or a value does not fit.
        """
        try:
            values = dict(data)
            values["groups"] = tuple(
                HeadGroup(
                    **{
                        **group,
                        "heads": tuple(group.get("heads", ())),
                        "method": Method[group.get("method", "exact").upper()],
                        "precision": Precision[group.get("precision", "fp32").upper()],
                    }
                )
                for group in values["groups"]
            )
            return cls(**values)
        except (KeyError, TypeError, AttributeError) as error:
            raise ArgumentError(
                expected_got("plan", "the values that Plan.to_dict wrote", repr(error))
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a candidate needs, from first principles.

    Args:
        flops: floating-point operations of its products.
        bytes_moved: bytes read and written in main memory.
        workspace_bytes: memory beside inputs and output.
        time_ms: roofline time on the given hardware.
    """

    flops: float
    bytes_moved: float
    workspace_bytes: int
    time_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEntry:
    """One candidate and what became of it.

    Args:
        candidate: the executor and what it changes.
        accepted: it is in the plan.
        reason: one sentence: expected and got.
        heads: query heads that it serves; empty means all when accepted.
        cost: what it would need; None when it was refused before that mattered.
        error_estimate: largest estimated error over the heads it was considered for.
    """

    candidate: str
    accepted: bool
    reason: str
    heads: tuple[int, ...] = ()
    cost: Cost | None = None
    error_estimate: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A plan and why it is that one.

    Args:
        plan: what to run.
        trace: every candidate once.
        policy: name of the policy that was asked for.
        notes: remarks that concern no single candidate.
    """

    plan: Plan
    trace: tuple[TraceEntry, ...] = ()
    policy: str = ""
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the trace as text, the accepted candidates first."""
        budget = f"error budget {self.plan.error_budget:g}"
        head = [f"policy {self.policy or 'none'} ({budget})"]
        entries = sorted(self.trace, key=lambda entry: not entry.accepted)
        width = max((len(entry.candidate) for entry in entries), default=0)
        for entry in entries:
            mark = "+" if entry.accepted else "-"
            head.append(f"  {mark} {entry.candidate:<{width}}  {entry.reason}")
        return "\n".join([*head, *(f"  note: {note}" for note in self.notes)])

    def to_dict(self) -> dict[str, Any]:
        """Return the decision as plain JSON values."""
        return {
            "policy": self.policy,
            "plan": self.plan.to_dict(),
            "trace": [asdict(entry) for entry in self.trace],
            "notes": list(self.notes),
        }
