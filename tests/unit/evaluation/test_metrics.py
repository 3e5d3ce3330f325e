import pytest
import torch

from adaattn.evaluation.metrics import compare_logits, paired_summary, quartiles, token_losses


def _direct(
    exact: torch.Tensor, other: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = (torch.log_softmax(x.double(), -1) for x in (exact, other))
    kl = torch.nn.functional.kl_div(second, first, reduction="none", log_target=True).sum(-1)
    index = targets[:, None]
    return (first.gather(-1, index) - second.gather(-1, index))[:, 0], kl


@pytest.mark.parametrize("change", [1e-4, 1e-2, 1.0, 30.0])
def test_differences_are_nearer_to_float64_than_two_float32_log_softmaxes(change: float) -> None:
    exact = torch.randn(64, 1000) * 3
    other = exact + change * torch.randn_like(exact)
    targets = torch.randint(0, 1000, (64,))
    loss, kl = _direct(exact, other, targets)
    (found,) = compare_logits(exact, [other], targets)
    first, second = torch.log_softmax(exact, -1), torch.log_softmax(other, -1)
    index = targets[:, None]
    eager_loss = (first.gather(-1, index) - second.gather(-1, index))[:, 0]
    eager_kl = (first.exp() * (first - second)).sum(-1)
    band = torch.finfo(torch.float32).eps
    for mine, eager, truth in (
        (found.loss_difference, eager_loss, loss),
        (found.divergence, eager_kl, kl),
    ):
        allowed = 2 * (eager - truth).abs().max() + band * (1 + truth.abs().max())
        assert (mine - truth).abs().max() <= allowed


def test_a_divergence_of_a_billionth_survives_float32() -> None:
    exact = torch.randn(32, 5000)
    other = exact + 5e-5 * torch.randn_like(exact)
    _, kl = _direct(exact, other, torch.zeros(32, dtype=torch.int64))
    (found,) = compare_logits(exact, [other], torch.zeros(32, dtype=torch.int64))
    first, second = torch.log_softmax(exact, -1), torch.log_softmax(other, -1)
    eager = (first.exp() * (first - second)).sum(-1)
    assert (found.divergence - kl).abs().max() < (eager - kl).abs().max()
    assert (found.divergence > 0).all()


def test_identical_logits_differ_by_exactly_nothing() -> None:
    logits = torch.randn(8, 100)
    (found,) = compare_logits(logits, [logits.clone()], torch.arange(8))
    assert torch.count_nonzero(found.divergence) == 0
    assert torch.count_nonzero(found.loss_difference) == 0


def test_tokens_that_a_model_forbids_with_minus_infinity_count_for_nothing() -> None:
    exact = torch.randn(4, 10)
    exact[:, 7:] = -torch.inf
    other = exact + 0.1
    other[:, 0] += 1.0
    loss, kl = _direct(exact[:, :7], other[:, :7], torch.arange(4))
    (found,) = compare_logits(exact, [other], torch.arange(4))
    torch.testing.assert_close(found.divergence, kl, rtol=1e-6, atol=0)
    torch.testing.assert_close(found.loss_difference, loss, rtol=1e-6, atol=0)


def test_losses_are_those_of_cross_entropy() -> None:
    logits, targets = torch.randn(16, 50), torch.randint(0, 50, (16,))
    truth = torch.nn.functional.cross_entropy(logits.double(), targets, reduction="none")
    eager = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    band = torch.finfo(torch.float32).eps * truth.abs().max()
    error = (token_losses(logits, targets) - truth).abs().max()
    assert error <= 2 * (eager - truth).abs().max() + band


def test_half_precision_logits_are_compared_in_float32() -> None:
    exact = torch.randn(4, 20).bfloat16()
    other = exact + 0.5
    other[:, 3] += 1
    (found,) = compare_logits(exact, [other], torch.arange(4))
    (wide,) = compare_logits(exact.float(), [other.float()], torch.arange(4))
    assert torch.equal(found.divergence, wide.divergence)


def test_a_paired_summary_is_mean_standard_error_and_mean_magnitude() -> None:
    mean, error, magnitude = paired_summary(torch.tensor([1.0, -1.0, 3.0, -3.0]).double())
    assert (mean, magnitude) == (0.0, 2.0)
    assert error == pytest.approx((20 / 3) ** 0.5 / 2)
    assert paired_summary(torch.zeros(0)) == (0.0, 0.0, 0.0)
    assert paired_summary(torch.ones(1).double()) == (1.0, 0.0, 1.0)


def test_quartiles_are_those_of_the_values_themselves_and_one_value_is_all_three() -> None:
    assert quartiles([7.0]) == (7.0, 7.0, 7.0)
    assert quartiles([3.0, 1.0]) == (1.5, 2.0, 2.5)
    assert quartiles([9.0, 1.0, 2.0, 3.0, 4.0]) == (2.0, 3.0, 4.0)
