"""Times the single problems of ``adaattn evaluate --cases``, without its model; writes a JSON.

    python -m benchmarks.cases --device cuda --only softcap window

How often each is timed is that command's own rule.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from adaattn.evaluation.case_list import CASES
from adaattn.evaluation.cases import compare_cases
from benchmarks.timing import add_device, save


def main(given: Sequence[str] | None = None) -> int:
    """Return 1 if results differed or no problem has such a name, else 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_device(parser)
    parser.add_argument("--only", nargs="+", default=[""], help="problems whose names have these")
    parser.add_argument("--out", type=Path, default=None, help="folder of the JSON result")
    parser.add_argument("--commit", default="", help="what to record where there is no checkout")
    options = parser.parse_args(given)
    chosen = [case for case in CASES if any(text in case.name for text in options.only)]
    rows = []
    for found in compare_cases(options.device, cases=chosen):
        ratio = found.time_ratio
        rows.append(asdict(found) | {"ratio": ratio})
        said = found.why_not or f"{found.ours_ms:.3g} ms, {found.peer_ms:.3g} ms: {ratio:.2f}"
        print(f"{found.name} ({found.detail}): {found.chosen}: {said}", flush=True)
    print(save(f"cases_{options.device}", options, rows))
    return int(not rows or any("differ" in row["why_not"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
