"""How a compiled kernel is launched: what is handed over, and what is kept of tensors."""

from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adaattn.backends.hopper.gradient_launch import GradientVariant
from adaattn.backends.hopper.launch import choose
from adaattn.spec import MaskKind, Precision
from adaattn.testing import make_problem

compiled = pytest.importorskip("adaattn.backends.hopper.compiled")
driver = pytest.importorskip("triton.backends.nvidia.driver")

VIEW = ((2, 3, 64, 8), (1536, 512, 8, 1))


class Built:
    """Stands for Triton's compiled kernel: keeps what it is launched with."""

    def __init__(self, types: list[str], num_described: int) -> None:
        metas = [{"place": place} for place in range(num_described)]
        self.metadata = namedtuple("Metadata", "tensordesc_meta")(metas)
        self.src = SimpleNamespace(signature=dict(enumerate(types)), constants={})
        self.function, self.packed_metadata = "function", "metadata"
        self.launched: list[tuple[Any, ...]] = []

    def _init_handles(self) -> None:
        self.types = list(self.src.signature.values())
        assert self.metadata.tensordesc_meta is None

    def run(self, *given: Any) -> None:
        """Keep a launch."""
        self.launched.append(given)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Any]]:
    """Return where tensors lie that are described for TMA, and for which place."""
    found: list[tuple[int, Any]] = []

    def describe(tensor: Any, meta: Any) -> list[Any]:
        assert (tensor.shape, tensor.strides) == VIEW
        found.append((tensor.base.data_ptr(), meta["place"]))
        return ["map", *tensor.shape, *tensor.strides]

    monkeypatch.setattr(compiled, "make_tensordesc_arg", describe)
    return found


@pytest.mark.parametrize("has_mask", [False, True])
def test_a_launch_hands_over_what_tritons_own_does(has_mask: bool) -> None:
    mask = {"mask": MaskKind.ADDITIVE, "mask_shape": (1, 1, 256, 256)} if has_mask else {}
    problem = make_problem(precision=Precision.BF16, head_dim=64, len_q=256, len_k=256, **mask)
    variant = choose(problem)
    signature = compiled._signature(variant, compiled._constants(variant))
    metas = [{}] * sum(name.startswith("tensordesc") for name in signature.values())
    expected = [
        "i64" if name.startswith("*") else name
        for name in driver.expand_signature(signature.values(), metas)
        if name != "constexpr"
    ]
    assert list(compiled._launched_types(signature.values())) == expected


def test_a_backward_launch_hands_over_what_tritons_own_does() -> None:
    gradient_compiled = pytest.importorskip("adaattn.backends.hopper.gradient_compiled")
    types = list(gradient_compiled._types(GradientVariant(block_d=128), "main").values())
    described = [name for name in types if name.startswith("tensordesc")]
    expected = driver.expand_signature(described, [{}] * len(described))
    assert list(compiled._launched_types(described)) == expected


def test_a_tensor_is_described_once_for_each_place_and_address(
    encoded: list[tuple[int, Any]],
) -> None:
    built = Built(["tensordesc<bf16[1,1,64,64],x>"] * 2 + ["*fp32", "i32", "constexpr"], 2)
    launch = compiled.Kernel(built).bind([VIEW, VIEW])
    once = ["nvTmaDesc", *["i32"] * 4, *["i64"] * 4]
    assert built.types == [*once, *once, "i64", "i32"]
    first, second = torch.zeros(2, 3, 64, 8), torch.zeros(2, 3, 64, 8)
    described = ["map", *VIEW[0], *VIEW[1]]
    for _ in range(3):
        launch(7, 5, (first, second), 11, 13)
    assert encoded == [(first.data_ptr(), 0), (second.data_ptr(), 1)]
    launch(7, 5, (second, second), 11, 13)
    assert encoded[2:] == [(second.data_ptr(), 0)]
    head = (7, 1, 1, 5, "function", "metadata", None, None, None)
    assert built.launched == [(*head, *described, *described, 11, 13)] * 4


def test_no_more_than_a_limit_is_kept(
    encoded: list[tuple[int, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "_MOST_KEPT", 2)
    launch = compiled.Kernel(Built(["tensordesc<bf16[1,1,64,64],x>"], 1)).bind([VIEW])
    tensors = [torch.zeros(8) for _ in range(3)]
    for tensor in tensors:  # the third one has the others forgotten
        launch(1, 0, (tensor,))
    launch(1, 0, (tensors[2],))
    assert len(encoded) == 3
    launch(1, 0, (tensors[0],))
    assert len(encoded) == 4


def test_as_many_tensors_as_views_are_expected(encoded: list[tuple[int, Any]]) -> None:
    del encoded
    launch = compiled.Kernel(Built(["tensordesc<bf16[1,1,64,64],x>"], 1)).bind([VIEW])
    with pytest.raises(ValueError, match="zip"):
        launch(1, 0, ())
