"""Which number formats may be used on which machine, for what budget, on what numbers."""

from dataclasses import replace

import pytest

from adaattn.planning.precision import choose_precisions, lower_precisions
from adaattn.spec import MaskKind, Policy, Precision, TensorStats
from adaattn.testing import fake_facts, make_problem

FP64, FP32, BF16, FP16 = Precision.FP64, Precision.FP32, Precision.BF16, Precision.FP16
E4M3 = Precision.FP8_E4M3
LOSSY = Policy(error_budget=0.05)
STATS = TensorStats(
    max_magnitude=10.0, precision_errors=((BF16, (0.004, 0.005)), (FP16, (0.0005, 0.0006)))
)


@pytest.mark.parametrize(
    ("machine", "allowed"),
    [
        ("h200", {BF16, FP16}),
        ("l40s", {BF16, FP16}),
        ("a100", {BF16, FP16}),
        ("v100", {FP16}),
        ("pascal", set()),
        ("cpu", set()),
        ("cpu_amx", {BF16}),
    ],
)
def test_each_machine_may_use_what_it_computes_natively(
    machine: str, allowed: set[Precision]
) -> None:
    facts = fake_facts(machine)
    choices = lower_precisions(make_problem(device_type=facts.device_type), facts, LOSSY)
    assert {item.precision for item in choices} == {BF16, FP16}
    assert {item.precision for item in choices if not item.refusal} == allowed
    for item in choices:
        if item.refusal:
            native = ", ".join(precision.label for precision in facts.instructions)
            assert item.refusal == f"{facts.name} computes {native} natively, not it"


@pytest.mark.parametrize(("machine", "allowed"), [("h200", True), ("l40s", True), ("a100", False)])
def test_fp8_is_for_hopper_and_ada_and_only_where_the_policy_lists_it(
    machine: str, allowed: bool
) -> None:
    problem, facts = make_problem(device_type="cuda"), fake_facts(machine)
    listed = replace(LOSSY, precisions=(E4M3,))
    (choice,) = lower_precisions(problem, facts, listed)
    assert choice.precision is E4M3
    assert (choice.refusal == "") is allowed
    assert E4M3 not in {item.precision for item in lower_precisions(problem, facts, LOSSY)}


@pytest.mark.parametrize(
    ("own", "lower"),
    [(FP64, {FP32, BF16, FP16}), (FP32, {BF16, FP16}), (BF16, set()), (FP16, set())],
)
def test_only_formats_below_the_inputs_own_are_choices(
    own: Precision, lower: set[Precision]
) -> None:
    choices = lower_precisions(make_problem(precision=own), fake_facts("a100"), LOSSY)
    assert {item.precision for item in choices} == lower


def test_a_format_listed_twice_is_one_choice() -> None:
    twice = replace(LOSSY, precisions=(BF16, FP16, BF16))
    choices = lower_precisions(make_problem(), fake_facts("a100"), twice)
    assert [item.precision for item in choices] == [BF16, FP16]


@pytest.mark.parametrize("head_budgets", [(), ((0, 1, 0.0),)])
def test_a_budget_of_0_refuses_every_lower_format(
    head_budgets: tuple[tuple[int, int, float], ...],
) -> None:
    exact = Policy(error_budget=0.0, head_budgets=head_budgets)
    choices = lower_precisions(make_problem(), fake_facts("h200"), exact)
    assert {item.refusal for item in choices} == {
        "lower than the input's fp32, and the error budget is 0"
    }


def test_a_calibrated_head_opens_the_lower_formats_though_the_policy_loses_nothing() -> None:
    calibrated = Policy(error_budget=0.0, head_budgets=((0, 1, 0.02),))
    choices = lower_precisions(make_problem(), fake_facts("h200"), calibrated)
    assert {item.refusal for item in choices} == {""}


def test_deterministic_gradients_keep_the_inputs_own_format() -> None:
    facts = fake_facts("h200")
    both = make_problem(requires_grad=True, deterministic=True)
    kept = "deterministic gradients were asked for; the input's own format is kept"
    refusals = {c.precision: c.refusal for c in lower_precisions(both, facts, LOSSY)}
    assert refusals[BF16] == kept
    assert all(refusals.values())
    choices = lower_precisions(make_problem(deterministic=True), facts, LOSSY)
    assert {item.refusal for item in choices} == {""}


def test_fp16_is_kept_out_of_training_and_bf16_is_not() -> None:
    choices = lower_precisions(make_problem(requires_grad=True), fake_facts("h200"), LOSSY)
    assert {item.precision: item.refusal for item in choices} == {
        BF16: "",
        FP16: "small gradients vanish in fp16, and output errors do not show it",
    }


def test_an_additive_mask_keeps_the_inputs_own_format_and_a_boolean_one_does_not() -> None:
    refusals = {
        kind: {
            item.refusal
            for item in lower_precisions(make_problem(mask=kind), fake_facts("h200"), LOSSY)
        }
        for kind in (MaskKind.ADDITIVE, MaskKind.BOOLEAN)
    }
    assert refusals == {
        MaskKind.ADDITIVE: {"the additive mask would be rounded to it as well, or overflow"},
        MaskKind.BOOLEAN: {""},
    }


def test_the_inputs_own_format_comes_first_and_loses_nothing() -> None:
    own, *lower = choose_precisions(make_problem(), STATS, fake_facts("a100"), LOSSY)
    assert (own.precision, own.errors, own.refusal) == (FP32, (), "")
    assert {item.precision: item.errors for item in lower} == dict(STATS.precision_errors)


def test_formats_without_numbers_are_told_apart_after_measuring_and_not_before_it() -> None:
    problem, facts = make_problem(), fake_facts("a100")
    before = lower_precisions(problem, facts, LOSSY)
    after = choose_precisions(problem, TensorStats(), facts, LOSSY)
    assert {item.refusal for item in (*before, *after)} == {""}
    assert all(item.is_measured for item in before)
    assert [item.is_measured for item in after] == [True, False, False]


@pytest.mark.parametrize(
    ("magnitude", "refusal"),
    [
        (32752.0, ""),
        (40000.0, "elements reach 4e+04; fp16 is safe up to 32752"),
        (1e9, "elements reach 1e+09; fp16 is safe up to 32752"),
    ],
)
def test_fp16_is_refused_where_its_range_is_too_small_and_bf16_is_not(
    magnitude: float, refusal: str
) -> None:
    stats = replace(STATS, max_magnitude=magnitude)
    choices = choose_precisions(make_problem(), stats, fake_facts("a100"), LOSSY)
    assert {item.precision: item.refusal for item in choices} == {FP32: "", BF16: "", FP16: refusal}


def test_what_the_machine_refuses_stays_refused_whatever_was_measured() -> None:
    _, *lower = choose_precisions(make_problem(), STATS, fake_facts("cpu"), LOSSY)
    assert all("natively, not it" in item.refusal for item in lower)


def test_a_machine_without_a_name_is_called_by_its_device_type() -> None:
    nameless = replace(fake_facts("cpu"), name="")
    choice, _ = lower_precisions(make_problem(), nameless, LOSSY)
    assert choice.refusal == "cpu computes fp64, fp32 natively, not it"
