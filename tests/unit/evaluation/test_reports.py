import io
import re
from dataclasses import replace

import pytest

from adaattn.errors import ArgumentError, AssetError
from adaattn.evaluation.html_report import html_report
from adaattn.evaluation.ledger import Refusal
from adaattn.evaluation.report import (
    cost_rows,
    headline,
    method_lines,
    print_report,
    quality_rows,
    verdict,
)
from adaattn.evaluation.results import EvaluationResult, RunResult

EVIL = "</script><script>alert(1)</script><b>[bold]"

EXACT = RunResult(
    name="exact",
    implementation="adaattn",
    error_budget=0.0,
    loss=2.0,
    perplexity=7.389,
    loss_difference=0.0,
    loss_difference_error=0.0,
    mean_absolute_difference=0.0,
    divergence=0.0,
    max_divergence=0.0,
    attention_ms=1000.0,
    forward_ms=4000.0,
    peak_bytes=50_000_000,
    workspace_bytes=2_000_000,
    methods=(("sdpa.flash/fp32", 1.0),),
    approximated=0.0,
    mean_output_error=0.0,
    max_output_error=0.0,
    fallbacks=0,
    chosen=(("sdpa.flash/fp32",) * 2,) * 2,
    decisions=("policy exact\n  + sdpa.flash/fp32",) * 2,
    refusals=(),
    difference_by_position=((1, 0.0), (9, 0.0)),
    token_differences=(0.0,) * 16,
)
SDPA = replace(
    EXACT,
    name="sdpa",
    implementation="sdpa",
    error_budget=None,
    mean_absolute_difference=2.5e-5,
    attention_ms=None,
    peak_bytes=None,
    methods=(),
    chosen=(),
    decisions=(),
)
CHEAP = replace(
    EXACT,
    name=EVIL,
    error_budget=0.05,
    loss_difference=1.5e-3,
    loss_difference_error=2e-4,
    mean_absolute_difference=2e-3,
    divergence=4e-4,
    perplexity=7.396,
    attention_ms=600.0,
    methods=(("low_rank/fp32 rank=8", 0.75), ("sdpa.flash/fp32", 0.25)),
    approximated=0.75,
    mean_output_error=0.01,
    max_output_error=0.04,
    chosen=(("low_rank/fp32 rank=8", EVIL),) * 2,
)
KEPT = replace(
    EXACT,
    name="balanced",
    error_budget=0.01,
    refusals=(Refusal(candidate="low_rank/fp32", reason="it is slower", calls=9),),
)
RESULT = EvaluationResult(
    model=EVIL,
    text="opticks",
    device="cpu",
    device_name="",
    dtype="float32",
    tokens=17,
    scored=16,
    window=8,
    stride=4,
    runs=(SDPA, EXACT, CHEAP, KEPT),
    entropy_bits=((1.0, 2.0), (3.0, 4.0)),
    seconds=(("load", 1.0),),
    versions=(("torch", "2"),),
)


def printed(result: EvaluationResult, width: int) -> str:
    from rich.console import Console

    stream = io.StringIO()
    print_report(result, Console(file=stream, width=width))
    return stream.getvalue()


def test_the_printed_report_holds_every_number_and_does_not_read_names_as_markup() -> None:
    text = printed(RESULT, 200)
    assert "[bold]" in text
    for words in ("+1.5e-03 ± 2e-04", "4.0e-04", "0.60x", "50 MB", "2.0 MB", "75.0% low_rank"):
        assert words in text


def test_the_tables_fit_a_terminal_of_eighty_columns() -> None:
    short = replace(RESULT, model="demo", runs=(SDPA, EXACT, replace(CHEAP, name="speed")))
    table = [line for line in printed(short, 80).splitlines() if line.startswith(("speed", " spe"))]
    assert len(table) == 2


def test_rows_say_what_is_reference_unknown_or_equal() -> None:
    by_name = {row[0]: row for row in quality_rows(RESULT)}
    assert by_name["exact"][2] == "reference"
    assert by_name["balanced"][2] == "none, bit for bit"
    assert by_name["sdpa"][5] == ""
    costs = {row[0]: row for row in cost_rows(RESULT)}
    assert costs["sdpa"][1:3] == ("unknown", "")
    assert costs["sdpa"][5:] == ("unknown", "unknown")


def test_the_verdict_says_what_each_policy_bought_or_why_it_bought_nothing() -> None:
    words = verdict(RESULT)
    assert "agrees with Transformers' sdpa to 2.5e-05 nat" in words
    assert "approximated 75% of the heads; perplexity moved by +0.095%" in words
    assert "40% less time than exact attention" in words
    assert "balanced kept every head exact (loss unchanged)" in words
    assert "low_rank/fp32 was refused because it is slower." in words


@pytest.mark.parametrize(
    ("attention_ms", "words"),
    [(1500.0, "50% more time than exact attention: it did not pay"), (1005.0, "as long as exact")],
)
def test_a_policy_that_did_not_pay_is_said_not_to(attention_ms: float, words: str) -> None:
    slow = replace(RESULT, runs=(SDPA, EXACT, replace(CHEAP, attention_ms=attention_ms)))
    assert words in verdict(slow)


def test_a_result_without_an_exact_run_cannot_be_judged() -> None:
    with pytest.raises(ArgumentError, match="runs: expected one named exact, got sdpa"):
        verdict(replace(RESULT, runs=(SDPA,)))


def test_many_methods_are_summed_up() -> None:
    many = replace(EXACT, methods=tuple((f"m{i}", 0.125) for i in range(8)))
    (line,) = method_lines(replace(RESULT, runs=(many,)))
    assert line == ("heads by method, exact: 12.5% m0, 12.5% m1, 12.5% m2, 12.5% m3, 50.0% others")


def test_the_page_is_whole_and_loads_nothing() -> None:
    page = html_report(RESULT)
    head = page[: page.index("<script>")]
    body = page[page.index("</script></head>") :]
    assert "plotly.js v" in page
    for part in (head, body):
        assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", part)
    assert body.count("Plotly.newPlot(") == 2 + 3
    assert "policy exact" in body


def test_names_cannot_break_out_of_the_page() -> None:
    page = html_report(RESULT)
    assert "alert(1)</script>" not in page
    assert "&lt;/script&gt;" in page


def test_the_page_does_without_entropy_and_without_methods() -> None:
    bare = replace(RESULT, runs=(SDPA, replace(EXACT, chosen=())), entropy_bits=())
    assert html_report(bare).count("Plotly.newPlot(") == 1


def test_a_missing_plotly_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(AssetError, match=r"expected plotly, .*pip install 'adaattn\[viz\]'"):
        html_report(RESULT)


def test_the_headline_names_the_cell() -> None:
    assert "16 tokens scored, window 8, stride 4, float32 on cpu" in headline(RESULT)
