"""The commands and their options. What each does is imported when it runs."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from adaattn.cli.console import JsonOption, one_line_errors

__all__ = ["app"]

app = typer.Typer(
    name="adaattn",
    help="Attention that picks the cheapest way to keep the quality you ask for, and says why.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_JSON_HELP = "Write JSON to this file; without a file, or with -, to stdout."

_SIZES = (
    "Batch, heads of q, heads of k and v, queries, keys, dimension of q and k, and of v if other"
)
_POLICY = "quality, balanced, speed, an error budget such as 0.01, or a policy file"

Json = Annotated[str | None, typer.Option("--json", metavar="[PATH]", help=_JSON_HELP)]


def _print_version(wanted: bool) -> None:
    if wanted:
        from adaattn import __version__

        typer.echo(f"adaattn {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Attention that picks the cheapest way to keep the quality you ask for, and says why."""


@app.command(cls=JsonOption)
def evaluate(
    model: Annotated[
        str, typer.Option(help='"demo" (fetched once), a Transformers name, or a folder.')
    ] = "demo",
    text: Annotated[str, typer.Option(help='"opticks", or the path of a UTF-8 file.')] = "opticks",
    tokens: Annotated[int, typer.Option(help="Most tokens of the text to use.")] = 8192,
    window: Annotated[int, typer.Option(help="Most tokens in a forward pass.")] = 2048,
    stride: Annotated[int, typer.Option(help="Tokens by which windows advance.")] = 1024,
    policies: Annotated[
        str, typer.Option(help=f"Each {_POLICY}; with commas between.")
    ] = "balanced,speed",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    cases: Annotated[
        bool,
        typer.Option("--cases/--no-cases", help="Compare single attention problems with PyTorch."),
    ] = False,
    json: Json = None,
    html: Annotated[
        Path | None, typer.Option(help="Write one self-contained page with plots.")
    ] = None,
    no_progress: Annotated[bool, typer.Option("--no-progress", help="No progress bar.")] = False,
) -> None:
    """Measure what exact attention and each policy cost and lose on a model and a text."""
    with one_line_errors():
        from adaattn.cli.machines import check_device

        check_device(device)
        from adaattn.cli.evaluate import run_evaluate
        from adaattn.evaluation.perplexity import EvaluationRequest

        run_evaluate(
            EvaluationRequest(
                model=model,
                text=text,
                tokens=tokens,
                window=window,
                stride=stride,
                policies=tuple(name.strip() for name in policies.split(",") if name.strip()),
                device=device,
                dtype=dtype,
                cases=cases,
            ),
            json_path=json,
            html_path=html,
            shows_progress=not no_progress,
        )


@app.command(cls=JsonOption)
def info(json: Json = None) -> None:
    """Print hardware, measured times, versions, and every executor or why it cannot run."""
    with one_line_errors():
        from adaattn.cli.info import run_info

        run_info(json_path=json)


@app.command(cls=JsonOption)
def plan(
    shape: Annotated[str, typer.Option(metavar="B,Hq,Hkv,Sq,Sk,D[,Dv]", help=f"{_SIZES}.")],
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "float32",
    causal: Annotated[bool, typer.Option("--causal", help="Keys after the query are hidden.")] = (
        False
    ),
    window: Annotated[
        str, typer.Option(metavar="LEFT,RIGHT", help="Keys seen around the query; -1 is all.")
    ] = "-1,-1",
    align: Annotated[
        str, typer.Option(help="top_left or bottom_right: where query positions count from.")
    ] = "top_left",
    dilation: Annotated[int, typer.Option(help="Only keys at multiples of this distance.")] = 1,
    softcap: Annotated[float, typer.Option(help="c in c*tanh(s/c); 0 is none.")] = 0.0,
    attn_mask: Annotated[
        str | None,
        typer.Option(
            metavar="bool|float[:SHAPE]", help="A mask [Sq, Sk], or of a shape such as 1,1,1,512."
        ),
    ] = None,
    alibi_slopes: Annotated[bool, typer.Option("--alibi-slopes", help="ALiBi, [Hq].")] = False,
    sinks: Annotated[bool, typer.Option("--sinks", help="Learned sinks, [Hq].")] = False,
    dropout_p: Annotated[float, typer.Option(help="Probability of dropping a weight.")] = 0.0,
    cu_seqlens_q: Annotated[
        str | None,
        typer.Option(
            metavar="0,N,...,Sq", help="Bounds of packed sequences; Sq and Sk are all tokens."
        ),
    ] = None,
    cu_seqlens_k: Annotated[
        str | None,
        typer.Option(metavar="0,N,...,Sk", help="Those of the keys, if other."),
    ] = None,
    policy: Annotated[str, typer.Option(help=f"{_POLICY}.")] = "quality",
    device: Annotated[
        str, typer.Option(help="auto, cpu, cuda, cuda:N, or a card that need not be here: h200.")
    ] = "auto",
    error_budget: Annotated[
        float | None,
        typer.Option(help="Relative error of each head's output; replaces the policy's."),
    ] = None,
    memory_budget: Annotated[
        str | None, typer.Option(help="Most workspace, such as 512MB or 2GiB.")
    ] = None,
    backward: Annotated[
        bool, typer.Option("--backward", "--training", help="Gradients are wanted.")
    ] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Print every candidate.")] = False,
    json: Json = None,
) -> None:
    """Print what a call would run, and why each other way was refused."""
    with one_line_errors():
        from adaattn.cli.machines import check_device

        check_device(device, or_card=True)
        from adaattn.cli.plan import PlanRequest, run_plan

        run_plan(
            PlanRequest(
                shape=shape,
                dtype=dtype,
                is_causal=causal,
                window=window,
                align=align,
                dilation=dilation,
                softcap=softcap,
                attn_mask=attn_mask,
                alibi_slopes=alibi_slopes,
                sinks=sinks,
                dropout_p=dropout_p,
                cu_seqlens_q=cu_seqlens_q,
                cu_seqlens_k=cu_seqlens_k,
                policy=policy,
                device=device,
                error_budget=error_budget,
                memory_budget=memory_budget,
                backward=backward,
                explains=explain,
            ),
            json_path=json,
        )


@app.command(cls=JsonOption)
def tune(
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="B,Hq,Hkv,Sq,Sk,D[,Dv]", help=f"{_SIZES}; may be given several times."
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Of the shapes: float32, bfloat16, float16 or float64.")
    ] = "float32",
    causal: Annotated[bool, typer.Option("--causal", help="Keys after the query are hidden.")] = (
        False
    ),
    window: Annotated[
        str, typer.Option(metavar="LEFT,RIGHT", help="Keys seen around the query; -1 is all.")
    ] = "-1,-1",
    align: Annotated[
        str, typer.Option(help="top_left or bottom_right: where query positions count from.")
    ] = "top_left",
    softcap: Annotated[float, typer.Option(help="c in c*tanh(s/c); 0 is none.")] = 0.0,
    training: Annotated[
        bool, typer.Option("--training", "--backward", help="With a backward pass.")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    budget: Annotated[float, typer.Option(help="Seconds for all of it.")] = 60.0,
    rounds: Annotated[int, typer.Option(help="Turns of each executor on a problem.")] = 7,
    table: Annotated[
        Path | None, typer.Option(help="Take over this file, and measure nothing.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write to this file, and not to this machine's own.")
    ] = None,
    json: Json = None,
    no_progress: Annotated[bool, typer.Option("--no-progress", help="No progress bar.")] = False,
) -> None:
    """Time every exact executor on this machine; calls are planned by these times from then on."""
    with one_line_errors():
        from adaattn.cli.machines import check_device

        check_device(device)
        from adaattn.cli.plan import PlanRequest
        from adaattn.cli.tune import TuneRequest, run_tune
        from adaattn.errors import ArgumentError

        asked = PlanRequest(
            shape="",
            dtype=dtype,
            is_causal=causal,
            window=window,
            align=align,
            softcap=softcap,
            backward=training,
        )
        if not shape and asked != PlanRequest(shape=""):
            raise ArgumentError.got("--shape", "one beside options of shapes", "none")
        problems = tuple(replace(asked, shape=item) for item in shape or ())
        request = TuneRequest(
            problems=problems,
            device=device,
            budget_s=budget,
            rounds=rounds,
            load=table,
            out=out,
        )
        run_tune(request, json_path=json, shows_progress=not no_progress)
