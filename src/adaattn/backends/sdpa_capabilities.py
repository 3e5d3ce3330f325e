"""What each of PyTorch's own kernels does natively, and when its user would get it.

Masks that stand for windows or packed sequences belong to other executors.
"""

from functools import partial

from adaattn.spec import AttentionProblem, Capability, Feature, KVKind, Precision

__all__ = ["CAPABILITIES"]

_HALF = (Precision.BF16, Precision.FP16)
_MASKS = Feature.BOOLEAN_MASK | Feature.ADDITIVE_MASK
_TRAINING = Feature.BACKWARD | Feature.DETERMINISTIC_BACKWARD


def _is_allowed(name: str, problem: AttentionProblem) -> str:
    """Return the reason that an ambient ``sdpa_kernel`` gives against a kernel, or ""."""
    allowed = problem.allowed_sdpa
    if allowed is None or name in allowed:
        return ""
    return f"the ambient sdpa_kernel allows {', '.join(allowed) or 'none'}"


_SHORT_ROWS, _SHORT_KEYS = 8, 512
_FEW_SCORES = 1 << 27


def _order(problem: AttentionProblem) -> int:
    """Return 10, or 61, behind math, where PyTorch has refused the kernel for math."""
    return 61 if problem.sdpa_default == "sdpa.math" else 10


_FEW_ROWS_BESIDE_SINKS = 256


def _flash2_order(problem: AttentionProblem) -> int:
    """Return 10, or 61 behind math; with sinks at least 31 where rows are few, behind `chunked`.

    Scaling the output takes three launches. Of few rows or a narrow window written scores keep the
    device 0.7 to 1.0 times as long, though the host 1.3 to 3 times; of 256 rows and more 1.0 to 25
    (H200, PyTorch 2.11, 2026-11).
    """
    few = problem.has_sinks and problem.len_q < _FEW_ROWS_BESIDE_SINKS
    return max(_order(problem), 31 if few else 0)


def _efficient_order(problem: AttentionProblem) -> int:
    """Return 10; 61 where PyTorch would take math, but for grouped heads.

    Their k and v can be repeated, as Transformers does, and a fused kernel be had. Not for a few
    rows of many keys, which it would read in one block, nor in training before the scores that
    math keeps are large: its backward pass took 1.2 to 1.6 times that of math at 4 and 32 tokens
    (H200, D 512 and fp32, PyTorch 2.11, 2026-11).
    """
    few = problem.len_q <= _SHORT_ROWS and problem.len_k > _SHORT_KEYS
    scores = problem.batch * problem.num_heads * problem.len_q * problem.len_k
    small = problem.requires_grad and scores < _FEW_SCORES
    return _order(problem) if few or small or problem.group_size == 1 else 10


CAPABILITIES = (
    Capability(
        name="sdpa.flash",
        backend="sdpa",
        rules=(partial(_is_allowed, "sdpa.flash"),),
        device_types=("cpu",),
        features=Feature.CAUSAL_TOP_LEFT | _MASKS | Feature.WIDE_MASK | _TRAINING | Feature.LSE,
        skips_hidden=True,
        is_fused=True,
        efficiency=0.55,
        order=_order,
    ),
    Capability(
        name="sdpa.flash2",
        backend="sdpa",
        rules=(partial(_is_allowed, "sdpa.flash2"),),
        device_types=("cuda",),
        precisions=_HALF,
        features=(
            Feature.CAUSAL_BOTTOM_RIGHT
            | Feature.WINDOW
            | Feature.SINKS
            | Feature.DROPOUT
            | _TRAINING
            | Feature.LSE
        ),
        kv_kinds=(KVKind.DENSE, KVKind.PACKED),
        max_head_dim=256,
        min_compute_capability=(8, 0),
        skips_hidden=True,
        is_fused=True,
        efficiency=0.45,
        order=_flash2_order,
    ),
    Capability(
        name="sdpa.efficient",
        backend="sdpa",
        rules=(partial(_is_allowed, "sdpa.efficient"),),
        device_types=("cuda",),
        precisions=(Precision.FP32, *_HALF),
        features=(
            Feature.CAUSAL_TOP_LEFT
            | _MASKS
            | Feature.MASK_GRADIENT
            | Feature.DROPOUT
            | Feature.BACKWARD
            | Feature.VALUE_DIM
            | Feature.LSE
        ),
        min_compute_capability=(5, 0),
        skips_hidden=True,
        expands_kv=True,
        splits_keys=False,
        is_fused=True,
        efficiency=0.3,
        order=_efficient_order,
    ),
    Capability(
        name="sdpa.cudnn",
        backend="sdpa",
        rules=(partial(_is_allowed, "sdpa.cudnn"),),
        device_types=("cuda",),
        precisions=_HALF,
        features=(
            Feature.CAUSAL_TOP_LEFT | _MASKS | Feature.DROPOUT | Feature.BACKWARD | Feature.LSE
        ),
        max_head_dim=256,
        min_compute_capability=(9, 0),
        skips_hidden=True,
        is_fused=True,
        efficiency=0.8,
        # Where cuDNN can serve, PyTorch takes it before its own kernels.
        order=lambda problem: _order(problem) - 1,
    ),
    Capability(
        name="sdpa.math",
        backend="sdpa",
        rules=(partial(_is_allowed, "sdpa.math"),),
        features=(
            Feature.CAUSAL_TOP_LEFT
            | _MASKS
            | Feature.MASK_GRADIENT
            | Feature.SCALE_SIGN
            | Feature.DROPOUT
            | _TRAINING
            | Feature.VALUE_DIM
        ),
        materialises_scores=True,
        expands_kv=True,
        efficiency=0.5,
        num_launches=8,
        # Scores written out are what PyTorch falls back on.
        order=lambda problem: 60,
    ),
)
