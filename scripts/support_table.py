"""Checks, or with --write renews, the tables of executors in README.md and docs/backends.md.

    python scripts/support_table.py --write

They say what each executor declares it can do. The text between the two comment lines of a page
is this script's; a contract test holds it to the code.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from adaattn.backends import capabilities
from adaattn.spec import Capability, Feature, KVKind

ROOT = Path(__file__).resolve().parents[1]
BEGIN = "<!-- support table, by scripts/support_table.py -->"
END = "<!-- end of the support table -->"

_ALL = [feature for feature in Feature if feature.name]
_COLUMNS = {
    "training": Feature.BACKWARD,
    "window": Feature.WINDOW,
    "softcap": Feature.SOFTCAP,
    "sinks": Feature.SINKS,
    "ALiBi": Feature.ALIBI,
    "dropout": Feature.DROPOUT,
}


def overview(declared: Sequence[Capability]) -> list[str]:
    """Return the lines of the README's table: what users ask for first."""
    lines = _head("executor", "method", "CPU", "GPU", *_COLUMNS, "packed")
    for capability in declared:
        honoured = [feature in capability.features for feature in _COLUMNS.values()]
        honoured.append(KVKind.PACKED in capability.kv_kinds)
        devices = [device in capability.device_types for device in ("cpu", "cuda")]
        lines.append(
            _row(
                f"`{capability.name}`",
                _method(capability),
                *("yes" if answer else "" for answer in (*devices, *honoured)),
            )
        )
    return lines


def details(declared: Sequence[Capability]) -> list[str]:
    """Return the lines of the table in docs/backends.md: all that an executor declares."""
    lines = _head("name", "method", "devices", "dtypes", "max D", "features beyond plain attention")
    for capability in declared:
        formats = sorted(capability.precisions, key=lambda precision: precision.value)
        lines.append(
            _row(
                f"`{capability.name}`",
                _method(capability),
                ", ".join(capability.device_types),
                ", ".join(precision.label for precision in formats),
                str(capability.max_head_dim or ""),
                _features(capability),
            )
        )
    return lines


PAGES: dict[str, Callable[[Sequence[Capability]], list[str]]] = {
    "README.md": overview,
    "docs/backends.md": details,
}


def renewed(page: str, lines: list[str]) -> str:
    """Return a page with these lines between its two comment lines.

    Raises:
        SystemExit: the page does not have each comment line once.
    """
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise SystemExit(f"a page with a table: expected {BEGIN} and {END} once each")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return "\n".join([before + BEGIN, "", *lines, "", END + after])


def stale_pages(root: Path, *, writes: bool = False) -> list[str]:
    """Return the pages whose table is not what the code declares; with ``writes`` renew them."""
    stale = []
    for name, table in PAGES.items():
        page = (root / name).read_text(encoding="utf-8")
        expected = renewed(page, table(capabilities()))
        if page != expected:
            stale.append(name)
            if writes:
                (root / name).write_text(expected, encoding="utf-8")
    return stale


def _method(capability: Capability) -> str:
    return capability.method.name.lower().replace("_", " ")


def _features(capability: Capability) -> str:
    """Return what a capability honours, or what it lacks where that is the shorter list."""
    honoured = [f.name.lower() for f in _ALL if f in capability.features]
    missing = [f.name.lower() for f in _ALL if f not in capability.features]
    packed = KVKind.PACKED in capability.kv_kinds
    (honoured if packed else missing).append("packed")
    if not missing:
        return "all"
    if len(missing) < len(honoured):
        return "all but " + ", ".join(missing)
    return ", ".join(honoured)


def _head(*titles: str) -> list[str]:
    return [_row(*titles), "|" + "---|" * len(titles)]


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 1 if a table is stale and was left so, else 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="renew the tables")
    options = parser.parse_args(arguments)
    stale = stale_pages(ROOT, writes=options.write)
    for name in stale:
        sys.stdout.write(f"{name}: {'renewed' if options.write else 'stale, run with --write'}\n")
    return 1 if stale and not options.write else 0


if __name__ == "__main__":
    sys.exit(main())
