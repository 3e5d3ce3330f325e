"""What the documents say is so: their code runs, the files they name exist."""

import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import adaattn

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("changelog.d/*.md")])
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")
KINDS = {"added", "changed", "deprecated", "removed", "fixed", "security"}


def _python_of(page: Path) -> str:
    blocks = FENCE.findall(page.read_text(encoding="utf-8"))
    return "\n".join(body for language, body in blocks if language == "python")


def _named_files(text: str) -> set[str]:
    """Paths in code quotes that look like files or folders of the project."""
    quoted = re.findall(r"`([^`\s]+)`", text)
    return {
        word.rstrip("/")
        for word in quoted
        if re.fullmatch(r"\.?[\w.{},-]+(/[\w.-]+)*/?", word)
        and (word.endswith((".py", ".md", ".toml", ".txt", "/", ".typed")))
    }


@pytest.mark.parametrize("page", [p for p in PAGES if _python_of(p)], ids=lambda p: p.name)
def test_the_python_blocks_of_a_page_run_in_order(page: Path, fresh: Callable[..., str]) -> None:
    fresh(_python_of(page))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_the_links_of_a_page_lead_to_files(page: Path) -> None:
    targets = LINK.findall(page.read_text(encoding="utf-8"))
    local = [target for target in targets if not target.startswith(("http://", "https://"))]
    assert [target for target in local if not (page.parent / target).exists()] == []


def test_the_design_names_only_what_exists(root: Path) -> None:
    text = (root / "DESIGN.md").read_text(encoding="utf-8")
    named = _named_files(text)
    assert len(named) > 20, "the pattern that finds file names no longer matches them"
    places = (root, root / "src" / "adaattn", root / "tests")
    assert [name for name in sorted(named) if not any((p / name).exists() for p in places)] == []


def test_the_design_names_every_module_and_folder_of_the_package(root: Path) -> None:
    named = _named_files((root / "DESIGN.md").read_text(encoding="utf-8"))
    package = root / "src" / "adaattn"
    public = {
        item.name
        for item in package.iterdir()
        if (item.is_dir() and (item / "__init__.py").exists()) or item.suffix == ".py"
    }
    assert sorted(public - {"__init__.py", "__main__.py"} - named) == []


@pytest.mark.parametrize("name", [n for n in adaattn.__all__ if not n.startswith("__")])
def test_every_public_name_is_documented(name: str) -> None:
    thing = getattr(adaattn, name)
    if not (inspect.isclass(thing) or inspect.isroutine(thing) or inspect.ismodule(thing)):
        pages = [page for page in PAGES if f"`{name}`" in page.read_text(encoding="utf-8")]
        assert pages, f"{name} is data, which has no docstring, and no page explains it"
        return
    own = thing.__doc__ or ""
    assert own.strip(), f"{name} has no docstring"
    assert not own.startswith(f"{name}("), f"{name} has the docstring that dataclass writes"


@pytest.mark.parametrize("target", ["demo", "test", "lint", "type", "bench", "docs"])
def test_every_make_target_that_a_document_names_exists(root: Path, target: str) -> None:
    makefile = (root / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_documents_name_no_make_target_that_is_missing(root: Path) -> None:
    makefile = (root / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    named = set()
    for page in PAGES:
        named |= set(re.findall(r"`make ([\w-]+)", page.read_text(encoding="utf-8")))
        named |= set(re.findall(r"^make ([\w-]+)", page.read_text(encoding="utf-8"), re.MULTILINE))
    assert named, "no document names a make target"
    assert named - targets == set()


def test_changelog_fragments_are_named_by_topic_and_kind(root: Path) -> None:
    fragments = [f.name for f in (root / "changelog.d").iterdir() if f.name != "README.md"]
    assert [n for n in fragments if not re.fullmatch(rf"[\w-]+\.({'|'.join(KINDS)})\.md", n)] == []


def test_the_command_line_of_the_readme_is_understood(root: Path) -> None:
    text = (root / "README.md").read_text(encoding="utf-8")
    used = set(re.findall(r"^\$? ?adaattn (\w+)", text, re.MULTILINE))
    assert used
    for command in sorted(used):
        done = subprocess.run(
            [sys.executable, "-m", "adaattn", command, "--help"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
