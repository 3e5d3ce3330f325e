"""Checks, or with --write renews, the table of refused architectures in docs/transformers.md.

    python scripts/transformers_table.py --write

It reads the modelling code of every architecture of the installed Transformers, which takes about
a minute.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import transformers
from transformers import CONFIG_MAPPING, MODEL_MAPPING

from adaattn.integrations.transformers import unsupported_reasons

PAGE = Path(__file__).resolve().parents[1] / "docs" / "transformers.md"
BEGIN = "<!-- refused architectures, by scripts/transformers_table.py -->"
END = "<!-- end of the refused architectures -->"
TITLES = {
    "computes attention itself": "Their modelling code computes attention itself",
    "a table of its own": "Their modelling code has its own table of attention classes",
}


def refused() -> dict[str, list[str]]:
    """Return the names of the architectures that are refused, under each title."""
    rows: dict[str, list[str]] = {title: [] for title in TITLES.values()}
    for name in sorted(CONFIG_MAPPING):
        try:
            model = MODEL_MAPPING.get(CONFIG_MAPPING[name], ())
        except ValueError:  # the mapping names a class that this release does not have
            continue
        for model_class in model if isinstance(model, (list, tuple)) else [model]:
            # A class that a missing package replaces says so when it is used, whatever it is.
            if not issubclass(model_class, transformers.PreTrainedModel):
                continue
            for reason in unsupported_reasons(model_class)[:1]:
                rows[next(t for part, t in TITLES.items() if part in reason)].append(name)
    return rows


def renewed(page: str) -> str:
    """Return the page with the table of the installed Transformers.

    Args:
        page: the text of docs/transformers.md.
    """
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    lines = [f"With Transformers {transformers.__version__}:", "", "| why | refused |", "|---|---|"]
    for title, names in refused().items():
        unique = dict.fromkeys(names)
        lines.append(f"| {title} ({len(unique)}) | {', '.join(f'`{n}`' for n in unique)} |")
    return "\n".join([before + BEGIN, "", *lines, "", END + after])


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 1 if the table is stale and was left so, else 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="renew the table")
    options = parser.parse_args(arguments)
    page = PAGE.read_text(encoding="utf-8")
    expected = renewed(page)
    if page == expected:
        return 0
    if options.write:
        PAGE.write_text(expected, encoding="utf-8")
    sys.stdout.write(f"{PAGE.name}: {'renewed' if options.write else 'stale, run with --write'}\n")
    return 0 if options.write else 1


if __name__ == "__main__":
    sys.exit(main())
