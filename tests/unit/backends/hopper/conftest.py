"""The Hopper kernels' device code run on a CPU, in place of what is compiled of it."""

import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.unit.backends import simulation
from tests.unit.backends.simulation import World, bound, device_code

from adaattn.backends.hopper import forward as host
from adaattn.backends.hopper import gradient_launch, gradient_passes, gradients, prepared
from adaattn.backends.hopper.gradient_launch import GradientVariant, Sharing
from adaattn.backends.hopper.launch import ROWS, Variant, box_rows
from adaattn.spec import MaskKind

FILES = (
    *("device/barriers", "device/stages"),
    *(
        f"hopper/{name}"
        for name in ("mask_bits", "scores", "places", "pipeline", "results", "dropped", "kernel",
                     "gradient_scores", "gradient_masks", "backward", "gradient_order",
                     "gradient_rows", "backward_keys", "backward_queries")
    ),
)  # fmt: skip


late = simulation.late


class Machine:
    """Stands for compiled kernels: runs their source, one block of threads after the other."""

    def __init__(self) -> None:
        self.others: dict[str, Any] = {}

    def replace(self, name: str, remake: Callable[[Any], Any]) -> None:
        """Have what is made of a function of the source run in its place, from now on."""
        self.others[name] = remake(device_code(FILES)[name])
        host.bound.cache_clear()
        gradients.backward_of.cache_clear()

    def __call__(self, variant: Variant, device: torch.device) -> Any:
        compiled = pytest.importorskip("adaattn.backends.hopper.compiled")
        space = device_code(FILES)
        space.update(self.others)
        code = space["forward"]
        tiling = variant.tiling
        columns = (
            tiling.block_d,
            tiling.block_d,
            tiling.block_v,
            tiling.block_v // tiling.out_parts,
        )
        boxes = list(zip(box_rows(tiling), columns, strict=True))

        if tiling.stages_m:
            columns = tiling.block_n // (2 if variant.mask is MaskKind.BOOLEAN else 1)
            boxes.append((ROWS, columns))
        return bound(code, compiled._constants(variant), boxes)

    def backward(self, variant: GradientVariant, device: torch.device) -> Any:
        """Stand for the compiled kernels of a backward pass."""
        compiled = pytest.importorskip("adaattn.backends.hopper.gradient_compiled")
        space = device_code(FILES)
        space.update(self.others)
        query, upstream = (variant.block_m, variant.block_d), (variant.block_m, variant.block_v)
        key, value = (variant.block_n, variant.block_d), (variant.block_n, variant.block_v)
        read, written = (query, key, value, upstream), (key, value)
        words = [(2 * variant.block_m,)] if variant.packs_mask else []
        boxes: dict[str, Any] = {
            "main": (*read, (2 * variant.block_m,), *written, (16, 256), *words),
            "keys": (*read, (variant.block_m,), *written),
            "queries": (*read, query),
        }
        return tuple(
            bound(
                space[compiled._FUNCTIONS[kind].__name__],
                compiled.constants_of(variant, kind),
                boxes.get(kind, ()),
            )
            for kind in compiled.kinds_of(variant)
        )


@pytest.fixture(autouse=True)
def _for_any_number_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have grouped heads go the way of many blocks: tests are small, and those of few say so."""
    monkeypatch.setattr(gradient_launch, "_fastest_sharing", lambda *given: Sharing.TURNS)


@pytest.fixture(scope="session")
def once() -> Callable[..., None]:
    """Return what calls a function the first time that it is given something, known by its repr.

    Many faults are shown by one problem, which is held to the definition unbroken first.
    """
    seen: set[str] = set()

    def call(thing: object, function: Callable[[], None]) -> None:
        key = f"{getattr(function, 'func', function)}{thing!r}"
        if key not in seen:
            function()
            seen.add(key)

    return call


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each head of a group blocks of keys of its own."""
    monkeypatch.setattr(gradient_launch, "_fastest_sharing", lambda *given: Sharing.APART)


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Have the kernel's source run in its place, on three processors."""
    machine = Machine()
    monkeypatch.setattr(prepared, "_compiled", machine)
    monkeypatch.setattr(prepared, "address_of", lambda tensor: tensor)
    monkeypatch.setattr(prepared, "_NO_ADDRESSES", prepared.NOTHING_BESIDE)
    monkeypatch.setattr(prepared, "probe", lambda device: SimpleNamespace(num_processors=3))
    monkeypatch.setattr(prepared, "note", lambda kernel: None)
    monkeypatch.setattr(gradients, "_compiled", machine.backward)
    monkeypatch.setattr(gradient_passes, "address_of", lambda tensor: tensor)
    monkeypatch.setattr(gradients, "note", lambda kernel: None)
    gradients.backward_of.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    host.bound.cache_clear()
    prepared._LISTED.clear()
    return machine


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have the blocks of a launch run at the same time."""
    monkeypatch.setattr(World, "are_together", True)
    random.seed(0)
    yield
