"""The tables of the documents are those of the code."""

from dataclasses import fields
from pathlib import Path

import pytest

from adaattn import errors
from adaattn.backends import capabilities
from adaattn.policies import PRESETS
from adaattn.spec import Capability, Feature, Policy, Precision

_ALL = [feature for feature in Feature if feature.name]


def _features(capability: Capability) -> str:
    """Return what a capability honours, or what it lacks where that is the shorter list."""
    honoured = [f.name.lower() for f in _ALL if f in capability.features]
    missing = [f.name.lower() for f in _ALL if f not in capability.features]
    if not missing:
        return "all"
    if len(missing) < len(honoured):
        return "all but " + ", ".join(missing)
    return ", ".join(honoured)


def _row(capability: Capability) -> str:
    order = sorted(capability.precisions, key=lambda precision: Precision(precision).value)
    cells = (
        f"`{capability.name}`",
        capability.method.name.lower().replace("_", " "),
        ", ".join(capability.device_types),
        ", ".join(precision.label for precision in order),
        str(capability.max_head_dim or ""),
        _features(capability),
    )
    return "| " + " | ".join(cells) + " |"


def test_the_table_of_backends_is_what_they_declare(root: Path) -> None:
    page = (root / "docs" / "backends.md").read_text(encoding="utf-8")
    lines = [line for line in page.splitlines() if line.startswith("| `")]
    expected = [_row(capability) for capability in capabilities()]
    assert lines == expected, "\n".join(["the table should be:", *expected])


@pytest.mark.parametrize("name", [n for n in errors.__all__ if n[0].isupper()])
def test_the_table_of_errors_has_every_class_and_its_bases(root: Path, name: str) -> None:
    page = (root / "docs" / "errors.md").read_text(encoding="utf-8")
    if name == "AdaAttnError":
        assert f"adaattn.errors.{name}" in page
        return
    bases = [b.__name__ for b in getattr(errors, name).__bases__ if b is not errors.AdaAttnError]
    row = f"| `{name}` | " + ", ".join(f"`{base}`" for base in bases) + " |"
    assert row in page


def test_the_tables_of_policies_have_every_field_and_preset(root: Path) -> None:
    page = (root / "docs" / "policies.md").read_text(encoding="utf-8")
    assert [f.name for f in fields(Policy) if f"| `{f.name}` | " not in page] == []
    for name, policy in PRESETS.items():
        assert f"| `{name}` | {policy.error_budget:g} | " in page
