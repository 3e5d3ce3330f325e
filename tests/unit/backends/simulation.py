"""Device code in Gluon, run on a CPU: each warpgroup a greenlet, TMA a copy.

The files of device code are executed with Gluon's words replaced: tiles are tensors, asynchronous
products are done at once, barriers block. What it shows is that positions, masks and barriers are
right, and that nothing is read or written outside of a tensor; what it cannot show is whether the
compiler keeps asynchronous work in order. In a `World` that is late, products are done when they
are waited for, stores too, and copies and accesses take some simulated time: what reads too early,
or writes where somebody still reads, is wrong there.
"""

import ast
import heapq
import inspect
import itertools
import math
import operator
import random
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from greenlet import getcurrent, greenlet
from torch._tensor import _convert
from torch.utils._python_dispatch import _disable_current_modes

from adaattn import _constants, backends

_FIRST_ADDER = 3
"""Partition of a backward pass behind two of consumers and one that copies."""


class _Own:
    """What belongs to the warpgroup that runs."""

    def __getattr__(self, name: str) -> Any:
        return getattr(getcurrent(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(getcurrent(), name, value)


_LOCAL = _Own()

Waiters = list[greenlet]
"""Those who wait for something to happen."""


class Tile(torch.Tensor):
    """A number or tile of the device: assignment never changes what another name holds."""

    type = SimpleNamespace(layout=None)  # type: ignore[assignment]

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Do as PyTorch's own, in less time: what is made of tiles is a tile, or some of them."""
        with torch._C.DisableTorchFunctionSubclass():
            found = function(*args, **(kwargs or {}))
        if type(found) is torch.Tensor:
            return found.as_subclass(cls)
        return _convert(found, cls) if isinstance(found, tuple | list) else found

    # A device divides towards zero, and a remainder has the sign of what was divided.
    def __floordiv__(self, other: Any) -> Any:
        return torch.div(self, other, rounding_mode="trunc")

    def __mod__(self, other: Any) -> Any:
        return torch.fmod(self, other)


class Number(int):
    """A whole number of the device: a tensor of one takes ten times as long.

    It acts as a tile of no dimensions, and is one where it meets what is no whole number.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(_as_tile(self), name)

    def __neg__(self) -> "Number":
        return Number(-int(self))

    def to(self, dtype: torch.dtype) -> Any:
        """Return it as a number of another type."""
        return self if dtype is torch.int64 else _as_tile(self).to(dtype)


def _as_tile(value: Any) -> Any:
    """Return a number as a tile; what is none as it is."""
    return torch.tensor(int(value)).as_subclass(Tile) if type(value) is Number else value


_TRUTH = tuple(torch.tensor(it).as_subclass(Tile) for it in (False, True))


def _quotient(this: int, that: int) -> int:
    """Return a quotient, towards zero."""
    found = abs(this) // abs(that)
    return found if (this < 0) == (that < 0) else -found


def _operator(name: str, made: Callable[[Any], Any] | None) -> Callable[[Any, Any], Any]:
    """Return an operator of numbers; that of tiles, unless it is said what integers make."""
    of_tiles = getattr(operator, f"__{name}__")
    others = {"floordiv": _quotient, "mod": lambda this, that: this - that * _quotient(this, that)}
    of_ints = others.get(name, of_tiles)

    def operate(this: Any, that: Any) -> Any:
        if made and isinstance(this, int) and isinstance(that, int):
            return made(of_ints(int(this), int(that)))
        return of_tiles(_as_tile(this), _as_tile(that))

    return operate


def _set_operators() -> None:
    for name in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(Number, f"__{name}__", _operator(name, _TRUTH.__getitem__))
    for name in ("add", "sub", "mul", "floordiv", "mod", "lshift", "rshift", "and", "or", "xor",
                 "truediv"):  # fmt: skip
        operate = _operator(name, None if name == "truediv" else Number)
        setattr(Number, f"__{name}__", operate)
        setattr(Number, f"__r{name}__", lambda this, that, operate=operate: operate(that, this))
        # Else PyTorch would write to a tile that has other names.
        setattr(Tile, f"__i{name}__", _operator(name, None))


_set_operators()


def tile(value: Any) -> Any:
    """Return a value of the device."""
    if type(value) in (int, Number):
        return Number(value)
    made = value if isinstance(value, torch.Tensor) else torch.tensor(value)
    return made.to(torch.int64 if made.dtype == torch.int32 else made.dtype).as_subclass(Tile)


class Pointer:
    """Places in a tensor's memory, of which all elements are given in one line."""

    def __init__(self, flat: torch.Tensor | None, places: Any = 0) -> None:
        self.flat, self.places = flat, places

    @staticmethod
    def to(tensor: torch.Tensor | None) -> "Pointer":
        """Return a pointer to a tensor, or to none."""
        if tensor is None:
            return Pointer(None)
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        return Pointer(tensor.as_strided((1 + sum((n - 1) * step for n, step in steps),), (1,)))

    @property
    def dtype(self) -> SimpleNamespace:
        """What it points to."""
        return SimpleNamespace(element_ty=None if self.flat is None else self.flat.dtype)

    def __add__(self, steps: Any) -> "Pointer":
        return Pointer(self.flat, self.places + steps)

    def among(self, low: int, high: int) -> torch.Tensor:
        """Return all elements: none of the places that are meant may be outside."""
        assert self.flat is not None, "a tensor that was not given"
        size = self.flat.numel()
        assert low >= 0 and high < size, f"outside of a tensor of {size}: {low} to {high}"
        return self.flat

    def memory(self, mask: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return all elements, the places, 0 where they are not meant, and which of them are."""
        places = torch.as_tensor(self.places).as_subclass(torch.Tensor)
        meant = torch.as_tensor(mask).as_subclass(torch.Tensor)
        places = places if mask is True else torch.where(meant, places, 0)
        low, high = torch.aminmax(places)
        return self.among(int(low), int(high)), places.long(), meant

    # What expand_dims does to pointers.
    def unsqueeze(self, axis: int) -> "Pointer":
        """Return the places with one more dimension."""
        return Pointer(self.flat, self.places.unsqueeze(axis))


def load(pointer: Pointer, mask: Any = True, other: Any = 0, volatile: bool = False) -> Any:
    """Return numbers; booleans as bytes. What others write meanwhile takes some time."""
    if volatile:
        _LOCAL.world.launch.look()
    if isinstance(pointer.places, int) and mask is True:
        place = int(pointer.places)
        found = pointer.among(place, place)[place].clone()
        return found.as_subclass(Tile) if found.is_floating_point() else Number(found)
    flat, places, meant = pointer.memory(mask)
    found = flat.take(places)
    found = found.to(torch.int64) if found.dtype in (torch.bool, torch.int32) else found
    if mask is not True:
        found = torch.where(meant, found, torch.tensor(other, dtype=found.dtype))
    return found.as_subclass(Tile)


def store(pointer: Pointer, value: Any, mask: Any = True) -> None:
    """Write numbers."""
    if isinstance(pointer.places, int) and isinstance(value, int) and mask is True:
        place = int(pointer.places)
        pointer.among(place, place)[place] = int(value)
    else:
        flat, places, meant = pointer.memory(mask)
        value = torch.as_tensor(value).as_subclass(torch.Tensor)
        places, meant, value = torch.broadcast_tensors(places, meant, value)
        flat[places[meant]] = value[meant].to(flat.dtype)
    _LOCAL.world.launch.changed()


def atomic_xchg(pointer: Pointer, value: Any, sem: str, scope: str) -> None:
    """Put a number in global memory."""
    del sem, scope
    store(pointer, value)


def atomic_max(pointer: Pointer, value: Any, sem: str, scope: str) -> None:
    """Raise a number in global memory."""
    del sem, scope
    store(pointer, max(load(pointer), tile(value)))


class Barrier:
    """An mbarrier, or a named barrier: its phase ends when all have arrived."""

    def __init__(self, world: "World", count: int = 0) -> None:
        self.world, self.count, self.arrived, self.bytes, self.phase = world, count, 0, 0, 0
        self.waiters: Waiters = []

    def change(self, arrivals: int = 0, num_bytes: int = 0) -> None:
        """Note arrivals and bytes that are awaited, or there."""
        self.arrived += arrivals
        self.bytes += num_bytes
        assert self.arrived <= self.count, "a barrier that more arrive at than belong to it"
        if self.arrived == self.count and self.bytes == 0:
            self.arrived, self.phase = 0, self.phase + 1
            self.world.launch.wake(self.waiters)

    def wait(self, is_over: Callable[[], bool]) -> None:
        """Wait until a phase is over."""
        while not is_over():
            self.world.launch.wait(self.waiters)


class Promise:
    """A product or store under way."""

    def __init__(self, compute: Callable[[], Any]) -> None:
        self.compute, self.value, self.is_done = compute, None, False

    def finish(self) -> None:
        """Do it."""
        self.value, self.is_done = self.compute(), True


def value_of(item: Any) -> Any:
    """Return what came of a promise; itself while it is under way, as a sum that is added to."""
    return item.value if isinstance(item, Promise) and item.is_done else item


def finish(pending: list[Promise], left: int) -> list[Promise]:
    """Finish all but the last ones; return those."""
    done = len(pending) - left
    for promise in pending[: max(done, 0)]:
        promise.finish()
    return pending[max(done, 0) :]


def dawdle() -> None:
    """Take some time, where the world is late; some warpgroups take more."""
    if World.is_late:
        _LOCAL.world.launch.sleep(random.random() * _LOCAL.pace)


class Launch:
    """Blocks that run together in simulated time, and the memory that they share.

    One warpgroup or copy runs at a time, until it sleeps or waits; then whoever's time comes first.
    So the order is the same on every machine, and those whom nobody wakes are seen at once.
    """

    def __init__(self) -> None:
        self.now, self.numbers, self.writes = 0.0, itertools.count(), 0
        self.queue: list[tuple[float, int, greenlet]] = []
        self.waiting: set[greenlet] = set()
        self.waiters: Waiters = []

    def run(self, functions: Sequence[Callable[[], None]]) -> None:
        """Run functions at the same time, to the end of all."""
        self.loop = getcurrent()
        for function in functions:
            self.start(function)
        try:
            while self.queue:
                self.now, _, task = heapq.heappop(self.queue)
                task.switch()
            if self.waiting:
                raise TimeoutError("all who are left wait for one another")
        finally:
            for task in (*self.waiting, *(task for *_, task in self.queue)):
                task.throw()

    def start(self, function: Callable[[], None]) -> Any:
        """Run a function from now on; return what can be joined."""

        def run() -> None:
            function()
            self.wake(task.waiters)

        task: Any = greenlet(run, self.loop)
        task.waiters = []
        heapq.heappush(self.queue, (self.now, next(self.numbers), task))
        return task

    def sleep(self, seconds: float) -> None:
        """Let others run for some time."""
        heapq.heappush(self.queue, (self.now + seconds, next(self.numbers), getcurrent()))
        self.loop.switch()

    def wait(self, waiters: Waiters) -> None:
        """Let others run until one of them calls `wake`."""
        waiters.append(getcurrent())
        self.waiting.add(getcurrent())
        self.loop.switch()

    def wake(self, waiters: Waiters) -> None:
        """Let all who wait go on."""
        for task in waiters:
            self.waiting.discard(task)
            heapq.heappush(self.queue, (self.now, next(self.numbers), task))
        waiters.clear()

    def join(self, task: Any) -> None:
        """Wait until what was started has ended."""
        if not task.dead:
            self.wait(task.waiters)

    def changed(self) -> None:
        """Note that something was written to memory."""
        self.writes += 1
        self.wake(self.waiters)

    def look(self) -> None:
        """Wait until something was written, unless that was since this warpgroup looked last."""
        while getattr(getcurrent(), "seen", -1) == self.writes:
            self.wait(self.waiters)
        _LOCAL.seen = self.writes


class World:
    """The shared state of one block of threads."""

    is_late = False
    are_together = False
    copy_s = 0.02
    """How long a copy takes at most, where the world is late."""

    def __init__(self, launch: Launch, block: int, num_blocks: int) -> None:
        self.launch, self.block, self.num_blocks = launch, block, num_blocks
        self.named: dict[int, Barrier] = {}
        self.copies: list[Any] = []

    def later(self, work: Callable[[], None]) -> Any:
        """Do something soon, while others go on."""

        def copy() -> None:
            _LOCAL.world = self
            self.launch.sleep(random.random() * self.copy_s)
            work()

        self.copies.append(self.launch.start(copy))
        return self.copies[-1]

    def pace_of(self, place: int) -> float:
        """Return how many seconds a partition dawdles at most: those that add are last."""
        paces = (0.0001, 0.005)
        if place >= _FIRST_ADDER:
            return 10 * paces[self.block // 2 % 2]
        return paces[(place + self.block) % 2]

    def run(self, parts: list[tuple[Any, tuple[Any, ...]]], warps: list[int]) -> None:
        """Run the partitions at the same time, the first of four warps."""

        def partition(place: int, function: Any, arguments: tuple[Any, ...]) -> None:
            _LOCAL.place, _LOCAL.pace = place, self.pace_of(place)
            _LOCAL.num_threads = 32 * (4, *warps)[place]
            _LOCAL.world, _LOCAL.products, _LOCAL.stores = self, [], []
            _LOCAL.writes, _LOCAL.unreleased = [], []
            function(*arguments)

        started = [
            self.launch.start(partial(partition, place, *part)) for place, part in enumerate(parts)
        ]
        for each in started:
            self.launch.join(each)
        for each in self.copies:
            self.launch.join(each)


class Shared:
    """Stages in shared memory; without numbers until somebody writes them."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.dtype, self.shape = tensor, tensor.dtype, tensor.shape

    def index(self, stage: Any) -> "Shared":
        """Return one stage."""
        return Shared(self.tensor[int(stage)])

    def permute(self, order: list[int]) -> "Shared":
        """Return it transposed."""
        return Shared(self.tensor.permute(order))

    def slice(self, start: int, length: int, dim: int = 0) -> "Shared":
        """Return a part."""
        return Shared(self.tensor.narrow(dim, start, length))

    def load(self, layout: Any) -> Any:
        """Read a tile."""
        del layout
        dawdle()
        return tile(self.tensor.clone())

    def store(self, value: torch.Tensor) -> None:
        """Write a tile."""
        dawdle()
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
    poison = float("nan") if dtype.is_floating_point else -1
    return Shared(torch.full(shape, poison, dtype=dtype))


class Descriptor:
    """A tensor as TMA sees it: rows of a box outside of it are zeros, and are not stored."""

    def __init__(self, tensor: torch.Tensor, view: Any, box: tuple[int, ...]) -> None:
        assert tensor.data_ptr() % 16 == 0, "TMA reads from multiples of 16 bytes"
        # Two booleans are one number.
        tensor = tensor.view(torch.int16) if tensor.dtype is torch.bool else tensor
        self.tensor, (self.shape, self.strides) = tensor, view
        self.pointer = Pointer.to(tensor)
        self.dtype, self.layout = tensor.dtype, None
        nbytes = math.prod(box) * tensor.element_size()
        single = (1,) * (len(self.shape) - len(box))
        self.block_type = SimpleNamespace(shape=[*single, *box], nbytes=nbytes)

    def box(self, corner: Sequence[Any]) -> tuple[torch.Tensor, tuple[slice, ...]]:
        """Return what of a box is inside of the tensor, and where in the box that is."""
        starts = [max(int(c), 0) for c in corner]
        ends = [int(c) + n for c, n in zip(corner, self.block_type.shape, strict=True)]
        counts = [
            max(min(end, size) - start, 0)
            for start, end, size in zip(starts, ends, self.shape, strict=True)
        ]
        inside = tuple(
            slice(start - int(c), start - int(c) + n)
            for start, c, n in zip(starts, corner, counts, strict=True)
        )
        # Places in 64 bits wrap around.
        first = sum(map(operator.mul, starts, self.strides))
        first = (first + 2**63) % 2**64 - 2**63
        last = first + sum((n - 1) * step for n, step in zip(counts, self.strides, strict=True))
        if 0 in counts:
            return self.tensor.new_empty(counts), inside
        self.pointer.among(first, last)
        first += self.tensor.storage_offset()
        return self.tensor.as_strided(counts, self.strides, first), inside


def tma_load(source: Descriptor, corner: tuple[Any, ...], full: Barrier, buffer: Shared) -> None:
    """Copy a box to shared memory, and tell of it."""

    def copy() -> None:
        found, inside = source.box(corner)
        box = found.new_zeros(source.block_type.shape)
        box[inside] = found
        buffer.tensor.copy_(box.reshape(buffer.tensor.shape))
        full.change(num_bytes=-source.block_type.nbytes)

    full.world.later(copy) if World.is_late else copy()


def tma_store(target: Descriptor, corner: Sequence[Any], buffer: Shared, add: bool = False) -> None:
    """Copy a box from shared memory, or add it to what is there."""
    world: World = _LOCAL.world

    def write(value: torch.Tensor) -> None:
        found, inside = target.box(corner)
        value = value.reshape(target.block_type.shape)[inside]
        found.copy_(found + value if add else value)
        world.launch.changed()

    def read() -> None:
        _LOCAL.writes.append(world.later(partial(write, buffer.tensor.clone())))

    if World.is_late:
        _LOCAL.stores.append(Promise(read))
    else:
        write(buffer.tensor)


def store_wait(left: int) -> None:
    """Wait for stores to have read what they copy."""
    if World.is_late:
        if _LOCAL.place >= _FIRST_ADDER:
            dawdle()
        _LOCAL.stores = finish(_LOCAL.stores, left)


def write_wait() -> None:
    """Wait for what stores have read to be in memory.

    What warps that add have written other blocks may see later, until it is released, as on an
    H200. Other warps tell no other block of anything. Which thread releases is not looked at, nor
    what a reader would have to acquire.
    """
    store_wait(0)
    _LOCAL.unreleased += _LOCAL.writes
    _LOCAL.writes = []
    if _LOCAL.place < _FIRST_ADDER:
        release()


def release() -> None:
    """Wait until other blocks see it."""
    for write in _LOCAL.unreleased:
        _LOCAL.world.launch.join(write)
    _LOCAL.unreleased = []


def product(left: Any, right: Shared, total: Any, *, use_acc: bool = True, is_async: bool) -> Any:
    """Return total + left right, in fp32; at once."""
    del is_async

    def compute() -> Any:
        first = left.tensor if isinstance(left, Shared) else left
        made = first.as_subclass(torch.Tensor).float() @ right.tensor.float()
        return (value_of(total) + made if use_acc else made).as_subclass(Tile)

    if not World.is_late:
        return compute()
    _LOCAL.products.append(Promise(compute))
    return _LOCAL.products[-1]


def product_wait(pending: int, deps: list[Any]) -> Any:
    """Return what was waited for."""
    if World.is_late:
        _LOCAL.products = finish(_LOCAL.products, pending)
    found = [value_of(item) for item in deps]
    return found[0] if len(found) == 1 else tuple(found)


def assembly(text: str, constraints: str, arguments: list[Any], **rest: Any) -> Any:
    """Do what the kernel's pieces of assembly do."""
    del constraints, rest
    world: World = _LOCAL.world
    if "wait_group" in text:
        write_wait()
    if "fence.release" in text:
        release()
    if "tanh" in text:
        return torch.tanh(arguments[0])
    if "rcp" in text:
        return 1.0 / arguments[0]
    if "shl" in text:
        return arguments[0].float()
    if "selp.f32" in text:
        x, words, bits, hidden = arguments
        return torch.where((words & bits) != 0, x, hidden).as_subclass(Tile)
    if "bar." in text:
        found = re.search(r"bar\.\w+ \S+, (\d+);", text)
        assert found is not None
        threads, number = int(found[1]), int(arguments[0])
        assert number < 16, "a named barrier that the device does not have"
        named = world.named.setdefault(number, Barrier(world, threads))
        before = named.phase
        named.change(arrivals=_LOCAL.num_threads)
        if "bar.sync" in text:
            named.wait(lambda: named.phase > before)
    return None


def names() -> dict[str, Any]:
    """Return Gluon's words as this file understands them."""

    def where(condition: Any, this: Any, that: Any) -> Any:
        condition, this, that = torch.as_tensor(condition), tile(this), tile(that)
        if type(this) is Number and type(that) is Number and condition.dim() == 0:
            return this if condition else that
        return torch.where(condition, _as_tile(this), _as_tile(that)).as_subclass(Tile)

    def binary(function: Any, of_ints: Any) -> Any:
        def operate(a: Any, b: Any) -> Any:
            if isinstance(a, int) and isinstance(b, int):
                return Number(of_ints(int(a), int(b)))
            tiles = torch.broadcast_tensors(_as_tile(tile(a)), _as_tile(tile(b)))
            return function(*tiles).as_subclass(Tile)

        return operate

    def nothing(*args: Any, **kwargs: Any) -> None:
        del args, kwargs

    def split(x: Any) -> Any:
        return x[..., 0], x[..., 1]

    nothing.get_default_for = nothing  # type: ignore[attr-defined]
    gl = SimpleNamespace(
        constexpr=lambda x: x, tensor=None, shared_memory_descriptor=None,
        to_tensor=tile, load=load, store=store, where=where,
        minimum=binary(torch.minimum, min), maximum=binary(torch.maximum, max),
        cdiv=lambda a, b: (a + b - 1) // b,
        program_id=lambda axis: tile(_LOCAL.world.block),
        num_programs=lambda axis: tile(_LOCAL.world.num_blocks),
        arange=lambda low, high, layout: tile(torch.arange(low, high)),
        zeros=lambda shape, dtype, layout: tile(torch.zeros(shape, dtype=dtype)),
        full=lambda shape, value, dtype, layout: tile(torch.full(shape, value, dtype=dtype)),
        expand_dims=lambda x, axis: x.unsqueeze(axis), convert_layout=lambda x, layout: x,
        sum=lambda x, axis: x.sum(axis), max=lambda x, axis: x.amax(axis),
        reshape=lambda x, shape: x.reshape(shape), permute=lambda x, order: x.permute(order),
        broadcast=lambda a, b: [x.as_subclass(Tile) for x in torch.broadcast_tensors(a, b)],
        split=split, join=lambda a, b: torch.stack((a, b), -1), exp2=torch.exp2, log2=torch.log2,
        abs=torch.abs, static_range=range, bfloat16=torch.bfloat16,
        SliceLayout=nothing, NVMMADistributedLayout=nothing, DotOperandLayout=nothing,
        NVMMASharedLayout=nothing, BlockedLayout=nothing, allocate_shared_memory=shared,
        inline_asm_elementwise=assembly, atomic_xchg=atomic_xchg,
        atomic_max=atomic_max,
        int32=torch.int64, int64=torch.int64, float32=torch.float32,
        warp_specialize=lambda parts, warps, registers: _LOCAL.world.run(parts, warps),
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
        "tma": SimpleNamespace(tensor_descriptor=None, store_wait=store_wait),
        "aggregate": lambda kind: kind,
        "barrier": nothing,
        "shaped_as": lambda buffer, descriptor: buffer,
        "tma_add": partial(tma_store, add=True),
        "tma_load": tma_load,
        "tma_store": tma_store,
        "fence_async_shared": nothing,
        "warpgroup_mma": product,
        "warpgroup_mma_wait": product_wait,
        "_constants": _constants,
    }


def device_code(files: Sequence[str]) -> dict[str, Any]:
    """Return the functions of files of device code, in one namespace.

    Args:
        files: below `adaattn.backends`, each behind those that it takes functions of.
    """
    space = names()
    for name in files:
        exec(_compiled(Path(backends.__file__).parent / f"{name}.py"), space)
    return space


@cache
def _compiled(path: Path) -> Any:
    """Return the code of a kernel's file, without what it imports."""
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom)]
    return compile(tree, str(path), "exec")


def run_blocks(num_blocks: int, code: Callable[..., Any], given: list[Any]) -> None:
    """Run one block of threads after the other, or all at the same time."""

    def run(launch: Launch, block: int) -> None:
        _LOCAL.world = World(launch, block, num_blocks)
        code(*given)

    blocks = random.sample(range(num_blocks), num_blocks)
    for together in [blocks] if World.are_together else [[block] for block in sorted(blocks)]:
        launch = Launch()
        launch.run([partial(run, launch, block) for block in together])


def bound(
    code: Callable[..., Any], constants: dict[str, Any], boxes: Sequence[tuple[int, ...]]
) -> Callable[..., Any]:
    """Return what stands for a kernel's `bind`."""
    parameters = inspect.signature(code).parameters
    launched = [name for name in parameters if name not in constants]
    # What is no constant has a lower-case name in the source.
    assert launched == [it for it in parameters if it.islower() and it not in constants]

    def bind(views: Sequence[Any]) -> Callable[..., None]:
        def arguments(copied: Any, others: Sequence[Any]) -> list[Any]:
            found: dict[str, Any] = dict(constants)
            places = zip(copied, views, boxes, strict=True)
            described = (Descriptor(*place) for place in places)
            for name, value in zip(launched, (*described, *others), strict=True):
                if value is None or isinstance(value, torch.Tensor):
                    value = Pointer.to(value)
                elif name.islower() and type(value) is int:
                    value = tile(value)
                found[name] = value
            return [found[name] for name in parameters]

        def launch(num_blocks: int, stream: int, copied: Any, *others: Any) -> None:
            with torch.no_grad(), _disable_current_modes():  # a device knows nothing of either
                run_blocks(num_blocks, code, arguments(copied, others))

        return launch

    return bind


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have asynchronous work done as late as it may be, and everything take some time."""
    monkeypatch.setattr(World, "is_late", True)
    random.seed(0)
    yield
