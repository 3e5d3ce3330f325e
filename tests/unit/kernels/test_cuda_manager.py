"""The view of one device."""

import copy
import importlib
import pickle
from collections.abc import Callable

import pytest
import torch

from adaattn import hardware
from adaattn.errors import ArgumentError, ArgumentTypeError, DeviceError, DTypeError
from adaattn.kernels.cuda_utils import CUDAManager
from adaattn.spec import HardwareFacts, Precision

probe_module = importlib.import_module("adaattn.hardware.probe")


@pytest.fixture
def card(
    machine: Callable[..., HardwareFacts], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], CUDAManager]:
    """Return the view of an invented card, in a process that has seen none before."""

    def install(name: str) -> CUDAManager:
        machine(name)
        monkeypatch.setattr(CUDAManager, "_known", {})
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(hardware, "free_memory_bytes", lambda device: 10 << 30)
        probe_module._existing_index.cache_clear()
        return CUDAManager()

    return install


def test_a_process_has_one_view_of_each_device(card: Callable[[str], CUDAManager]) -> None:
    manager = card("h200")

    assert manager is CUDAManager("cuda") is CUDAManager(torch.device("cuda", 0))
    assert manager is not CUDAManager("cuda:1")
    assert CUDAManager("cpu") is CUDAManager(torch.device("cpu")) is not manager
    assert copy.deepcopy(manager) is manager
    assert pickle.loads(pickle.dumps(manager)) is manager


def test_a_view_shows_what_the_probe_found(card: Callable[[str], CUDAManager]) -> None:
    manager = card("h200")

    assert manager.is_cuda
    assert manager.name == "NVIDIA H200"
    assert manager.compute_capability == (9, 0)
    assert manager.num_processors == 132
    assert manager.total_memory_bytes == 141 << 30
    assert manager.free_memory_bytes == 10 << 30
    assert manager.max_threads_per_block == 1024
    assert repr(manager) == "CUDAManager('cuda:0': NVIDIA H200)"


@pytest.mark.parametrize(
    ("name", "fp16", "bf16", "fp8"),
    [
        ("h200", True, True, True),
        ("l40s", True, True, True),
        ("a100", True, True, False),
        ("v100", True, False, False),
        ("pascal", False, False, False),
    ],
)
def test_number_formats_follow_the_generation(
    card: Callable[[str], CUDAManager], name: str, fp16: bool, bf16: bool, fp8: bool
) -> None:
    manager = card(name)

    assert (manager.supports_fp16, manager.supports_bf16, manager.supports_fp8) == (fp16, bf16, fp8)
    assert manager.supports("fp32")
    assert manager.supports(Precision.FP16) is manager.supports("fp16") is fp16


# Five tiles of 64 columns in fp16 take 640 bytes a token, of 256 columns 2560, in fp32 5120.
@pytest.mark.parametrize(
    ("name", "kib", "narrow", "wide", "wide_fp32"),
    [
        ("h200", 227, 128, 64, 32),
        ("a100", 163, 128, 64, 32),
        ("l40s", 99, 128, 32, 16),
        ("v100", 96, 128, 32, 16),
        ("pascal", 48, 64, 16, 16),
    ],
)
def test_tiles_fit_the_shared_memory_of_the_generation(
    card: Callable[[str], CUDAManager],
    name: str,
    kib: int,
    narrow: int,
    wide: int,
    wide_fp32: int,
) -> None:
    manager = card(name)

    assert manager.block_memory_bytes == kib << 10
    assert manager.optimal_block_size(64) == narrow
    assert manager.optimal_block_size(256) == wide
    assert manager.optimal_block_size(256, torch.float32) == wide_fp32
    assert manager.optimal_block_size(8192, torch.float32) == 16


def test_an_amd_card_is_not_taken_for_the_nvidia_card_of_the_same_number(
    card: Callable[[str], CUDAManager], monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = card("h200")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert manager.block_memory_bytes == 64 << 10
    assert manager.optimal_block_size(128) == 32


def test_a_cpu_has_clear_values_too(machine: Callable[..., HardwareFacts]) -> None:
    facts = machine("cpu")
    manager = CUDAManager("cpu")

    assert not manager.is_cuda
    assert manager.compute_capability == (0, 0)
    assert manager.max_threads_per_block == 1
    assert manager.block_memory_bytes == facts.l2_bytes // 8
    assert manager.total_memory_bytes == 32 << 30
    assert manager.facts is facts
    assert manager.optimal_block_size(64, torch.float32) == 128


def test_the_tile_is_64_where_the_memory_of_a_block_is_unknown(
    machine: Callable[..., HardwareFacts],
) -> None:
    machine("cpu", l2_bytes=0)
    assert CUDAManager("cpu").optimal_block_size(64) == 64


def test_the_budget_is_a_share_of_what_is_free_or_else_of_all(
    machine: Callable[..., HardwareFacts], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine("cpu", memory_bytes=1000)
    manager = CUDAManager("cpu")

    monkeypatch.setattr(hardware, "free_memory_bytes", lambda device: 600)
    assert (manager.memory_budget_bytes(), manager.memory_budget_bytes(0.5)) == (540, 300)
    monkeypatch.setattr(hardware, "free_memory_bytes", lambda device: None)
    assert manager.memory_budget_bytes(0.5) == 500


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5])
def test_a_share_out_of_range_is_refused(share: float) -> None:
    with pytest.raises(ArgumentError, match=r"share: expected a number in \(0, 1\], got"):
        CUDAManager("cpu").memory_budget_bytes(share)


def test_wrong_arguments_are_refused() -> None:
    manager = CUDAManager("cpu")
    with pytest.raises(ArgumentError, match="head_dim: expected an integer of at least 1, got 0"):
        manager.optimal_block_size(0)
    with pytest.raises(DTypeError, match="dtype of the tile: expected float64"):
        manager.optimal_block_size(64, torch.int32)
    with pytest.raises(ArgumentError, match=r"precision: expected one of 'fp32', .* got 'fp7'"):
        manager.supports("fp7")
    with pytest.raises(ArgumentTypeError, match="precision: expected a Precision or 'fp32'"):
        manager.supports(16)  # type: ignore[arg-type]
    with pytest.raises(DeviceError, match="device: expected 'cpu' or 'cuda', got 'tpu'"):
        CUDAManager("tpu")
