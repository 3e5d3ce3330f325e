"""Holds the cost model's ranking of executors against the clock.

    python -m benchmarks.cost_ranking --device cpu

For each problem every executor that can serve it is timed. Two numbers matter: the share of
pairs that the model orders as the clock does (pairs within 15 % of each other do not count),
and the regret: the time of the executor that planning takes over the best time there was.
"""

import itertools
from dataclasses import replace
from typing import Any

import torch

import adaattn
from adaattn import hardware
from adaattn.backends import capabilities
from adaattn.call.describe import Arguments, build_call
from adaattn.planning import reasons
from adaattn.spec import Capability, Method
from benchmarks.timing import arguments, interleaved, save

_CLOSE = 1.15
_PROBLEMS: dict[str, tuple[tuple[int, int, int, int, int, int], dict[str, Any]]] = {
    "causal D64 S1024": ((1, 8, 8, 1024, 1024, 64), {"is_causal": True}),
    "full D128 S512": ((1, 8, 8, 512, 512, 128), {}),
    "grouped causal D64 S2048": ((1, 9, 3, 2048, 2048, 64), {"is_causal": True}),
    "decode 32/4 D128 S8192": ((1, 32, 4, 1, 8192, 128), {}),
    "decode 9/3 D64 S4096": ((1, 9, 3, 1, 4096, 64), {}),
    "decode 8/8 D64 S4096": ((1, 8, 8, 1, 4096, 64), {}),
    "window D64 S2048": ((1, 4, 4, 2048, 2048, 64), {"is_causal": True, "window": (128, 0)}),
    "softcap D64 S1024": ((1, 4, 4, 1024, 1024, 64), {"is_causal": True, "softcap": 20.0}),
    "wide D256 S512": ((1, 4, 4, 512, 512, 256), {}),
    "short D64 S64 B16": ((16, 8, 8, 64, 64, 64), {"is_causal": True}),
}


def rank(name: str, device: str, rounds: int) -> dict[str, Any]:
    """Return predictions and timings of one problem."""
    (batch, heads, kv_heads, len_q, len_k, dim), semantics = _PROBLEMS[name]
    query = torch.randn(batch, heads, len_q, dim, device=device)
    key, value = (torch.randn(batch, kv_heads, len_k, dim, device=device) for _ in range(2))
    gqa = {"enable_gqa": True} if heads != kv_heads else {}
    usable = _usable(query, key, value, semantics | gqa)
    functions = {item.name: _call(query, key, value, semantics | gqa, item.name) for item in usable}
    timed = {
        key: value.median_ms
        for key, value in interleaved(functions, device=device, rounds=rounds).items()
    }
    predicted = {
        item.name: adaattn.plan_attention(
            query, key, value, backend=item.name, **semantics, **gqa
        ).cost.time_ms
        for item in usable
    }
    chosen = adaattn.plan_attention(query, key, value, **semantics, **gqa).plan
    taken = chosen.groups[0].capability
    pairs = [
        (predicted[a] < predicted[b]) == (timed[a] < timed[b])
        for a, b in itertools.combinations(timed, 2)
        if max(timed[a], timed[b]) > _CLOSE * min(timed[a], timed[b])
    ]
    regret = timed[taken] / min(timed.values())
    print(
        f"{name:<26} {sum(pairs)}/{len(pairs)} pairs, took {taken} ({regret:.2f}x the best)  "
        + ", ".join(f"{key} {predicted[key]:.3g}->{timed[key]:.3g}" for key in timed)
    )
    return {
        "cell": name,
        "predicted_ms": predicted,
        "timed_ms": timed,
        "chosen": taken,
        "ordered_pairs": sum(pairs),
        "pairs": len(pairs),
        "regret": regret,
    }


def _usable(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, semantics: dict[str, Any]
) -> list[Capability]:
    """Return the exact executors that can serve a call."""
    call = build_call(query, key, value, Arguments(**semantics))
    facts = hardware.probe(query.device)
    problem = replace(call.problem, allowed_sdpa=None)
    return [
        item
        for item in capabilities()
        if item.method is Method.EXACT and not reasons(item, problem, facts)
    ]


def _call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    semantics: dict[str, Any],
    backend: str,
) -> Any:
    """Return a call to one executor."""
    return lambda: adaattn.scaled_dot_product_attention(
        query, key, value, backend=backend, **semantics
    )


def main() -> None:
    """Rank every problem and write the result."""
    options = arguments(__doc__ or "").parse_args()
    hardware.measure_rates(options.device)
    rows = [rank(name, options.device, options.rounds) for name in _PROBLEMS]
    ordered, pairs = (sum(row[key] for row in rows) for key in ("ordered_pairs", "pairs"))
    worst = max(row["regret"] for row in rows)
    print(f"ordered as the clock does: {ordered} of {pairs} pairs; worst regret {worst:.2f}x")
    print(save(f"cost_ranking_{options.device}", options, rows))


if __name__ == "__main__":
    main()
