"""The cache of measured rates: what is kept, what is refused, what never stops a call."""

import errno
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from adaattn.hardware import clear_cache, load_rates, measure_rates, probe, rates, saved_rates
from adaattn.hardware.probe import describe
from adaattn.spec import HardwareFacts, Precision, Rates

MEASURED = Rates(
    flops=((Precision.FP32, 3e11), (Precision.BF16, 2.5e12)),
    bandwidth=3e10,
    launch_s=2e-6,
    efficiency=(("decode.grouped:fp32:64", 0.8), ("sdpa.flash:fp32:128", 0.9)),
    source="measured",
)


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.setenv("ADAATTN_CACHE", str(tmp_path))
    monkeypatch.setattr(rates, "run_benchmark", lambda device, facts: MEASURED)
    clear_cache()
    yield tmp_path / "rates"
    clear_cache()


def test_measured_rates_are_loaded_again_and_used_by_probe(folder: Path) -> None:
    assert load_rates("cpu") is None
    assert probe("cpu").rates.source.startswith("default")

    assert measure_rates("cpu") == MEASURED

    assert load_rates("cpu") == MEASURED
    assert probe("cpu").rates == MEASURED
    assert [path.suffix for path in folder.iterdir()] == [".json"]


def test_rates_that_did_not_settle_are_returned_and_not_saved(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    restless = Rates(flops=((Precision.FP32, 1e9),), source="measured on a busy machine")
    monkeypatch.setattr(rates, "run_benchmark", lambda device, facts: restless)

    with caplog.at_level(logging.WARNING, "adaattn"):
        assert measure_rates("cpu") == restless

    assert "did not settle and were not saved" in caplog.text
    assert load_rates("cpu") is None
    assert not folder.exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: '{"rates": {}}',
        lambda text: "\x00\xff binary",
        lambda text: text.replace("30000000000.0", "-1.0"),
        lambda text: text.replace("30000000000.0", "NaN"),
        lambda text: text.replace('"bf16": 25', '"bf17": 25'),
        lambda text: text.replace("sdpa.flash:fp32:128", "sdpa.flash:fp32:wide"),
        lambda text: text.replace("sdpa.flash:fp32:128", "sdpa.flash"),
    ],
)
def test_a_damaged_file_is_logged_ignored_and_replaced(
    damage, caplog: pytest.LogCaptureFixture
) -> None:
    measure_rates("cpu")
    path = saved_rates.path_of(describe("cpu"))
    whole = path.read_text()
    damaged = damage(whole)
    assert damaged != whole
    path.write_text(damaged)
    clear_cache()

    with caplog.at_level(logging.WARNING, "adaattn"):
        assert load_rates("cpu") is None
        assert probe("cpu").rates.source.startswith("default")
    assert "ignored the measured rates" in caplog.text
    assert str(path) in caplog.text

    measure_rates("cpu")
    assert load_rates("cpu") == MEASURED


def test_a_file_of_bytes_that_are_not_text_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    measure_rates("cpu")
    saved_rates.path_of(describe("cpu")).write_bytes(b"\xff\xfe\x00")

    with caplog.at_level(logging.WARNING, "adaattn"):
        assert load_rates("cpu") is None
    assert "ignored the measured rates" in caplog.text


def test_a_file_of_another_device_is_not_believed(caplog: pytest.LogCaptureFixture) -> None:
    measure_rates("cpu")
    path = saved_rates.path_of(describe("cpu"))
    data = json.loads(path.read_text())
    data["key"]["name"] = "another processor"
    path.write_text(json.dumps(data))

    with caplog.at_level(logging.WARNING, "adaattn"):
        assert load_rates("cpu") is None
    assert "it belongs to" in caplog.text


def test_each_device_torch_and_thread_count_has_its_own_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts = HardwareFacts(device_type="cpu", name="A/B: C", num_processors=2)
    paths = {
        saved_rates.path_of(facts),
        saved_rates.path_of(HardwareFacts(device_type="cpu", name="A B C", num_processors=2)),
        saved_rates.path_of(HardwareFacts(device_type="cpu", name="A/B: C", num_processors=4)),
    }
    monkeypatch.setattr(torch, "__version__", "99.0")
    paths.add(saved_rates.path_of(facts))

    assert len(paths) == 4
    assert all(path.name.startswith("a-b-c-") for path in paths)


def test_a_cache_folder_that_cannot_be_made_is_logged_and_not_fatal(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.write_text("a file stands where the folder should be")

    with caplog.at_level(logging.WARNING, "adaattn"):
        assert measure_rates("cpu") == MEASURED
        assert load_rates("cpu") is None
    assert "could not save the measured rates" in caplog.text


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_a_write_that_fails_is_logged_and_leaves_nothing_behind(
    folder: Path,
    number: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(source: object, target: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "replace", refuse)

    with caplog.at_level(logging.WARNING, "adaattn"):
        assert measure_rates("cpu") == MEASURED
    assert os.strerror(number) in caplog.text
    assert list(folder.iterdir()) == []


def test_clear_cache_deletes_the_files_only_when_asked() -> None:
    measure_rates("cpu")
    clear_cache()
    assert load_rates("cpu") == MEASURED
    clear_cache(saved=True)
    assert load_rates("cpu") is None
    assert probe("cpu").rates.source.startswith("default")
