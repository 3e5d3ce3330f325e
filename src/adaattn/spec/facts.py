"""Facts that planning reads: the problem, the numbers measured on it, the device, the executors."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from adaattn.spec.enums import Align, Aux, HeadTerm, KVKind, MaskKind, Precision
from adaattn.spec.method import HeadMethod

if TYPE_CHECKING:
    from adaattn.spec.evidence import TimingTable

__all__ = ["AttentionProblem", "HardwareFacts", "MethodErrors", "Rates", "TensorStats"]


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
        mask_is_aligned: False where a mask on a GPU has rows that do not begin at multiples of 16
            bytes, which TMA cannot read.
        mask_is_wide: the additive mask has more bits than the query.
        mask_requires_grad: a gradient is wanted for an additive mask.
        softcap: c in c*tanh(s/c); 0 is none.
        has_sinks: learned logits join the denominator.
        sinks_require_grad: a gradient is wanted for them.
        has_alibi: ALiBi slopes are given.
        alibi_requires_grad: a gradient is wanted for them.
        head_terms: which of scale, window and softcap each head has its own of, in tensors; here
            those are 1, unlimited and 0.
        head_terms_require_grad: a gradient is wanted for one of them.
        block_size: rows and keys of a block, where blocks of keys are listed; (0, 0) else.
        most_blocks: blocks of keys that a list has room for; a row may see all all the same.
        dropout_p: probability of dropping a weight.
        num_sequences: N packed sequences; 0 when not packed.
        max_len_q: longest packed query sequence, or the caller's bound of it.
        max_len_k: longest packed key sequence, or the caller's bound of it.
        packed_square: every packed sequence has as many queries as keys.
        requires_grad: a gradient is wanted for q, k or v.
        deterministic: PyTorch was asked for deterministic algorithms.
        batch_invariant: the numbers of one sequence may not depend on the others, to the last bit.
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
    mask_is_aligned: bool = True
    mask_is_wide: bool = False
    mask_requires_grad: bool = False
    softcap: float = 0.0
    has_sinks: bool = False
    sinks_require_grad: bool = False
    has_alibi: bool = False
    alibi_requires_grad: bool = False
    head_terms: HeadTerm = HeadTerm.NONE
    head_terms_require_grad: bool = False
    block_size: tuple[int, int] = (0, 0)
    most_blocks: int = 0
    dropout_p: float = 0.0
    num_sequences: int = 0
    max_len_q: int = 0
    max_len_k: int = 0
    packed_square: bool = False
    requires_grad: bool = False
    deterministic: bool = False
    batch_invariant: bool = False
    aux: Aux = Aux.NONE
    allowed_sdpa: tuple[str, ...] | None = None
    sdpa_default: str = ""
    may_wait: bool = True
    dense_columns: bool = False
    stride_bytes: int = 1

    def without_layout(self) -> "AttentionProblem":
        """Return the problem that it is in any layout: what is learnt of it holds in all."""
        return replace(self, dense_columns=False, stride_bytes=1, mask_is_aligned=True)

    @property
    def group_size(self) -> int:
        """Query heads that share one key and value head; 1 when there are none."""
        return max(self.num_heads // max(self.num_kv_heads, 1), 1)

    @property
    def kv_kind(self) -> KVKind:
        """How keys and values are stored."""
        return KVKind.PACKED if self.num_sequences else KVKind.DENSE

    @property
    def offset(self) -> int:
        """Key position of query row 0."""
        return self.len_k - self.len_q if self.align is Align.BOTTOM_RIGHT else 0

    @property
    def wants_gradients(self) -> bool:
        """Whether a gradient is wanted, of anything."""
        of_scores = self.mask_requires_grad or self.alibi_requires_grad
        of_heads = self.sinks_require_grad or self.head_terms_require_grad
        return self.requires_grad or of_scores or of_heads

    @property
    def has_blocks(self) -> bool:
        """Whether blocks of keys are listed for blocks of rows."""
        return self.block_size[1] > 0

    @property
    def has_softcap(self) -> bool:
        """Whether scores are capped, alike for all heads or by a number of each."""
        return self.softcap > 0 or self.by_head(HeadTerm.SOFTCAP)

    def by_head(self, term: HeadTerm) -> bool:
        """Return whether each head has its own number; by numbers, as in `wants`."""
        return bool(self.head_terms.value & term.value)

    def wants(self, aux: Aux) -> bool:
        """Return whether an output beside the result is asked for.

        By numbers: torch.compile of PyTorch 2.11 follows no other words for flags.
        """
        return bool(self.aux.value & aux.value)

    @property
    def longest(self) -> tuple[int, int]:
        """(Sq, Sk), of packed sequences the longest, or the caller's bounds of it."""
        if self.num_sequences:
            return self.max_len_q, self.max_len_k
        return self.len_q, self.len_k

    @property
    def attended_pairs(self) -> int:
        """(query, key) pairs of packed sequences at most, causality left out."""
        return min(self.len_q * self.max_len_k, self.len_k * self.max_len_q)

    @property
    def visible_pairs(self) -> float:
        """(query, key) pairs that causality and windows leave, per head and batch.

        Exact without dilation; within one pair a row with it; an estimate for packed sequences,
        whose lengths are not all known here, and for lists of blocks, by the room that they have.
        Windows of single heads are in tensors, and not known here: all that causality leaves.
        """
        left, right = self.window
        right = 0 if self.is_causal else right
        if self.num_sequences:
            pairs = float(self.attended_pairs)
            pairs *= 0.5 if self.is_causal else 1.0
            if left >= 0 and right >= 0:
                pairs = min(pairs, float(self.len_q * (left + 1 + right)))
        else:
            low, high, count = self.offset, self.len_k, self.len_q
            upper = _clamped_sum(count, low + right + 1, high) if right >= 0 else count * high
            lower = _clamped_sum(count, low - left, high) if left >= 0 else 0
            pairs = float(max(upper - lower, 0))
        if self.has_blocks:
            pairs *= min(self.most_blocks * self.block_size[1] / max(self.len_k, 1), 1.0)
        return pairs / self.dilation

    @property
    def is_positional(self) -> bool:
        """True when which keys are seen depends on positions."""
        windowed = self.window != (-1, -1) or self.by_head(HeadTerm.WINDOW)
        return self.is_causal or windowed or self.dilation > 1


def _clamped_sum(count: int, start: int, high: int) -> int:
    """Return the sum of clamp(start + i, 0, high) over i in range(count)."""
    first = min(max(-start, 0), count)
    last = min(max(high - start, first), count)
    rising = (last - first) * (2 * start + first + last - 1) // 2
    return rising + (count - last) * high


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
        method_errors: what the sampled rows say of each approximation; those that were predicted
            not to do are left out. Those of one executor stand in the order of their errors, the
            largest first.
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
    method_errors: tuple["MethodErrors", ...] = ()
    measure_ms: float = 0.0

    def errors_of(self, capability: str, method: HeadMethod) -> "MethodErrors | None":
        """Return what was measured of a method as an executor computes it, or None."""
        wanted = (capability, method)
        return next((it for it in self.method_errors if (it.capability, it.method) == wanted), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodErrors:
    """What sampled rows say of one approximation. One entry per query head.

    Args:
        capability: name of the executor's capability.
        method: the approximation with its parameters.
        errors: relative Frobenius error of the sampled output rows.
        densities: share of the visible keys that is computed; () is all.
    """

    capability: str
    method: HeadMethod
    errors: tuple[float, ...]
    densities: tuple[float, ...] = ()


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

    def matrix_flops_of(self, precision: Precision) -> float:
        """Return the same, a quarter of fp32's for a format without a rate of its own."""
        return self.flops_of(precision) or 0.25 * self.flops_of(Precision.FP32)


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
        has_tiles: whether a CPU multiplies bf16 by tiles (AMX), at many times its other rates.
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
    has_tiles: bool = False
    rates: Rates = field(default_factory=Rates)
    timings: "TimingTable | None" = None
