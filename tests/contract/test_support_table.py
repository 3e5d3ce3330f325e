"""The tables of the documents are those of the code."""

import importlib.util
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType

import pytest

from adaattn import errors
from adaattn.backends import capabilities
from adaattn.policies import PRESETS
from adaattn.spec import Feature, Policy, Precision


@pytest.fixture(scope="module")
def script(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "support_table", root / "scripts" / "support_table.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_tables_of_executors_are_what_they_declare(script: ModuleType, root: Path) -> None:
    assert script.stale_pages(root) == [], "make tables renews them"


def test_every_executor_has_a_row_in_both_tables(script: ModuleType, root: Path) -> None:
    for page in script.PAGES:
        text = (root / page).read_text(encoding="utf-8")
        missing = [c.name for c in capabilities() if text.count(f"\n| `{c.name}` | ") != 1]
        assert missing == [], page


def test_a_row_says_what_the_capability_says(script: ModuleType) -> None:
    declared = replace(
        capabilities()[0],
        name="invented",
        device_types=("cuda",),
        precisions=(Precision.FP16, Precision.FP32),
        features=Feature.WINDOW | Feature.LSE,
        max_head_dim=96,
    )
    assert script.details([declared])[-1] == (
        "| `invented` | exact | cuda | fp32, fp16 | 96 | window, lse |"
    )
    assert script.overview([declared])[-1] == (
        "| `invented` | exact |  | yes |  | yes |  |  |  |  |  |"
    )


def test_the_script_finds_and_renews_a_stale_table(
    script: ModuleType,
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "docs").mkdir()
    for page in script.PAGES:
        text = (root / page).read_text(encoding="utf-8")
        (tmp_path / page).write_text(text.replace("| `chunked` |", "| `lumped` |"), "utf-8")
    monkeypatch.setattr(script, "ROOT", tmp_path)
    assert script.main([]) == 1
    assert capsys.readouterr().out.count("stale, run with --write") == 2
    assert script.main(["--write"]) == 0
    assert script.main([]) == 0
    for page in script.PAGES:
        assert (tmp_path / page).read_text("utf-8") == (root / page).read_text("utf-8")


def test_a_page_without_the_two_comment_lines_is_refused(script: ModuleType) -> None:
    with pytest.raises(SystemExit, match="once each"):
        script.renewed("a page", [])


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
