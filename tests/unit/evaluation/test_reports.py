import html
import io
import re
from dataclasses import replace

import pytest

from adaattn.errors import ArgumentError
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
from adaattn.evaluation.results import Comparison, EvaluationResult, RunResult

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
    divergence_error=0.0,
    max_divergence=0.0,
    attention_ms=1000.0,
    attention_ms_low=990.0,
    attention_ms_high=1020.0,
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
    attention_ms_low=None,
    attention_ms_high=None,
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
    divergence_error=5e-5,
    perplexity=7.396,
    attention_ms=600.0,
    attention_ms_low=590.0,
    attention_ms_high=640.0,
    methods=(("low_rank/fp32 rank=8", 0.75), ("sdpa.flash/fp32", 0.25)),
    approximated=0.75,
    mean_output_error=0.01,
    max_output_error=0.04,
    chosen=(("low_rank/fp32 rank=8", EVIL),) * 2,
    token_differences=tuple(1.5e-3 * index for index in range(16)),
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


COMPARED = Comparison(
    name="decode <one row>",
    detail="1 row, 4096 keys",
    peer="F.scaled_dot_product_attention",
    chosen="grouped/fp32",
    ours_ms=2.0,
    peer_ms=6.0,
    ours_bytes=1_000_000,
    peer_bytes=8_000_000,
    error=1e-6,
)


def cards(result: EvaluationResult) -> list[tuple[str, str, str]]:
    """Return tone, value and detail of each card of a result's page."""
    found = re.findall(
        r'<section class="card ?(\w*)"><h2>.*?</h2><strong>(.*?)</strong><p>(.*?)</p>',
        re.sub("</?span[^>]*>", "", html_report(result)).replace("\N{NO-BREAK SPACE}", " "),
    )
    return [(tone, html.unescape(value), html.unescape(detail)) for tone, value, detail in found]


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
    times = {
        "attention_ms": attention_ms,
        "attention_ms_low": attention_ms - 1,
        "attention_ms_high": attention_ms + 1,
    }
    slow = replace(RESULT, runs=(SDPA, EXACT, replace(CHEAP, **times)))
    assert words in verdict(slow)


def test_a_loss_within_the_spread_of_the_windows_is_not_called_one() -> None:
    spread = replace(CHEAP, attention_ms=1030.0, attention_ms_low=990.0, attention_ms_high=1060.0)
    words = verdict(replace(RESULT, runs=(SDPA, EXACT, spread)))
    assert "3% more time than exact attention in the median window, within the noise" in words


def test_a_result_without_an_exact_run_cannot_be_judged() -> None:
    with pytest.raises(ArgumentError, match="runs: expected one named exact, got sdpa"):
        verdict(replace(RESULT, runs=(SDPA,)))


def test_many_methods_are_summed_up() -> None:
    many = replace(EXACT, methods=tuple((f"m{i}", 0.125) for i in range(8)))
    (line,) = method_lines(replace(RESULT, runs=(many,)))
    assert line == ("heads by method, exact: 12.5% m0, 12.5% m1, 12.5% m2, 12.5% m3, 50.0% others")


def test_the_headline_names_the_cell() -> None:
    assert "16 tokens scored, window 8, stride 4, float32 on cpu" in headline(RESULT)


def test_the_page_is_one_small_file_that_runs_and_loads_nothing(
    demo_result: EvaluationResult,
) -> None:
    for page in (html_report(RESULT), html_report(demo_result)):
        assert len(page.encode()) < 250_000
        assert not re.search(r"<(script|link|img|iframe|object|embed)", page)
        assert not re.search(r"https?://|@import|url\(|(src|href)\s*=", page)


def test_a_page_of_a_large_model_stays_below_a_megabyte(demo_result: EvaluationResult) -> None:
    large = replace(
        demo_result.runs[-1],
        chosen=(("low_rank/fp32 rank=8", "sdpa.flash/fp32") * 32,) * 80,
        decisions=tuple(f"{layer} " + 1000 * "a reason " for layer in range(80)),
    )
    runs = (*demo_result.runs[:2], *(replace(large, name=f"policy {i}") for i in range(4)))
    page = html_report(replace(demo_result, runs=runs))
    assert len(page.encode()) < 1_000_000
    assert "Further traces are left out of this page" in page


def test_names_cannot_break_out_of_the_page() -> None:
    compared = replace(COMPARED, name=EVIL, detail=EVIL, peer=EVIL, chosen=EVIL)
    not_run = replace(compared, peer_ms=None, why_not=EVIL)
    page = html_report(
        replace(RESULT, text=EVIL, device_name=EVIL, comparisons=(compared, not_run))
    )
    assert "<script" not in page
    assert "<b>" not in page
    assert "&lt;/script&gt;" in page


def test_the_title_says_model_and_text_in_words() -> None:
    demo = html_report(replace(RESULT, model="demo"))
    assert "<h1>What AdaAttn gives on SmolLM2-135M-Instruct reading Newton&#x27;s Opticks" in demo
    own = html_report(replace(RESULT, model="/models/own", text="/texts/novel.txt"))
    assert "<h1>What AdaAttn gives on own reading novel.txt</h1>" in own


def test_the_cards_say_what_was_gained() -> None:
    gained = replace(CHEAP, name="speed", peak_bytes=30_000_000, forward_ms=3600.0)
    baseline = replace(SDPA, peak_bytes=50_000_000)
    quality, time, memory, heads = cards(replace(RESULT, runs=(baseline, EXACT, gained, KEPT)))
    assert quality[:2] == ("bad", "0.15 % worse")
    assert "under speed" in quality[2]
    assert "loss +1.5e-03 ± 2e-04 nat a token" in quality[2]
    assert time[:2] == ("good", "40 % less time")
    assert "600 ms, exact 1 s. All layers: 3.6 s, exact 4 s." in time[2]
    assert memory[:2] == ("good", "40 % less")
    assert heads[:2] == ("", "75 %")
    assert "speed 75 %, balanced 0 %" in heads[2]


def test_the_cards_print_a_loss_as_a_loss() -> None:
    slow = replace(
        KEPT, attention_ms=1040.0, forward_ms=4400.0, peak_bytes=60_000_000, approximated=0.0
    )
    baseline = replace(SDPA, peak_bytes=50_000_000)
    quality, time, memory, heads = cards(replace(RESULT, runs=(baseline, EXACT, slow)))
    assert quality[:2] == ("good", "unchanged")
    assert time[:2] == ("bad", "4 % slower")
    assert memory[:2] == ("bad", "20 % more")
    assert heads[1] == "none"


def test_the_cards_do_not_call_noise_a_change_and_say_what_is_not_known() -> None:
    noisy = replace(
        CHEAP, loss_difference_error=1e-3, attention_ms=1010.0, peak_bytes=None, name="speed"
    )
    quality, time, memory, _ = cards(replace(RESULT, runs=(SDPA, EXACT, noisy)))
    assert quality[:2] == ("", "+0.15 %")
    assert "within the noise" in quality[2]
    assert time[:2] == ("", "no difference")
    assert memory[:2] == ("", "not measured")
    broken = replace(CHEAP, loss_difference=float("nan"), divergence=float("nan"), name="speed")
    blind = replace(EXACT, attention_ms=None, attention_ms_low=None, attention_ms_high=None)
    quality, time, *_ = cards(replace(RESULT, runs=(SDPA, blind, broken)))
    assert quality[:2] == ("bad", "lost")
    assert time[1] == "not measured"
    assert [value for _, value, _ in cards(replace(RESULT, runs=(SDPA, EXACT)))] == ["none"] * 4


def test_a_gain_within_the_spread_of_the_windows_is_not_called_one() -> None:
    """A busy machine once gave exact work under another name 17 % less time than exact."""
    spread = replace(CHEAP, name="speed", attention_ms_high=995.0)
    result = replace(RESULT, runs=(SDPA, EXACT, spread))
    assert cards(result)[1][:2] == ("", "no clear gain")
    assert "within the noise of these times" in cards(result)[1][2]
    assert "in the median window, within the noise" in verdict(result)
    clear = replace(RESULT, runs=(SDPA, EXACT, replace(spread, attention_ms_high=985.0)))
    assert cards(clear)[1][:2] == ("good", "40 % less time")
    assert "40% less time than exact attention." in verdict(clear)


@pytest.mark.parametrize("ours", [600.0, 1400.0])
def test_what_two_runs_of_the_same_kernels_are_apart_is_no_gain_and_no_loss(ours: float) -> None:
    """PyTorch's own attention once took 4 % less time than exact, which ran the very same kernel;
    a policy that took 4 % more was said not to pay."""
    run = replace(
        CHEAP, name="speed", attention_ms=ours, attention_ms_low=ours, attention_ms_high=ours
    )
    for same, is_told in ((1450.0, False), (550.0, False), (1350.0, True), (1000.0, True)):
        alike = replace(SDPA, mean_absolute_difference=0.0, attention_ms=same)
        found = verdict(replace(RESULT, runs=(alike, EXACT, run)))
        assert ("within the noise of" in found) is not is_told
        for other in (
            replace(alike, mean_absolute_difference=1e-6),
            replace(alike, mean_absolute_difference=float("nan")),
            replace(SDPA, attention_ms=None),
        ):
            assert "within the noise of" not in verdict(replace(RESULT, runs=(other, EXACT, run)))
        # What another policy's measuring took is no noise.
        other = replace(KEPT, attention_ms=same)
        assert "within the noise of" not in verdict(replace(RESULT, runs=(SDPA, EXACT, run, other)))


def test_a_policy_that_ran_what_exact_attention_runs_gains_nothing() -> None:
    quick = replace(KEPT, attention_ms=500.0, attention_ms_low=499.0, attention_ms_high=501.0)
    _, time, _, _ = cards(replace(RESULT, runs=(SDPA, EXACT, quick)))
    assert time[:2] == ("", "no difference")
    assert "the difference is noise" in time[2]


@pytest.mark.parametrize(
    ("ours_ms", "value", "tone", "detail"),
    [
        ((2.0, 3.0), "2 of 2 faster", "good", "beside PyTorch, 2.0x to 3.0x. On the text: "),
        ((2.0, 12.0), "1 of 2 faster", "good", "3.0x; 1 slower, 2.0x. On"),
        ((12.0, 18.0), "0 of 2 faster", "bad", "single problems; 2 slower, 2.0x to 3.0x. On"),
        ((6.0, 6.0), "0 of 2 faster", "", "single problems. On the text: "),
    ],
)
def test_single_problems_come_first_in_the_cards(
    ours_ms: tuple[float, float], value: str, tone: str, detail: str
) -> None:
    compared = tuple(replace(COMPARED, ours_ms=item, peer_ms=6.0) for item in ours_ms)
    unknown = replace(COMPARED, peer_ms=None, error=None, why_not="too large")
    _, time, memory, _ = cards(replace(RESULT, comparisons=(*compared, unknown)))
    assert time[:2] == (tone, value)
    assert detail in time[2]
    assert memory[1] == "3 of 3 less"


def test_memory_that_is_next_to_nothing_is_equal() -> None:
    small = replace(COMPARED, ours_bytes=28_700, peer_bytes=12_300)
    page = html_report(replace(RESULT, comparisons=(small,)))
    assert 'class="tone ref">equal</text>' in page


def test_a_share_above_nothing_is_not_printed_as_nothing() -> None:
    for share, words in ((0.0019, "0.19%"), (1e-9, "0.01%"), (0.751, "75%")):
        text = verdict(replace(RESULT, runs=(SDPA, EXACT, replace(CHEAP, approximated=share))))
        assert f"approximated {words} of the heads" in text


def test_every_run_is_a_point_with_its_error_bars(demo_result: EvaluationResult) -> None:
    page = html_report(demo_result)
    points = re.findall(r"<circle [^>]*><title>(.*?)</title>", page)
    assert [html.unescape(words).split(":")[0] for words in points] == [
        run.name for run in demo_result.runs
    ]
    assert points[-1] == (
        "speed: 150 ms (quartiles 147 ms, 158 ms), KL 1.0e-03 ± 1e-04 nat a token"
    )
    # Quartiles of each run, and a standard error of the two that diverge at all.
    assert len(re.findall(r'<line [^>]*class="spread', page)) == 5 + 2
    assert ">0, exact</text>" in page
    assert 'class="name c2">speed</text>' in page


def test_the_faster_and_the_better_run_stand_further_left_and_further_down(
    demo_result: EvaluationResult,
) -> None:
    page = html_report(demo_result)
    places = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', page)
    (sdpa, exact, _, balanced, speed) = [(float(x), float(y)) for x, y in places]
    assert sdpa[0] == exact[0]
    assert speed[0] < exact[0] < balanced[0]
    assert speed[1] < balanced[1] < exact[1]


def test_runs_without_time_are_named_instead_of_drawn() -> None:
    page = html_report(RESULT)
    assert "Not drawn, since their time or KL is not known: sdpa." in page
    assert page.count("<circle") == 3


def test_losses_are_a_line_with_its_band_and_a_sentence_where_there_are_none() -> None:
    page = html_report(RESULT)
    assert page.count('class="curve ') == page.count('class="band ') == 1
    assert "Exactly zero at every token: sdpa, balanced." in page
    assert "Running mean over 1 tokens" in page
    still = html_report(replace(RESULT, runs=(SDPA, EXACT, KEPT)))
    assert 'class="curve ' not in still
    assert "Loss minus exact loss along the text" not in still
    broken = replace(CHEAP, token_differences=(float("nan"), *CHEAP.token_differences[1:]))
    assert "not finite: &lt;/script&gt;" in html_report(replace(RESULT, runs=(EXACT, broken)))


def test_a_steady_loss_is_a_level_line_at_its_height() -> None:
    steady = replace(CHEAP, token_differences=(2e-3,) * 320)
    page = html_report(replace(RESULT, runs=(SDPA, EXACT, steady)))
    (curve,) = re.findall(r'<path d="M([^"]*)" class="curve ', page)
    heights = {point.split()[1] for point in curve.split("L")}
    # The top of the plot is the largest value, the bottom is zero.
    assert heights == {"38"}
    assert "Running mean over 20 tokens" in page


def test_each_head_is_a_cell_with_its_method_and_entropy(demo_result: EvaluationResult) -> None:
    page = html_report(demo_result)
    cells = re.findall(r"<rect [^>]*><title>layer \d+, head \d+: .*?</title>", page)
    assert len(cells) == 2 * 30 * 9
    small = html_report(RESULT)
    assert "<title>layer 1, head 0: low_rank/fp32 rank=8, 3.00 bits</title>" in small
    assert "Under exact, balanced: every head of the first window was served by sdpa" in small
    assert small.count("Heads under ") == 1


def test_exact_heads_are_grey_and_settings_of_a_method_shades_of_its_colour() -> None:
    chosen = (("low_rank/fp32 rank=8", "low_rank/fp32 rank=16", "sdpa.flash/fp32"),)
    page = html_report(replace(RESULT, runs=(SDPA, EXACT, replace(CHEAP, chosen=chosen))))
    legend = dict(
        (label, css)
        for css, label in re.findall(r'<i class="([^"]*)"></i>([^<]*) \([\d.]+\s%\)', page)
    )
    assert legend == {
        "low_rank/fp32 rank=16": "c0",
        "low_rank/fp32 rank=8": "c0 s1",
        "sdpa.flash/fp32": "ref s1",
    }


def test_the_entropy_of_both_kinds_of_heads_is_compared() -> None:
    chosen = (("low_rank/fp32 rank=8", "sdpa.flash/fp32"),) * 2
    page = html_report(replace(RESULT, runs=(SDPA, EXACT, replace(CHEAP, chosen=chosen))))
    assert "2.0 bits in heads that adapted, 3.0 bits in heads that stayed exact" in page


def test_the_page_does_without_entropy_and_without_methods() -> None:
    bare = replace(RESULT, runs=(SDPA, replace(EXACT, chosen=())), entropy_bits=())
    page = html_report(bare)
    assert "Heads under" not in page
    assert " bits" not in page
    assert "Beside PyTorch" not in page


def test_a_comparison_is_a_row_with_its_ratios() -> None:
    slower = replace(COMPARED, name="short", ours_ms=3.0, peer_ms=1.5, peer_bytes=500_000)
    page = html_report(replace(RESULT, comparisons=(COMPARED, slower)))
    assert page.count('<div class="row">') == 2
    for words in ("3.0x faster", "8.0x less", "2.00 ms"):
        assert words.replace("2.00", "2") in page
    assert 'class="tone bad">2.0x slower</text>' in page
    assert 'class="tone bad">2.0x more</text>' in page
    assert "decode &lt;one row&gt;" in page


def test_a_comparison_within_the_noise_is_neither_gain_nor_loss() -> None:
    equal = replace(COMPARED, ours_ms=6.05, ours_bytes=None)
    page = html_report(replace(RESULT, comparisons=(equal,)))
    assert 'class="tone ref">equal</text>' in page
    assert "not measured" in page


def test_a_peer_that_was_not_run_says_why_and_what_it_would_need() -> None:
    not_run = replace(
        COMPARED, peer_ms=None, error=None, peer_bytes=64_000_000_000, why_not="it does not fit."
    )
    page = html_report(replace(RESULT, comparisons=(not_run,)))
    assert "PyTorch was not run: it does not fit. It would need at least 64 GB." in page
    assert "at least 64000x less" in page
    assert not re.search(r">[^<]*x (faster|slower)<", page)


def test_the_reasons_are_folded_and_equal_ones_are_shown_once() -> None:
    page = html_report(RESULT)
    assert page.count("policy exact") == 3
    assert "<summary>layers 0 to 1</summary>" in page
    assert "<li>low_rank/fp32: it is slower (9 times)</li>" in page
    assert "<details open" not in page
