"""What users get: the metadata and the files of the wheel."""

import importlib
import re
import tomllib
from importlib import resources
from pathlib import Path

import adaattn


def _project(root: Path) -> dict:
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def _name(requirement: str) -> str:
    return re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-")


def test_torch_is_the_only_hard_dependency(root: Path) -> None:
    assert [_name(requirement) for requirement in _project(root)["dependencies"]] == ["torch"]


def test_the_package_ships_its_types_and_its_text() -> None:
    package = resources.files("adaattn")
    assert (package / "py.typed").is_file()
    text = (package / "evaluation" / "texts" / "opticks.txt").read_text(encoding="utf-8")
    assert "refrangible" in text.lower() or "refraction" in text.lower()


def test_the_version_is_the_same_everywhere(root: Path) -> None:
    version = _project(root)["version"]
    assert adaattn.__version__ == version
    citation = (root / "CITATION.cff").read_text(encoding="utf-8")
    assert f"version: {version}\n" in citation


def test_every_direct_requirement_is_pinned_for_the_two_commands(root: Path) -> None:
    text = (root / "constraints.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
    pinned = {_name(line) for line in lines}
    data = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    wanted = set(data["project"]["dependencies"])
    for group in data["project"]["optional-dependencies"].values():
        wanted |= set(group)
    for group in data["dependency-groups"].values():
        wanted |= {entry for entry in group if isinstance(entry, str)}
    assert {_name(entry) for entry in wanted} - pinned == set()


def test_the_console_script_points_at_a_function(root: Path) -> None:
    module, function = _project(root)["scripts"]["adaattn"].split(":")
    assert callable(getattr(importlib.import_module(module), function))
