"""What is printed of single problems beside PyTorch, and what is written of them."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from adaattn.evaluation import perplexity
from adaattn.evaluation.case_list import CASES
from adaattn.evaluation.perplexity import EvaluationRequest, evaluate
from adaattn.evaluation.report import comparison_lines, comparison_rows, print_report, verdict
from adaattn.evaluation.results import Comparison, EvaluationResult

FASTER = Comparison(
    name="window",
    detail="4 heads, 64 tokens",
    peer="a mask",
    chosen="chunked/fp32",
    ours_ms=10.0,
    peer_ms=32.0,
    ours_bytes=5_000_000,
    peer_bytes=300_000_000,
    error=1e-7,
)
SLOWER = replace(FASTER, name="bias", ours_ms=40.0)
LEVEL = replace(FASTER, name="level", ours_ms=32.2)
NEARLY = replace(FASTER, name="nearly", ours_ms=30.2, ours_bytes=None, peer_bytes=None)
NOT_RUN = replace(
    FASTER,
    name="[long]",
    ours_ms=1234.5,
    peer_ms=None,
    peer_bytes=1_100_000_000,
    error=None,
    why_not="it holds a number for each score",
)
ALL = (FASTER, SLOWER, LEVEL, NEARLY, NOT_RUN)


@pytest.fixture(scope="module")
def result(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> EvaluationResult:
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text("Whence is it that Nature doth nothing in vain? " * 5)
    request = EvaluationRequest(
        model=str(tiny_model), text=str(text), tokens=80, window=64, stride=32, device="cpu"
    )
    return replace(evaluate(request), comparisons=ALL)


def test_rows_say_who_was_faster_and_what_was_not_run(result: EvaluationResult) -> None:
    rows = {row[0]: row[1:] for row in comparison_rows(result)}
    measured = ("5 MB", "300 MB", "1.0e-07")
    assert rows["window"] == ("10 ms", "32 ms", "3.2x faster", *measured)
    assert rows["bias"] == ("40 ms", "32 ms", "0.80x: slower", *measured)
    assert rows["level"][2] == "as fast"
    assert rows["nearly"][2:5] == ("1.06x faster", "unknown", "unknown")
    assert rows["[long]"][:6] == ("1234 ms", "not run", "", "5 MB", "over 1100 MB", "")


def test_lines_say_what_was_compared_and_why_something_was_not(result: EvaluationResult) -> None:
    lines = comparison_lines(result)
    assert lines[0] == "window: 4 heads, 64 tokens; AdaAttn: chunked/fp32; PyTorch: a mask"
    assert lines[-1].endswith("; PyTorch: a mask; not compared: it holds a number for each score")


def test_the_verdict_counts_the_faster_and_names_the_others(result: EvaluationResult) -> None:
    assert verdict(result).endswith(
        "Of 5 single problems, AdaAttn computed 2 faster than PyTorch, 1.1 to 3.2 times as fast; "
        "slower: bias (0.80x); as fast: level; by AdaAttn alone: [long]."
    )
    one = verdict(replace(result, comparisons=(FASTER,)))
    assert one.endswith("computed 1 faster than PyTorch, 3.2 times as fast.")
    none = verdict(replace(result, comparisons=(SLOWER,)))
    assert none.endswith("computed 0 faster than PyTorch; slower: bias (0.80x).")
    assert "single problems" not in verdict(replace(result, comparisons=()))


def test_the_table_is_printed_only_where_there_is_one(result: EvaluationResult) -> None:
    from rich.console import Console

    def printed(shown: EvaluationResult) -> str:
        stream = io.StringIO()
        print_report(shown, Console(file=stream, width=160))
        return stream.getvalue()

    text = printed(result)
    assert "Single problems beside PyTorch" in text
    assert "3.2x faster" in text
    assert "[long]" in text
    assert "Single problems" not in printed(replace(result, comparisons=()))


def test_comparisons_come_back_from_json(result: EvaluationResult) -> None:
    written = json.loads(json.dumps(result.to_dict()))["comparisons"]
    assert tuple(Comparison(**item) for item in written) == ALL


def test_cases_follow_the_model_and_progress_counts_on(
    tiny_model: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compared(device: str, *, progress: perplexity.Progress) -> tuple[Comparison, ...]:
        assert device == "cpu"
        for done in range(len(CASES) + 1):
            progress("compare", done, len(CASES))
        return ALL

    monkeypatch.setattr(perplexity, "compare_cases", compared)
    request = EvaluationRequest(
        model=str(tiny_model),
        text=str(text_file),
        tokens=80,
        window=64,
        stride=32,
        device="cpu",
        cases=True,
    )
    seen: list[tuple[str, int, int]] = []
    found = evaluate(request, progress=lambda *step: seen.append(step))
    assert found.comparisons == ALL
    assert found.seconds[-1][0] == "compare"
    counted = [step for step in seen if step[0] in ("evaluate", "compare")]
    totals = {total for _, _, total in counted}
    assert len(totals) == 1
    steps = list(dict.fromkeys(done for _, done, _ in counted))
    assert steps == list(range(totals.pop() + 1))
