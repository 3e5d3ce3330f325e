"""Presets, the ambient policy, and policy files that are whole or refused."""

import json
import os
import stat
import threading
from pathlib import Path

import pytest

import adaattn
from adaattn.errors import PolicyError
from adaattn.policies import (
    PRESETS,
    current_policy,
    load_policy,
    resolve_policy,
    save_policy,
    use_policy,
)
from adaattn.spec import Method, Policy, Precision

MINE = Policy(
    name="mine",
    error_budget=0.02,
    memory_budget_bytes=1 << 30,
    methods=(Method.EXACT, Method.BLOCK_SPARSE),
    precisions=(Precision.BF16,),
    audit_rows=64,
    head_budgets=((0, 3, 0.0), (1, 2, 0.1)),
    provenance="calibrated on Opticks, \N{LATIN SMALL LETTER E WITH ACUTE}dition 4",
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.json"
    save_policy(MINE, path)
    return path


@pytest.mark.parametrize(
    ("name", "budget"), [("quality", 0.0), ("balanced", 0.01), ("speed", 0.05)]
)
def test_the_presets_allow_the_errors_that_are_promised(name: str, budget: float) -> None:
    assert resolve_policy(name) is PRESETS[name]
    assert PRESETS[name].error_budget == budget
    assert PRESETS[name].name == name
    assert PRESETS[name].audit_rows > 0


def test_the_default_is_quality() -> None:
    assert current_policy() is PRESETS["quality"]
    assert resolve_policy(None) is PRESETS["quality"]


def test_the_ambient_policy_nests_and_is_restored_also_after_an_error() -> None:
    with use_policy("balanced") as outer:
        assert outer is PRESETS["balanced"] is current_policy()
        with pytest.raises(ZeroDivisionError), use_policy(MINE) as inner:
            assert inner is MINE is resolve_policy(None)
            raise ZeroDivisionError
        assert current_policy() is outer
        with use_policy("quality"):
            assert current_policy() is PRESETS["quality"]
        assert current_policy() is outer
    assert current_policy() is PRESETS["quality"]


def test_an_unknown_name_leaves_the_ambient_policy_as_it_was() -> None:
    with pytest.raises(PolicyError), use_policy("fast"):
        pass
    assert current_policy() is PRESETS["quality"]


def test_another_thread_follows_its_own_policy() -> None:
    seen = []
    with use_policy("speed"):
        thread = threading.Thread(target=lambda: seen.append(current_policy().name))
        thread.start()
        thread.join()
    assert seen == ["quality"]


@pytest.mark.parametrize(
    "unknown",
    ["fast", "Balanced", "", "a\0b", "x" * 5000, 1.01, ["balanced"], Path("balanced")],
    ids=lambda value: repr(value)[:20],
)
def test_what_is_no_policy_is_answered_with_what_there_is(unknown: object) -> None:
    message = "policy: expected 'quality', 'balanced', 'speed', a Policy, the path of a policy"
    with pytest.raises(PolicyError, match=message):
        resolve_policy(unknown)


def test_a_call_refuses_an_unknown_policy() -> None:
    torch = pytest.importorskip("torch")
    x = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ValueError, match="policy: expected 'quality'"):
        adaattn.scaled_dot_product_attention(x, x, x, policy="fast")


def test_a_policy_file_comes_back_as_it_was(file: Path) -> None:
    assert load_policy(file) == MINE
    assert load_policy(str(file)) == MINE
    assert resolve_policy(file) == resolve_policy(str(file)) == MINE
    with use_policy(file) as policy:
        assert policy == MINE


def test_a_policy_file_is_for_people_to_read(file: Path) -> None:
    document = json.loads(file.read_text(encoding="utf-8"))
    assert document["format"] == "adaattn-policy" and document["version"] == 1
    assert document["policy"]["methods"] == ["exact", "block_sparse"]
    assert document["policy"]["precisions"] == ["bf16"]
    assert len(file.read_text(encoding="utf-8").splitlines()) > 10


def test_a_file_of_any_name_is_found_if_it_is_there(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = file.rename(tmp_path / "tuned")
    assert resolve_policy(other) == MINE
    monkeypatch.chdir(tmp_path)
    assert resolve_policy("tuned") == MINE
    save_policy(PRESETS["speed"], tmp_path / "balanced")
    assert resolve_policy("balanced") is PRESETS["balanced"]
    assert resolve_policy(Path("balanced")) == PRESETS["speed"]


def test_a_folder_is_no_policy(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="policy: expected 'quality'"):
        resolve_policy(tmp_path)
    with pytest.raises(PolicyError, match="expected a readable file"):
        load_policy(tmp_path)


@pytest.mark.parametrize(
    "name", ["missing.json", "no/folder.json", "a\0b.json", "x" * 5000 + ".json"]
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(PolicyError, match=r"policy file .*expected a readable file, got "):
        resolve_policy(tmp_path / name)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"",
            "expected JSON, got text that breaks off at line 1; write it again with adaattn.save",
        ),
        (b'{"format":\n "adaattn-policy",', "expected JSON, got text that breaks off at line 2"),
        (b"\xff\xfe", "expected a readable file, got UnicodeDecodeError"),
        (b"[" * 100000, "expected a readable file, got RecursionError"),
        (b"[]", 'expected an object with "format": "adaattn-policy", got another file'),
        (b"3", "got another file"),
        (b"{}", "got another file"),
        (b'{"format": "safetensors"}', "got another file"),
        (
            b'{"format": "adaattn-policy"}',
            "version of policy file .*: expected 1, got None; use the version of AdaAttn that",
        ),
        (b'{"format": "adaattn-policy", "version": 2}', "expected 1, got 2"),
        (
            b'{"format": "adaattn-policy", "version": 1}',
            'expected an object under "policy", got None',
        ),
        (
            b'{"format": "adaattn-policy", "version": 1, "policy": [1]}',
            r'expected an object under "policy", got \[1\]',
        ),
        (
            b'{"format": "adaattn-policy", "version": 1, "policy": {"colour": "red"}}',
            r"policy keys: expected .*, got \['colour'\]",
        ),
        (
            b'{"format": "adaattn-policy", "version": 1, "policy": {"error_budget": 3}}',
            "policy values: expected those of adaattn.Policy",
        ),
    ],
)
def test_a_corrupt_foreign_or_newer_file_is_refused(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "policy.json"
    path.write_bytes(content)
    with pytest.raises(PolicyError, match=message):
        load_policy(path)
    with pytest.raises(PolicyError, match=message), use_policy(path):
        pass


def test_a_file_cut_off_anywhere_is_refused(file: Path) -> None:
    whole = file.read_bytes().rstrip()
    for length in range(0, len(whole), 7):
        file.write_bytes(whole[:length])
        with pytest.raises(PolicyError, match="policy file"):
            load_policy(file)


def test_saving_replaces_an_existing_file_and_leaves_nothing_else(file: Path) -> None:
    save_policy(PRESETS["speed"], file)
    assert load_policy(file) == PRESETS["speed"]
    assert os.listdir(file.parent) == [file.name]


@pytest.mark.skipif(os.name != "posix", reason="POSIX permissions")
def test_a_saved_file_has_the_permissions_of_any_new_file(file: Path) -> None:
    """It was once readable by its owner alone, as a temporary file is."""
    plain = file.parent / "plain"
    plain.touch()
    assert stat.S_IMODE(file.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("step", ["write_text", "replace"])
def test_a_save_that_breaks_off_leaves_the_old_file_whole_and_no_half_written_one(
    file: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException, step: str
) -> None:
    original = getattr(Path, step)

    def break_off(self: Path, *args: object, **kwargs: object) -> None:
        if step == "write_text":
            original(self, args[0][:20], **kwargs)
        raise failure

    monkeypatch.setattr(Path, step, break_off)
    expected = PolicyError if isinstance(failure, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        save_policy(PRESETS["speed"], file)
    assert os.listdir(file.parent) == [file.name]
    assert load_policy(file) == MINE


@pytest.mark.parametrize("name", ["no/such/folder.json", "", "a\0b", "x" * 5000])
def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(PolicyError, match=r"policy file .*: expected a place that can be written"):
        save_policy(MINE, f"{tmp_path}/{name}")
    assert os.listdir(tmp_path) == []
