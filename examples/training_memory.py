"""Measure what training adds to memory: attention written out by hand, exact, and adaptive rank.

Each way trains in a process of its own, so that no peak hides in what another one left behind.
"""

import argparse
import subprocess
import sys

from _training import WAYS, add_options, train

from adaattn import hardware


def measure(way, options):
    """Print the most bytes that training added in this process, and the share of low rank."""
    with hardware.peak_memory("cpu") as peak:
        model, _ = train(way, options)
    print(peak.added_bytes or 0, model.get_statistics()["share_by_method"].get("low_rank", 0.0))


def compare(options, arguments):
    """Run each way, and print what it took and what adaptive rank saves."""
    peaks = {}
    for way in WAYS:
        command = [sys.executable, __file__, *arguments, "--way", way]
        found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        peaks[way] = int(found[0])
        low_rank = f", {float(found[1]):.0%} of heads in low rank" if way == WAYS[-1] else ""
        print(f"{way + ' attention':24} {peaks[way] / 2**20:6.0f} MiB{low_rank}", flush=True)
    if not all(peaks.values()):
        print("this system does not tell how much memory a process used at most")
        return
    for way in WAYS[:2]:
        saved = 1 - peaks["adaptive rank"] / peaks[way]
        verdict = (
            f"saves {saved:.0%}" if saved > 0 else f"saves nothing, it takes {-saved:.0%} more"
        )
        print(f"against {way} attention adaptive rank {verdict}")


def main():
    """Read the command line; without --way compare all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_options(parser, steps=10)
    parser.add_argument("--way", choices=WAYS, help="measure this one alone, in this process")
    options = parser.parse_args()
    if options.way:
        measure(options.way, options)
    else:
        print(f"memory added by {options.steps} training steps over {options.length} bytes each")
        compare(options, sys.argv[1:])


if __name__ == "__main__":
    main()
