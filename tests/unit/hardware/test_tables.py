"""Tables of measured times: whose they are, what is refused, what never stops a call."""

import errno
import json
import logging
import os
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
import torch

from adaattn.errors import TableError
from adaattn.hardware import tables
from adaattn.hardware.datasheet import find_datasheet
from adaattn.spec import Cell, HardwareFacts, Measured, Precision, TimingTable

CPU = HardwareFacts(device_type="cpu", name="A processor", num_processors=4)
H200 = HardwareFacts(device_type="cuda", name="NVIDIA H200", compute_capability=(9, 0))
FORMAT = f'"format": {tables._FORMAT}'


def cell(length: int = 512, ms: float = 1.5, name: str = "fp32 causal") -> Cell:
    times = {
        "sdpa.flash": Measured(device_ms=ms, host_ms=ms),
        "chunked": Measured(device_ms=2 * ms, host_ms=3 * ms, compile_ms=70.0, settled=False),
    }
    return Cell(
        problem_class=name,
        heads=8,
        group_size=2,
        len_q=length,
        len_k=length,
        head_dim=64,
        visible=(length + 1) / 2,
        times=times,
        default="sdpa.flash",
    )


def flash_ms(table: TimingTable | None) -> dict[int, float]:
    """Return the time of one executor by length."""
    assert table is not None
    cells = [item for items in table.cells.values() for item in items]
    return {item.len_q: item.times["sdpa.flash"].device_ms for item in cells}


@pytest.fixture(autouse=True)
def shipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return an empty folder of shipped tables; own tables are in a fresh one too."""
    monkeypatch.setenv("ADAATTN_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "shipped"
    folder.mkdir()
    monkeypatch.setattr(tables, "_SHIPPED", folder)
    tables._warn_once.cache_clear()
    return folder


def ship(folder: Path, name: str, facts: HardwareFacts, *cells: Cell) -> Path:
    path = folder / name
    path.write_text(tables.table_text(facts, tables.stamped(facts, cells)))
    return path


def cpu_name(cores: int) -> str:
    return f"cpu-{cores}-cores-{torch.backends.cpu.get_cpu_capability().lower()}.json"


def test_a_saved_table_comes_back_as_it_was() -> None:
    assert tables.timings_of(CPU) is None
    written = tables.stamped(CPU, [cell(512), cell(1024), cell(512, name="half")])

    assert tables.save(CPU, written)

    found = tables.timings_of(CPU)
    assert found is not None
    assert found.cells == written.cells
    assert (found.device, found.source) == ("A processor", "measured here")
    assert found.versions["torch"] == torch.__version__
    assert (found.date, found.commit) == (written.date, written.commit)


def test_cells_measured_later_replace_those_of_their_problem_and_leave_the_others() -> None:
    tables.save(CPU, tables.stamped(CPU, [cell(512, 1.0), cell(1024, 2.0)]))
    tables.save(CPU, tables.stamped(CPU, [cell(1024, 5.0), cell(2048, 9.0)]))
    assert flash_ms(tables.timings_of(CPU)) == {512: 1.0, 1024: 5.0, 2048: 9.0}


def test_own_cells_take_the_place_of_shipped_ones_and_the_source_names_both(shipped: Path) -> None:
    ship(shipped, cpu_name(4), replace(CPU, name="Another"), cell(512, 1.0), cell(1024, 2.0))
    found = tables.timings_of(CPU)
    assert found is not None
    assert found.source == "table of Another"

    tables.save(CPU, tables.stamped(CPU, [cell(1024, 7.0)]))

    found = tables.timings_of(CPU)
    assert flash_ms(found) == {512: 1.0, 1024: 7.0}
    assert found.source == "measured here and table of Another"


@pytest.mark.parametrize(
    ("cores", "threads", "serves"),
    [(4, 4, True), (4, 2, True), (4, 8, True), (4, 1, False), (4, 9, False)],
)
def test_a_cpu_table_serves_thread_counts_within_a_factor_of_two(
    shipped: Path, cores: int, threads: int, serves: bool
) -> None:
    ship(shipped, cpu_name(cores), replace(CPU, num_processors=cores), cell())
    found = tables.timings_of(replace(CPU, num_processors=threads))
    assert (found is not None) is serves


def test_of_several_cpu_tables_the_nearest_thread_count_serves(shipped: Path) -> None:
    for cores in (2, 8, 16):
        facts = replace(CPU, num_processors=cores)
        ship(shipped, cpu_name(cores), facts, cell(512, float(cores)))
    assert flash_ms(tables.timings_of(replace(CPU, num_processors=10))) == {512: 8.0}


def test_a_cpu_of_another_instruction_set_has_no_table(
    shipped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ship(shipped, cpu_name(4), CPU, cell())
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
    assert tables.timings_of(CPU) is None


def test_a_cpu_that_multiplies_bf16_has_not_the_table_of_one_that_converts(
    shipped: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ship(shipped, cpu_name(4), CPU, cell())
    native = replace(CPU, instructions=(*CPU.instructions, Precision.BF16))
    with caplog.at_level(logging.WARNING, "adaattn"):
        assert tables.timings_of(native) is None
    assert "native_bf16 True" in caplog.text


def test_a_cpu_with_tiles_has_a_table_of_its_own(shipped: Path) -> None:
    """Where bf16 goes by tiles, one masked call beats what is quickest elsewhere."""
    tiled = replace(CPU, has_tiles=True)
    ship(shipped, cpu_name(4), CPU, cell(512, 1.0))
    assert tables.timings_of(tiled) is None
    ship(shipped, cpu_name(4).replace(".json", "-amx.json"), tiled, cell(512, 2.0))
    assert flash_ms(tables.timings_of(tiled)) == {512: 2.0}
    assert flash_ms(tables.timings_of(CPU)) == {512: 1.0}


@pytest.mark.parametrize(
    ("name", "serves"),
    [
        ("NVIDIA H100 80GB HBM3", True),
        ("NVIDIA H100 PCIe", False),
        ("NVIDIA H200", False),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", False),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", False),
    ],
)
def test_a_gpu_table_serves_the_card_that_the_data_sheets_call_the_same(
    shipped: Path, name: str, serves: bool
) -> None:
    ship(shipped, "cuda-h100-sxm.json", replace(H200, name="NVIDIA H100 80GB HBM3"), cell())
    assert (tables.timings_of(replace(H200, name=name)) is not None) is serves


def test_what_a_table_lacks_is_told_by_that_of_a_card_with_the_same_chip(shipped: Path) -> None:
    """A cell of its own stays the first, also where the other card timed an executor more."""
    h100 = replace(H200, name="NVIDIA H100 80GB HBM3")
    more = replace(cell(512, 9.0), times=cell(512, 9.0).times | {"new": cell().times["sdpa.flash"]})
    ship(shipped, "cuda-h200.json", H200, cell(512, 1.0), cell(1024, 2.0))
    ship(shipped, "cuda-h100-sxm.json", h100, more, cell(1024, 8.0), cell(2048, 4.0))
    table = tables.timings_of(H200)
    assert table is not None and table.device == "NVIDIA H200"
    assert table.source == "table of NVIDIA H200 and table of NVIDIA H100 80GB HBM3"
    (cells,) = table.cells.values()
    found = [(item.len_q, item.times["sdpa.flash"].device_ms, item.source) for item in cells]
    own, other = "table of NVIDIA H200", "table of NVIDIA H100 80GB HBM3"
    assert found == [(512, 1.0, own), (1024, 2.0, own), (512, 9.0, other), (2048, 4.0, other)]

    tables.save(H200, tables.stamped(H200, [replace(more, len_k=512)]))

    table = tables.timings_of(H200)
    assert table is not None
    (cells,) = table.cells.values()
    found = [(item.len_q, item.times["sdpa.flash"].device_ms, item.source) for item in cells]
    assert found == [(512, 9.0, "measured here"), (1024, 2.0, own), (2048, 4.0, other)]


def test_a_shipped_file_whose_contents_are_of_another_card_is_refused(
    shipped: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ship(shipped, "cuda-h200.json", replace(H200, name="NVIDIA H100 PCIe"), cell())
    with caplog.at_level(logging.WARNING, "adaattn"):
        assert tables.timings_of(H200) is None
    assert "expected NVIDIA H200, got NVIDIA H100 PCIe" in caplog.text


def damaged(text: str, *change: str) -> str:
    assert change[0] in text
    return text.replace(*change)


DAMAGE = {
    "empty": lambda text: "",
    "half": lambda text: text[: len(text) // 2],
    "a list": lambda text: "[]",
    "no cells": lambda text: damaged(text, '"cells"', '"cell"'),
    "no hardware": lambda text: damaged(text, '"hardware"', '"hard"'),
    "a later format": lambda text: damaged(text, FORMAT, f"{FORMAT}0"),
    "an earlier format": lambda text: damaged(text, FORMAT, '"format": 1'),
    "a negative time": lambda text: damaged(text, "[1.5,", "[-1.5,"),
    "no number": lambda text: damaged(text, "[1.5,", "[NaN,"),
    "no end": lambda text: damaged(text, "[1.5,", "[Infinity,"),
    "a huge number": lambda text: damaged(text, "[1.5,", "[" + "9" * 400 + ","),
    "endless lists": lambda text: "[" * 200_000,
    "a word": lambda text: damaged(text, "[1.5,", '["fast",'),
    "a time too few": lambda text: damaged(text, "[1.5, 1.5,", "[1.5,"),
    "a size too few": lambda text: damaged(text, "[8, 2,", "[8,"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_logged_once_counts_as_none_and_is_replaced(
    damage, caplog: pytest.LogCaptureFixture
) -> None:
    tables.save(CPU, tables.stamped(CPU, [cell()]))
    path = tables.own_path(CPU)
    path.write_text(damage(path.read_text()))

    with caplog.at_level(logging.WARNING, "adaattn"):
        assert tables.timings_of(CPU) is None
        assert tables.timings_of(CPU) is None
    assert len(caplog.records) == 1
    assert str(path) in caplog.text

    tables.save(CPU, tables.stamped(CPU, [cell(64)]))
    assert list(flash_ms(tables.timings_of(CPU))) == [64]


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_that_was_asked_for_is_an_error(shipped: Path, damage) -> None:
    path = ship(shipped, "any.json", CPU, cell())
    path.write_text(damage(path.read_text()))
    with pytest.raises(TableError, match=r"expected .*, got .*; measure again with"):
        tables.read_table(path, CPU)


def test_bytes_that_are_no_text_and_missing_files_are_errors_when_asked_for(shipped: Path) -> None:
    path = shipped / "bytes.json"
    path.write_bytes(b"\xff\xfe\x00")
    for wrong in (path, shipped / "none.json", shipped):
        with pytest.raises(TableError, match="expected"):
            tables.read_table(wrong, CPU)


def test_a_table_of_another_device_that_was_asked_for_is_an_error(shipped: Path) -> None:
    path = ship(shipped, "any.json", H200, cell())
    with pytest.raises(TableError, match=r"expected A processor \(.*\), got NVIDIA H200 \(.*cuda"):
        tables.read_table(path, CPU)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_a_table_that_cannot_be_saved_is_logged_and_leaves_nothing_behind(
    number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(source: object, target: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "replace", refuse)
    with caplog.at_level(logging.WARNING, "adaattn"):
        assert not tables.save(CPU, tables.stamped(CPU, [cell()]))
    assert os.strerror(number) in caplog.text
    assert list(tables.own_path(CPU).parent.iterdir()) == []


def test_another_torch_or_thread_count_has_a_file_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paths = {tables.own_path(CPU), tables.own_path(replace(CPU, num_processors=5))}
    monkeypatch.setattr(torch, "__version__", "99.0")
    paths.add(tables.own_path(CPU))
    assert len(paths) == 3
    assert all(path.name.startswith("a-processor-") for path in paths)


def test_a_table_has_a_cell_on_each_line_of_its_file() -> None:
    text = tables.table_text(CPU, tables.stamped(CPU, [cell(64), cell(128)]))
    lines = [json.loads(line.rstrip(",")) for line in text.splitlines() if line.startswith("[8")]
    assert [line[2] for line in lines] == [64, 128]


def test_five_hundred_cells_are_a_small_file(shipped: Path) -> None:
    """Loading is part of a process's first call: it took 7.5 ms with a dictionary for each cell.

    The time follows the size of the file, 250 kB then; a clock is no test on a busy machine.
    """
    cells = [cell(64 + number, name=f"class {number % 25}") for number in range(500)]
    path = ship(shipped, "large.json", CPU, *cells)
    assert path.stat().st_size < 75_000


SHIPPED = sorted(
    item.name
    for item in (resources.files("adaattn") / "hardware" / "tables").iterdir()
    if item.name.endswith(".json")
)


def test_the_package_ships_a_table_for_a_cpu() -> None:
    """Of the built wheel, where the tests run from one."""
    assert [name for name in SHIPPED if name.startswith("cpu-")]


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_table_is_of_the_device_in_its_name_and_says_where_it_is_from(name: str) -> None:
    text = (resources.files("adaattn") / "hardware" / "tables" / name).read_text("utf-8")
    data = json.loads(text)
    table = TimingTable.from_dict(data, name)
    kind, *words = name.removesuffix(".json").split("-")
    assert (data["format"], data["hardware"]["device_type"]) == (tables._FORMAT, kind)
    if kind == "cpu":
        assert words[:2] == [str(data["hardware"]["num_processors"]), "cores"]
        assert "-".join(words[2:]) == tables._slug(data["hardware"]["instruction_set"])
    else:
        sheet = find_datasheet(table.device)
        assert sheet is not None
        assert tables._slug(sheet.card) == "-".join(words)
    assert table.date
    assert table.commit
    assert table.versions["torch"]
    cells = [item for items in table.cells.values() for item in items]
    assert len(cells) > 50
    assert all(item.times for item in cells)
