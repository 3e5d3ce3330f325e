"""Train a byte-level decoder on *Opticks* with adaptive rank, beside a twin with exact attention."""

import argparse
import ctypes
import sys

import torch

from adaattn import hardware, record_events
from adaattn.evaluation.corpus import load_text
from adaattn.models import Decoder, TransformerConfig


def written_out(query, key, value, **_):
    """Return causal softmax(QK^T)V with every score in memory, and no weights."""
    scores = query @ key.mT * query.shape[-1] ** -0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(later, float("-inf")).softmax(-1) @ value, None


def train(batches, options, attention, settings=None, runs=None):
    """Return the model, its loss at each step, and the most memory that training added."""
    torch.manual_seed(options.seed)  # the same weights whatever the attention
    sizes = {"embed_dim": options.width, "num_heads": options.heads, "head_dim": options.head_dim}
    sizes |= {"max_positions": options.length, "attention_settings": settings or {}}
    config = TransformerConfig(vocab_size=256, num_layers=2, attention=attention, **sizes)
    model, losses = Decoder(config), []
    for module in model.attention_modules():
        module.runner.run = runs or module.runner.run
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if sys.platform == "linux":  # what the C library keeps would hide a part of the next peak
        getattr(ctypes.CDLL(None), "malloc_trim", int)(0)
    with hardware.peak_memory("cpu") as peak:
        for batch in batches:
            loss = model(batch, labels=batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return model, losses, peak.added_bytes


def main(options):
    """Train both, and say what came of it."""
    if hardware.load_rates("cpu") is None:
        print("measuring this machine: whether low rank pays depends on it", flush=True)
        hardware.measure_rates("cpu")
    text = torch.frombuffer(bytearray(load_text("opticks"), "utf-8"), dtype=torch.uint8).long()
    torch.manual_seed(options.seed)
    starts = torch.randint(len(text) - options.length, (options.steps,)).tolist()
    batches = [text[start : start + options.length][None] for start in starts]
    ...
