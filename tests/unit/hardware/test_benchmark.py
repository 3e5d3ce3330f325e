"""The micro-benchmark on the machine at hand. Only what must hold on any machine is asserted."""

import itertools
import math
from pathlib import Path

import pytest
import torch

from adaattn.hardware import benchmark
from adaattn.hardware.benchmark import run_benchmark
from adaattn.hardware.probe import describe
from adaattn.hardware.workloads import sdpa_kernels
from adaattn.spec import Precision, Rates

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def measured() -> Rates:
    return run_benchmark(CPU, describe(CPU))


def test_every_number_is_positive_and_finite(measured: Rates) -> None:
    numbers = [measured.bandwidth, measured.launch_s]
    numbers += [flops for _, flops in measured.flops]
    numbers += [share for _, share in measured.efficiency]
    assert all(math.isfinite(number) and number > 0 for number in numbers)
    assert measured.source.startswith("measured")


def test_every_floating_point_format_has_a_rate(measured: Rates) -> None:
    expected = {Precision.FP64, Precision.FP32, Precision.BF16, Precision.FP16}
    assert expected <= {precision for precision, _ in measured.flops}


def test_the_kernels_of_fp32_are_measured_at_each_head_dimension(measured: Rates) -> None:
    keys = dict(measured.efficiency)
    for dim in (64, 128):
        for name in ("sdpa.flash", "sdpa.math", "decode.sdpa", "decode.grouped"):
            assert f"{name}:fp32:{dim}" in keys
            share = measured.efficiency_of(name, Precision.FP32, dim, default=-1.0)
            assert share == keys[f"{name}:fp32:{dim}"]


def test_rates_are_far_from_impossible(measured: Rates) -> None:
    """No thread does 10 TFLOP/s in fp32 nor copies 1 TB/s; a wrong unit would."""
    threads = torch.get_num_threads()
    assert 1e7 < measured.flops_of(Precision.FP32) < threads * 1e13
    assert 1e7 < measured.bandwidth < threads * 1e12
    assert 1e-8 < measured.launch_s < 1.0


def test_the_random_state_and_the_autograd_mode_stay_the_users(measured: Rates) -> None:
    state = torch.random.get_rng_state()
    bench = benchmark._Bench(CPU, benchmark._cpu_sizes(describe(CPU)))
    bench.copy_bandwidth()
    bench._random(4, 4)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.is_grad_enabled()


def test_a_kernel_that_is_not_supported_is_left_out_and_logged_for_debugging(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = benchmark._Bench(CPU, benchmark._cpu_sizes(describe(CPU)))

    def refuse(*tensors: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("no such kernel here")

    with caplog.at_level("DEBUG", "adaattn"):
        assert bench._seconds("sdpa.cudnn:bf16:64", lambda: refuse) is None
    assert "not measured: sdpa.cudnn:bf16:64: no such kernel here" in caplog.text


def test_a_mistake_that_is_not_a_missing_kernel_is_not_hidden() -> None:
    bench = benchmark._Bench(CPU, benchmark._cpu_sizes(describe(CPU)))

    def broken() -> torch.Tensor:
        raise KeyError("a mistake of ours")

    with pytest.raises(KeyError, match="a mistake of ours"):
        bench._seconds("product fp32 128", lambda: broken)


def test_the_fastest_run_counts_across_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = benchmark._Bench(CPU, benchmark._cpu_sizes(describe(CPU)))
    seconds = iter([9.0, 0.5, 0.2, 0.4, 9.0, 0.8, 0.3, 0.7])
    monkeypatch.setattr(benchmark, "_host_once", lambda call: next(seconds))

    assert bench._fastest("cell", lambda: None) == 0.2
    assert bench._fastest("cell", lambda: None) == 0.2
    assert bench.fastest == {"cell": 0.2}


@pytest.mark.parametrize(
    ("after", "is_settled"),
    [
        ({"a": 1.0, "b": 1.0}, True),
        ({"a": 0.95, "b": 1.0}, True),
        ({"a": 0.5, "b": 1.0}, False),
        ({"a": 1.0, "b": 1.0, "c": 1.0}, False),
    ],
)
def test_rounds_end_when_no_measurement_gets_faster(
    after: dict[str, float], is_settled: bool
) -> None:
    assert benchmark._settled({"a": 1.0, "b": 1.0}, after) is is_settled


@pytest.mark.parametrize(
    ("waiting_s", "source"), [(0.0, "measured"), (0.9, "measured on a busy machine")]
)
def test_rates_measured_while_waiting_for_a_processor_are_not_trusted(
    monkeypatch: pytest.MonkeyPatch, waiting_s: float, source: str
) -> None:
    """Under constant load every round is slow alike, and settling alone once kept 1 GFLOP/s."""
    clock = itertools.count()
    threads = torch.get_num_threads()
    monkeypatch.setattr(benchmark.time, "perf_counter", lambda: float(next(clock)))
    queue = itertools.count()
    monkeypatch.setattr(benchmark, "_queued_seconds", lambda: waiting_s * threads * next(queue))

    def constant(bench: benchmark._Bench, instructions: object) -> Rates:
        bench.fastest["cell"] = 0.5
        return Rates(source=benchmark.MEASURED)

    monkeypatch.setattr(benchmark, "_round", constant)

    assert run_benchmark(CPU, describe(CPU)).source == source


def test_waiting_for_a_processor_is_read_over_all_threads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for thread, text in (("7", "100 2000000000 3\n"), ("8", "100 500000000 3\n"), ("9", "")):
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "schedstat").write_text(text)
    monkeypatch.setattr(benchmark, "_TASKS", tmp_path)
    assert benchmark._queued_seconds() == 2.5

    monkeypatch.setattr(benchmark, "_TASKS", tmp_path / "absent")
    assert benchmark._queued_seconds() == 0.0


def test_a_product_held_up_by_other_work_does_not_end_the_search_for_the_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each call takes 8 ms whatever its size, as at a barrier on a busy machine, plus its work."""
    sides: list[int] = []

    def seconds(bench: benchmark._Bench, label: str, make: object) -> float:
        sides.append(int(label.rsplit(" ", 1)[1]))
        return 8e-3 + 2.0 * sides[-1] ** 3 / 1e12

    monkeypatch.setattr(benchmark._Bench, "_seconds", seconds)
    sizes = benchmark._cpu_sizes(describe(CPU))

    rates = dict(benchmark._Bench(CPU, sizes).product_rates(()))

    assert max(sides) == sizes.last_matrix
    assert 0.5e12 < rates[Precision.FP32] < 1e12


def test_a_machine_that_never_settles_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[int] = []

    def get_faster(bench: benchmark._Bench, instructions: object) -> Rates:
        rounds.append(1)
        bench.fastest["cell"] = 0.5 ** len(rounds)
        return Rates(source=benchmark.MEASURED)

    monkeypatch.setattr(benchmark, "_round", get_faster)
    monkeypatch.setattr(benchmark, "_queued_seconds", lambda: 0.0)

    rates = run_benchmark(CPU, describe(CPU))

    assert rates.source == "measured on a busy machine"
    assert len(rounds) == benchmark._MAX_ROUNDS


def test_cudnn_and_flash_are_never_asked_for_fp32_on_cuda() -> None:
    """cuDNN's operator does not refuse fp32: on an H200 it "ran" at 12 times fp32's rate."""
    assert set(sdpa_kernels("cuda", Precision.FP32)) == {"sdpa.efficient", "sdpa.math"}
    assert set(sdpa_kernels("cuda", Precision.BF16)) == {
        "sdpa.cudnn",
        "sdpa.efficient",
        "sdpa.flash",
        "sdpa.math",
    }
