"""Train a byte-level decoder on *Opticks* with adaptive rank, beside a twin with exact attention.

Both have the same first weights and read the same passages. Low rank is used forward only: the
backward pass takes all columns, so every direction of q, k and v keeps its gradient.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import torch
from training_memory import add_sizes, make_model, passages, train

from adaattn import hardware, record_events


def plot(path, curves):
    """Write the loss curves to a page, if plotly is there."""
    try:
        import plotly.graph_objects as go
    except ImportError:
        print("no page was written: plotly is missing, pip install 'adaattn[viz]' brings it")
        return
    lines = [go.Scatter(y=losses, name=name) for name, losses in curves.items()]
    axes = {"xaxis_title": "step", "yaxis_title": "loss, nats a byte"}
    go.Figure(lines, layout=axes).write_html(path)
    print(f"wrote {path}")


def main():
    """Train both, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_sizes(parser, steps=40)
    parser.add_argument("--plot", metavar="HTML", help="write the loss curves there, by plotly")
    options = parser.parse_args()
    if hardware.load_rates("cpu") is None:
        hardware.measure_rates("cpu")  # whether low rank pays is a question to this machine
    ...
