"""Times chunks of every size, beside the size that planning takes.

python -m benchmarks.chunk_rows --device cpu --rounds 40
python -m benchmarks.chunk_rows --device cuda --rounds 5     # chunks that are written out
python -m benchmarks.chunk_rows --device cuda --rounds 5 --only streamed
"""

import time
from collections.abc import Callable
from typing import Any

import torch

from adaattn.backends import capability_named, run_group
from adaattn.spec import AttentionProblem, Capability, HeadGroup, Launch, Precision, Scheme
from adaattn.testing import make_problem, make_tensors
from benchmarks.timing import arguments, save, synchronize

SIZES = {"cpu": (64, 128, 256, 512, 1024), "cuda": (256, 512, 1024, 2048, 4096, 8192)}
_MOST_BYTES = 16 << 30
"""Of a chunk's scores on a GPU."""

ON_A_CPU: dict[str, dict[str, Any]] = {
    "window 13+13, 128 heads, S225 D48": {
        "batch": 8, "num_heads": 16, "len_q": 225, "head_dim": 48, "window": (13, 13),
    },
    "window 10, S1475 D64": {"num_heads": 1, "len_q": 1475, "head_dim": 64, "window": (10, 0)},
    "window 128, 8 heads, S2048 D64": {
        "num_heads": 8, "len_q": 2048, "head_dim": 64, "window": (128, 0),
    },
    "window 74, S292 D128 bf16": {
        "num_heads": 1, "len_q": 292, "head_dim": 128, "window": (74, 0),
        "precision": Precision.BF16,
    },
    "window 1, 4 heads, S130 D128": {
        "num_heads": 4, "len_q": 130, "head_dim": 128, "window": (1, 0),
    },
    "window 32, 8 heads, S1024 D64": {
        "batch": 2, "num_heads": 4, "len_q": 1024, "head_dim": 64, "window": (32, 0),
    },
    "ALiBi, S1084 D32": {
        "num_heads": 1, "len_q": 1084, "head_dim": 32, "is_causal": True, "has_alibi": True,
    },
    "ALiBi, 2 heads, S300 D64": {
        "num_heads": 2, "len_q": 300, "head_dim": 64, "is_causal": True, "has_alibi": True,
    },
} | {
    f"sinks, window {left}, {heads} heads, S{length} D{dim} bf16": {
        "num_heads": heads, "len_q": length, "head_dim": dim, "window": (left, 0),
        "has_sinks": True, "precision": Precision.BF16,
    }
    for left, heads, dim in ((12, 36, 128), (24, 16, 64), (8, 8, 128))
    for length in (100, 114, 128, 160, 192, 256, 400)
}  # fmt: skip

ON_A_GPU: dict[str, dict[str, Any]] = {
    f"{kind}, {heads} heads, S{length} D{dim} {precision.label}": {
        "num_heads": heads, "len_q": length, "head_dim": dim, "precision": precision,
        "is_causal": True, "device_type": "cuda", **given,
    }
    for kind, given in (("sinks", {"has_sinks": True}), ("softcap", {"softcap": 30.0}))
    for precision in (Precision.BF16, Precision.FP32)
    for heads, length, dim in ((4, 6371, 96), (32, 2048, 128), (32, 8192, 64))
} | {
    f"streamed {kind}, {heads} heads, S{length} D{dim}": {
        "num_heads": heads, "len_q": length, "head_dim": dim, "precision": Precision.BF16,
        "device_type": "cuda", **given,
    }
    for kind, given in (
        ("window 2+2", {"window": (2, 2)}), ("window 256", {"window": (256, 0)}),
        ("window 1024", {"window": (1024, 0)}), ("softcap", {"softcap": 30.0}),
        ("softcap causal", {"softcap": 30.0, "is_causal": True}),
    )
    for heads, length, dim in ((8, 2048, 512), (16, 3067, 512), (16, 8192, 512))
} | {
    f"streamed {kind}, {heads} heads, S{length} D{dim}": {
        "num_heads": heads, "len_q": length, "head_dim": dim, "precision": Precision.BF16,
        "device_type": "cuda", "is_causal": kind == "causal",
    }
    for kind in ("full", "causal")
    for heads, length, dim in ((16, 2048, 1024), (4, 4095, 2048))
}  # fmt: skip


def calls(
    capability: Capability, problem: AttentionProblem, own: int
) -> dict[int, Callable[[], object]]:
    """Return an executor's call for each size of chunks and its own; all rows are the last."""
    tensors = make_tensors(problem)
    upstream = torch.randn_like(tensors.query).contiguous()
    leaves = (tensors.query, tensors.key, tensors.value)

    def call(group: HeadGroup) -> object:
        output = run_group(tensors, problem, group).output
        return torch.autograd.grad(output, leaves, upstream) if problem.requires_grad else output

    found: dict[int, Callable[[], object]] = {}
    for size in sorted({*SIZES[problem.device_type], own}):
        if min(size, problem.len_q) * capability.row_bytes(problem) > _MOST_BYTES:
            break
        group = HeadGroup(
            capability=capability.name,
            scheme=Scheme.of(problem.precision),
            launch=Launch(chunk_rows=size),
        )
        found[size] = lambda group=group: call(group)  # type: ignore[misc]
        if size >= problem.len_q:
            break
    return found


def measure(name: str, problem: AttentionProblem, rounds: int) -> dict[str, Any]:
    """Return the fastest time of each size, and of the one that planning takes."""
    capability = capability_named("streamed" if name.startswith("streamed") else "chunked")
    own = capability.chunk_rows(problem, None) or problem.len_q
    by_size = calls(capability, problem, own)
    for function in by_size.values():
        function()
        function()
        synchronize(problem.device_type)
    best = dict.fromkeys(by_size, float("inf"))
    for _ in range(rounds):
        for size, function in by_size.items():
            start = time.perf_counter()
            function()
            synchronize(problem.device_type)
            best[size] = min(best[size], 1e3 * (time.perf_counter() - start))
    chosen = min(own, max(by_size))
    share = best[chosen] / min(best.values())
    shown = ", ".join(f"{size}: {ms:.3g} ms" for size, ms in best.items())
    print(f"{name:<50} {shown}; takes {chosen}, {share:.2f} of the best", flush=True)
    return {"cell": name, "best_ms": best, "chosen": chosen, "chosen_over_best": share}


def main() -> None:
    """Measure every problem, forward and in training, and write the result."""
    options = arguments(__doc__ or "").parse_args()
    rows = []
    for name, values in (ON_A_GPU if options.device == "cuda" else ON_A_CPU).items():
        for training in (False, True):
            label = f"{name}, training" if training else name
            if options.only in label:
                problem = make_problem(**values, requires_grad=training)
                rows.append(measure(label, problem, options.rounds))
    print(save(f"chunk_rows_{options.device}", options, rows))


if __name__ == "__main__":
    main()
