"""Every reason against an executor, in words, and no reason where there is none."""

from dataclasses import replace

import pytest

from adaattn.backends import capability_named
from adaattn.planning.support import needed_features, reasons
from adaattn.spec import (
    Align,
    AttentionProblem,
    Aux,
    Capability,
    Feature,
    HardwareFacts,
    HeadTerm,
    KVKind,
    MaskKind,
    Precision,
)
from adaattn.testing import fake_facts, make_problem

CPU = fake_facts("cpu")
ALL = ~Feature(0)
BARE = Capability(name="bare", backend="bare")
EITHER = replace(BARE, kv_kinds=(KVKind.DENSE, KVKind.PACKED))
MASKED = {"mask": MaskKind.BOOLEAN}
ADDED = {"mask": MaskKind.ADDITIVE}

NEEDS = [
    ({"is_causal": True, "len_k": 9}, Feature.CAUSAL_TOP_LEFT, "aligned to the top left"),
    (
        {"is_causal": True, "len_k": 9, "align": Align.BOTTOM_RIGHT},
        Feature.CAUSAL_BOTTOM_RIGHT,
        "causal order or a window aligned to the bottom right with Sq != Sk",
    ),
    (
        {"window": (3, 2), "len_k": 9},
        Feature.CAUSAL_TOP_LEFT,
        "or a window aligned to the top left",
    ),
    (
        {"window": (3, -1), "len_k": 9, "align": Align.BOTTOM_RIGHT},
        Feature.CAUSAL_BOTTOM_RIGHT,
        "or a window aligned to the bottom right",
    ),
    (MASKED, Feature.BOOLEAN_MASK, "a boolean mask"),
    (ADDED, Feature.ADDITIVE_MASK, "an additive mask"),
    (ADDED | {"mask_requires_grad": True}, Feature.MASK_GRADIENT, "a gradient for the mask"),
    (
        MASKED | {"window": (2, 2)},
        Feature.MASKED_POSITIONS,
        "a mask together with causal order, a window or ALiBi",
    ),
    (ADDED | {"has_alibi": True}, Feature.MASKED_POSITIONS, "a mask together with causal order"),
    (
        {"is_causal": True, "scale": 0.0},
        Feature.SCALE_SIGN,
        "causal order with a scale of 0 or less",
    ),
    ({"is_causal": True, "scale": -0.5}, Feature.SCALE_SIGN, "a scale of 0 or less"),
    (
        ADDED | {"precision": Precision.BF16, "mask_is_wide": True},
        Feature.WIDE_MASK,
        "an additive mask of a wider dtype than the query's",
    ),
    ({"window": (2, -1)}, Feature.WINDOW, "a sliding window"),
    ({"window": (-1, 2)}, Feature.WINDOW, "a sliding window"),
    ({"dilation": 2}, Feature.DILATION, "a dilated pattern"),
    ({"softcap": 20.0}, Feature.SOFTCAP, "softcap"),
    ({"has_sinks": True}, Feature.SINKS, "attention sinks"),
    (
        {"has_sinks": True, "sinks_require_grad": True},
        Feature.SINKS_GRADIENT,
        "gradients with attention sinks",
    ),
    (
        {"has_sinks": True, "requires_grad": True},
        Feature.SINKS_GRADIENT,
        "gradients with attention sinks",
    ),
    ({"has_alibi": True}, Feature.ALIBI, "ALiBi slopes"),
    (
        {"has_alibi": True, "alibi_requires_grad": True},
        Feature.ALIBI_GRADIENT,
        "a gradient for ALiBi slopes",
    ),
    ({"dropout_p": 0.1}, Feature.DROPOUT, "dropout"),
    ({"value_dim": 8}, Feature.VALUE_DIM, "Dv different from D"),
    ({"batch": 0}, Feature.EMPTY, "an empty input"),
    ({"num_heads": 0}, Feature.EMPTY, "an empty input"),
    ({"len_q": 0, "len_k": 4}, Feature.EMPTY, "an empty input"),
    ({"len_k": 0}, Feature.EMPTY, "an empty input"),
    ({"requires_grad": True}, Feature.BACKWARD, "gradients"),
    (
        {"requires_grad": True, "deterministic": True},
        Feature.DETERMINISTIC_BACKWARD,
        "a deterministic backward pass",
    ),
    ({"aux": Aux.LSE}, Feature.LSE, "the log-sum-exp as an output"),
    (
        {"aux": Aux.LSE, "requires_grad": True},
        Feature.LSE_GRADIENT,
        "a gradient through the log-sum-exp",
    ),
    ({"aux": Aux.ROW_MAX}, Feature.ROW_MAX, "the row maximum as an output"),
    ({"aux": Aux.ENTROPY}, Feature.ENTROPY, "the row entropy as an output"),
    ({"aux": Aux.WEIGHTS}, Feature.WEIGHTS, "the weights as an output"),
    ({"block_size": (16, 16)}, Feature.BLOCK_LIST, "a list of blocks"),
    ({"aux": Aux.DROPPED_MASS}, Feature.DROPPED_MASS, "blocks that are not listed"),
    (
        {"batch_invariant": True},
        Feature.BATCH_INVARIANT,
        "results that do not depend on the rest of the batch",
    ),
    (
        {"head_terms": HeadTerm.SCALE},
        Feature.HEAD_TERMS,
        "a scale, window or softcap of each head, from a tensor",
    ),
    (
        {"head_terms": HeadTerm.SCALE, "head_terms_require_grad": True},
        Feature.HEAD_TERMS_GRADIENT,
        "a gradient for the scale or softcap of each head",
    ),
    ({"head_terms": HeadTerm.WINDOW}, Feature.WINDOW, "a sliding window"),
    ({"head_terms": HeadTerm.SOFTCAP}, Feature.SOFTCAP, "softcap"),
]


@pytest.mark.parametrize(("values", "feature", "words"), NEEDS)
def test_a_feature_in_use_that_is_absent_is_named(
    values: dict[str, object], feature: Feature, words: str
) -> None:
    problem = make_problem(**values)
    lacking = replace(BARE, features=ALL & ~feature)
    found = reasons(lacking, problem, CPU)
    assert len(found) == 1
    assert found[0].startswith("it does not support ") and words in found[0]
    assert reasons(replace(BARE, features=ALL), problem, CPU) == ()


def test_every_feature_is_needed_by_some_problem() -> None:
    table = Feature(0)
    for _, feature, _ in NEEDS:
        table |= feature
    assert table == ALL


def test_a_plain_problem_needs_no_feature() -> None:
    assert needed_features(make_problem()) == ()
    assert reasons(BARE, make_problem(), CPU) == ()


@pytest.mark.parametrize("values", [{"len_q": 8}, {"lengths_q": (3, 5)}])
@pytest.mark.parametrize("corner", [Feature.CAUSAL_TOP_LEFT, Feature.CAUSAL_BOTTOM_RIGHT])
def test_causal_order_of_square_problems_needs_either_corner(
    values: dict[str, object], corner: Feature
) -> None:
    problem = make_problem(is_causal=True, align=Align.BOTTOM_RIGHT, **values)
    assert reasons(replace(EITHER, features=corner), problem, CPU) == ()
    assert reasons(EITHER, problem, CPU) == ("it does not support causal order",)


def test_a_kind_of_keys_and_values_that_is_not_taken_is_named() -> None:
    packed = make_problem(lengths_q=(3, 5))
    assert reasons(BARE, packed, CPU) == ("it does not support packed sequences",)
    assert reasons(EITHER, packed, CPU) == reasons(EITHER, make_problem(), CPU) == ()
    only = replace(BARE, kv_kinds=(KVKind.PACKED,))
    assert reasons(only, make_problem(), CPU) == ("it does not support dense keys and values",)


def test_packed_sequences_of_unlike_lengths_need_their_own_corner() -> None:
    problem = make_problem(lengths_q=(3, 5), lengths_k=(5, 3), is_causal=True)
    other = replace(EITHER, features=Feature.CAUSAL_BOTTOM_RIGHT)
    assert reasons(other, problem, CPU) == (
        "it does not support causal order or a window aligned to the top left with Sq != Sk",
    )


@pytest.mark.parametrize(
    ("capability", "values", "machine", "sentence"),
    [
        (
            {"unavailable": "Triton is not installed"},
            {},
            "cpu",
            "this installation cannot run it: Triton is not installed",
        ),
        ({"device_types": ("cuda",)}, {}, "cpu", "it runs on cuda, the tensors are on cpu"),
        (
            {},
            {"device_type": "xpu"},
            "cpu",
            "it runs on cpu or cuda, the tensors are on xpu",
        ),
        (
            {"precisions": (Precision.BF16, Precision.FP16)},
            {},
            "cpu",
            "it takes bf16, fp16, got fp32",
        ),
        (
            {"max_head_dim": 8},
            {"head_dim": 4, "value_dim": 16},
            "cpu",
            "it takes head dimensions up to 8, got 16",
        ),
        (
            {"min_group_size": 2},
            {"num_heads": 3},
            "cpu",
            "it needs at least 2 query heads per key head, got 1",
        ),
        ({"max_len_q": 4}, {}, "cpu", "it is for at most 4 query rows, got 8"),
        (
            {"min_compute_capability": (9, 0)},
            {"device_type": "cuda"},
            "a100",
            "it needs compute capability 9.0, the device has 8.0",
        ),
        (
            {"max_compute_capability": (8, 9)},
            {"device_type": "cuda"},
            "h200",
            "it needs compute capability 8.9 at most, the device has 9.0",
        ),
    ],
)
def test_each_limit_says_what_was_expected_and_what_came(
    capability: dict[str, object], values: dict[str, object], machine: str, sentence: str
) -> None:
    limited = replace(BARE, features=ALL, **capability)
    assert reasons(limited, make_problem(**values), fake_facts(machine)) == (sentence,)


@pytest.mark.parametrize(
    ("capability", "values", "machine"),
    [
        ({"max_head_dim": 16}, {}, "cpu"),
        ({"min_group_size": 2}, {"num_heads": 4, "num_kv_heads": 2}, "cpu"),
        ({"max_len_q": 8}, {}, "cpu"),
        ({"min_compute_capability": (9, 0)}, {"device_type": "cuda"}, "h200"),
        ({"min_compute_capability": (9, 0)}, {}, "cpu"),
        ({"max_compute_capability": (9, 0)}, {"device_type": "cuda"}, "h200"),
        ({"max_compute_capability": (8, 0)}, {}, "cpu"),
    ],
)
def test_a_limit_that_is_just_met_is_no_reason(
    capability: dict[str, object], values: dict[str, object], machine: str
) -> None:
    limited = replace(BARE, **capability)
    assert reasons(limited, make_problem(**values), fake_facts(machine)) == ()


def test_no_heads_at_all_are_no_reason_against_an_executor_that_takes_empty_inputs() -> None:
    """A call without heads had zero query heads per key head, fewer than every executor takes."""
    empty = make_problem(num_heads=0)
    assert reasons(replace(BARE, features=Feature.EMPTY), empty, CPU) == ()


@pytest.mark.parametrize(
    ("allowed", "sentence"),
    [
        (("sdpa.math", "sdpa.flash"), ()),
        (("sdpa.math",), ("the ambient sdpa_kernel allows sdpa.math",)),
        ((), ("the ambient sdpa_kernel allows none",)),
        (None, ()),
    ],
)
def test_an_ambient_sdpa_kernel_rules_out_the_other_kernels_of_sdpa_alone(
    allowed: tuple[str, ...] | None, sentence: tuple[str, ...]
) -> None:
    problem = make_problem(allowed_sdpa=allowed)
    assert reasons(capability_named("sdpa.flash"), problem, CPU) == sentence
    assert reasons(BARE, problem, CPU) == ()


def test_all_reasons_are_collected_not_only_the_first() -> None:
    problem: AttentionProblem = make_problem(softcap=2.0, dropout_p=0.5, len_q=9)
    capability = Capability(
        name="picky",
        backend="picky",
        device_types=("cuda",),
        precisions=(Precision.FP16,),
        max_head_dim=8,
        max_len_q=1,
        unavailable="no",
    )
    found = reasons(capability, problem, HardwareFacts(device_type="cpu"))
    assert len(found) == 7
