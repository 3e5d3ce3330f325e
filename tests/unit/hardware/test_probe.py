"""Facts of invented machines: every architecture, without its card."""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from adaattn.errors import DeviceError
from adaattn.hardware import clear_cache, probe
from adaattn.hardware.defaults import default_rates
from adaattn.spec import HardwareFacts, Precision

# The package exports a function of the module's name.
probe_module = importlib.import_module("adaattn.hardware.probe")

FP64, FP32, BF16, FP16 = Precision.FP64, Precision.FP32, Precision.BF16, Precision.FP16
FP8 = (Precision.FP8_E4M3, Precision.FP8_E5M2)
INT8 = Precision.INT8


@pytest.fixture(autouse=True)
def _fresh_facts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("ADAATTN_CACHE", str(tmp_path))
    clear_cache()
    yield
    clear_cache()


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def install(
        name: str, capability: tuple[int, int], *, processors: int = 100, count: int = 2
    ) -> None:
        properties = SimpleNamespace(
            name=name,
            major=capability[0],
            minor=capability[1],
            total_memory=24 << 30,
            multi_processor_count=processors,
            L2_cache_size=6 << 20,
        )
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)

    return install


@pytest.fixture
def fake_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    def install(*, supported: tuple[str, ...] = (), flags: str = "sse2 avx2") -> None:
        for question in ("avx512_bf16", "amx_tile", "amx_fp16", "vnni"):
            monkeypatch.setattr(
                torch.cpu,
                f"_is_{question}_supported",
                lambda answer=question in supported: answer,
                raising=False,
            )
        cpu_info = tmp_path / "cpuinfo"
        cpu_info.write_text(f"model name\t: Test CPU @ 2GHz\nflags\t\t: {flags}\n\n")
        monkeypatch.setattr(probe_module, "_CPU_INFO", cpu_info)

    return install


@pytest.mark.parametrize(
    ("name", "capability", "instructions"),
    [
        ("NVIDIA B200", (10, 0), (FP64, FP32, BF16, FP16, *FP8, INT8)),
        ("NVIDIA GeForce RTX 5090", (12, 0), (FP64, FP32, BF16, FP16, *FP8, INT8)),
        ("NVIDIA H200", (9, 0), (FP64, FP32, BF16, FP16, *FP8, INT8)),
        ("NVIDIA L4", (8, 9), (FP64, FP32, BF16, FP16, *FP8, INT8)),
        ("NVIDIA GeForce RTX 3090", (8, 6), (FP64, FP32, BF16, FP16, INT8)),
        ("NVIDIA A100-SXM4-40GB", (8, 0), (FP64, FP32, BF16, FP16, INT8)),
        ("Tesla T4", (7, 5), (FP64, FP32, FP16, INT8)),
        ("Tesla V100-SXM2-32GB", (7, 0), (FP64, FP32, FP16)),
        ("Tesla P100-PCIE-16GB", (6, 0), (FP64, FP32)),
    ],
)
def test_each_architecture_has_its_instructions(
    fake_gpu: Callable[..., None],
    name: str,
    capability: tuple[int, int],
    instructions: tuple[Precision, ...],
) -> None:
    fake_gpu(name, capability)

    facts = probe("cuda")

    assert (facts.device_type, facts.name) == ("cuda", name)
    assert facts.compute_capability == capability
    assert facts.instructions == instructions
    assert (facts.memory_bytes, facts.num_processors, facts.l2_bytes) == (24 << 30, 100, 6 << 20)
    assert all(facts.rates.flops_of(precision) > 0 for precision in instructions)
    assert facts.rates.bandwidth > 0 and facts.rates.launch_s > 0


def test_an_amd_card_is_not_taken_for_the_nvidia_card_of_the_same_number(
    fake_gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gpu("AMD Instinct MI300X", (9, 4))
    monkeypatch.setattr(torch.version, "hip", "6.4")

    assert probe("cuda").instructions == (FP64, FP32, BF16, FP16)


def test_a_known_card_gets_its_data_sheet_and_an_unknown_one_a_default(
    fake_gpu: Callable[..., None],
) -> None:
    fake_gpu("NVIDIA A100-SXM4-80GB", (8, 0))
    assert probe("cuda").rates.source.startswith("datasheet NVIDIA A100")

    clear_cache()
    fake_gpu("NVIDIA A100-SXM4-80GB MIG 1g.10gb", (8, 0), processors=14)
    slice_rates = probe("cuda").rates
    assert slice_rates.source == "default of 14 multiprocessors"
    assert slice_rates.flops_of(BF16) < 0.2 * 312e12


def test_one_thread_is_not_called_threads() -> None:
    facts = HardwareFacts(device_type="cpu", num_processors=1)
    assert default_rates(facts).source == "default of 1 thread"
    assert default_rates(replace(facts, num_processors=2)).source == "default of 2 threads"


def test_plain_cuda_is_the_current_device(
    fake_gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gpu("NVIDIA H200", (9, 0))
    seen: list[int] = []
    properties = torch.cuda.get_device_properties(0)

    def record(index: int) -> object:
        seen.append(index)
        return properties

    monkeypatch.setattr(torch.cuda, "get_device_properties", record)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)

    assert probe() == probe("cuda") == probe(torch.device("cuda", 1))
    assert seen == [1]
    probe("cuda:0")
    assert seen == [1, 0]


def test_facts_are_asked_for_once_until_the_cache_is_cleared(
    fake_gpu: Callable[..., None],
) -> None:
    fake_gpu("NVIDIA H200", (9, 0))
    first = probe("cuda:0")
    fake_gpu("Tesla T4", (7, 5))
    assert probe("cuda:0") is first

    clear_cache()
    assert probe("cuda:0").name == "Tesla T4"


def test_a_machine_without_cuda_is_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    facts = probe()

    assert facts.device_type == "cpu"
    assert facts.name and facts.compute_capability == (0, 0)
    assert facts.num_processors == torch.get_num_threads()
    assert facts.memory_bytes > 0


@pytest.mark.parametrize("device", ["meta", torch.device("meta"), "warp9"])
def test_an_unknown_device_is_refused(device: str | torch.device) -> None:
    with pytest.raises(DeviceError, match=r"expected 'cpu' or 'cuda', got '(meta|warp9)'"):
        probe(device)


def test_cuda_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="expected 'cpu', got cuda:0; this PyTorch sees no CUDA"):
        probe("cuda")


def test_a_card_that_is_not_there_is_refused(fake_gpu: Callable[..., None]) -> None:
    fake_gpu("NVIDIA H200", (9, 0), count=2)
    with pytest.raises(DeviceError, match="expected an index below 2, got cuda:2"):
        probe("cuda:2")


@pytest.mark.parametrize(
    ("supported", "flags", "instructions"),
    [
        ((), "sse2 avx2", (FP64, FP32)),
        (("vnni",), "avx2", (FP64, FP32, INT8)),
        (("avx512_bf16",), "avx512f", (FP64, FP32, BF16)),
        (("amx_tile",), "avx512f", (FP64, FP32, BF16)),
        (("amx_tile", "amx_fp16"), "avx512f", (FP64, FP32, BF16, FP16)),
        ((), "avx512f avx512_fp16", (FP64, FP32, FP16)),
    ],
)
def test_a_cpu_has_the_formats_that_its_flags_name(
    fake_cpu: Callable[..., None],
    supported: tuple[str, ...],
    flags: str,
    instructions: tuple[Precision, ...],
) -> None:
    fake_cpu(supported=supported, flags=flags)

    facts = probe("cpu")

    assert facts.name == "Test CPU @ 2GHz"
    assert facts.instructions == instructions
    assert facts.rates.source == default_rates(facts).source
    assert facts.rates.flops_of(FP32) > facts.rates.flops_of(FP64) > 0
    is_native = BF16 in instructions
    assert (facts.rates.flops_of(BF16) > facts.rates.flops_of(FP32)) == is_native


def test_a_torch_without_the_questions_about_the_cpu_is_answered_no(
    monkeypatch: pytest.MonkeyPatch, fake_cpu: Callable[..., None]
) -> None:
    fake_cpu(supported=("amx_tile", "amx_fp16", "vnni"))
    for question in ("avx512_bf16", "amx_tile", "amx_fp16", "vnni"):
        monkeypatch.delattr(torch.cpu, f"_is_{question}_supported", raising=False)

    assert probe("cpu").instructions == (FP64, FP32)


def test_a_system_without_proc_still_has_facts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(probe_module, "_CPU_INFO", tmp_path / "absent")
    monkeypatch.setattr(probe_module, "_CPU_CACHES", tmp_path / "absent")

    facts = probe("cpu")

    assert facts.name and facts.l2_bytes == 0


def test_the_last_level_cache_is_the_largest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for index, size in enumerate(("48K", "2048K", "32M")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size + "\n")
    monkeypatch.setattr(probe_module, "_CPU_CACHES", tmp_path)

    assert probe("cpu").l2_bytes == 32 << 20


def test_facts_follow_the_number_of_threads() -> None:
    before = torch.get_num_threads()
    facts = probe("cpu")
    try:
        torch.set_num_threads(before + 1)
        assert probe("cpu").num_processors == before + 1
    finally:
        torch.set_num_threads(before)
    assert probe("cpu") is facts
