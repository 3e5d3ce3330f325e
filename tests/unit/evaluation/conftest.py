"""A made-up result of a model as large as the demo's, with all that its page can show."""

import random
from dataclasses import replace

import pytest

from adaattn.evaluation.results import Comparison, EvaluationResult, RunResult

LAYERS, HEADS, TOKENS = 30, 9, 8191
FLASH = "sdpa.flash/fp32"
LABELS = (FLASH, "low_rank/fp32 rank=8", "low_rank/fp32 rank=16", "block_sparse/bf16 mass=0.9")


def _exact(name: str, error_budget: float | None) -> RunResult:
    return RunResult(
        name=name,
        implementation="adaattn" if name != "sdpa" else "sdpa",
        error_budget=error_budget,
        loss=3.3,
        perplexity=27.11,
        loss_difference=0.0,
        loss_difference_error=0.0,
        mean_absolute_difference=0.0,
        divergence=0.0,
        divergence_error=0.0,
        max_divergence=0.0,
        attention_ms=234.0,
        attention_ms_low=232.0,
        attention_ms_high=237.0,
        forward_ms=1420.0,
        peak_bytes=21_000_000,
        workspace_bytes=0,
        methods=((FLASH, 1.0),),
        approximated=0.0,
        mean_output_error=0.0,
        max_output_error=0.0,
        fallbacks=0,
        chosen=((FLASH,) * HEADS,) * LAYERS if name != "sdpa" else (),
        decisions=(f"policy {name}\n  + {FLASH}  taken for all heads " + 60 * "and why ",) * LAYERS,
        refusals=(),
        difference_by_position=((1, 0.0), (4096, 0.0)),
        token_differences=(0.0,) * TOKENS,
    )


def _policy(name: str, scale: float, attention_ms: float) -> RunResult:
    draws = random.Random(name)
    chosen = tuple(tuple(draws.choices(LABELS, k=HEADS)) for _ in range(LAYERS))
    return replace(
        _exact(name, 0.01),
        loss_difference=scale / 10,
        loss_difference_error=scale / 90,
        mean_absolute_difference=scale,
        divergence=scale / 20,
        divergence_error=scale / 200,
        attention_ms=attention_ms,
        attention_ms_low=0.98 * attention_ms,
        attention_ms_high=1.05 * attention_ms,
        peak_bytes=18_000_000,
        methods=tuple((label, 1 / len(LABELS)) for label in LABELS),
        approximated=1 - 1 / len(LABELS),
        chosen=chosen,
        decisions=tuple(f"policy {name}, layer {layer} " + 200 * "why " for layer in range(LAYERS)),
        token_differences=tuple(draws.gauss(scale / 10, scale) for _ in range(TOKENS)),
    )


@pytest.fixture(scope="session")
def demo_result() -> EvaluationResult:
    draws = random.Random(0)
    compared = Comparison(
        name="Decoding, one query row over 65 536 keys",
        detail="batch 1, 32 heads over 8 key heads, head size 128, bf16",
        peer="F.scaled_dot_product_attention with enable_gqa",
        chosen="grouped/bf16",
        ours_ms=4.1,
        peer_ms=13.2,
        ours_bytes=1_100_000,
        peer_bytes=1_074_000_000,
        error=3e-3,
    )
    not_run = replace(
        compared,
        name="ALiBi over 65 536 tokens",
        peer_ms=None,
        ours_ms=9400.0,
        peer_bytes=155_000_000_000,
        error=None,
        why_not="its mask alone takes more memory than this machine has",
    )
    return EvaluationResult(
        model="/models/some-organisation/a-name-that-does-not-fit-a-narrow-screen-at-all-"
        + 40 * "x",
        text="opticks",
        device="cpu",
        device_name="a CPU",
        dtype="float32",
        tokens=TOKENS + 1,
        scored=TOKENS,
        window=2048,
        stride=1024,
        runs=(
            _exact("sdpa", None),
            _exact("exact", 0.0),
            _exact("quality", 0.0),
            _policy("<b>balanced & of a long name</b>", 2e-3, 236.0),
            _policy("speed", 2e-2, 150.0),
        ),
        entropy_bits=tuple(tuple(draws.uniform(1, 9) for _ in range(HEADS)) for _ in range(LAYERS)),
        seconds=(("load", 1.0),),
        versions=(("torch", "2.9"),),
        comparisons=(compared, not_run, replace(compared, name="Short rows", ours_ms=16.5)),
    )
