"""Compute attention over a long sequence under a memory budget that its scores would not fit.

PyTorch's fused CPU kernel has neither sliding windows nor softcaps, which Gemma 2 uses.
"""

import argparse
import ctypes
import sys
import time

import torch
from _options import add_numbers, one_line_errors

import adaattn
from adaattn.hardware import peak_memory


def written_out(query, key, value, rows, window, softcap):
    """Return the given query rows in float64, with their scores over all keys in memory."""
    query, key, value = query[:, :, rows].double(), key.double(), value.double()
    scores = softcap * torch.tanh(query @ key.mT * query.shape[-1] ** -0.5 / softcap)
    age = rows[:, None] - torch.arange(key.shape[2])
    return scores.masked_fill((age < 0) | (age > window), float("-inf")).softmax(-1) @ value


def main():
    """Plan, run, measure and check."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_numbers(parser, length=16384, window=1024, heads=4, head_dim=64, mib=64)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    query, key, value = torch.randn(3, 1, options.heads, options.length, options.head_dim)
    policy = adaattn.Policy(name="small memory", memory_budget_bytes=options.mib << 20)
    settings = {"is_causal": True, "window": (options.window, 0), "softcap": 50.0, "policy": policy}
    with one_line_errors(parser):
        decision = adaattn.plan_attention(query, key, value, **settings)
    for entry in decision.trace:
        if entry.accepted or entry.candidate.startswith("reference"):
            print(f"{entry.candidate}: {entry.reason}")
    rows, workspace = decision.plan.groups[0].launch.chunk_rows, decision.workspace_bytes / 2**20
    print(f"the plan: {rows} query rows at once, {workspace:.0f} MiB of workspace")
    adaattn.scaled_dot_product_attention(query, key, value, **settings)  # sets up thread pools
    if sys.platform == "linux":  # pages that the C library keeps would hide the peak
        ctypes.CDLL(None).malloc_trim(0)
    start = time.perf_counter()
    with peak_memory("cpu") as peak:
        output = adaattn.scaled_dot_product_attention(query, key, value, **settings)
    print(f"{options.length} tokens in {time.perf_counter() - start:.2f} s")
    if peak.added_bytes is not None:
        beside = (peak.added_bytes - output.nbytes) / 2**20
        print(f"measured peak: {beside:.0f} MiB beside the output")
    rows = torch.randint(options.length, (16,))
    exact = written_out(query, key, value, rows, options.window, 50.0)
    error = (output[:, :, rows] - exact).norm() / exact.norm()
    print(f"relative error against 16 rows written out in float64: {error:.1e}")


if __name__ == "__main__":
    main()
