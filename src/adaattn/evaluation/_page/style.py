"""The look of the page: one style sheet, and the classes that give runs their colours."""

from adaattn.evaluation.results import EvaluationResult

__all__ = ["NUM_COLOURS", "STYLE", "run_colours"]

NUM_COLOURS = 6
"""Classes ``c0`` to ``c5`` set the colour ``--c``, ``ref`` and ``ink`` are grey and black."""

# Each colour has a contrast of at least 4.5 with its page, light or dark.
_LIGHT = (
    "--page:#ffffff;--panel:#f5f6f8;--ink:#1a1e24;--muted:#59626e;--rule:#d9dde3;--ref:#767f8b;"
    "--good:#0b7a52;--bad:#b23a1a;--c0:#1f5fbf;--c1:#bb4f10;--c2:#0d7d64;--c3:#93389c;"
    "--c4:#8a6500;--c5:#bd2b5b;"
)
_DARK = (
    "--page:#13161a;--panel:#1c2127;--ink:#e9ecf0;--muted:#a0aab6;--rule:#353c46;--ref:#939dab;"
    "--good:#4fca9a;--bad:#ff8f6b;--c0:#75adff;--c1:#f59a63;--c2:#52cbaa;--c3:#d592e6;"
    "--c4:#e2bb50;--c5:#ff86a8;"
)

STYLE = (
    f":root{{color-scheme:light dark;{_LIGHT}}}\n"
    f"@media (prefers-color-scheme:dark){{:root{{{_DARK}}}}}\n"
    + "".join(f".c{index}{{--c:var(--c{index})}}" for index in range(NUM_COLOURS))
    + """
.ref{--c:var(--ref)} .ink{--c:var(--ink)} .good{--c:var(--good)} .bad{--c:var(--bad)}
*{box-sizing:border-box}
body{margin:0 auto;max-width:72rem;padding:2rem 1rem 4rem;background:var(--page);color:var(--ink);
font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;
overflow-wrap:anywhere}
h1{font-size:clamp(1.5rem,1.2rem + 1.2vw,2rem);line-height:1.2;margin:0 0 .4rem;
letter-spacing:-.015em}
header p{max-width:none}
h2{font-size:1.3rem;line-height:1.3;margin:3rem 0 .5rem;letter-spacing:-.01em}
h3{font-size:1rem;line-height:1.35;margin:0 0 .2rem}
p{margin:.4rem 0;max-width:46rem}
.number{white-space:nowrap} .strip{fill:var(--panel)}
.muted,.note{color:var(--muted)} .note{font-size:.875rem;line-height:1.45}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(15rem,100%),1fr));gap:.75rem;
margin:1.5rem 0 1.25rem}
.card{background:var(--panel);border-radius:.6rem;padding:.9rem 1rem;
border-top:3px solid var(--c,var(--rule))}
.card h2{font-size:.875rem;font-weight:600;margin:0;color:var(--muted);letter-spacing:0}
.card strong{display:block;font-size:1.65rem;line-height:1.25;font-weight:650;
letter-spacing:-.02em;color:var(--c,var(--ink));margin:.1rem 0 .25rem}
.card p{font-size:.875rem;line-height:1.45;margin:0;color:var(--muted)}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(26rem,100%),1fr));
gap:2rem 2.5rem;align-items:start;margin:1rem 0}
figure{margin:0;min-width:0}
svg{display:block;width:100%;max-width:34rem;height:auto;margin:.4rem 0}
svg text{font-size:12px;fill:var(--muted)}
svg text.name{fill:var(--c);font-weight:600;paint-order:stroke;stroke:var(--page);
stroke-width:3px;stroke-linejoin:round} svg text.strong{fill:var(--ink);font-weight:600}
svg text.tone{fill:var(--c);font-weight:600}
.grid{stroke:var(--rule);stroke-width:1} .axis{stroke:var(--muted);stroke-width:1}
.dash{stroke:var(--muted);stroke-width:1;stroke-dasharray:4 3}
.lead{stroke:var(--c);stroke-width:.75} .spread{stroke:var(--c);stroke-width:1.5;opacity:.6}
.curve{fill:none;stroke:var(--c);stroke-width:2;stroke-linejoin:round}
.band{fill:var(--c);opacity:.18} .fill{fill:var(--c)}
.mark{fill:var(--c);stroke:var(--page);stroke-width:1.5}
.s1{opacity:.7} .s2{opacity:.46} .s3{opacity:.28}
rect:hover{stroke:var(--ink);stroke-width:1}
.legend{display:flex;flex-wrap:wrap;gap:.15rem 1rem;list-style:none;margin:.3rem 0;padding:0;
font-size:.875rem;line-height:1.5}
.legend i{display:inline-block;width:.75rem;height:.75rem;border-radius:.15rem;margin-right:.4rem;
background:var(--c)}
.rows{margin:.5rem 0}
.row{display:grid;grid-template-columns:minmax(0,2fr) minmax(0,3fr);gap:.25rem 1.5rem;
align-items:center;padding:.7rem 0;border-top:1px solid var(--rule)}
.row p{margin:0} .row svg+p{margin-top:.4rem} .row svg{margin:0} .row.head{border:0;padding:0}
.scroll{overflow-x:auto;margin:.6rem 0 1.2rem}
table{border-collapse:collapse;font-size:.9375rem;font-variant-numeric:tabular-nums;
overflow-wrap:normal}
th,td{padding:.4rem .9rem;text-align:right;border-bottom:1px solid var(--rule);white-space:nowrap}
th{color:var(--muted);font-weight:600;font-size:.8125rem}
th:first-child,td:first-child{text-align:left;padding-left:0;white-space:normal;min-width:4rem;
max-width:16rem;overflow-wrap:break-word}
ul{padding-left:1.2rem} details{margin:.3rem 0} summary{cursor:pointer}
details details{margin-left:1rem}
pre{overflow-x:auto;font-size:13px;line-height:1.45;padding:.7rem;border-radius:.4rem;
background:var(--panel)}
@media (max-width:44rem){.row{grid-template-columns:minmax(0,1fr)}.row.head p{display:none}}
@media print{body{padding:0}figure,.card,.row{break-inside:avoid}}
"""
)


def run_colours(result: EvaluationResult) -> dict[str, str]:
    """Return the class of each run: grey for Transformers' own, black for exact."""
    colours = {result.runs[0].name: "ref", "exact": "ink"}
    for run in result.runs:
        if run.name not in colours:
            colours[run.name] = f"c{(len(colours) - 2) % NUM_COLOURS}"
    return colours
