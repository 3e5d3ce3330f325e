"""The same numbers on a GPU as on the CPU, judged by the float64 results of the CPU."""

import pytest
import torch

from adaattn.linalg.bounds import dropped_mass, value_radius
from adaattn.linalg.entropy import (
    attention_entropy,
    multi_scale_entropy,
    sampled_attention_entropy,
)
from adaattn.linalg.low_rank import effective_rank, principal_components, randomized_svd
from adaattn.linalg.precision import (
    Granularity,
    Scheme,
    hadamard_rotate,
    quantize,
    smooth_keys,
)
from adaattn.spec import Align, Precision
from adaattn.testing import assert_matches

pytestmark = pytest.mark.gpu


def attention_inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return 2 * torch.randn(2, 8, 257, 64), 2 * torch.randn(2, 2, 300, 64)


def test_entropies_agree_between_devices() -> None:
    query, key = attention_inputs()
    for is_causal in (False, True):
        arguments = {"is_causal": is_causal, "align": Align.BOTTOM_RIGHT}
        for measured in (
            lambda q, k, a=arguments: attention_entropy(q, k, max_chunk_bytes=10**6, **a),
            lambda q, k, a=arguments: sampled_attention_entropy(q, k, **a).mean,
            lambda q, k, a=arguments: multi_scale_entropy(q, k, rows=50, **a).bits,
        ):
            actual = measured(query.cuda(), key.cuda())
            exact = measured(query.double(), key.double())
            assert actual.is_cuda
            assert_matches(actual.cpu(), exact, measured(query, key), summands=300 * 64)


def test_entropy_gradients_agree_between_devices() -> None:
    def gradient(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        query = query.detach().requires_grad_()
        attention_entropy(query, key, is_causal=True, max_chunk_bytes=10**6).sum().backward()
        return query.grad

    query, key = attention_inputs()
    actual = gradient(query.cuda(), key.cuda()).cpu()
    exact = gradient(query.double(), key.double())
    assert_matches(actual, exact, gradient(query, key), summands=300 * 64)


def test_spectra_agree_between_devices_and_bounds_hold_there() -> None:
    matrix = torch.randn(3, 400, 6) @ torch.randn(3, 6, 64) + 0.01 * torch.randn(3, 400, 64)
    for measured in (
        lambda x: randomized_svd(x, 6).s,
        lambda x: principal_components(x, 6).residual_norms,
        value_radius,
    ):
        exact, eager = measured(matrix.double()), measured(matrix)
        assert_matches(measured(matrix.cuda()).cpu(), exact, eager, summands=400 * 64)
    # A Gram matrix magnifies the rounding of small singular values by the condition number.
    values = torch.linalg.svdvals(matrix.double())
    summands = int(400 * 64 * (values[:, 0] / values[:, -1]).max().square())
    ranks = effective_rank(matrix.double())
    assert_matches(effective_rank(matrix.cuda()).cpu(), ranks, ranks, summands=summands)
    on_gpu = matrix.cuda()
    found = randomized_svd(on_gpu, 4)
    residual = on_gpu.double() - found.reconstruct().double()
    assert (torch.linalg.matrix_norm(residual, 2) <= found.spectral_bound).all()
    assert (found.frobenius_error >= found.spectral_bound * 0.1).all()


def test_gradients_of_decompositions_are_finite_there_too() -> None:
    matrix = (torch.randn(40, 3) @ torch.randn(3, 20)).cuda().requires_grad_()
    loss = randomized_svd(matrix, 5).reconstruct().square().sum() + effective_rank(matrix)
    (loss + principal_components(matrix, 5).residual_norms.sum()).backward()
    assert matrix.grad.isfinite().all()


def test_codes_are_the_same_on_both_devices() -> None:
    tensor = torch.randn(2, 3, 130, 63)
    for precision in (Precision.FP8_E4M3, Precision.FP8_E5M2, Precision.INT8, Precision.INT4):
        for granularity in Granularity:
            for scheme in Scheme:
                if scheme is Scheme.ASYMMETRIC and precision not in (6, 7):
                    continue
                stored = quantize(tensor.cuda(), precision, granularity, scheme=scheme)
                error = (stored.dequantize() - tensor.cuda()).abs()
                assert (error <= stored.error_bound()).all()
                host = quantize(tensor, precision, granularity, scheme=scheme)
                same = stored.codes().cpu() == host.codes()
                assert same.double().mean() > 1 - 1 / tensor.shape[-2]


def test_rotations_and_masses_agree_between_devices() -> None:
    tensor = torch.randn(2, 3, 70, 128)
    for measured in (
        hadamard_rotate,
        lambda x: smooth_keys(x)[0],
        lambda x: dropped_mass(x, 64, torch.zeros_like(x[..., 0])),
    ):
        exact, eager = measured(tensor.double()), measured(tensor)
        assert_matches(measured(tensor.cuda()).cpu(), exact, eager, summands=128)
