"""FlexAttention, for score changes that SDPA lacks. GPUs only.

On a CPU it has no backward pass and compiles with a C++ compiler that users may not have,
so the reference and `chunked` serve there. The compiled functions are kept, and so are block
masks that follow from positions and packed sequences; a sink is applied to the result through
the log-sum-exp, which FlexAttention differentiates.
"""

import importlib.util
from typing import Any, Final

import torch

from adaattn.backends.flex_masks import block_mask, compiled_once, score_mod
from adaattn.backends.flex_tiles import BLOCK
from adaattn.backends.interface import Result, Tensors
from adaattn.errors import ExecutorError
from adaattn.spec import AttentionProblem, Aux, Capability, Feature, HeadGroup, KVKind, Precision

__all__ = ["CAPABILITIES", "run"]


def _unavailable() -> str:
    """Return why FlexAttention cannot run here, or ""."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return ""


_LEAST_COLUMNS: Final = 16


def _narrow(problem: AttentionProblem) -> str:
    """Return why columns are too few for its blocks, or ""."""
    columns = min(problem.head_dim, problem.value_dim)
    few = f"it takes D and Dv from {_LEAST_COLUMNS} on, got {columns}"
    return few if columns < _LEAST_COLUMNS else ""


def _without_kernel(problem: AttentionProblem) -> str:
    """Return why no kernel of its backward pass fits, or "".

    In fp32 Inductor finds none for the heads of a group over few queries, and says so in the
    backward pass, where nothing can step down: 4 heads by 33 queries fail, 2 by 33 and 4 by 512 do
    not (H200, PyTorch 2.11, 2026-11).
    """
    rows = problem.group_size * problem.len_q
    short = problem.len_q < BLOCK < rows and problem.group_size > 1
    if problem.requires_grad and problem.precision is Precision.FP32 and short:
        return f"its fp32 gradients take groups of up to {BLOCK} short rows, got {rows}"
    return ""


def _blocks(problem: AttentionProblem) -> str:
    """Return why listed blocks do not consist of its tiles, or ""."""
    if not any(size % BLOCK for size in problem.block_size):
        return ""
    rows, keys = problem.block_size
    return f"it takes lists of blocks in steps of {BLOCK}, got {rows} rows and {keys} keys"


CAPABILITIES = (
    Capability(
        name="flex",
        backend="flex",
        device_types=("cuda",),
        precisions=(Precision.FP32, Precision.BF16, Precision.FP16),
        features=(
            Feature.CAUSAL_TOP_LEFT
            | Feature.CAUSAL_BOTTOM_RIGHT
            | Feature.BOOLEAN_MASK
            | Feature.ADDITIVE_MASK
            | Feature.MASKED_POSITIONS
            | Feature.WIDE_MASK
            | Feature.SCALE_SIGN
            | Feature.WINDOW
            | Feature.DILATION
            | Feature.SOFTCAP
            | Feature.SINKS
            | Feature.SINKS_GRADIENT
            | Feature.ALIBI
            | Feature.VALUE_DIM
            | Feature.BACKWARD
            | Feature.LSE
            | Feature.LSE_GRADIENT
            | Feature.BLOCK_LIST
        ),
        kv_kinds=(KVKind.DENSE, KVKind.PACKED),
        rules=(_narrow, _without_kernel, _blocks),
        max_head_dim=256,
        min_len_q=16,
        min_compute_capability=(8, 0),
        skips_hidden=True,
        is_fused=True,
        efficiency=0.55,
        # Host time, mostly the guards of the compiled function: 270 microseconds more than
        # the memory-efficient kernel's in training on an H200 (docs/kernel-notes.md).
        num_launches=50,
        unavailable=_unavailable(),
        # Behind masks written out for SDPA: a first call compiles for seconds.
        order=lambda problem: 40,
        compiles=True,
    ),
)


def run(tensors: Tensors, problem: AttentionProblem, group: HeadGroup) -> Result:
    """Return attention by one compiled FlexAttention kernel."""
    wants_lse = problem.has_sinks or bool(problem.aux & Aux.LSE)
    tracing = torch.compiler.is_compiling()
    kernel = _entry if tracing else compiled_once(_entry, _facts(tensors, problem, wants_lse))
    try:
        output, lse = kernel(
            tensors.query,
            tensors.key,
            tensors.value,
            wants_lse=wants_lse,
            score_mod=score_mod(tensors, problem),
            block_mask=block_mask(tensors, problem),
            scale=problem.scale,
            enable_gqa=problem.group_size > 1,
        )
    except RuntimeError as error:
        # Inductor's own class: where no template fits, or none fits shared memory.
        if type(error).__name__ != "InductorError":
            raise
        first = str(error).splitlines()[0]
        raise ExecutorError(f"FlexAttention cannot be compiled for it: {first}") from error
    if tensors.sinks is not None:
        output, lse = _with_sinks(output, lse, tensors.sinks)
    return Result(output=output, lse=lse if problem.aux & Aux.LSE else None)


def _with_sinks(
    output: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and log-sum-exp with sinks in the denominator; unseen rows stay 0 and -inf.

    Args:
        output: [B, Hq, Sq, Dv] without sinks.
        lse: [B, Hq, Sq] of it, fp32; -inf where a row sees no key.
        sinks: [Hq].
    """
    unseen = lse == float("-inf")
    seen = lse.masked_fill(unseen, 0.0)  # so that no gradient meets an infinity
    logits = sinks.float()[None, :, None]
    share = torch.sigmoid(seen - logits).masked_fill(unseen, 0.0)
    output = (output.float() * share.unsqueeze(-1)).to(output.dtype)
    return output, torch.logaddexp(seen, logits).masked_fill(unseen, float("-inf"))


def _facts(tensors: Tensors, problem: AttentionProblem, wants_lse: bool) -> tuple[object, ...]:
    """Return all that a compiled kernel depends on: what Dynamo guards, so that each is one graph.

    The numbers of one packing are not among it: its tensors are read when the kernel runs.
    """
    query, key, value = tensors.query, tensors.key, tensors.value
    return (
        *(_layout(item) for item in (query, key, value, tensors.mask, tensors.alibi_slopes)),
        (query is key, query is value, key is value),  # equal arguments become one input
        tensors.cu_seqlens_q is not None,
        problem.packed_square,
        None if tensors.blocks is None else tensors.blocks.counts.shape[:2],
        problem.scale,
        problem.is_causal,
        problem.align,
        problem.window,
        problem.dilation,
        problem.softcap,
        problem.deterministic,
        wants_lse,
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_float32_matmul_precision(),
    )


def _layout(tensor: torch.Tensor | None) -> tuple[object, ...] | None:
    """Return what compiled code takes for granted of a tensor."""
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def _entry(*args: Any, wants_lse: bool, **kwargs: Any) -> tuple[torch.Tensor, Any]:
    """Return FlexAttention's output, and its log-sum-exp or None."""
    from torch.nn.attention import flex_attention

    module: Any = flex_attention
    if not wants_lse:
        return module.flex_attention(*args, **kwargs), None
    if not hasattr(module, "AuxRequest"):  # before PyTorch 2.9
        output, lse = module.flex_attention(*args, return_lse=True, **kwargs)
        return output, lse
    output, aux = module.flex_attention(*args, return_aux=module.AuxRequest(lse=True), **kwargs)
    return output, aux.lse
