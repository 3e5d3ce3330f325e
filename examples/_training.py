"""What train_decoder.py and training_memory.py share: a small byte-level decoder in training."""

import argparse
from pathlib import Path

import torch
from _options import add_numbers

from adaattn.evaluation.corpus import load_text
from adaattn.models import Decoder, TransformerConfig

__all__ = ["WAYS", "add_options", "output_file", "train"]

WAYS = ("written out", "exact", "adaptive rank")
SIZES = {"vocab_size": 256, "num_layers": 2, "embed_dim": 64, "num_heads": 2, "head_dim": 128}


def add_options(parser, steps):
    """Add the options of the training to a command line."""
    longest = len(load_text("opticks").encode()) - 1
    add_numbers(parser, longest, steps=steps, length=4096, error_budget=0.05)


def output_file(path):
    """Return the path of a file to write, its folder checked."""
    if not Path(path).is_dir() and Path(path).absolute().parent.is_dir():
        return path
    raise argparse.ArgumentTypeError(f"expected a file in an existing folder, got {path}")


def written_out(query, key, value, **_):
    """Return causal softmax(QK^T)V by hand, with every score in memory, and no weights."""
    later = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).triu(1)
    scores = (query @ key.mT * query.shape[-1] ** -0.5).masked_fill(later, float("-inf"))
    return scores.softmax(-1) @ value, None


def train(way, options):
    """Return a decoder trained on passages of *Opticks* in one of `WAYS`, and each step's loss."""
    torch.manual_seed(options.seed)  # the same first weights and the same passages in every way
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
