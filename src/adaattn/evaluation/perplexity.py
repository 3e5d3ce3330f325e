"""What each policy costs and what it loses, on a real model and a real text.

Every window goes through Transformers' own sdpa, through exact attention, and through each
policy, in an order that rotates so that a machine that slows down slows all alike. Losses
are compared token by token: two perplexities alone say little, since small errors lower one
as often as they raise it (KL over the vocabulary does not).

Not covered: batches, padding, encoders, and models spread over several devices.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from adaattn._events import record_events
from adaattn.errors import ArgumentError, UnsupportedError
from adaattn.evaluation.assets import Progress
from adaattn.evaluation.attention_clock import AttentionClock, EntropyProbe, intercepted
from adaattn.evaluation.case_list import CASES
from adaattn.evaluation.cases import compare_cases
from adaattn.evaluation.conversion import versions
from adaattn.evaluation.corpus import load_text
from adaattn.evaluation.ledger import Ledger
from adaattn.evaluation.metrics import compare_logits, token_losses
from adaattn.evaluation.models import DTYPES, LanguageModel, load_model
from adaattn.evaluation.policy_run import Run, finished
from adaattn.evaluation.results import EvaluationResult
from adaattn.evaluation.windows import Window, sliding_windows
from adaattn.hardware import peak_memory, probe, return_freed_memory
from adaattn.integrations.transformers import register
from adaattn.policies import resolve_policy, use_policy
from adaattn.spec import Policy

__all__ = ["EvaluationRequest", "evaluate"]

_NAME = "adaattn_evaluation"
_BASELINE = "sdpa"
_EXACT = "exact"
# Logits alive at once: 67 MB in fp32, and about four times that while two runs are compared.
# Blocks of more than 32 MiB glibc gives back when they are freed; of smaller ones it kept 2 GB.
_CHUNK_LOGITS = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRequest:
    """What to evaluate.

    Args:
        model: ``"demo"``, a Transformers name, or a folder.
        text: a shipped text's name or a file.
        tokens: most tokens of the text to use.
        window: most tokens in a forward pass.
        stride: tokens by which windows advance.
        policies: preset names, policy files or policies.
        device: ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        cases: compare single attention problems with PyTorch too.

    Raises:
        ArgumentError: a value does not fit.
    """

    model: str = "demo"
    text: str = "opticks"
    tokens: int = 8192
    window: int = 2048
    stride: int = 1024
    policies: tuple[str | Policy, ...] = ("balanced", "speed")
    device: str = "auto"
    dtype: str = "float32"
    cases: bool = False

    def __post_init__(self) -> None:
        """Refuse what could only fail later."""
        if self.tokens < 2:
            raise ArgumentError.got("tokens", "at least 2", self.tokens)
        sliding_windows(self.tokens, self.window, self.stride)
        if self.dtype not in DTYPES:
            raise ArgumentError.got("dtype", f"one of {', '.join(DTYPES)}", self.dtype)


def evaluate(
    request: EvaluationRequest | None = None, *, progress: Progress | None = None
) -> EvaluationResult:
    """Return what exact attention and each policy cost and lose on a text.

    Args:
        request: what to evaluate; None is the demo model on the shipped text.
        progress: called with (stage, done, total): bytes while fetching, then forward passes
            in stage ``"evaluate"`` and cases, counted on, in stage ``"compare"``.

    Raises:
        AssetError: the model or the text cannot be had.
        PolicyError: a policy's name is unknown or its file corrupt.
        ArgumentError: the text is too short, the window too long, or a name doubled.
        UnsupportedError: the model's attention does not go through Transformers' registry.

    Example:
        >>> from adaattn.evaluation.perplexity import EvaluationRequest, evaluate
        >>> result = evaluate(EvaluationRequest(tokens=4096))  # doctest: +SKIP
        >>> result.run("balanced").divergence < 1e-2  # doctest: +SKIP
        True
    """
    request = request or EvaluationRequest()
    report = progress or (lambda stage, done, total: None)
    result = _evaluate_model(request, report)  # the model's memory is free again
    if not request.cases:
        return result
    windows = list(sliding_windows(result.tokens, result.window, result.stride))
    num_passes = _num_passes(len(windows), len(result.runs))

    def counted_on(stage: str, done: int, total: int) -> None:
        report(stage, num_passes + done, num_passes + total)

    seconds = list(result.seconds)
    with _stage("compare", seconds):
        comparisons = compare_cases(result.device, progress=counted_on)
    return replace(result, comparisons=comparisons, seconds=tuple(seconds))


def _evaluate_model(request: EvaluationRequest, report: Progress) -> EvaluationResult:
    """Return what the model's runs cost and lose."""
    policies = _resolve(request.policies)
    text = load_text(request.text)
    seconds: list[tuple[str, float]] = []
    report("load", 0, 0)
    with _stage("load", seconds), torch.inference_mode():
        model = load_model(
            request.model, device=request.device, dtype=request.dtype, progress=report
        )
        prefix, tokens = model.encode(text, request.tokens)
    windows = list(sliding_windows(len(tokens), request.window, request.stride))
    _check_length(model, min(request.window, len(tokens)) + len(prefix))
    with torch.inference_mode(), register(_NAME):
        baseline = _BASELINE if _accepts(model, _BASELINE) else "eager"
        runs = _make_runs(baseline, policies, model.device)
        num_cases = len(CASES) if request.cases else 0
        step = _counter(report, _num_passes(len(windows), len(runs)) + num_cases)
        with _stage("warm up", seconds):
            first = _tensor(model, prefix, tokens[: windows[0].end])
            entropy = _warm_up(model, runs, first, step)
        with _stage("evaluate", seconds):
            losses = _measure(model, runs, prefix, tokens, windows, step)
    starts = [position for w in windows for position in range(w.first_scored, w.end)]
    return EvaluationResult(
        model=request.model,
        text=request.text,
        device=str(model.device),
        device_name=probe(model.device).name,
        dtype=request.dtype,
        tokens=len(tokens),
        scored=len(starts),
        window=request.window,
        stride=request.stride,
        runs=tuple(finished(run, losses, starts) for run in runs),
        entropy_bits=entropy,
        seconds=tuple(seconds),
        versions=tuple(sorted(versions().items())),
    )


def _resolve(policies: Sequence[str | Policy]) -> list[Policy]:
    """Return each policy as a value, the names all different."""
    if not policies:
        raise ArgumentError.got("policies", "at least one", "none", "name quality, say")
    found = [resolve_policy(policy) for policy in policies]
    names = [_BASELINE, _EXACT, *(policy.name for policy in found)]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise ArgumentError.got(
            "policies", "different names, none sdpa or exact", ", ".join(doubled)
        )
    return found


def _check_length(model: LanguageModel, length: int) -> None:
    longest = getattr(model.network.config, "max_position_embeddings", None)
    if longest is not None and length > longest:
        raise ArgumentError.got("window", f"at most the model's {longest} positions", length)


def _num_passes(num_windows: int, num_runs: int) -> int:
    """Return the forward passes of all: one for the entropy, one to be warm, one a window."""
    return (num_windows + 1) * num_runs + 1


def _counter(report: Progress, total: int) -> Callable[[], None]:
    """Return a function that reports one more forward pass done, of so many steps in all."""
    passes = itertools.count(1)
    report("evaluate", 0, total)
    return lambda: report("evaluate", next(passes), total)


@contextlib.contextmanager
def _stage(name: str, seconds: list[tuple[str, float]]) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds.append((name, time.perf_counter() - start))


def _accepts(model: LanguageModel, implementation: str) -> bool:
    """Return whether a model runs with an implementation (sdpa knows neither softcap nor sinks)."""
    try:
        model.network.set_attn_implementation(implementation)
        model.forward(torch.zeros(1, 2, dtype=torch.int64, device=model.device))
    except ValueError:
        return False
    return True


def _make_runs(baseline: str, policies: Sequence[Policy], device: torch.device) -> list[Run]:
    runs = [Run(name=baseline, implementation=baseline, clock=AttentionClock(device))]
    for policy in (Policy(name=_EXACT), *policies):
        runs.append(
            Run(
                name=policy.name,
                implementation=_NAME,
                policy=policy,
                clock=AttentionClock(device),
            )
        )
    return runs


def _warm_up(
    model: LanguageModel,
    runs: Sequence[Run],
    inputs: torch.Tensor,
    step: Callable[[], None],
) -> tuple[tuple[float, ...], ...]:
    """Run every path once, for its peak memory; return the entropy of the rows."""
    entropy_probe = EntropyProbe()
    model.network.set_attn_implementation(runs[0].implementation)
    with intercepted(runs[0].implementation, entropy_probe.wrap):
        model.forward(inputs)
    step()
    for run in runs:
        return_freed_memory()
        with peak_memory(model.device) as peak:
            _forward(model, run, inputs)
        run.peak_bytes = peak.added_bytes
        run.clock.read_ms()
        if run.policy is not None and run.ledger.summary().calls == 0:
            raise UnsupportedError(
                "adaattn",
                [f"model {model.name!r} does not use Transformers' attention registry"],
                "choose a model whose attention can be set with attn_implementation",
            )
        run.ledger = Ledger()
        step()
    return entropy_probe.layers


def _measure(
    model: LanguageModel,
    runs: list[Run],
    prefix: list[int],
    tokens: list[int],
    windows: Sequence[Window],
    step: Callable[[], None],
) -> torch.Tensor:
    """Return the exact run's losses, [N] float64; everything else goes into the runs."""
    exact = next(run for run in runs if run.name == _EXACT)
    losses = []
    for index, window in enumerate(windows):
        inputs = _tensor(model, prefix, tokens[window.begin : window.end])
        rows: dict[str, torch.Tensor] = {}
        turn = index % len(runs)
        for run in (*runs[turn:], *runs[:turn]):
            hidden = _timed_forward(model, run, inputs)
            rows[run.name] = hidden[-window.num_scored - 1 : -1].clone()
            step()
        targets = inputs[0, -window.num_scored :]
        losses.append(_score(model, exact, runs, rows, targets))
        rows.clear()
        return_freed_memory()
    return torch.cat(losses)


def _timed_forward(model: LanguageModel, run: Run, inputs: torch.Tensor) -> torch.Tensor:
    """Return what one forward pass gives, and add its time to the run."""
    synchronise: Callable[[], object] = (
        torch.cuda.synchronize if model.device.type == "cuda" else lambda: None
    )
    synchronise()
    start = time.perf_counter()
    hidden = _forward(model, run, inputs)
    synchronise()
    run.forward_ms.append((time.perf_counter() - start) * 1e3)
    run.attention_ms.append(run.clock.read_ms())
    run.ledger.settle()
    return hidden


def _forward(model: LanguageModel, run: Run, inputs: torch.Tensor) -> torch.Tensor:
    model.network.set_attn_implementation(run.implementation)
    with contextlib.ExitStack() as stack:
        run.is_clocked = stack.enter_context(intercepted(run.implementation, run.clock.wrap))
        if run.policy is not None:
            stack.enter_context(use_policy(run.policy))
            stack.enter_context(record_events(run.ledger.add))
        return model.forward(inputs)


def _score(
    model: LanguageModel,
    exact: Run,
    runs: Sequence[Run],
    rows: dict[str, torch.Tensor],
    targets: torch.Tensor,
) -> torch.Tensor:
    """Return the exact losses of a window's scored tokens, comparing the other runs to them."""
    others = [run for run in runs if run is not exact]
    num_rows = max(1, _CHUNK_LOGITS // model.network.config.get_text_config().vocab_size)
    losses = []
    for begin in range(0, targets.numel(), num_rows):
        part = slice(begin, begin + num_rows)
        truth = model.logits(rows[exact.name][part])
        losses.append(token_losses(truth, targets[part]).cpu())
        logits = (model.logits(rows[run.name][part]) for run in others)
        for run, found in zip(others, compare_logits(truth, logits, targets[part]), strict=True):
            run.differences.append(found.loss_difference.cpu())
            run.divergences.append(found.divergence.cpu())
    return torch.cat(losses)


def _tensor(model: LanguageModel, prefix: list[int], tokens: list[int]) -> torch.Tensor:
    return torch.tensor([prefix + tokens], device=model.device)
