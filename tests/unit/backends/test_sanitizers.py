"""What compute-sanitizer says of small cases of our kernels: memory, and races in shared memory.

racecheck does not know how Triton gives arguments to warps with work of their own. It names the
lines of a kernel's signature and of `warp_specialize` then, in a kernel that does nothing else too
(docs/kernel-notes.md, 2026-11-30). Any other line is a fault of ours, or one more thing that it
does not know: it takes a wait at an mbarrier for none. It sees plain loads and stores of shared
memory alone, not those of matrices (LDSM, STSM), of TMA and of tensor cores, by which the stages of
Hopper's kernels are written and read; those waits are held by the faults of
`hopper/test_gradient_faults.py` and its like.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.unit.backends.sanitized import CASES

import adaattn.backends

SANITIZER = "compute-sanitizer"
LIMIT_S = 240
BACKENDS = Path(adaattn.backends.__file__).parent
ACCESS = re.compile(r"(?:Read|Write) access at (\w+)\+0x\w+ in (\w+\.py):(\d+)")
CLEAN = {"memcheck": r"ERROR SUMMARY: 0 errors", "racecheck": r"RACECHECK SUMMARY: "}

HANDED_OVER = """
========= Error: Race reported between Read access at backward+0x160 in backward.py:{signature}
=========     and Write access at backward+0x7bb0 in backward.py:{signature} [40 hazards]
=========     and Write access at backward+0xccd0 in backward.py:{begins} [48 hazards]
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


def races(report: str) -> Iterator[str]:
    """Yield the accesses of a report that are not to what Triton gives to warps."""
    for kernel, file, number in ACCESS.findall(report):
        found = [path.read_text().splitlines() for path in BACKENDS.rglob(file)]
        around = [text for lines in found for text in lines[int(number) - 1 : int(number) + 1]]
        if not any(f"def {kernel}(" in text or "warp_specialize(" in text for text in around):
            yield f"{kernel} at {file}:{number}"


@pytest.mark.parametrize("moved", [0, 40])
def test_accesses_to_arguments_of_warps_are_told_from_others(moved: int) -> None:
    lines = (BACKENDS / "hopper" / "backward.py").read_text().splitlines()
    signature = 1 + lines.index("def backward(")
    begins = next(number for number, text in enumerate(lines) if "warp_specialize(" in text)
    report = HANDED_OVER.format(signature=signature, begins=begins + moved)
    assert list(races(report)) == [f"backward at backward.py:{begins + moved}"] * (moved > 0)


needs_sanitizer = pytest.mark.skipif(
    not torch.cuda.is_available() or shutil.which(SANITIZER) is None,
    reason="it runs kernels on a GPU, below compute-sanitizer",
)


def reported(tool: str, module: str, *names: str) -> "subprocess.CompletedProcess[str]":
    """Return what a tool says of a module beside this one that runs kernels."""
    command = [SANITIZER, "--tool", tool, "--print-limit", "1000", sys.executable, "-m"]
    command += [f"tests.unit.backends.{module}", *names]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


@pytest.mark.gpu
@needs_sanitizer
@pytest.mark.parametrize("tool", CLEAN)
@pytest.mark.parametrize("name", CASES)
def test_small_cases_are_clean(name: str, tool: str) -> None:
    done = reported(tool, "sanitized", name)
    assert f"done: {name}" in done.stdout, done.stdout + done.stderr
    assert re.search(CLEAN[tool], done.stdout), done.stdout
    assert list(races(done.stdout)) == []


@pytest.mark.gpu
@needs_sanitizer
def test_a_race_that_is_there_is_seen() -> None:
    done = reported("racecheck", "planted_race")
    text = (Path(__file__).parent / "planted_race.py").read_text().splitlines()
    read = next(number for number, line in enumerate(text, 1) if "tile.load" in line)
    assert f"raced at planted_race.py:{read}" in races(done.stdout), done.stdout + done.stderr
