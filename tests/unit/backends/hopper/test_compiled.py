"""How a compiled kernel is launched: what is handed over, and what is kept of tensors."""

import re
from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adaattn.backends.device import launch as launches
from adaattn.backends.hopper.gradient_launch import GradientVariant
from adaattn.backends.hopper.launch import choose
from adaattn.spec import MaskKind, Precision
from adaattn.testing import make_problem

compiled = pytest.importorskip("adaattn.backends.hopper.compiled")
tma = pytest.importorskip("adaattn.backends.device.tma")
gradient_compiled = pytest.importorskip("adaattn.backends.hopper.gradient_compiled")
driver = pytest.importorskip("triton.backends.nvidia.driver")

VIEW = ((2, 3, 64, 8), (1536, 512, 8, 1))
TYPE = "tensordesc<bf16[1,1,64,64],x>"
HEAD = (7, 1, 1, 5, "function", "metadata", None, None, None)


def metadata(**values: Any) -> Any:
    """Return a kernel's metadata as Triton keeps it."""
    return namedtuple("Metadata", values)(**values)


class Built:
    """Stands for Triton's compiled kernel: keeps what it is launched with."""

    def __init__(self, types: list[str], num_described: int) -> None:
        self.metadata = metadata(tensordesc_meta=[{"place": it} for it in range(num_described)])
        self.src = SimpleNamespace(signature=dict(enumerate(types)), constants={})
        self.function, self.packed_metadata = "function", "metadata"
        # Shared with the copy that is launched.
        self.launched: list[tuple[Any, ...]] = []
        self.types: list[str] = []

    def _init_handles(self) -> None:
        self.types += self.src.signature.values()
        assert self.metadata.tensordesc_meta is None

    def run(self, *given: Any) -> None:
        """Keep a launch."""
        self.launched.append(given)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return where tensors lie that are described for TMA, and for which place."""
    found: list[tuple[int, int]] = []

    def describe(tensor: Any, meta: Any) -> list[Any]:
        assert (tensor.shape, tensor.strides) == VIEW
        found.append((tensor.base.data_ptr(), meta["place"]))
        return _description(tensor.base, meta["place"])

    monkeypatch.setattr(tma, "make_tensordesc_arg", describe)
    return found


def _description(tensor: torch.Tensor, place: int) -> list[Any]:
    return [("map", tensor.data_ptr(), place), *VIEW[0], *VIEW[1]]


def _taken_by_triton(types: list[str]) -> list[str]:
    """Return the types in C of what Triton's own launch hands to a kernel."""
    metas = [{}] * sum(name.startswith("tensordesc") for name in types)
    if hasattr(driver, "expand_signature"):
        names = [name for name in driver.expand_signature(types, metas) if name != "constexpr"]
        return [driver.ty_to_cpp(name) for name in names]
    source = driver.make_launcher({}, dict(enumerate(types)), metas)  # Triton 3.6
    (found,) = re.findall(r"void _launch\(([^)]*)\)", source)
    declared = [item.split()[0] for item in found.split(", ")]
    floats = {"uint16_t": "double", "uint32_t": "double"}
    return [floats.get(name, name) for name in declared[declared.index("CUtensorMap") :]]


@pytest.mark.parametrize("kind", ["plain", "mask", "main", "keys", "queries"])
def test_a_launch_hands_over_what_tritons_own_does(kind: str) -> None:
    if kind in gradient_compiled._FUNCTIONS:
        columns = 128 if kind == "main" else 256
        variant = GradientVariant(block_d=columns, block_v=columns, is_split=kind != "main")
        assert kind in gradient_compiled.kinds_of(variant)
        types = gradient_compiled._types(variant, kind)
        function = gradient_compiled._FUNCTIONS[kind]
        constants = gradient_compiled.constants_of(variant, kind)
    else:
        mask = {"mask": MaskKind.ADDITIVE, "mask_shape": (1, 1, 256, 256)} if kind == "mask" else {}
        problem = make_problem(precision=Precision.BF16, head_dim=64, len_q=256, len_k=256, **mask)
        forward = choose(problem)
        types, constants = compiled._types(forward), compiled._constants(forward)
        function = compiled.kernel.forward
    listed = list(tma.signature_of(function, types, constants).values())
    found = [driver.ty_to_cpp(name) for name in launches._launched_types(listed)]
    expected = [name.replace("CUdeviceptr", "int64_t") for name in _taken_by_triton(listed)]
    assert found == expected


def test_triton_makes_the_launch_of_what_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = pytest.importorskip("triton.compiler.compiler")
    made, launched = [], []

    def launcher(source: Any, known: Any) -> Any:
        made.append((list(source.signature.values()), source.constants, known.tensordesc_meta))
        return lambda *given: launched.append(given)

    active = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_target=lambda: SimpleNamespace(warp_size=32),
        launcher_cls=launcher,
        utils=SimpleNamespace(load_binary=lambda *given: ("module", "function", 168, 0, 1024)),
    )
    monkeypatch.setattr(compiler, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(compiler, "max_shared_mem", lambda device: 2**20)
    kernel = object.__new__(compiler.CompiledKernel)
    kernel.module = kernel.function = kernel._run = None
    kernel.src = SimpleNamespace(signature={0: TYPE, 1: "*fp32", 2: "constexpr"}, constants={2: 1})
    kernel.metadata = metadata(tensordesc_meta=[{}], shared=0, num_warps=4, tmem_size=None)
    kernel.packed_metadata, kernel.name, kernel.kernel = "metadata", "name", b""
    kernel.metadata_group, kernel.hash = {}, ""
    monkeypatch.setattr(tma, "make_tensordesc_arg", lambda tensor, meta: ["map"])
    tma.Launcher(kernel).bind([VIEW])(7, 5, (torch.zeros(8),), 11)
    assert made == [(["nvTmaDesc", *["i32"] * 4, *["i64"] * 4, "i64"], {}, None)]
    assert launched == [(*HEAD, "map", 11)]


def test_a_tensor_is_described_once_for_each_place_and_address(
    encoded: list[tuple[int, int]],
) -> None:
    built = Built([TYPE, TYPE, "*fp32", "i32", "constexpr"], 2)
    launch = tma.Launcher(built).bind([VIEW, VIEW])
    once = ["nvTmaDesc", *["i32"] * 4, *["i64"] * 4]
    assert built.types == [*once, *once, "i64", "i32"]
    first, second = torch.zeros(2, 3, 64, 8), torch.zeros(2, 3, 64, 8)
    pairs = [(first, second), (second, first), (first, first), (first, second)]
    for pair in pairs:
        launch(7, 5, pair, 11, 13)
    expected = [(it.data_ptr(), place) for pair in pairs[:2] for place, it in enumerate(pair)]
    assert encoded == expected
    for pair, given in zip(pairs, built.launched, strict=True):
        described = [*_description(pair[0], 0), *_description(pair[1], 1)]
        assert given == (*HEAD, *described, 11, 13)


def test_layouts_of_one_kernel_share_no_description(encoded: list[tuple[int, int]]) -> None:
    built = Built([TYPE], 1)
    kernel, tensor = tma.Launcher(built), torch.zeros(8)
    for launch in (kernel.bind([VIEW]), kernel.bind([VIEW])):
        launch(7, 5, (tensor,))
    assert len(encoded) == 2


def test_no_more_than_a_limit_is_kept_of_all_layouts(
    encoded: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tma, "_MOST_KEPT", 2)
    kernel = tma.Launcher(Built([TYPE], 1))
    one, other = kernel.bind([VIEW]), kernel.bind([VIEW])
    first, second = torch.zeros(8), torch.zeros(8)
    one(1, 0, (first,))
    other(1, 0, (first,))
    one(1, 0, (second,))  # has the two before forgotten
    one(1, 0, (second,))
    assert len(encoded) == 3
    other(1, 0, (first,))
    assert len(encoded) == 4


def test_as_many_tensors_as_views_are_expected(encoded: list[tuple[int, int]]) -> None:
    del encoded
    launch = tma.Launcher(Built([TYPE], 1)).bind([VIEW])
    with pytest.raises(ValueError, match="zip"):
        launch(1, 0, ())
