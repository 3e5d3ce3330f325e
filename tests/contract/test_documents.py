"""What the documents say is so: their code runs, the files they name exist."""

import importlib.util
import inspect
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote

import pytest

import adaattn

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("changelog.d/*.md"),
        *ROOT.glob(".github/*.md"),
    ]
)
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
# From a file in a repository's page these lead to what its workflows did.
WORKFLOW_LINK = re.compile(r"^\.\./\.\./actions/workflows/([\w-]+\.yml)(?:/badge\.svg)?$")
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
    assert [target for target in local if not _place(page, target).exists()] == []


def _place(page: Path, target: str) -> Path:
    """Return the file that a link leads to, for a link to a workflow's runs the workflow."""
    workflow = WORKFLOW_LINK.match(target)
    return ROOT / ".github" / "workflows" / workflow[1] if workflow else page.parent / target


def test_the_badges_say_what_the_project_declares(root: Path) -> None:
    """They are plain pictures, because the project names no address; so they must be kept."""
    text = unquote((root / "README.md").read_text(encoding="utf-8"))
    data = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    python = "Programming Language :: Python :: 3."
    minors = [c.removeprefix(python) for c in data["project"]["classifiers"] if python in c]
    versions = " | ".join(f"3.{minor}" for minor in minors)
    floor = data["tool"]["coverage"]["report"]["fail_under"]
    licence = data["project"]["license"].replace("-", "--")
    for badge in (
        f"badge/version-{adaattn.__version__}-",
        f"badge/python-{versions}-",
        f"badge/coverage-≥ {floor} %-",
        f"badge/licence-{licence}-",
    ):
        assert badge in text


@pytest.fixture(scope="module")
def public_api(root: Path) -> ModuleType:
    """The part of the documentation that writes its API pages; it works without Sphinx."""
    spec = importlib.util.spec_from_file_location("public_api", root / "docs" / "public_api.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_public_module_is_on_one_page_of_the_api(root: Path, public_api: ModuleType) -> None:
    marked = [
        module
        for page in sorted((root / "docs" / "api").glob("*.md"))
        for module in re.findall(r"^<!-- modules of ([\w.]+) -->$", page.read_text("utf-8"), re.M)
    ]
    described = [name for module in marked for name in public_api.public_modules(module)]
    assert sorted(described) == sorted(set(described)), "a module is described twice"
    assert set(public_api.public_modules("adaattn")) - set(described) == {"adaattn"}


def test_every_api_page_is_in_the_table_of_contents(root: Path) -> None:
    index = (root / "docs" / "api" / "index.md").read_text(encoding="utf-8")
    pages = {page.stem for page in (root / "docs" / "api").glob("*.md")} - {"index"}
    assert pages - set(index.splitlines()) == set()


@pytest.mark.parametrize("name", [n for n in adaattn.__all__ if not n.startswith("__")])
def test_every_public_name_is_described_where_its_link_leads(
    root: Path, public_api: ModuleType, name: str
) -> None:
    thing = getattr(adaattn, name)
    if inspect.ismodule(thing):
        return
    home = public_api.home_of(adaattn, name)
    if home == "adaattn":  # defined in a private module, so a page names it
        pages = "".join(p.read_text("utf-8") for p in (root / "docs" / "api").glob("*.md"))
        assert re.search(rf"^\.\. auto\w+:: adaattn\.{name}$", pages, re.MULTILINE)
        return
    section = public_api.expand(f"<!-- modules of {home} -->")
    own = section.partition(f"automodule:: {home}\n")[2].partition("```")[0]
    assert re.search(rf"\b{name}\b", own)


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


@pytest.mark.parametrize(
    "folder", ["call", "planning", "backends", "backends/hopper", "backends/triton"]
)
def test_the_design_names_every_file_that_a_call_goes_through(root: Path, folder: str) -> None:
    named = _named_files((root / "DESIGN.md").read_text(encoding="utf-8"))
    files = {f"{folder}/{path.name}" for path in (root / "src/adaattn" / folder).glob("*.py")}
    assert len(files) > 3
    assert sorted(files - {f"{folder}/__init__.py"} - named) == []


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


@pytest.mark.parametrize(
    "target", ["demo", "test", "lint", "type", "bench", "docs", "tables", "picture"]
)
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
