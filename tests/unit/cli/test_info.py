import json
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest

from adaattn.cli import info
from adaattn.spec import Cell, TimingTable

CELL = Cell(
    problem_class="fp32",
    heads=1,
    group_size=1,
    len_q=8,
    len_k=8,
    head_dim=8,
    visible=8.0,
    times={},
)
TABLE = TimingTable(
    source="table of Test CPU",
    date="2026-11-01",
    cells={"fp32": (CELL, CELL), "fp32 causal": (CELL,)},
)


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


def test_a_device_without_measured_times_is_told_how_to_get_them(
    invoke: Callable[..., Any],
) -> None:
    (line,) = [line for line in invoke("info").stdout.splitlines() if "measured times" in line]
    assert line.endswith("none: adaattn tune measures one")


def test_the_table_of_measured_times_of_a_device_is_named(
    invoke: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["adaattn.hardware.probe"], "timings_of", lambda facts: TABLE)
    found = json.loads(invoke("info", "--json").stdout)["devices"]["cpu"]["measured times"]
    assert found == {"source": "table of Test CPU", "date": "2026-11-01", "cells": 3}
    printed = invoke("info").stdout
    assert re.search(r"measured times:\n +source +table of Test CPU\n +date +2026-11-01\n", printed)
