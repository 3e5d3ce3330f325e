"""Free memory and the peak of a block."""

from pathlib import Path

import pytest
import torch

from adaattn.hardware import (
    free_memory_bytes,
    memory,
    peak_memory,
    peak_so_far,
    return_freed_memory,
)
from adaattn.hardware.memory import host_memory_bytes


def test_free_memory_of_a_cpu_is_some_of_what_it_has() -> None:
    free = free_memory_bytes("cpu")
    if free is None:
        assert not Path("/proc/meminfo").exists()
    else:
        assert 0 < free <= host_memory_bytes()


def test_a_control_group_limits_what_is_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)

    assert free_memory_bytes("cpu") == 2_000_000
    assert host_memory_bytes() == 3_000_000


def test_a_control_group_of_version_1_limits_it_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("3000000\n")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("4000000\n")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)

    assert free_memory_bytes("cpu") == 0


@pytest.mark.parametrize("limit", ["max", str(2**63 - 4096)])
def test_a_control_group_without_a_limit_limits_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: str
) -> None:
    (tmp_path / "memory.max").write_text(limit)
    (tmp_path / "memory.current").write_text("1000000\n")
    (tmp_path / "meminfo").write_text("MemTotal:  9 kB\nMemAvailable:    5 kB\n")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(memory, "_PROC_MEMINFO", tmp_path / "meminfo")

    assert free_memory_bytes("cpu") == 5 * 1024


def test_free_memory_is_unknown_where_the_system_does_not_tell(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(memory, "_PROC_MEMINFO", tmp_path / "absent")

    assert free_memory_bytes("cpu") is None


def test_free_memory_of_a_gpu_counts_what_the_allocator_keeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 9000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 500)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 200)

    assert free_memory_bytes("cuda:0") == 1300


def test_the_peak_counts_memory_that_the_block_gave_back() -> None:
    size = 256 << 20
    with peak_memory("cpu") as large:
        block = torch.ones(size // 4)
        del block
    with peak_memory("cpu") as small:
        torch.ones(1024)
    if large.added_bytes is None or small.added_bytes is None:
        pytest.skip("this system cannot reset the peak of a process")

    # A page of each end of the block may be shared with what was there before.
    assert large.added_bytes >= 0.9 * size
    assert small.added_bytes < 0.5 * size
    assert large.peak_bytes is not None and large.peak_bytes >= large.added_bytes


def test_the_peak_is_unknown_where_it_cannot_be_reset(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory, "_PROC_CLEAR", tmp_path / "absent" / "clear_refs")

    with peak_memory("cpu") as peak:
        torch.ones(4)

    assert (peak.peak_bytes, peak.added_bytes) == (None, None)


def test_the_peak_is_unknown_where_the_kernel_ignores_the_reset(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "status").write_text("VmHWM:\t  900000 kB\nVmRSS:\t  100000 kB\n")
    monkeypatch.setattr(memory, "_PROC_STATUS", tmp_path / "status")
    monkeypatch.setattr(memory, "_PROC_CLEAR", tmp_path / "clear_refs")

    with peak_memory("cpu") as peak:
        pass

    assert (tmp_path / "clear_refs").read_text() == "5"
    assert (peak.peak_bytes, peak.added_bytes) == (None, None)


def test_the_peak_of_a_gpu_is_the_allocators(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append("reset"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 350)

    with peak_memory("cuda:0") as peak:
        assert calls == ["reset"]

    assert (peak.peak_bytes, peak.added_bytes) == (350, 250)


def test_the_peak_of_a_block_that_failed_is_still_read() -> None:
    peak = peak_memory("cpu")
    with pytest.raises(ValueError, match="inside"), peak:
        raise ValueError("inside")
    assert (peak.added_bytes is None) == (peak.peak_bytes is None)


def test_the_peak_so_far_of_a_process_never_falls() -> None:
    before = peak_so_far("cpu")
    if before is None:
        assert memory.resource is None
        return
    block = torch.ones(64 << 20, dtype=torch.uint8)
    after = peak_so_far("cpu")
    del block
    assert after is not None
    assert before <= after <= peak_so_far("cpu")
    assert 16 << 20 < before < host_memory_bytes()


def test_the_peak_so_far_agrees_with_the_kernel() -> None:
    """Both are the resident memory at most; the kernel counts in pages, per thread."""
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("this system has no /proc")
    with peak_memory("cpu") as peak:
        block = torch.ones(256 << 20, dtype=torch.uint8)
        del block
    so_far = peak_so_far("cpu")
    assert so_far is not None
    if peak.peak_bytes is not None:
        assert so_far >= peak.peak_bytes - (16 << 20)


@pytest.mark.parametrize(("platform", "unit"), [("linux", 1024), ("darwin", 1)])
def test_each_system_counts_the_peak_in_its_own_unit(
    monkeypatch: pytest.MonkeyPatch, platform: str, unit: int
) -> None:
    class Usage:
        ru_maxrss = 7

    class Resource:
        RUSAGE_SELF = 0

        @staticmethod
        def getrusage(who: int) -> Usage:
            return Usage()

    monkeypatch.setattr(memory, "resource", Resource)
    monkeypatch.setattr("sys.platform", platform)
    assert peak_so_far("cpu") == 7 * unit


def test_the_peak_so_far_is_unknown_where_the_system_does_not_tell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "resource", None)
    assert peak_so_far("cpu") is None


def test_the_peak_so_far_of_a_gpu_is_the_allocators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 350)
    assert peak_so_far("cuda") == 350


def test_freed_memory_goes_back_to_the_system_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed: list[int] = []

    class Library:
        malloc_trim = trimmed.append

    monkeypatch.setattr(memory.ctypes, "CDLL", lambda _: Library)
    monkeypatch.setattr(memory.sys, "platform", "linux")
    return_freed_memory()
    assert trimmed == [0]
    monkeypatch.setattr(memory.sys, "platform", "darwin")
    return_freed_memory()
    assert trimmed == [0]


def test_a_library_that_cannot_give_memory_back_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda _: object())
    monkeypatch.setattr(memory.sys, "platform", "linux")
    return_freed_memory()
