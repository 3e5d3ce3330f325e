"""Measure the memory of training steps: attention written out, exact, and with adaptive rank.

Each way trains in a process of its own, so that no peak hides in what another left behind.
"""

import argparse
import subprocess
import sys

import torch

from adaattn import hardware
from adaattn.evaluation.corpus import load_text
from adaattn.models import Decoder, TransformerConfig

SIZES = {"vocab_size": 256, "num_layers": 2, "embed_dim": 64, "num_heads": 2, "head_dim": 128}
WAYS = ("written out", "exact", "adaptive rank")


def written_out(query, key, value, **_):
    """Return causal softmax(QK^T)V with every score in memory, and no weights."""
    later = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).triu(1)
    scores = (query @ key.mT * query.shape[-1] ** -0.5).masked_fill(later, float("-inf"))
    return scores.softmax(-1) @ value, None


def train(way, options):
    """Return a decoder trained on passages of *Opticks*, and its loss at each step."""
    torch.manual_seed(options.seed)  # the same weights and passages for every way
    kind = {"attention": "dense"}
    if way == "adaptive rank":
        settings = {"error_budget": options.error_budget}
        kind = {"attention": "adaptive_rank", "attention_settings": settings}
    model = Decoder(TransformerConfig(**SIZES, max_positions=options.length, **kind))
    for module in model.attention_modules() if way == "written out" else ():
        module.runner.run = written_out
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    text = torch.tensor(list(load_text("opticks").encode()))
    for start in torch.randint(len(text) - options.length, (options.steps,)).tolist():
        tokens = text[None, start : start + options.length]
        loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses
