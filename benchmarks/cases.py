"""Times the single problems of ``adaattn evaluate --cases``, without its model; writes a JSON."""

import sys
from collections.abc import Sequence
from dataclasses import asdict

from adaattn.evaluation.cases import compare_cases
from benchmarks.timing import arguments, save


def main(given: Sequence[str] | None = None) -> int:
    """Return 1 if a problem was not compared for a difference of the results, else 0."""
    parser = arguments((__doc__ or "").splitlines()[0])
    options = parser.parse_args(given)
    rows = []
    for found in compare_cases(options.device):
        ratio = found.time_ratio
        rows.append(asdict(found) | {"ratio": ratio})
        said = found.why_not or f"{found.ours_ms:.3g} ms, {found.peer_ms:.3g} ms: {ratio:.2f}"
        print(f"{found.name} ({found.detail}): {found.chosen}: {said}", flush=True)
    print(save(f"cases_{options.device}", options, rows))
    return int(any("differ" in row["why_not"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
