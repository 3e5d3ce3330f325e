"""The examples in docstrings run and give what they say."""

import doctest
import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import adaattn

_MODULES = sorted(
    item.name
    for item in pkgutil.walk_packages(adaattn.__path__, "adaattn.")
    if not item.name.endswith("__main__")
)


def _with_examples() -> list[str]:
    """Return the modules whose text has an example; reading is faster than importing all."""
    package = Path(adaattn.__file__).parent
    found = []
    for name in _MODULES:
        path = package.joinpath(*name.split(".")[1:])
        file = path.with_suffix(".py")  # a folder of data may stand beside it
        file = file if file.exists() else path / "__init__.py"
        if ">>> " in file.read_text(encoding="utf-8"):
            found.append(name)
    return found


def _run(module: ModuleType) -> tuple[int, str]:
    """Return how many examples ran, and what the failed ones printed."""
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in doctest.DocTestFinder(exclude_empty=True).find(module):
        torch.manual_seed(0)
        runner.run(test, out=said.append)
    return runner.tries, "".join(said) if runner.failures else ""


@pytest.fixture
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let examples write files, and measure this machine, without a trace elsewhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ADAATTN_CACHE", str(tmp_path / "cache"))
    yield
    adaattn.hardware.clear_cache()


@pytest.mark.parametrize("name", _with_examples())
@pytest.mark.usefixtures("own_folders")
def test_the_examples_of_a_module_give_what_they_say(name: str) -> None:
    tried, failed = _run(importlib.import_module(name))
    assert tried, "a >>> that no docstring has"
    assert failed == ""


def test_the_main_names_have_an_example() -> None:
    for name in ("scaled_dot_product_attention", "plan_attention", "record_events"):
        assert ">>> " in (getattr(adaattn, name).__doc__ or ""), name


def test_a_wrong_example_would_be_found() -> None:
    broken = ModuleType("broken")
    broken.__doc__ = ">>> 1 + 1\n3\n"
    tried, failed = _run(broken)
    assert tried == 1
    assert "Expected:\n    3\nGot:\n    2" in failed
