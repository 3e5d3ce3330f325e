"""What an executor declares: what it can do, what it takes, which parameters it may be given."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from adaattn.spec.enums import Feature, KVKind, Method, Precision
from adaattn.spec.facts import AttentionProblem, HardwareFacts, TensorStats
from adaattn.spec.method import METHODS, HeadMethod
from adaattn.spec.plan import HeadGroup
from adaattn.spec.policy import Policy

__all__ = ["Capability", "Overhead"]

_NO_FEATURES: Final = Feature(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """What an approximation takes beside the products of the attention that is left.

    Args:
        flops: floating-point operations in fp32, timed with those products.
        bytes_moved: bytes read and written in main memory.
        workspace_bytes: memory.
        launches: eager operations.
        seconds: time that overlaps with nothing; launches are counted apart.
        flops_in_seconds: floating-point operations whose time is in ``seconds``.
    """

    flops: float = 0.0
    bytes_moved: float = 0.0
    workspace_bytes: float = 0.0
    launches: int = 0
    seconds: float = 0.0
    flops_in_seconds: float = 0.0


def _usual_order(*_: object) -> int:
    """Return 50, behind every executor that says better."""
    return 50


def _zero(*_: object) -> int:
    """Return 0: all rows at once, or no bytes."""
    return 0


def _no_overhead(*_: object) -> Overhead:
    """Return nothing."""
    return Overhead()


def _unpredicted(*_: object) -> str:
    """Return no reason."""
    return ""


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
        kv_kinds: how keys and values may be stored.
        max_head_dim: largest D and Dv; 0 is unlimited.
        min_compute_capability: on CUDA.
        max_compute_capability: on CUDA, the last one whose instructions it is written in; (0, 0) is
            unlimited.
        min_group_size: least query heads per key and value head (a grouped decode needs 2).
        max_len_q: most query rows (a decode kernel takes few); 0 is unlimited.
        min_len_q: fewest query rows that it is for.
        skips_hidden: keys hidden by causality or windows cost nothing.
        materialises_scores: allocates all Sq x Sk scores.
        expands_kv: copies k and v for each query head of a group.
        splits_keys: the keys of a few rows are shared out among processors, so that fewer heads
            take less time.
        is_fused: one kernel with online softmax; counted as "flash" in statistics.
        is_one_kernel: the same kernel serves every mix of features, and what it takes without one
            tells what it takes with it.
        efficiency: share of the device's matrix rate reached.
        num_launches: eager operations per call.
        unavailable: why this installation cannot run it at all; "" if it can.
        rules: what features and sizes cannot say: each returns why the executor cannot serve a
            problem, or "".
        order: where a PyTorch user would look for this executor when nothing was measured; the
            lowest that can serve is the incumbent.
        waits: it reads the device on the host while it runs.
        compiles: its first call of a kind compiles a kernel.
        compile_ms: what compiling takes, if what it compiled serves many lengths and is kept on
            disk; 0 where it does not compile, or where only a measurement of each problem tells.
        chunk_rows: how many query rows it takes at once for a problem and a memory budget; 0 is
            all.
        row_bytes: what each of these rows allocates.
        methods: its method with each parameters to try for a problem under a policy, the cheapest
            first; () where none gains anything. None is the method as it is without parameters.
        overhead: what a group takes beside attention itself, for a share of keys kept.
        best_density: share of keys kept that is assumed until it is measured.
        backward_factor: products of forward and backward pass together, over those of the forward
            pass; a backward pass of another kind is in ``overhead``.
        sampling_cost: what measuring its errors costs, in computations of the sampled rows; see
            `adaattn.planning.plan` for what was measured.
        why_unmeasured: why a prediction left some parameters unmeasured; "" where none did.
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
    kv_kinds: tuple[KVKind, ...] = (KVKind.DENSE,)
    max_head_dim: int = 0
    min_compute_capability: tuple[int, int] = (0, 0)
    max_compute_capability: tuple[int, int] = (0, 0)
    min_group_size: int = 1
    max_len_q: int = 0
    min_len_q: int = 0
    skips_hidden: bool = False
    materialises_scores: bool = False
    expands_kv: bool = False
    splits_keys: bool = True
    is_fused: bool = False
    is_one_kernel: bool = False
    efficiency: float = 0.5
    num_launches: int = 1
    unavailable: str = ""
    rules: tuple[Callable[[AttentionProblem], str], ...] = ()
    order: Callable[[AttentionProblem], int] = _usual_order
    waits: bool = False
    compiles: bool = False
    compile_ms: float = 0.0
    chunk_rows: Callable[[AttentionProblem, int | None], int] = _zero
    row_bytes: Callable[[AttentionProblem], int] = _zero
    methods: Callable[[AttentionProblem, Policy], tuple[HeadMethod, ...]] | None = None
    overhead: Callable[[AttentionProblem, HeadGroup, HardwareFacts, float], Overhead] = _no_overhead
    best_density: float = 1.0
    backward_factor: float = 3.5
    sampling_cost: int = 0
    why_unmeasured: Callable[
        [AttentionProblem, TensorStats, HeadMethod, tuple[float, ...]], str
    ] = _unpredicted

    def methods_for(self, problem: AttentionProblem, policy: Policy) -> tuple[HeadMethod, ...]:
        """Return what ``methods`` says."""
        if self.methods is None:
            return (METHODS[self.method](),)
        return self.methods(problem, policy)
