"""Why a capability cannot serve a problem, as sentences. An empty tuple means that it can."""

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Final

from adaattn.spec import (
    Align,
    AttentionProblem,
    Aux,
    Capability,
    Feature,
    HardwareFacts,
    HeadTerm,
    MaskKind,
)

__all__ = ["needed_features", "reasons", "serving"]

_Rule = tuple[Feature, Callable[[AttentionProblem], bool], str]

_RULES: Final[tuple[_Rule, ...]] = (
    (
        Feature.CAUSAL_TOP_LEFT,
        lambda p: p.is_positional and p.align is Align.TOP_LEFT and not _is_square(p),
        "causal order or a window aligned to the top left with Sq != Sk",
    ),
    (
        Feature.CAUSAL_BOTTOM_RIGHT,
        lambda p: p.is_positional and p.align is Align.BOTTOM_RIGHT and not _is_square(p),
        "causal order or a window aligned to the bottom right with Sq != Sk",
    ),
    (Feature.BOOLEAN_MASK, lambda p: p.mask is MaskKind.BOOLEAN, "a boolean mask"),
    (Feature.ADDITIVE_MASK, lambda p: p.mask is MaskKind.ADDITIVE, "an additive mask"),
    (Feature.MASK_GRADIENT, lambda p: p.mask_requires_grad, "a gradient for the mask"),
    (
        Feature.MASKED_POSITIONS,
        lambda p: p.mask is not MaskKind.NONE and (p.is_positional or p.has_alibi),
        "a mask together with causal order, a window or ALiBi",
    ),
    (
        Feature.SCALE_SIGN,
        lambda p: (
            p.scale <= 0
            and (p.is_causal or (p.device_type == "cuda" and p.mask is not MaskKind.NONE))
        ),
        "causal order with a scale of 0 or less, nor on a GPU a mask with it",
    ),
    (
        Feature.WIDE_MASK,
        lambda p: p.mask_is_wide,
        "an additive mask of a wider dtype than the query's",
    ),
    (
        Feature.WINDOW,
        lambda p: p.window != (-1, -1) or p.by_head(HeadTerm.WINDOW),
        "a sliding window",
    ),
    (Feature.DILATION, lambda p: p.dilation > 1, "a dilated pattern"),
    (Feature.SOFTCAP, lambda p: p.has_softcap, "softcap"),
    (Feature.SINKS, lambda p: p.has_sinks, "attention sinks"),
    (
        Feature.SINKS_GRADIENT,
        lambda p: p.has_sinks and (p.requires_grad or p.sinks_require_grad),
        "gradients with attention sinks",
    ),
    (Feature.ALIBI, lambda p: p.has_alibi, "ALiBi slopes"),
    (Feature.ALIBI_GRADIENT, lambda p: p.alibi_requires_grad, "a gradient for ALiBi slopes"),
    (Feature.DROPOUT, lambda p: p.dropout_p > 0, "dropout"),
    (Feature.VALUE_DIM, lambda p: p.value_dim != p.head_dim, "Dv different from D"),
    (
        Feature.EMPTY,
        lambda p: not (p.batch and p.num_heads and p.len_q and p.len_k and p.value_dim),
        "an empty input",
    ),
    (Feature.BACKWARD, lambda p: p.requires_grad, "gradients"),
    (
        Feature.DETERMINISTIC_BACKWARD,
        lambda p: p.requires_grad and p.deterministic,
        "a deterministic backward pass",
    ),
    (Feature.LSE, lambda p: p.wants(Aux.LSE), "the log-sum-exp as an output"),
    (
        Feature.LSE_GRADIENT,
        lambda p: p.wants(Aux.LSE) and p.requires_grad,
        "a gradient through the log-sum-exp",
    ),
    (Feature.ROW_MAX, lambda p: p.wants(Aux.ROW_MAX), "the row maximum as an output"),
    (Feature.ENTROPY, lambda p: p.wants(Aux.ENTROPY), "the row entropy as an output"),
    (Feature.WEIGHTS, lambda p: p.wants(Aux.WEIGHTS), "the weights as an output"),
    (Feature.BLOCK_LIST, lambda p: p.has_blocks, "a list of blocks"),
    (
        Feature.DROPPED_MASS,
        lambda p: p.wants(Aux.DROPPED_MASS),
        "the mass of blocks that are not listed, as an output",
    ),
    (
        Feature.BATCH_INVARIANT,
        lambda p: p.batch_invariant,
        "results that do not depend on the rest of the batch",
    ),
    (
        Feature.HEAD_TERMS,
        lambda p: p.head_terms.value > 0,
        "a scale, window or softcap of each head, from a tensor",
    ),
    (
        Feature.HEAD_TERMS_GRADIENT,
        lambda p: p.head_terms_require_grad,
        "a gradient for the scale or softcap of each head",
    ),
)

_CAUSAL = Feature.CAUSAL_TOP_LEFT | Feature.CAUSAL_BOTTOM_RIGHT


def reasons(
    capability: Capability, problem: AttentionProblem, hardware: HardwareFacts | None
) -> tuple[str, ...]:
    """Return every reason why ``capability`` cannot compute ``problem``, as sentences.

    Without hardware facts (in a traced call, say) the device's generation is not judged.

    Example:
        >>> from adaattn.spec import AttentionProblem, Capability, HardwareFacts
        >>> problem = AttentionProblem(batch=1, num_heads=1, num_kv_heads=1, len_q=4, len_k=4,
        ...                            head_dim=8, value_dim=8, softcap=30.0)
        >>> reasons(Capability(name="x", backend="x"), problem, HardwareFacts(device_type="cpu"))
        ('it does not support softcap',)
    """
    found = [
        f"this installation cannot run it: {text}" for text in [capability.unavailable] if text
    ]
    if problem.device_type not in capability.device_types:
        expected = " or ".join(capability.device_types)
        found.append(f"it runs on {expected}, the tensors are on {problem.device_type}")
    if problem.precision not in capability.precisions:
        labels = ", ".join(precision.label for precision in capability.precisions)
        found.append(f"it takes {labels}, got {problem.precision.label}")
    found += [f"it does not support {text}" for text in _missing(capability.features, problem)]
    if problem.kv_kind not in capability.kv_kinds:
        found.append(f"it does not support {problem.kv_kind.value}")
    found += list(_size_reasons(capability, problem))
    if hardware is not None and problem.device_type == "cuda":
        found += list(_generation_reasons(capability, hardware))
    if capability.waits and not problem.may_wait:
        found.append('it reads the device on the host, which only check="always" allows')
    found += [why for rule in capability.rules if (why := rule(problem))]
    return tuple(found)


@lru_cache(maxsize=1024)
def serving(
    problem: AttentionProblem, hardware: HardwareFacts, capabilities: tuple[Capability, ...]
) -> tuple[Capability, ...]:
    """Return the capabilities against which nothing stands."""
    return tuple(item for item in capabilities if not reasons(item, problem, hardware))


def needed_features(problem: AttentionProblem) -> tuple[tuple[Feature, str], ...]:
    """Return each feature that the problem uses, with the words for it."""
    used = [(feature, text) for feature, applies, text in _RULES if applies(problem)]
    if problem.is_causal and _is_square(problem):
        used.append((_CAUSAL, "causal order"))
    return tuple(used)


def _missing(features: Feature, problem: AttentionProblem) -> Iterable[str]:
    """Yield the words of each needed feature that is absent."""
    for feature, text in needed_features(problem):
        if not features & feature:
            yield text


def _size_reasons(capability: Capability, problem: AttentionProblem) -> Iterable[str]:
    """Yield the reasons that concern sizes."""
    largest = max(problem.head_dim, problem.value_dim)
    if capability.max_head_dim and largest > capability.max_head_dim:
        yield f"it takes head dimensions up to {capability.max_head_dim}, got {largest}"
    if problem.group_size < capability.min_group_size:
        yield (
            f"it needs at least {capability.min_group_size} query heads per key head, "
            f"got {problem.group_size}"
        )
    if problem.len_q < capability.min_len_q:
        yield f"it is for at least {capability.min_len_q} query rows, got {problem.len_q}"
    if capability.max_len_q and problem.len_q > capability.max_len_q:
        yield f"it is for at most {capability.max_len_q} query rows, got {problem.len_q}"


def _generation_reasons(capability: Capability, hardware: HardwareFacts) -> Iterable[str]:
    """Yield the reasons that concern the generation of a CUDA device."""
    least, most = capability.min_compute_capability, capability.max_compute_capability
    found = hardware.compute_capability
    if found < least:
        yield f"it needs compute capability {_dotted(least)}, the device has {_dotted(found)}"
    if most != (0, 0) and found > most:
        yield (
            f"it needs compute capability {_dotted(most)} at most, the device has {_dotted(found)}"
        )


def _is_square(problem: AttentionProblem) -> bool:
    """Return whether both alignments are the same."""
    return problem.packed_square if problem.num_sequences else problem.len_q == problem.len_k


def _dotted(version: tuple[int, int]) -> str:
    """Return ``"9.0"`` for (9, 0)."""
    return f"{version[0]}.{version[1]}"
