"""Train a small decoder on *Opticks* with adaptive rank, and one with exact attention.

Both start from the same weights and read the same text. Low rank shortens the forward pass only.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from _training import add_options, output_file, train

from adaattn import record_events


def plot(path, curves):
    """Write the loss curves to a page, if plotly is there."""
    try:
        import plotly.graph_objects as go
    except ImportError:
        print("no page: plotly is missing, pip install 'adaattn[viz]' brings it")
        return
    lines = [go.Scatter(y=losses, name=name) for name, losses in curves.items()]
    go.Figure(lines, {"yaxis_title": "loss in nats a byte"}).write_html(path)


def main():
    """Train both, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_options(parser, steps=40)
    parser.add_argument("--plot", type=output_file, metavar="HTML", help="file for the loss curves")
    options = parser.parse_args()
    events = []
    with record_events(events.append):
        model, losses = train("adaptive rank", options)
    _, exact = train("exact", options)
    print("step   adaptive      exact  difference")
    for step in sorted({*range(0, options.steps, max(options.steps // 8, 1)), options.steps - 1}):
        mine, other = losses[step], exact[step]
        print(f"{step + 1:4}  {mine:9.4f}  {other:9.4f}  {mine - other:+10.1e}")
    found = model.get_statistics()
    share, ranks = found["share_by_method"].get("low_rank", 0.0), found["heads_by_rank"]
    print(f"{share:.0%} of the heads of all calls ran in low rank, by rank: {ranks or 'none'}")
    print("of low rank the planner said in the last call:")
    for entry in events[-1].decision.trace:
        if entry.candidate.startswith("low_rank"):
            print(f"  {entry.candidate}: {entry.reason}")
    if options.plot:
        plot(options.plot, {"adaptive rank": losses, "exact": exact})
    same = {"length": options.length, "error-budget": options.error_budget, "seed": options.seed}
    same["steps"] = min(options.steps, 10)
    command = [sys.executable, Path(__file__).with_name("training_memory.py")]
    command += [f"--{name}={value}" for name, value in same.items()]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
