"""Where the cache is: the variable that names it, else the platform's folder. And debugging."""

from pathlib import Path

import pytest

from adaattn._settings import cache_folder, is_debugging
from adaattn.errors import ArgumentError


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("ADAATTN_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    return tmp_path


def test_the_cache_is_in_the_users_own_folder_by_default(home: Path) -> None:
    assert cache_folder() == home / ".cache" / "adaattn"


def test_the_platforms_cache_folder_comes_before_it(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "elsewhere"))
    assert cache_folder() == home / "elsewhere" / "adaattn"
    monkeypatch.setenv("XDG_CACHE_HOME", "~/mine")
    assert cache_folder() == home / "mine" / "adaattn"


def test_the_variable_that_names_it_comes_before_both(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "elsewhere"))
    monkeypatch.setenv("ADAATTN_CACHE", str(home / "big disk"))
    assert cache_folder() == home / "big disk"
    monkeypatch.setenv("ADAATTN_CACHE", "~/models")
    assert cache_folder() == home / "models"


@pytest.mark.parametrize("variable", ["ADAATTN_CACHE", "XDG_CACHE_HOME"])
def test_an_empty_variable_names_nothing(
    home: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "")
    assert cache_folder() == home / ".cache" / "adaattn"


def test_asking_where_it_is_creates_nothing(home: Path) -> None:
    cache_folder()
    assert list(home.iterdir()) == []


@pytest.mark.parametrize(("value", "expected"), [("", False), ("0", False), ("1", True)])
def test_debugging_is_asked_for(
    value: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ADAATTN_DEBUG", value)
    assert is_debugging() is expected


def test_debugging_is_off_by_default_and_takes_no_other_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ADAATTN_DEBUG", raising=False)
    assert not is_debugging()
    monkeypatch.setenv("ADAATTN_DEBUG", "yes")
    with pytest.raises(ArgumentError, match="ADAATTN_DEBUG: expected 0 or 1, got 'yes'"):
        is_debugging()
