"""The frozen values that an evaluation returns."""

from dataclasses import asdict, dataclass, field
from typing import Any

from adaattn.evaluation.ledger import Refusal

__all__ = ["Comparison", "EvaluationResult", "RunResult"]

FORMAT = 1

_NOTHING = 1e6
"""Bytes that are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """One way of computing attention, over the whole text.

    Differences are taken token by token against the exact run.

    Args:
        name: ``"sdpa"`` (Transformers' own), ``"exact"``, or a policy's name.
        implementation: what Transformers called.
        error_budget: of the policy; None for Transformers' own.
        loss: mean negative log-likelihood, in nat a token.
        perplexity: exp of it.
        loss_difference: mean of the paired differences, in nat.
        loss_difference_error: standard error of that mean, in nat.
        mean_absolute_difference: mean of their absolute values, in nat.
        divergence: mean KL(exact || run) over the vocabulary, in nat.
        divergence_error: standard error of that mean, in nat.
        max_divergence: the largest of any token.
        attention_ms: time in a window's attention calls, adapter included, the median over
            windows (a busy machine spoils a mean); None if it cannot be seen.
        attention_ms_low: the first quartile over windows; None likewise.
        attention_ms_high: the third quartile over windows; None likewise.
        forward_ms: time of all layers in a window, attention included, without the vocabulary
            projection; the median likewise.
        peak_bytes: most memory a forward pass added; None where it cannot be measured.
        workspace_bytes: the most that a plan asked for beside inputs and output.
        methods: ``(label, share)`` of the heads of all calls.
        approximated: share of heads that any approximation served.
        mean_output_error: mean measured relative error of a head's output, exact heads as 0.
        max_output_error: the largest one.
        fallbacks: steps down taken.
        chosen: label of each head of each layer, in the first window.
        decisions: the trace of each layer, in the first window.
        refusals: the most frequent reasons for not approximating.
        difference_by_position: ``(first token, mean loss difference)`` of equal stretches.
        token_differences: [N] loss difference of each scored token, in nat.
    """

    name: str
    implementation: str
    error_budget: float | None
    loss: float
    perplexity: float
    loss_difference: float
    loss_difference_error: float
    mean_absolute_difference: float
    divergence: float
    divergence_error: float
    max_divergence: float
    attention_ms: float | None
    attention_ms_low: float | None
    attention_ms_high: float | None
    forward_ms: float
    peak_bytes: int | None
    workspace_bytes: int
    methods: tuple[tuple[str, float], ...]
    approximated: float
    mean_output_error: float
    max_output_error: float
    fallbacks: int
    chosen: tuple[tuple[str, ...], ...]
    decisions: tuple[str, ...]
    refusals: tuple[Refusal, ...]
    difference_by_position: tuple[tuple[int, float], ...]
    token_differences: tuple[float, ...] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One attention problem, computed as a PyTorch user would write it and by AdaAttn.

    Args:
        name: what the problem is, in a few words.
        detail: its shape in words and numbers.
        peer: what a PyTorch user writes for it.
        chosen: label of what AdaAttn ran.
        ours_ms: median time of a call.
        peer_ms: the same of the peer, in turns with ours; None where it was not timed.
        ours_bytes: most memory that a first call added, output and what it keeps for later calls
            included; None where it cannot be measured.
        peer_bytes: the same of the peer, with the mask that was made for it; where it was not
            run, what it would need at least.
        error: largest absolute difference of the two outputs, over the largest absolute value;
            None where the peer was not run.
        why_not: why the peer was not timed; "" where it was.
    """

    name: str
    detail: str
    peer: str
    chosen: str
    ours_ms: float
    peer_ms: float | None
    ours_bytes: int | None
    peer_bytes: int | None
    error: float | None
    why_not: str = ""

    @property
    def time_ratio(self) -> float | None:
        """How many times as fast AdaAttn was; None where PyTorch was not timed."""
        return self.peer_ms / self.ours_ms if self.peer_ms and self.ours_ms else None

    @property
    def memory_ratio(self) -> float | None:
        """How many times as much memory PyTorch needs; None where either is not known.

        Where both need less than a megabyte, nobody cares, and allocators round as they like.
        """
        if not self.peer_bytes or not self.ours_bytes:
            return None
        if max(self.peer_bytes, self.ours_bytes) < _NOTHING:
            return 1.0
        return self.peer_bytes / self.ours_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """Everything that one evaluation measured.

    Args:
        model: name or folder.
        text: name or path.
        device: where it ran.
        device_name: the vendor's name of it.
        dtype: of weights and activations.
        tokens: length of the text used.
        scored: tokens whose loss counts, each once.
        window: most tokens in a forward pass.
        stride: tokens by which windows advance.
        runs: Transformers' own sdpa, exact, then the policies.
        entropy_bits: mean entropy of the exact rows, by layer and head, from sampled rows of
            the first window; empty where it cannot be seen.
        seconds: wall time of each stage.
        versions: of the packages that matter.
        comparisons: single attention problems beside PyTorch; empty unless they were asked for.
    """

    model: str
    text: str
    device: str
    device_name: str
    dtype: str
    tokens: int
    scored: int
    window: int
    stride: int
    runs: tuple[RunResult, ...]
    entropy_bits: tuple[tuple[float, ...], ...]
    seconds: tuple[tuple[str, float], ...]
    versions: tuple[tuple[str, str], ...]
    comparisons: tuple[Comparison, ...] = ()

    def run(self, name: str) -> RunResult:
        """Return the run of a name.

        Raises:
            KeyError: there is none.
        """
        for run in self.runs:
            if run.name == name:
                return run
        raise KeyError(name)

    def to_dict(self, *, with_tokens: bool = False) -> dict[str, Any]:
        """Return the result as plain JSON values.

        Args:
            with_tokens: keep the difference of every single token too.
        """
        data = asdict(self)
        data["format"] = FORMAT
        data["versions"] = dict(self.versions)
        data["seconds"] = dict(self.seconds)
        for run in data["runs"]:
            run["methods"] = dict(run["methods"])
            if not with_tokens:
                del run["token_differences"]
        return data
