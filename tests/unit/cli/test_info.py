import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from adaattn.cli import info


def test_every_section_is_printed(invoke: Callable[..., Any]) -> None:
    result = invoke("info")
    assert result.exit_code == 0
    for words in ("adaattn:", "versions:", "torch", "devices:", "cpu:", "executors:", "rates"):
        assert words in result.stdout


def test_every_executor_is_available_or_says_why_not(invoke: Callable[..., Any]) -> None:
    from adaattn.backends import capabilities

    found = json.loads(invoke("info", "--json").stdout)
    executors = found["executors"]["cpu"]
    assert set(executors) == {capability.name for capability in capabilities()}
    assert executors["reference"] == "available"
    assert "runs on cuda" in executors["sdpa.cudnn"]


@pytest.mark.parametrize(
    ("module", "section"),
    [
        ("adaattn.backends", "executors"),
        ("adaattn.hardware", "devices"),
        ("torch", "cuda"),
        ("adaattn._settings", "adaattn"),
    ],
)
def test_a_broken_part_is_reported_in_its_place_and_the_rest_is_printed(
    invoke: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, module: str, section: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    result = invoke("info", "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert "ModuleNotFoundError" in json.dumps(found[section])
    assert found["versions"]["python"]
    assert invoke("info").exit_code == 0


def test_an_error_without_words_is_named_by_its_type() -> None:
    assert info._sentence(RuntimeError()) == "RuntimeError"
    assert info._sentence(ValueError("a\nb")) == "ValueError: a"


def test_measuring_is_done_when_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import adaattn.hardware

    measured: list[str] = []
    monkeypatch.setattr(adaattn.hardware, "measure_rates", measured.append)
    info.collect(measures=False)
    assert measured == []
    info.collect(measures=True)
    assert measured[0] == "cpu"
