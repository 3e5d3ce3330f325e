"""The scripts in examples/ at small sizes, held to what they print."""

import ast
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import adaattn
from adaattn.hardware import clear_cache

FOLDER = Path(__file__).resolve().parents[2] / "examples"
FILES = sorted(FOLDER.glob("*.py"))
SCRIPTS = [file for file in FILES if not file.name.startswith("_")]
MOST_LINES = 60

Run = Callable[..., str]

OFF_PROBATION = """
import runpy, sys
from adaattn.call.ledger import Ledger
Ledger._may_spend = lambda *_: True
Ledger.record = lambda *_: None
Ledger.wants_exact = lambda _: False
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a script, its approximations off probation: so short a training would not pay for them."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty cache folder, so that no script knows what was measured on this machine."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def run(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Run]:
    """Return what runs a script in this process, and what it printed."""
    monkeypatch.setenv("ADAATTN_CACHE", str(cache))
    monkeypatch.syspath_prepend(str(FOLDER))
    clear_cache()

    def call(name: str, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(FOLDER / name), run_name="__main__")
        printed = capsys.readouterr()
        assert printed.err == ""
        return printed.out

    yield call
    clear_cache()


def numbers(pattern: str, text: str) -> list[float]:
    """Return what the groups of the one place that a pattern matches say."""
    found = re.findall(pattern, text, re.MULTILINE)
    assert len(found) == 1, f"{pattern!r} matches {len(found)} times in\n{text}"
    parts = found[0] if isinstance(found[0], tuple) else (found[0],)
    return [float(part) for part in parts]


@pytest.fixture(scope="module")
def training(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """What the training and its measurements of memory print, and the page that it writes.

    It runs in a process of its own, on one thread, for it starts others.
    """
    page = tmp_path_factory.mktemp("training") / "loss.html"
    environment = {
        **os.environ,
        "ADAATTN_CACHE": str(cache),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(
            [str(Path(adaattn.__file__).resolve().parents[1]), str(FOLDER)]
        ),
    }
    sizes = ["--steps=16", "--length=1536", "--error-budget=0.2", f"--plot={page}"]
    done = subprocess.run(
        [sys.executable, "-c", OFF_PROBATION, FOLDER / "train_decoder.py", *sizes],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), f"{done.stdout}\n{done.stderr}"
    return done.stdout, page.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers with a tokenizer of bytes, saved as any user's folder is."""
    import tokenizers
    import transformers

    folder = tmp_path_factory.mktemp("tiny")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    raw = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = tokenizers.decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=raw).save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=len(alphabet),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_there_is_an_example_of_each_kind() -> None:
    assert [file.stem for file in SCRIPTS] == [
        "classify_passages",
        "convert_encoder",
        "generate",
        "sliding_window",
        "train_decoder",
        "training_memory",
    ]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_an_example_is_short_and_says_what_it_is(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert len(text.splitlines()) < MOST_LINES
    assert ast.get_docstring(ast.parse(text))


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: file.name)
def test_an_example_has_help_and_a_line_in_the_readme_and_the_docs(
    file: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        run(file.name, "--help")
    printed = capsys.readouterr().out
    assert printed.startswith(f"usage: {file.name}") and "--seed" in printed
    options = " ".join(printed.partition("\noptions:")[2].split())
    for option in re.split(r" (?=--[a-z-]+ )", options)[1:]:
        assert len(option.split()) > 3, f"{option} says nothing of what it is"
    for page in (FOLDER / "README.md", FOLDER.parent / "docs" / "examples.md"):
        assert f"`{file.name}`" in page.read_text(encoding="utf-8")


class TestTraining:
    def test_both_losses_fall(self, training: tuple[str, str]) -> None:
        rows = re.findall(r"^ *(\d+) +(\d\S+) +(\d\S+) +([+-]\S+)$", training[0], re.MULTILINE)
        assert [int(row[0]) for row in rows] == [1, 3, 5, 7, 9, 11, 13, 15, 16]
        first, last = rows[0], rows[-1]
        assert float(last[1]) < float(first[1]) and float(last[2]) < float(first[2])

    def test_the_twins_differ_by_less_than_a_head_may(self, training: tuple[str, str]) -> None:
        rows = re.findall(r"^ *\d+ +(\d\S+) +(\d\S+) +[+-]\S+$", training[0], re.MULTILINE)
        budget = 0.2
        assert all(abs(float(mine) / float(exact) - 1) < budget for mine, exact in rows)

    def test_low_rank_ran_and_the_planner_says_why(self, training: tuple[str, str]) -> None:
        (share,) = numbers(r"^(\d+)% of the heads of all calls ran in low rank", training[0])
        assert share > 0
        assert re.search(r"^  low_rank/fp32 rank=\S+: taken for all heads", training[0], re.M)

    def test_the_page_has_both_curves(self, training: tuple[str, str]) -> None:
        assert '"adaptive rank"' in training[1] and '"exact"' in training[1]

    def test_less_memory_than_with_written_out_scores(self, training: tuple[str, str]) -> None:
        (saved,) = numbers(r"^against written out attention .* saves (\d+)%$", training[0])
        assert saved >= 25
        assert "against exact attention adaptive rank saves" in training[0]


TRAINING = (
    ("--steps 0", "--steps: expected a number from 1 to"),
    ("--length -4", "--length: expected a number from 2 to"),
    ("--length 99999999", "--length: expected a number from 2 to 565012, got 99999999"),
    ("--seed -1", "--seed: expected a number from 0 to"),
    ("--error-budget 2", "--error-budget: expected a number from 0.0 to 0.99, got 2"),
    ("--error-budget nan", "--error-budget: expected a number from 0.0 to 0.99, got nan"),
)
WRONG = {
    "train_decoder.py": (
        *TRAINING,
        ("--plot /no/such/folder/page.html", "--plot: expected a file in an existing folder"),
    ),
    "training_memory.py": (*TRAINING, ("--way fast", "--way: invalid choice: 'fast'")),
    "classify_passages.py": (
        ("--steps 0", "--steps: expected a number from 1 to"),
        ("--batch 0", "--batch: expected a number from 1 to"),
        ("--batch two", "--batch: invalid int value: 'two'"),
        ("--length 1", "--length: expected a number from 2 to"),
        ("--length 99999999", "--length: expected a number from 2 to"),
    ),
    "convert_encoder.py": (
        ("--layers 0", "--layers: expected a number from 1 to"),
        ("--heads 3", "--heads: expected a divisor of the width, 256"),
        ("--policy fastest", "policy: expected 'quality'"),
        ("--policy no.json", "policy file no.json: expected a readable file"),
    ),
    "generate.py": (
        ("--model /no/such/folder", "/no/such/folder/config.json: expected a readable file"),
        ("--fetch --tokens 0", "--tokens: expected a number from 1 to"),
        ("--fetch --temperature -1", "--temperature: expected a number from 0.0 to 100.0"),
    ),
    "sliding_window.py": (
        ("--window -1", "--window: expected a number from 0 to"),
        ("--mib 0", "--mib: expected a number from 1 to"),
        ("--head-dim 0", "--head-dim: expected a number from 1 to"),
        ("--mib 1 --head-dim 4 --heads 9 --length 99999", "no executor can serve this call"),
    ),
}


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [(name, *case) for name, cases in WRONG.items() for case in cases],
)
def test_a_wrong_option_is_one_line_and_exit_2(
    run: Run, capsys: pytest.CaptureFixture[str], name: str, arguments: str, message: str
) -> None:
    """They were tracebacks, or numbers that mean nothing."""
    with pytest.raises(SystemExit, match=r"^2$"):
        run(name, *arguments.split())
    printed = capsys.readouterr()
    last = printed.err.splitlines()[-1]
    assert printed.out == ""
    assert last.startswith(f"{name}: error: ") and message in last


def test_the_classifier_learns_what_it_is_for(run: Run) -> None:
    printed = run("classify_passages.py", "--steps", 24, "--batch", 16)
    right = [float(item) for item in re.findall(r"right in (\S+)%$", printed, re.MULTILINE)]
    assert right[0] < 60 < 90 < right[-1]
    assert "flash_ratio: 1.0" in printed


def test_generating_streams_and_explains(run: Run, tiny_folder: Path) -> None:
    arguments = ("--model", tiny_folder, "--tokens", 5, "--temperature", 1.0, "--seed", 3)
    printed = run("generate.py", *arguments, "--policy", "quality")
    assert "5 tokens; the last call of attention: policy quality (error budget 0)" in printed
    assert numbers(r"^calls: (\d+)$", printed) == [5 * 2]
    assert printed == run("generate.py", *arguments, "--policy", "quality")


def test_generating_needs_to_be_told_which_model(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        run("generate.py")
    assert "one of the arguments --model --fetch is required" in capsys.readouterr().err


def test_converting_changes_rounding_alone(run: Run) -> None:
    sizes = ("--layers", 2, "--width", 64, "--batch", 2, "--length", 48)
    printed = run("convert_encoder.py", *sizes)
    assert "replaced 2 of 2 attention layers" in printed
    (before,) = numbers(r"^before  largest error (\S+),", printed)
    (after,) = numbers(r"^after   largest error (\S+),", printed)
    (apart,) = numbers(r"before and after: (\S+)$", printed)
    band = 8 * torch.finfo(torch.float32).eps
    assert after <= 2 * before + band and apart <= before + after + band
    assert "flash_ratio: 1.0" in printed


def test_a_long_sequence_is_planned_within_its_budget_and_right(run: Run) -> None:
    sizes = ("--length", 2048, "--window", 128, "--mib", 8)
    printed = run("sliding_window.py", *sizes)
    assert "reference/fp32: expected at most 8 MiB of workspace, got 128 MiB" in printed
    (planned,) = numbers(r"query rows at once, (\d+) MiB of workspace$", printed)
    (peak,) = numbers(r"^measured peak: (-?\d+) MiB beside the output$", printed)
    assert planned <= 8 and peak <= 8
    (error,) = numbers(r"in float64: (\S+)$", printed)
    assert error < 8 * torch.finfo(torch.float32).eps
