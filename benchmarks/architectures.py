"""Transformers' models with ``attn_implementation="adaattn"`` beside the one that they have.

    python -m benchmarks.architectures --device cpu

Small models of eight architectures, random weights: causal order, windows, softcaps, sinks, a bias
by position, encoders and cross attention. Each runs a forward pass, a step of training, and a
generation, of whole prompts and of padded ones. So small, the host decides: it is what the library
adds to a layer that is seen, at its worst. The peer is ``"sdpa"``, or ``"eager"`` where a model
takes nothing else. The outputs are compared first.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from adaattn.integrations.transformers import register
from benchmarks.failures import FailedError, blamed
from benchmarks.timing import arguments, save, synchronize

OURS: Final = "adaattn"
WAYS: Final = ("forward", "training", "generation", "padded generation")

_VOCABULARY: Final = 64
_PADDED: Final = 5
"""Tokens at the front of a padded prompt that are none."""

_WARM_CALLS: Final = 4
_ENCODERS: Final = ("Bert",)


def _sizes(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return what each configuration is made of, by its name in Transformers; without dropout."""
    length = options.tokens + options.new_tokens
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    usual = special | {
        "vocab_size": _VOCABULARY,
        "hidden_size": options.width,
        "intermediate_size": 2 * options.width,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
        "max_position_embeddings": length,
    }
    grouped = usual | {"num_key_value_heads": max(options.heads // 2, 1)}
    window = {"sliding_window": max(options.tokens // 4, 1)}
    of_heads = {"head_dim": options.width // options.heads}
    local = ["sliding_attention", "full_attention"]
    mixed = {"layer_types": [local[number % 2] for number in range(options.layers)]}
    return {
        "Llama": grouped,
        "Mistral": grouped | window,
        "Gemma2": grouped | window | of_heads | mixed | {"attn_logit_softcapping": 30.0},
        "GptOss": grouped
        | window
        | of_heads
        | mixed
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "GPT2": special
        | {
            "vocab_size": _VOCABULARY,
            "n_embd": options.width,
            "n_layer": options.layers,
            "n_head": options.heads,
            "n_positions": length,
            **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
        },
        "Bert": usual | dict.fromkeys(("attention_probs_dropout_prob", "hidden_dropout_prob"), 0.0),
        "T5": {
            "vocab_size": _VOCABULARY,
            "d_model": options.width,
            "d_ff": 2 * options.width,
            "d_kv": options.width // options.heads,
            "num_layers": options.layers,
            "num_heads": options.heads,
            "dropout_rate": 0.0,
            "pad_token_id": 0,
            "eos_token_id": 2,
            "decoder_start_token_id": 0,
        },
        "Bart": special
        | {
            "vocab_size": _VOCABULARY,
            "d_model": options.width,
            "encoder_layers": options.layers,
            "decoder_layers": options.layers,
            "encoder_attention_heads": options.heads,
            "decoder_attention_heads": options.heads,
            "encoder_ffn_dim": 2 * options.width,
            "decoder_ffn_dim": 2 * options.width,
            "max_position_embeddings": length,
            "decoder_start_token_id": 2,
            **dict.fromkeys(("activation_dropout", "attention_dropout", "dropout"), 0.0),
        },
    }


def made(name: str, values: dict[str, Any], options: argparse.Namespace) -> Any:
    """Return a model with random weights."""
    import transformers

    suffixes = {"GPT2": "LMHeadModel", "Bart": "ForConditionalGeneration", "Bert": "Model"}
    suffixes["T5"] = suffixes["Bart"]
    config = getattr(transformers, f"{name}Config")(**values)
    torch.manual_seed(0)
    model = getattr(transformers, name + suffixes.get(name, "ForCausalLM"))(config)
    if model.can_generate():
        model.generation_config.pad_token_id = 0
    return model.to(options.device, torch.bfloat16 if options.device == "cuda" else torch.float32)


def call_of(model: Any, way: str, options: argparse.Namespace) -> Callable[[], torch.Tensor]:
    """Return one pass of a model, or a generation; it returns its output, or its gradient."""
    source = torch.Generator().manual_seed(1)
    shape = (options.batch, options.tokens)
    tokens = torch.randint(3, _VOCABULARY, shape, generator=source).to(options.device)
    two = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
    if way == "forward":

        def forward() -> torch.Tensor:
            with torch.no_grad():
                output: torch.Tensor = model(input_ids=tokens, **two)[0]
            return output

        return forward
    if way == "training":
        model.train()
        weights = [item for item in model.parameters() if item.requires_grad]

        def step() -> torch.Tensor:
            output = model(input_ids=tokens, **two)[0]
            found = torch.autograd.grad(output.float().square().mean(), weights, allow_unused=True)
            return torch.cat([item.flatten() for item in found if item is not None])

        return step
    real = torch.ones_like(tokens)
    if way == "padded generation":
        real[0, :_PADDED] = 0
    new = {"max_new_tokens": options.new_tokens, "min_new_tokens": options.new_tokens}

    def generate() -> torch.Tensor:
        found: torch.Tensor = model.generate(tokens, attention_mask=real, do_sample=False, **new)
        return found

    return generate


def measure(name: str, way: str, values: dict[str, Any], options: argparse.Namespace) -> Any:
    """Return the row of one architecture and way: both times, or under ``"failed"`` why not."""
    row: dict[str, Any] = {"cell": f"{name} {way}"}
    try:
        with blamed("benchmark"), register(policy=options.policy):
            model = made(name, values, options).eval()
            peer = "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"
            calls = {}
            for side in (OURS, peer):
                own = copy.deepcopy(model)
                own.set_attn_implementation(side)
                with blamed(side):
                    calls[side] = call_of(own, way, options)
                    for _ in range(_WARM_CALLS):
                        calls[side]()
            agreement = _agreement(calls[OURS](), calls[peer]())
            row |= {"peer": peer, "agreement": agreement} | _timed(calls, peer, options)
    except FailedError as error:
        row |= {"failed": str(error), "failed_by": error.side}
    return row


def _agreement(output: torch.Tensor, other: torch.Tensor) -> float:
    """Return the share of equal tokens, or 1 minus the relative difference of two outputs."""
    if not output.is_floating_point():
        return float((output == other).double().mean())
    output, other = output.double(), other.double()
    return float(1.0 - (output - other).norm() / other.norm())


def _timed(
    calls: dict[str, Callable[[], Any]], peer: str, options: argparse.Namespace
) -> dict[str, Any]:
    """Return medians of what a caller waits, in turns, and of the ratio in each round."""
    samples: dict[str, list[float]] = {side: [] for side in calls}
    end = time.monotonic() + options.limit_s
    for number in range(options.rounds):
        if number >= 3 and time.monotonic() > end:
            break
        for side in list(calls) if number % 2 else reversed(calls):
            synchronize(options.device)
            start = time.perf_counter()
            calls[side]()
            synchronize(options.device)
            samples[side].append(1e3 * (time.perf_counter() - start))
    pairs = zip(samples[peer], samples[OURS], strict=True)
    return {
        "ratio": statistics.median(theirs / ours for theirs, ours in pairs),
        "ours_ms": statistics.median(samples[OURS]),
        "peer_ms": statistics.median(samples[peer]),
        "rounds": len(samples[OURS]),
    }


def main(given: list[str] | None = None) -> Path:
    """Return the path of the result of one run."""
    parser = arguments((__doc__ or "").splitlines()[0])
    parser.add_argument("--policy", default="quality", help="a preset or an error budget")
    parser.add_argument("--width", type=int, default=64, help="of the hidden state")
    parser.add_argument("--heads", type=int, default=4, help="of queries; half as many of keys")
    parser.add_argument("--layers", type=int, default=2, help="of each stack")
    parser.add_argument("--batch", type=int, default=2, help="sequences")
    parser.add_argument("--tokens", type=int, default=48, help="of a prompt")
    parser.add_argument("--new-tokens", type=int, default=32, help="that are generated")
    parser.add_argument("--limit-s", type=float, default=8.0, help="no round begins later")
    options = parser.parse_args(given)
    rows = []
    for name, values in _sizes(options).items():
        for way in WAYS:
            if options.only not in f"{name} {way}" or (name in _ENCODERS and "generation" in way):
                continue
            rows.append(measure(name, way, values, options))
            print(_line(rows[-1]), flush=True)
    path = save(f"architectures_{options.policy}_{options.device}", options, rows)
    print(path)
    return path


def _line(row: dict[str, Any]) -> str:
    """Return a row as a line of progress."""
    if "failed" in row:
        return f"FAILED by {row['failed_by']}: {row['cell']}: {row['failed'].splitlines()[0]}"
    return (
        f"{row['ratio']:7.3f}  {row['ours_ms']:9.3f} ms against {row['peer_ms']:9.3f}  "
        f"{row['cell']} [{row['peer']}], agreement {row['agreement']:.6f}"
    )


if __name__ == "__main__":
    main()
