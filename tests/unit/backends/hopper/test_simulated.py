"""The Hopper kernel's own device code, run on a CPU: each warpgroup a thread, TMA a copy.

The files of device code are executed with Gluon's words replaced: tiles are tensors, asynchronous
products are done at once, barriers block. What it shows is that positions, masks and barriers are
right, and that nothing is read or written outside of a tensor; what it cannot show is whether the
compiler keeps asynchronous work in order.
"""

import ast
import inspect
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adaattn import _constants
from adaattn.backends import hopper
from adaattn.backends.block_list import BlockList
from adaattn.backends.hopper import forward as host
from adaattn.backends.hopper import prepared
from adaattn.backends.hopper.launch import Variant, box_rows
from adaattn.backends.interface import Result, Tensors
from adaattn.spec import Align, AttentionProblem, Aux, HeadGroup, MaskKind, Precision
from adaattn.testing import (
    assert_results_match,
    attention,
    cast_tensors,
    make_problem,
    make_tensors,
    num_summands,
    poisoned_memory,
)

FILES = ("scores", "places", "pipeline", "kernel")
PATIENCE_S = 30.0
"""After which a barrier that nobody reaches is a deadlock."""

_LOCAL = threading.local()


class Tile(torch.Tensor):
    """A number or tile of the device: assignment never changes what another name holds."""

    type = SimpleNamespace(layout=None)  # type: ignore[assignment]

    def __iadd__(self, other: Any) -> Any:
        return self + other

    def __ixor__(self, other: Any) -> Any:
        return self ^ other


def tile(value: Any) -> Any:
    """Return a value of the device."""
    made = value if isinstance(value, torch.Tensor) else torch.tensor(value)
    return made.to(torch.int64 if made.dtype == torch.int32 else made.dtype).as_subclass(Tile)


class Pointer:
    """Places in a tensor's memory, in elements of it."""

    def __init__(self, tensor: torch.Tensor | None, places: Any = 0) -> None:
        self.tensor, self.places = tensor, places

    def __add__(self, steps: Any) -> "Pointer":
        return Pointer(self.tensor, self.places + steps)

    def memory(self, mask: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return all elements, the places and which of them are meant: none may be outside."""
        assert self.tensor is not None, "a tensor that was not given"
        places = torch.as_tensor(self.places).as_subclass(torch.Tensor)
        meant = torch.as_tensor(mask).as_subclass(torch.Tensor)
        places, meant = torch.broadcast_tensors(places, meant)
        size = 1 + sum((n - 1) * s for n, s in zip(self.tensor.shape, self.tensor.stride()))
        flat = self.tensor.as_strided((size,), (1,))
        outside = meant & ((places < 0) | (places >= size))
        assert not outside.any(), f"outside of a tensor of {size}: {places[outside][:4].tolist()}"
        return flat, places.long(), meant

    # What expand_dims does to pointers.
    def unsqueeze(self, axis: int) -> "Pointer":
        """Return the places with one more dimension."""
        return Pointer(self.tensor, self.places.unsqueeze(axis))


def load(pointer: Pointer, mask: Any = True, other: Any = 0) -> Any:
    """Return numbers; booleans as bytes."""
    flat, places, meant = pointer.memory(mask)
    found = flat[torch.where(meant, places, 0)]
    found = found.to(torch.int64) if found.dtype in (torch.bool, torch.int32) else found
    return torch.where(meant, found, torch.tensor(other, dtype=found.dtype)).as_subclass(Tile)


def store(pointer: Pointer, value: Any, mask: Any = True) -> None:
    """Write numbers."""
    flat, places, meant = pointer.memory(mask)
    value = torch.as_tensor(value).as_subclass(torch.Tensor)
    places, meant, value = torch.broadcast_tensors(places, meant, value)
    flat[places[meant]] = value[meant].to(flat.dtype)


class Barrier:
    """An mbarrier, or a named barrier: its phase ends when all have arrived."""

    def __init__(self, world: "World", count: int = 0) -> None:
        self.world, self.count, self.arrived, self.bytes, self.phase = world, count, 0, 0, 0

    def change(self, arrivals: int = 0, num_bytes: int = 0) -> None:
        """Note arrivals and bytes that are awaited, or there."""
        with self.world.changed:
            self.arrived += arrivals
            self.bytes += num_bytes
            assert self.arrived <= self.count, "a barrier that more arrive at than belong to it"
            if self.arrived == self.count and self.bytes == 0:
                self.arrived, self.phase = 0, self.phase + 1
                self.world.changed.notify_all()

    def wait(self, is_over: Callable[[], bool]) -> None:
        """Wait until a phase is over."""
        with self.world.changed:
            over = self.world.changed.wait_for(
                lambda: self.world.failed or is_over(), timeout=PATIENCE_S
            )
            assert over, "a deadlock"
            assert not self.world.failed, "another warpgroup failed"


class World:
    """The shared state of one block of threads."""

    def __init__(self, block: int, num_blocks: int) -> None:
        self.block, self.num_blocks = block, num_blocks
        self.changed = threading.Condition()
        self.failed: list[BaseException] = []
        self.named: dict[int, Barrier] = {}

    def run(self, parts: list[tuple[Any, tuple[Any, ...]]]) -> None:
        """Run the partitions at the same time."""

        def guarded(function: Any, arguments: tuple[Any, ...]) -> None:
            _LOCAL.world = self
            try:
                function(*arguments)
            except BaseException as error:
                with self.changed:
                    self.failed.append(error)
                    self.changed.notify_all()

        threads = [threading.Thread(target=guarded, args=part) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failed:
            raise self.failed[0]


class Shared:
    """Stages in shared memory; without numbers until somebody writes them."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.dtype = tensor, tensor.dtype

    def index(self, stage: Any) -> "Shared":
        """Return one stage."""
        return Shared(self.tensor[int(stage)])

    def permute(self, order: list[int]) -> "Shared":
        """Return it transposed."""
        return Shared(self.tensor.permute(order))

    def store(self, value: torch.Tensor) -> None:
        """Write a tile."""
        self.tensor.copy_(value)


class Barriers:
    """mbarriers in shared memory."""

    def __init__(self, count: int) -> None:
        self.made = [Barrier(_LOCAL.world) for _ in range(count)]

    def index(self, place: Any) -> Barrier:
        """Return one of them."""
        return self.made[int(place)]


def shared(dtype: Any, shape: list[int], layout: Any) -> Any:
    """Return shared memory."""
    del layout
    if dtype is torch.int64:
        return Barriers(shape[0]) if len(shape) > 1 else Barrier(_LOCAL.world)
    return Shared(torch.full(shape, float("nan"), dtype=dtype))


class Descriptor:
    """A tensor as TMA sees it: rows of a box outside of it are zeros, and are not stored."""

    def __init__(self, tensor: torch.Tensor, view: Any, box: tuple[int, int]) -> None:
        self.tensor, (self.shape, self.strides, before) = tensor, view
        self.before = before // tensor.element_size()
        self.dtype, self.layout = tensor.dtype, None
        nbytes = box[0] * box[1] * tensor.element_size()
        self.block_type = SimpleNamespace(shape=[1, 1, *box], nbytes=nbytes)

    def box(self, corner: list[Any]) -> Pointer:
        """Return the places of a box, and note which are inside."""
        spans = [int(c) + torch.arange(n) for c, n in zip(corner, self.block_type.shape)]
        grids = torch.meshgrid(*spans, indexing="ij")
        places = sum(g * s for g, s in zip(grids, self.strides)) - self.before
        inside = torch.ones_like(places, dtype=torch.bool)
        for grid, size in zip(grids, self.shape):
            inside &= (grid >= 0) & (grid < size)
        self.inside = inside[0, 0]
        return Pointer(self.tensor, places[0, 0])


def tma_load(source: Descriptor, corner: list[Any], full: Barrier, buffer: Shared) -> None:
    """Copy a box to shared memory, and tell of it."""
    with full.world.changed:
        pointer = source.box(corner)
        buffer.tensor.copy_(load(pointer, source.inside, 0.0).as_subclass(torch.Tensor))
    full.change(num_bytes=-source.block_type.nbytes)


def tma_store(target: Descriptor, corner: list[Any], buffer: Shared) -> None:
    """Copy a box from shared memory."""
    with _LOCAL.world.changed:
        pointer = target.box(corner)
        store(pointer, buffer.tensor, target.inside)


def product(left: Any, right: Shared, total: Any, *, use_acc: bool = True, is_async: bool) -> Any:
    """Return total + left right, in fp32; at once."""
    del is_async
    left = left.tensor if isinstance(left, Shared) else left
    made = left.as_subclass(torch.Tensor).float() @ right.tensor.float()
    return (total + made if use_acc else made).as_subclass(Tile)


def product_wait(pending: int, deps: list[Any]) -> Any:
    """Return what was waited for."""
    del pending
    return deps[0] if len(deps) == 1 else tuple(deps)


def assembly(text: str, constraints: str, arguments: list[Any], **rest: Any) -> Any:
    """Do what the kernel's pieces of assembly do."""
    del constraints, rest
    world: World = _LOCAL.world
    if "tanh" in text:
        return torch.tanh(arguments[0])
    if "rcp" in text:
        return 1.0 / arguments[0]
    if "bar." in text:
        found = re.search(r"bar\.\w+ \S+, (\d+);", text)
        assert found is not None
        threads, number = int(found[1]), int(arguments[0])
        with world.changed:
            named = world.named.setdefault(number, Barrier(world, threads))
            before = named.phase
        named.change(arrivals=128)
        if "bar.sync" in text:
            named.wait(lambda: named.phase > before)
    return None


def names() -> dict[str, Any]:
    """Return Gluon's words as this file understands them."""

    def where(condition: Any, this: Any, that: Any) -> Any:
        return torch.where(torch.as_tensor(condition), tile(this), tile(that)).as_subclass(Tile)

    def binary(function: Any) -> Any:
        return lambda a, b: function(*torch.broadcast_tensors(tile(a), tile(b))).as_subclass(Tile)

    def layout(*args: Any, **kwargs: Any) -> None:
        del args, kwargs

    def split(x: Any) -> Any:
        return x[..., 0], x[..., 1]

    nothing: Any = lambda *args, **kwargs: None
    layout.get_default_for = nothing  # type: ignore[attr-defined]
    gl = SimpleNamespace(
        constexpr=lambda x: x, tensor=None, shared_memory_descriptor=None,
        to_tensor=tile, load=load, store=store, where=where,
        minimum=binary(torch.minimum), maximum=binary(torch.maximum),
        cdiv=lambda a, b: (a + b - 1) // b,
        program_id=lambda axis: tile(_LOCAL.world.block),
        num_programs=lambda axis: tile(_LOCAL.world.num_blocks),
        arange=lambda low, high, layout: tile(torch.arange(low, high)),
        zeros=lambda shape, dtype, layout: tile(torch.zeros(shape, dtype=dtype)),
        expand_dims=lambda x, axis: x.unsqueeze(axis), convert_layout=lambda x, layout: x,
        sum=lambda x, axis: x.sum(axis), max=lambda x, axis: x.amax(axis),
        reshape=lambda x, shape: x.reshape(shape), permute=lambda x, order: x.permute(order),
        split=split, exp2=torch.exp2, log2=torch.log2, abs=torch.abs, static_range=range,
        SliceLayout=layout, NVMMADistributedLayout=layout, DotOperandLayout=layout,
        NVMMASharedLayout=layout, BlockedLayout=layout, allocate_shared_memory=shared,
        inline_asm_elementwise=assembly, int32=torch.int64, int64=torch.int64,
        float32=torch.float32,
        warp_specialize=lambda parts, warps, registers: _LOCAL.world.run(parts),
    )  # fmt: skip
    mbarrier = SimpleNamespace(
        MBarrierLayout=nothing,
        init=lambda barrier, count: setattr(barrier, "count", count),
        expect=lambda barrier, nbytes: barrier.change(arrivals=1, num_bytes=nbytes),
        arrive=lambda barrier: barrier.change(arrivals=1),
        wait=lambda barrier, parity: barrier.wait(lambda: barrier.phase % 2 != int(parity)),
    )
    return {
        "gluon": SimpleNamespace(jit=lambda f: f, constexpr_function=lambda f: f),
        "gl": gl,
        "mbarrier": mbarrier,
        "tma": SimpleNamespace(tensor_descriptor=None, store_wait=nothing),
        "aggregate": lambda kind: kind,
        "barrier": nothing,
        "shaped_as": lambda buffer, descriptor: buffer,
        "tma_load": tma_load,
        "tma_store": tma_store,
        "fence_async_shared": nothing,
        "warpgroup_mma": product,
        "warpgroup_mma_wait": product_wait,
        "_constants": _constants,
    }


def device_code() -> dict[str, Any]:
    """Return the functions of the kernel's files, in one namespace."""
    space = names()
    for name in FILES:
        path = Path(hopper.__file__).with_name(f"{name}.py")
        tree = ast.parse(path.read_text())
        tree.body = [node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom)]
        exec(compile(tree, str(path), "exec"), space)
    return space


POINTERS = ("lse", "row_max", "entropy", "tiles", "flags", "mask", "sinks", "slopes", "starts_q",
            "starts_k", "counts", "indices")  # fmt: skip


class Machine:
    """Stands for compiled kernels: runs their source, one block of threads after the other."""

    def __call__(self, variant: Variant, device: torch.device) -> Any:
        compiled = pytest.importorskip("adaattn.backends.hopper.compiled")
        code = device_code()["forward"]
        tiling = variant.tiling
        columns = (tiling.block_d, tiling.block_d, tiling.block_v, tiling.block_v // tiling.out_parts)
        boxes = list(zip(box_rows(tiling), columns))

        def launch(num_blocks: int, stream: int, *arguments: Any) -> None:
            given = []
            for name, value in zip(inspect.signature(code).parameters, arguments, strict=True):
                if len(given) < len(boxes):
                    given.append(Descriptor(*value, boxes[len(given)]))
                elif name in POINTERS:
                    given.append(Pointer(value))
                else:
                    given.append(tile(value) if name.islower() and type(value) is int else value)
            for block in range(num_blocks):
                _LOCAL.world = World(block, num_blocks)
                code(*given)

        return launch, lambda *both: both, tuple(compiled._constants(variant).values())


@pytest.fixture(autouse=True)
def simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "_compiled", Machine())
    monkeypatch.setattr(prepared, "_address", lambda tensor: tensor)
    monkeypatch.setattr(prepared, "probe", lambda device: SimpleNamespace(num_processors=3))
    monkeypatch.setattr(prepared, "note", lambda kernel: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    host._bound.cache_clear()
    prepared._LISTED.clear()


def run(tensors: Tensors, problem: AttentionProblem) -> Result:
    with poisoned_memory():
        return hopper.run(tensors, problem, HeadGroup(capability="hopper"))


def held_to_the_oracle(tensors: Tensors, problem: AttentionProblem) -> Result:
    found = run(tensors, problem)
    exact = attention(cast_tensors(tensors, torch.float64), problem)
    eager = attention(tensors, problem, compute_dtype=tensors.query.dtype)
    assert_results_match(found, exact, eager, summands=num_summands(problem, found.output))
    return found


USUAL: dict[str, Any] = {"precision": Precision.BF16, "head_dim": 32, "num_heads": 2}
ALL_AUX = Aux.LSE | Aux.ROW_MAX | Aux.ENTROPY
TO_END: dict[str, Any] = {"is_causal": True, "align": Align.BOTTOM_RIGHT}
DENSE: dict[str, dict[str, Any]] = {
    "plain": {"len_q": 300},
    "causal": {"len_q": 300, "is_causal": True, "aux": Aux.LSE},
    "window": {"len_q": 300, "is_causal": True, "window": (70, -1), "aux": Aux.ENTROPY},
    "everything": {"len_q": 200, "softcap": 5.0, "has_sinks": True, "has_alibi": True, **TO_END,
                   "len_k": 230, "aux": ALL_AUX},
    "mask": {"len_q": 150, "mask": MaskKind.ADDITIVE, "precision": Precision.FP16},
}  # fmt: skip


@pytest.mark.parametrize("name", DENSE)
def test_dense(name: str) -> None:
    problem = make_problem(**(USUAL | DENSE[name]))
    held_to_the_oracle(make_tensors(problem), problem)


PACKED: dict[str, dict[str, Any]] = {
    "ragged": {"lengths_q": (9, 0, 170, 1, 65), "aux": ALL_AUX},
    "causal": {"lengths_q": (130, 64, 3, 200), "is_causal": True},
    "other keys": {"lengths_q": (3, 80, 0, 5), "lengths_k": (170, 8, 20, 0), "aux": Aux.LSE},
    "causal, other keys": {"lengths_q": (3, 150, 70), "lengths_k": (70, 80, 150),
                           "is_causal": True},
    "to the end": {"lengths_q": (3, 150, 70, 5), "lengths_k": (70, 80, 150, 0), **TO_END,
                   "aux": Aux.LSE},
    "window": {"lengths_q": (300, 70, 17, 1), "is_causal": True, "window": (60, -1)},
    "window both ways, to the end": {"lengths_q": (100, 170, 17), "lengths_k": (200, 90, 300),
                                     "window": (50, 20), "align": Align.BOTTOM_RIGHT},
    "grouped heads": {"lengths_q": (130, 40), "num_heads": 4, "num_kv_heads": 2, **TO_END},
    "everything": {"lengths_q": (130, 0, 40), "lengths_k": (90, 10, 60), "softcap": 5.0,
                   "has_sinks": True, "has_alibi": True, **TO_END, "aux": ALL_AUX},
    "half": {"lengths_q": (130, 40), "precision": Precision.FP16, "aux": ALL_AUX},
    "mask": {"lengths_q": (130, 40, 70), "mask": MaskKind.BOOLEAN},
    "bias": {"lengths_q": (130, 40, 70), "mask": MaskKind.ADDITIVE, "is_causal": True},
    "mask of keys": {"lengths_q": (90, 70), "mask": MaskKind.BOOLEAN, "mask_shape": (1, 1, 1, 160)},
    "wide heads": {"lengths_q": (70, 130), "head_dim": 256, "is_causal": True},
    "long, so that three warpgroups serve": {"lengths_q": (193, 191), "head_dim": 64},
}  # fmt: skip


def made_packed(values: dict[str, Any]) -> tuple[AttentionProblem, Tensors]:
    """Return a packed problem and its tensors."""
    values = USUAL | values
    lengths = {name: values.pop(name) for name in ("lengths_q", "lengths_k") if name in values}
    problem = make_problem(**lengths, **values)
    return problem, make_tensors(problem, **lengths)


@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences_are_each_a_problem_of_its_own(name: str) -> None:
    problem, tensors = made_packed(PACKED[name])
    held_to_the_oracle(tensors, problem)


@pytest.mark.parametrize("layout", ["[1, H, T, D]", "[1, T, H, D]"])
@pytest.mark.parametrize("what", ["query", "key", "value"])
def test_a_sequence_sees_nothing_of_its_neighbours(what: str, layout: str) -> None:
    """Their rows stand in the same boxes; a weight of 0 times NaN would be NaN."""
    problem, tensors = made_packed({"lengths_q": (70, 90, 100), "is_causal": True})
    if layout == "[1, T, H, D]":
        turned = [
            x.transpose(1, 2).contiguous().transpose(1, 2)
            for x in (tensors.query, tensors.key, tensors.value)
        ]
        kv = replace(tensors.kv, key=turned[1], value=turned[2])
        tensors = replace(tensors, query=turned[0], kv=kv)
    clean = run(tensors, problem).output
    getattr(tensors, what)[:, :, 70:160] = float("nan")
    found = run(tensors, problem).output
    assert torch.equal(found[:, :, :70], clean[:, :, :70])
    assert torch.equal(found[:, :, 160:], clean[:, :, 160:])


@pytest.mark.parametrize(
    "starts",
    [(0, 500, 90), (0, 90, 40, 90), (-50, 90), (0, 40, 2000), (70, 20, 90), (90, 90, 0), (0, 0, 0),
     (-(2**31), 2**31 - 1), (2**31 - 1, -(2**31), 90)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("align", Align)
def test_starts_that_nobody_checked_lead_to_no_other_memory(
    starts: tuple[int, ...], align: Align
) -> None:
    """What is outside of a tensor is an error of the simulation; warpgroups that disagree, too."""
    problem = make_problem(**USUAL, lengths_q=(40, 50), is_causal=True, align=align)
    problem = replace(problem, num_sequences=len(starts) - 1, packed_square=False)
    query, key, value = torch.randn(3, 1, 2, 90, 32).bfloat16()
    bounds = torch.tensor(starts, dtype=torch.int32)
    tensors = Tensors.of(query, key, value, cu_seqlens_q=bounds, cu_seqlens_k=bounds.flip(0))
    assert run(tensors, problem).output.nan_to_num(0.0).abs().max() < 100


@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_scores_beyond_the_fixed_reference_are_computed_again(is_causal: bool) -> None:
    problem, tensors = made_packed({"lengths_q": (300, 40, 290, 1), "is_causal": is_causal})
    key = tensors.key.clone()
    key[:, :, :50] *= 300
    key[:, :, 340:400] *= 300
    held_to_the_oracle(replace(tensors, kv=replace(tensors.kv, key=key)), problem)


LISTS: dict[str, dict[str, Any]] = {
    "plain": {"len_q": 300, "len_k": 700, "aux": ALL_AUX},
    "causal": {"len_q": 700, "is_causal": True, "aux": Aux.LSE},
    "blocks of 64 keys": {"len_q": 300, "is_causal": True, "block_size": (128, 64)},
    "blocks of 192 keys": {"len_q": 300, "len_k": 500, "block_size": (128, 192), **TO_END},
    "large blocks": {"len_q": 700, "is_causal": True, "block_size": (256, 256)},
    "to the end": {"len_q": 500, "len_k": 130, **TO_END, "aux": ALL_AUX},
    "window": {"len_q": 700, "is_causal": True, "window": (200, -1), "block_size": (128, 256)},
    "window both ways": {"len_q": 500, "len_k": 700, "window": (150, 40), "aux": Aux.ENTROPY},
    "fewer keys than a block": {"len_q": 300, "len_k": 50},
    "grouped heads": {"len_q": 300, "num_heads": 4, "num_kv_heads": 2, "batch": 2, **TO_END},
    "everything": {"len_q": 500, "softcap": 5.0, "has_sinks": True, "has_alibi": True,
                   "is_causal": True, "aux": ALL_AUX},
    "half": {"len_q": 300, "precision": Precision.FP16, "aux": ALL_AUX},
    "mask": {"len_q": 300, "len_k": 333, "mask": MaskKind.BOOLEAN, "is_causal": True},
    "wide heads": {"len_q": 300, "head_dim": 256, "is_causal": True},
}  # fmt: skip


def made_listed(
    values: dict[str, Any], shape: tuple[bool, bool], density: float = 0.5, seed: int = 0
) -> tuple[AttentionProblem, Tensors]:
    """Return a problem with a random list of blocks: some rows have none, some heads all."""
    problem = make_problem(**(USUAL | {"block_size": (128, 128)} | values))
    rows, keys = problem.block_size
    row_blocks, key_blocks = -(-problem.len_q // rows), -(-problem.len_k // keys)
    leading = (problem.batch if shape[0] else 1, problem.num_heads if shape[1] else 1)
    torch.manual_seed(seed)
    mask = torch.rand(*leading, row_blocks, key_blocks) < density
    mask[..., -1, :] &= bool(seed % 2)
    blocks = BlockList.from_mask(mask, block_q=rows, block_k=keys)
    blocks.counts[-1, -1, :1] = -1
    problem = replace(problem, most_blocks=blocks.indices.shape[-1])
    return problem, replace(make_tensors(problem), blocks=blocks)


@pytest.mark.parametrize("shape", [(False, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("name", LISTS)
def test_only_listed_blocks_are_seen(name: str, shape: tuple[bool, bool]) -> None:
    problem, tensors = made_listed(LISTS[name], shape, seed=sum(shape))
    held_to_the_oracle(tensors, problem)


@pytest.mark.parametrize("is_causal", [False, True])
def test_listed_scores_beyond_the_fixed_reference_are_computed_again(is_causal: bool) -> None:
    problem, tensors = made_listed({"len_q": 600, "is_causal": is_causal}, (True, True), 0.7)
    key = tensors.key.clone()
    key[:, :, :200] *= 300
    held_to_the_oracle(replace(tensors, kv=replace(tensors.kv, key=key)), problem)


@pytest.mark.parametrize("values", [{}, {"is_causal": True}, {"window": (100, 50)},
                                    {"mask": MaskKind.ADDITIVE}, {"len_k": 50}], ids=str)  # fmt: skip
def test_numbers_of_lists_that_nobody_checked_lead_to_no_other_memory(
    values: dict[str, Any],
) -> None:
    problem, tensors = made_listed({"len_q": 300, "len_k": 500} | values, (True, True))
    assert tensors.blocks is not None
    counts, indices = tensors.blocks.counts, tensors.blocks.indices
    for seed in range(4):
        torch.manual_seed(seed)
        counts.random_(-(2**31), 2**31 - 1) if seed % 2 else counts.random_(-3, 9)
        indices.random_(-(2**31), 2**31 - 1) if seed > 1 else indices.random_(-2, 7)
        run(tensors, problem)
