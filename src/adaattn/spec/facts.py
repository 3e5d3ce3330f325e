"""Facts that planning reads: the problem, the numbers measured on it, the device, the executors."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from adaattn.spec.enums import Align, Aux, Feature, MaskKind, Method, Precision

if TYPE_CHECKING:
    from adaattn.spec.evidence import TimingTable

__all__ = ["AttentionProblem", "Capability", "HardwareFacts", "Rates", "TensorStats"]

_NO_FEATURES: Final = Feature(0)


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
        mask_is_wide: the additive mask has more bits than the query.
        mask_requires_grad: a gradient is wanted for an additive mask.
        softcap: c in c*tanh(s/c); 0 is none.
        has_sinks: learned logits join the denominator.
        sinks_require_grad: a gradient is wanted for them.
        has_alibi: ALiBi slopes are given.
        alibi_requires_grad: a gradient is wanted for them.
        dropout_p: probability of dropping a weight.
        num_sequences: N packed sequences; 0 when not packed.
        max_len_q: longest packed query sequence, or the caller's bound of it.
        max_len_k: longest packed key sequence, or the caller's bound of it.
        packed_square: every packed sequence has as many queries as keys.
        requires_grad: a gradient is wanted for q, k or v.
        deterministic: PyTorch was asked for deterministic algorithms.
        aux: outputs wanted beside the result.
        allowed_sdpa: SDPA kernels that an ambient ``sdpa_kernel`` leaves enabled; None is all.
        sdpa_default: the kernel that SDPA itself would use; "" if unknown.
        may_wait: reading the device on the host is allowed: always on a CPU, on CUDA where the
            policy checks each call.
        dense_columns: the last dimensions of q, k and v are known to have a stride of 1.
        stride_bytes: 1 to 16, a power of two that all other strides of q, k and v, in bytes, are
            known to be multiples of. What an address is a multiple of is no fact of a problem: a
            kernel that depends on it looks itself.
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
    mask_is_wide: bool = False
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
    requires_grad: bool = False
    deterministic: bool = False
    aux: Aux = Aux.NONE
    allowed_sdpa: tuple[str, ...] | None = None
    sdpa_default: str = ""
    may_wait: bool = True
    dense_columns: bool = False
    stride_bytes: int = 1

    def without_layout(self) -> "AttentionProblem":
        """Return the problem that it is in any layout: what is learnt of it holds in all."""
        return replace(self, dense_columns=False, stride_bytes=1)

    @property
    def group_size(self) -> int:
        """Query heads that share one key and value head; 1 when there are none."""
        return max(self.num_heads // max(self.num_kv_heads, 1), 1)

    @property
    def offset(self) -> int:
        """Key position of query row 0."""
        return self.len_k - self.len_q if self.align is Align.BOTTOM_RIGHT else 0

    @property
    def attended_pairs(self) -> int:
        """(query, key) pairs of packed sequences at most, causality left out."""
        return min(self.len_q * self.max_len_k, self.len_k * self.max_len_q)

    @property
    def is_positional(self) -> bool:
        """True when which keys are seen depends on positions."""
        return self.is_causal or self.window != (-1, -1) or self.dilation > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStats:
    """Numbers measured from q, k and v, as host values. One entry per query head.

    Args:
        sampled_rows: query rows per head that the estimates rest on.
        max_magnitude: largest absolute element of q, k and v.
        precision_errors: for each precision below the input's own, the relative Frobenius error of
            each head's sampled output rows.
        entropy_bits: mean entropy of the sampled rows' weights, in bits.
        pooled_entropy_bits: for each scale s, the same with the weights of s neighbouring keys
            added up: heads that pick single keys lose little, smooth ones log2(s).
        effective_ranks: effective rank of each head's scores; () unless low rank was looked at.
        score_tails: for each rank, the root mean square of what the best approximation of that
            rank leaves out of each head's scores.
        value_tails: for each rank, the share of the values' norm that it leaves out.
        value_spreads: share of the values' energy around their mean over the keys, per head.
        low_rank_errors: for each (rank, value_rank) the relative Frobenius error of each
            head's sampled output rows; ranks that were predicted not to do are left out.
        block_sparse: for each kept-mass target ``(mass, densities, errors)``, per head: the
            fraction of blocks kept and the error of the sampled output rows.
        measure_ms: what the measurement cost.
    """

    sampled_rows: int = 0
    max_magnitude: float = 0.0
    precision_errors: tuple[tuple[Precision, tuple[float, ...]], ...] = ()
    entropy_bits: tuple[float, ...] = ()
    pooled_entropy_bits: tuple[tuple[int, tuple[float, ...]], ...] = ()
    effective_ranks: tuple[float, ...] = ()
    score_tails: tuple[tuple[int, tuple[float, ...]], ...] = ()
    value_tails: tuple[tuple[int, tuple[float, ...]], ...] = ()
    value_spreads: tuple[float, ...] = ()
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
        source: where the numbers are from: "datasheet ..." or "default ...".
    """

    flops: tuple[tuple[Precision, float], ...] = ()
    bandwidth: float = 0.0
    launch_s: float = 0.0
    source: str = "default"

    def flops_of(self, precision: Precision) -> float:
        """Return the rate of one precision in FLOP/s; 0 when the device lacks it."""
        return dict(self.flops).get(precision, 0.0)


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
        rates: what it can do in a second, to prune, to size workspaces and to explain.
        timings: measured times of executors, which alone may displace PyTorch's choice; None
            where nobody measured this kind of device.
    """

    device_type: str
    name: str = ""
    compute_capability: tuple[int, int] = (0, 0)
    memory_bytes: int = 0
    num_processors: int = 1
    l2_bytes: int = 0
    instructions: tuple[Precision, ...] = (Precision.FP64, Precision.FP32)
    rates: Rates = field(default_factory=Rates)
    timings: "TimingTable | None" = None


def _usual_order(problem: AttentionProblem) -> int:
    """Return 50, behind every executor that says better."""
    del problem
    return 50


def _no_bytes(problem: AttentionProblem) -> int:
    """Return 0."""
    del problem
    return 0


def _all_rows(problem: AttentionProblem, memory_budget_bytes: int | None) -> int:
    """Return 0: all rows at once."""
    del problem, memory_budget_bytes
    return 0


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
        min_len_q: fewest query rows that it is for.
        skips_hidden: keys hidden by causality or windows cost nothing.
        materialises_scores: allocates all Sq x Sk scores.
        expands_kv: copies k and v for each query head of a group.
        is_fused: one kernel with online softmax; counted as "flash" in statistics.
        efficiency: share of the device's matrix rate reached.
        num_launches: eager operations per call.
        unavailable: why this installation cannot run it at all; "" if it can.
        rules: what features and sizes cannot say: each returns why the executor cannot serve a
            problem, or "".
        order: where a PyTorch user would look for this executor when nothing was measured; the
            lowest that can serve is the incumbent.
        waits: it reads the device on the host while it runs.
        compiles: its first call of a kind compiles a kernel.
        chunk_rows: how many query rows it takes at once for a problem and a memory budget; 0 is
            all.
        row_bytes: what each of these rows allocates.
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
    features: Feature = _NO_FEATURES
    max_head_dim: int = 0
    min_compute_capability: tuple[int, int] = (0, 0)
    min_group_size: int = 1
    max_len_q: int = 0
    min_len_q: int = 0
    skips_hidden: bool = False
    materialises_scores: bool = False
    expands_kv: bool = False
    is_fused: bool = False
    efficiency: float = 0.5
    num_launches: int = 1
    unavailable: str = ""
    rules: tuple[Callable[["AttentionProblem"], str], ...] = ()
    order: Callable[["AttentionProblem"], int] = _usual_order
    waits: bool = False
    compiles: bool = False
    chunk_rows: Callable[["AttentionProblem", int | None], int] = _all_rows
    row_bytes: Callable[["AttentionProblem"], int] = _no_bytes
