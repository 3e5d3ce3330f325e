"""Which number formats the products may use, with the error of each."""

from dataclasses import dataclass
from typing import Final

from adaattn.spec import AttentionProblem, HardwareFacts, MaskKind, Policy, Precision, TensorStats

__all__ = [
    "FP16_SAFE",
    "PrecisionChoice",
    "choose_precisions",
    "lower_precisions",
]

FP16_SAFE: Final = 32752.0
"""Half of fp16's largest number: leaves room for the rounding of products' inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionChoice:
    """One number format for the products.

    Args:
        precision: the format.
        errors: estimated relative error per query head; () for the input's own format.
        refusal: why it may not be used; "" if it may.
        is_measured: False where numbers were measured, and none for it.
    """

    precision: Precision
    errors: tuple[float, ...] = ()
    refusal: str = ""
    is_measured: bool = True


def lower_precisions(
    problem: AttentionProblem, hardware: HardwareFacts, policy: Policy
) -> tuple[PrecisionChoice, ...]:
    """Return each format below the input's own that the policy lists, refused or not.

    The executors of this version compute in fp64, fp32, bf16 and fp16; formats of eight
    bits become candidates with the executors that can use them.
    """
    choices = []
    for precision in dict.fromkeys(policy.precisions):
        if precision.bits >= problem.precision.bits:
            continue
        refusal = ""
        if not policy.allows_loss:
            refusal = f"lower than the input's {problem.precision.label}, and the error budget is 0"
        elif precision not in hardware.instructions:
            native = ", ".join(item.label for item in hardware.instructions)
            refusal = f"{hardware.name or hardware.device_type} computes {native} natively, not it"
        elif problem.mask is MaskKind.ADDITIVE:
            refusal = "the additive mask would be rounded to it as well, or overflow"
        elif precision is Precision.FP16 and problem.requires_grad:
            refusal = "small gradients vanish in fp16, and output errors do not show it"
        elif problem.deterministic and problem.requires_grad:
            refusal = "deterministic gradients were asked for; the input's own format is kept"
        choices.append(PrecisionChoice(precision=precision, refusal=refusal))
    return tuple(choices)


def choose_precisions(
    problem: AttentionProblem,
    stats: TensorStats,
    hardware: HardwareFacts,
    policy: Policy,
) -> tuple[PrecisionChoice, ...]:
    """Return the input's own format, then each lower one with its measured error.

    Args:
        problem: simplified.
        stats: numbers measured on the tensors.
        hardware: what the device computes natively.
        policy: what may be used.
    """
    own = PrecisionChoice(precision=problem.precision)
    lower = lower_precisions(problem, hardware, policy)
    measured = dict(stats.precision_errors)
    return (own, *(_with_errors(choice, measured, stats) for choice in lower))


def _with_errors(
    choice: PrecisionChoice, measured: dict[Precision, tuple[float, ...]], stats: TensorStats
) -> PrecisionChoice:
    """Return the choice with its measured errors if there are any, or refused for its range."""
    if choice.refusal:
        return choice
    refusal = ""
    if choice.precision is Precision.FP16 and stats.max_magnitude > FP16_SAFE:
        refusal = f"elements reach {stats.max_magnitude:.3g}; fp16 is safe up to {FP16_SAFE:g}"
    return PrecisionChoice(
        precision=choice.precision,
        errors=measured.get(choice.precision, ()),
        refusal=refusal,
        is_measured=choice.precision in measured,
    )
