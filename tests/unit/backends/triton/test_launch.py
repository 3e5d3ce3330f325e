"""How problems are launched: pure functions of shape and device."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial, partialmethod
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adaattn.backends import capabilities
from adaattn.backends.device import launch as launches
from adaattn.backends.device.launch import Launch
from adaattn.backends.triton import CAPABILITIES, direct
from adaattn.backends.triton import forward as kernels
from adaattn.backends.triton.arguments import Arguments, MaskLayout
from adaattn.backends.triton.launch import (
    Tile,
    choose_tile,
    is_halved,
    num_splits,
    packed_heads,
    padded,
)
from adaattn.errors import ExecutorError
from adaattn.hardware import probe
from adaattn.planning import decide, reasons
from adaattn.spec import Align, AttentionProblem, HeadGroup, Policy, Precision, Scheme, Why
from adaattn.testing import fake_facts, make_problem, make_tensors

SHORT = Tile(rows=16, keys=64, warps=4, stages=3)
SHARED_BYTES = 227 * 1024
"""Of a multiprocessor of compute capability 9.0, for one program."""


def problems() -> list[AttentionProblem]:
    sizes = itertools.product(
        (16, 64, 80, 128, 192, 256),
        (1, 40, 300, 4096),
        (1, 4),
        (Precision.BF16, Precision.FP16, Precision.FP32),
    )
    return [
        make_problem(
            head_dim=dim, len_q=rows, num_heads=8, num_kv_heads=8 // group, precision=precision
        )
        for dim, rows, group, precision in sizes
    ]


@pytest.mark.parametrize("columns", [1, 15, 16, 17, 80, 128, 129, 256])
def test_columns_are_padded_to_the_next_power_of_two_from_16_on(columns: int) -> None:
    found = padded(columns)
    assert found >= max(columns, 16)
    assert found == 16 or found < 2 * columns
    assert found & (found - 1) == 0


def test_the_tiles_that_stay_in_shared_memory_fit_it() -> None:
    for problem in problems():
        tile, columns = choose_tile(problem), padded(problem.head_dim)
        size = 4 if problem.precision is Precision.FP32 else 2
        query = tile.rows * columns * size
        keys_and_values = 2 * tile.keys * columns * size * tile.stages
        assert query + keys_and_values <= SHARED_BYTES, (problem.head_dim, problem.len_q, tile)


def test_rows_of_a_group_share_a_tile_where_there_are_few() -> None:
    few = make_problem(len_q=1, num_heads=32, num_kv_heads=8)
    many = make_problem(len_q=4096, num_heads=32, num_kv_heads=8)
    assert (packed_heads(few), packed_heads(many)) == (4, 1)
    assert choose_tile(few).rows == 16


def test_fp32_is_taken_apart_where_many_rows_read_the_same_keys() -> None:
    assert is_halved(make_problem(len_q=2048, precision=Precision.FP32))
    assert not is_halved(make_problem(len_q=1, precision=Precision.FP32))
    assert not is_halved(make_problem(len_q=2048, precision=Precision.BF16))


@pytest.mark.parametrize("programs", [1, 3, 8, 66, 100, 132, 264, 5000])
@pytest.mark.parametrize("len_k", [1, 100, 1000, 32768])
def test_splits_fill_the_device_and_are_not_too_short(programs: int, len_k: int) -> None:
    splits = num_splits(programs, SHORT, len_k, 132)
    assert splits >= 1
    assert splits == 1 or len_k / splits >= 256
    assert splits == 1 or programs * splits <= 2 * 132


@pytest.mark.parametrize("len_k", [1, 63, 64, 65, 1000, 4097])
@pytest.mark.parametrize("processors", [1, 7, 132])
def test_splits_cover_every_key_once(len_k: int, processors: int) -> None:
    problem = make_problem(len_q=1, len_k=len_k, num_heads=8, num_kv_heads=2)
    splits, split_keys = Arguments(problem).splits(2, 1, len_k, processors)
    assert split_keys % choose_tile(problem).keys == 0
    assert (splits - 1) * split_keys < len_k <= splits * split_keys


@pytest.mark.parametrize("len_q", [1, 7, 16])
@pytest.mark.parametrize("left", [0, 63, 64, 1000, 4095])
@pytest.mark.parametrize("right", [-1, 0, 3, 8191])
def test_splits_cover_the_window_at_the_end_and_little_more(
    len_q: int, left: int, right: int
) -> None:
    """Simplified, a single causal row has a window that is open on the right."""
    len_k = 32768
    problem = make_problem(
        len_q=len_q,
        len_k=len_k,
        num_heads=8,
        num_kv_heads=2,
        window=(left, right),
        align=Align.BOTTOM_RIGHT,
    )
    tile = choose_tile(problem)
    splits, split_keys = Arguments(problem).splits(2, len_q, len_k, 132)
    begin = max(len_k - len_q - left, 0) // tile.keys * tile.keys
    assert begin + splits * split_keys >= len_k
    assert (splits - 1) * split_keys < left + len_q + tile.rows + tile.keys


def test_kernels_that_split_a_window_are_known_apart_from_those_that_do_not() -> None:
    """What was compiled for a wide window does not serve a narrow one."""
    problem = make_problem(len_q=1, len_k=32768, window=(127, -1), align=Align.BOTTOM_RIGHT)
    narrow, wide = (Arguments(replace(problem, window=(left, -1))) for left in (127, 4095))
    assert narrow.splits(2, 1, 32768, 132)[0] == 1 < wide.splits(2, 1, 32768, 132)[0]
    assert narrow.known_by != wide.known_by


@pytest.mark.parametrize("lengths", [(1,), (0, 0, 5), (64, 1, 63), (200, 0, 3, 128)])
def test_tiles_of_packed_sequences_cover_every_row(lengths: tuple[int, ...]) -> None:
    """Sequence n has the tiles from starts[n] // rows + n on, as the kernel finds them."""
    problem = make_problem(lengths_q=lengths, head_dim=16)
    arguments, tile = Arguments(problem), choose_tile(problem)
    rows = tile.rows // packed_heads(problem)
    _, tiles = arguments.programs(1, problem.num_heads, problem.len_q, len(lengths))
    starts = [0, *itertools.accumulate(lengths)]
    for number, length in enumerate(lengths):
        first = starts[number] // rows + number
        behind = starts[number + 1] // rows + number + 1
        assert (behind - first) * rows >= length
        assert behind <= tiles


def test_a_mask_of_keys_alone_is_read_once_for_a_tile() -> None:
    of_keys = MaskLayout(1, (128, 0, 0, 1))
    of_heads = MaskLayout(2, (0, 64, 0, 1))
    assert of_keys.constants(4, 16)[1] is False
    assert of_heads.constants(4, 16)[1] is True
    assert of_heads.constants(1, 16)[1] is False


@pytest.mark.parametrize("kind", [1, 2])
def test_a_mask_that_grows_with_a_cache_has_one_kernel(kind: int) -> None:
    lengths = (*range(1, 65), 128, 1000, 4096)
    for strides in (lambda keys: (keys, 0, 0, 1), lambda keys: (4 * keys, 0, keys, 1)):
        assert len({MaskLayout(kind, strides(keys)).constants(4, 16) for keys in lengths}) == 1


def test_padding_masks_of_prompts_of_any_length_have_one_kernel() -> None:
    assert len({MaskLayout(1, (keys, 0, 0, 1)).constants(1, 128) for keys in range(1, 65)}) == 1


@pytest.mark.parametrize(("row", "align"), [(4096, 16), (4104, 8), (4097, 1)])
def test_rows_of_a_mask_that_begin_at_multiples_are_read_as_vectors(row: int, align: int) -> None:
    assert MaskLayout(2, (0, 0, row, 1)).constants(1, 128)[3] == align


DECODE: dict[str, Any] = {"len_q": 1, "len_k": 5000, "num_heads": 8, "num_kv_heads": 2}
ALLOCATING: dict[str, dict[str, Any]] = {
    "nothing": {"len_q": 40},
    "parts of split keys": DECODE | {"value_dim": 24},
    "parts in fp32": DECODE | {"precision": Precision.FP32},
    "halves of fp32": {"len_q": 140, "precision": Precision.FP32},
}


@pytest.mark.parametrize("name", ALLOCATING)
def test_planning_knows_of_all_that_a_call_allocates(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (capability,) = CAPABILITIES
    problem = make_problem(**({"precision": Precision.FP16} | ALLOCATING[name]))
    group = HeadGroup(capability="triton", scheme=Scheme.of(problem.precision))
    facts = replace(probe("cpu"), num_processors=13)
    monkeypatch.setattr("adaattn.backends.triton.executor.probe", lambda name: facts)
    monkeypatch.setattr(Launch, "__call__", lambda self, *tensors: None)
    allocated: list[torch.Tensor] = []

    def noting(made: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        allocated.append(made(*args, **kwargs))
        return allocated[-1]

    for way in ("new_empty", "new_empty_strided"):
        noted = partialmethod(partial(noting, getattr(torch.Tensor, way)))
        monkeypatch.setattr(torch.Tensor, way, noted)
    tensors = make_tensors(problem)
    output = direct(problem, group)(tensors.query, tensors.key, tensors.value)
    overhead = capability.overhead(problem, group, facts, 1.0)
    beside = [item for item in allocated if item.data_ptr() != output.data_ptr()]
    assert overhead.workspace_bytes == sum(item.nbytes for item in beside)
    assert bool(overhead.launches) == (name != "nothing")


def test_odd_columns_are_for_fp32_alone() -> None:
    (capability,) = CAPABILITIES
    gpu = {"device_type": "cuda", "dense_columns": True, "head_dim": 57, "stride_bytes": 4}
    for precision, is_served in ((Precision.FP32, True), (Precision.BF16, False)):
        why = reasons(capability, make_problem(**gpu, precision=precision), None)
        assert any("even D and Dv" in text for text in why) is not is_served
    rows = gpu | {"head_dim": 64, "precision": Precision.FP16}
    for step, is_served in ((2, False), (4, True), (16, True)):
        why = reasons(capability, make_problem(**(rows | {"stride_bytes": step})), None)
        assert any("begin at multiples of 4" in text for text in why) is not is_served
    # In a graph strides are known when it runs: then q, k and v are copied.
    unknown = make_problem(**(rows | {"dense_columns": False, "stride_bytes": 1}))
    assert not any("begin at multiples" in text for text in reasons(capability, unknown, None))
    assert Arguments(unknown).are_copied
    assert not Arguments(make_problem(**(rows | {"stride_bytes": 16}))).are_copied


@pytest.mark.parametrize(("capability", "overlaps"), [((8, 9), False), ((9, 0), True)])
def test_what_adds_up_splits_is_launched_early_where_gpus_can(
    capability: tuple[int, int], overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = make_problem(**DECODE, precision=Precision.FP16)
    facts = replace(probe("cpu"), num_processors=13, compute_capability=capability)
    monkeypatch.setattr("adaattn.backends.triton.executor.probe", lambda name: facts)
    launched: list[Launch] = []
    monkeypatch.setattr(Launch, "__call__", lambda self, *tensors: launched.append(self))
    tensors = make_tensors(problem)
    direct(problem, HeadGroup(capability="triton"))(tensors.query, tensors.key, tensors.value)
    forward, combine = launched
    names = kernels.forward.arg_names[-len(forward.constants) :]
    assert forward.constants[names.index("IS_FOLLOWED")] is overlaps
    assert combine.constants[-1] is overlaps
    assert (("launch_pdl", True) in combine.options) is overlaps


def test_a_budget_too_small_for_the_parts_of_split_keys_takes_another_executor() -> None:
    """Parts of 16 splits, in fp32, are 32 times the result in bf16."""
    problem = make_problem(
        **(DECODE | {"num_kv_heads": 8, "len_k": 32768, "head_dim": 128, "device_type": "cuda"}),
        precision=Precision.BF16,
        dense_columns=True,
        stride_bytes=16,
    )
    both = [item for item in capabilities() if item.name in ("triton", "sdpa.efficient")]
    both = [replace(item, unavailable="") for item in both]
    machine, policy = fake_facts("h200"), Policy(memory_budget_bytes=50_000)
    decision = decide(problem, None, machine, policy, tuple(both))
    (refused,) = [entry for entry in decision.trace if entry.candidate.startswith("triton")]
    assert refused.why is Why.MEMORY
    assert decision.plan.groups[0].capability == "sdpa.efficient"


class Compiled:
    """Stands for what Triton compiles: its launch is made for what its source is then."""

    def __init__(self, signature: dict[str, str], launched: list[tuple[Any, ...]]) -> None:
        self.src = SimpleNamespace(signature=signature)
        self.metadata, self.packed_metadata, self.launched = SimpleNamespace(), "packed", launched
        self.module, self.function, self._run = "loaded before", "of before", None

    def _init_handles(self) -> None:
        assert self.module is None
        types = dict(self.src.signature)
        self.function = "function"
        self._run = lambda *given: self.launched.append((types, *given))

    @property
    def run(self) -> Any:
        return self._run


def test_a_launch_hands_over_addresses_and_numbers_and_no_constants() -> None:
    signature = {"q": "*bf16", "k": "constexpr", "v": "*fp32", "scale": "fp32", "rows": "i32",
                 "TILE": "constexpr", "IS_CAUSAL": "constexpr"}  # fmt: skip
    launched: list[tuple[Any, ...]] = []
    kernel = Compiled(signature, launched)
    known = launches.bare(kernel)
    assert kernel.src.signature is signature, "who else launches it needs it as it was"
    assert (kernel.module, kernel.function) == ("loaded before", "of before")
    launch = Launch(
        module="triton.forward", name="forward", grid=(3, 2, 1), numbers=(0.5, 7),
        constants=(64, True), options=(("num_warps", 4),),
    )  # fmt: skip
    launch._kernels[0b010] = known  # of calls whose second tensor is None
    first, third = torch.zeros(8), torch.ones(8)
    launch(first, None, third)
    types = dict(enumerate(("i64", "i64", "fp32", "i32")))
    addresses = first.data_ptr(), third.data_ptr()
    hooks = (None, None, None)
    given = (3, 2, 1, 0, "function", "packed", *hooks, *addresses, 0.5, 7)
    assert launched == [(types, *given)]


class TritonLauncher:
    """A launcher as Triton's: it asks for memory, and hands what it was given over with more."""

    def __init__(self, size: int, *, hands_a_tuple: bool) -> None:
        self.size, self.hands_a_tuple = size, hands_a_tuple
        self.launched: list[tuple[Any, ...]] = []
        self.launch: Callable[..., None] = lambda *given: self.launched.append(given)

    def __call__(self, x: Any, y: Any, z: Any, stream: Any, function: Any, *rest: Any) -> None:
        memory = x * y * z * self.size if self.size else None
        *before, packed, _, enter, leave = rest[:4]
        assert not before
        rest = rest[4:]
        arguments = (rest,) if self.hands_a_tuple else rest
        self.launch(x, y, z, stream, function, False, memory, packed, enter, leave, *arguments)


@pytest.mark.parametrize("hands_a_tuple", [False, True])
@pytest.mark.parametrize("size", [0, 16])
def test_what_a_launcher_would_hand_over_is_handed_over_without_it(
    size: int, hands_a_tuple: bool
) -> None:
    launcher = TritonLauncher(size, hands_a_tuple=hands_a_tuple)
    given = ("function", "packed", None, None, None)
    run, before = launches._without_launcher(launcher, given)
    assert launcher.launched == [], "it was asked for nothing"
    assert (run is launcher) == (size > 0), "one that needs memory asks for it at each call"
    run(3, 2, 1, 7, *before, 11, 12, 13)
    launcher(3, 2, 1, 7, *given, 11, 12, 13)
    assert launcher.launched[0] == launcher.launched[1]


class Turned(TritonLauncher):
    """One that hands a grid over in another order."""

    def __call__(self, x: Any, y: Any, z: Any, stream: Any, function: Any, *rest: Any) -> None:
        super().__call__(z, y, x, stream, function, *rest)


class Longer(TritonLauncher):
    """One that hands something over behind the arguments."""

    def __call__(self, *given: Any) -> None:
        super().__call__(*given, "more")


class Asking(TritonLauncher):
    """One that asks something of the stream."""

    def __call__(self, x: Any, y: Any, z: Any, stream: Any, function: Any, *rest: Any) -> None:
        super().__call__(x, y, z, stream.number, function, *rest)


@pytest.mark.parametrize("odd", [
    *(lambda *given: None, print, object()),
    *(kind(0, hands_a_tuple=False) for kind in (Turned, Longer, Asking)),
], ids=lambda it: type(it).__name__)  # fmt: skip
def test_another_launcher_stays_as_it_is(odd: Any) -> None:
    given = ("function", "packed", None, None, None)
    assert launches._without_launcher(odd, given) == (odd, given)


def test_what_another_thread_compiles_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[Any, ...]] = []
    kernel = Compiled({"q": "*fp32", "rows": "i32"}, launched)
    later = SimpleNamespace(result=lambda: kernel)
    function = SimpleNamespace(warmup=lambda *given, **options: later)
    monkeypatch.setattr(Launch, "_function", lambda self: function)
    launch = Launch(
        module="triton.forward", name="forward", grid=(1, 1, 1), numbers=(7,), constants=(),
        options=(("num_warps", 2),),
    )  # fmt: skip
    tensor = torch.zeros(8)
    launch(tensor)
    launch(tensor)
    assert [given[-2:] for given in launched] == [(tensor.data_ptr(), 7)] * 2


def test_tensors_of_several_devices_are_refused() -> None:
    launch = Launch(
        module="triton.forward", name="forward", grid=(1, 1, 1), numbers=(7,), constants=(),
        options=(("num_warps", 1),),
    )  # fmt: skip
    with pytest.raises(ExecutorError, match="one device"):
        launch._known_or_compiled((torch.zeros(8), torch.zeros(8, device="meta")))


def test_calls_without_a_tensor_have_a_kernel_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is None is a constant of what is compiled: a gradient that came later was once lost."""
    compiled: list[tuple[bool, ...]] = []
    launched: list[int] = []

    def compiling(self: Launch, tensors: tuple[torch.Tensor | None, ...]) -> Any:
        number = len(compiled)
        compiled.append(tuple(item is None for item in tensors))
        return (lambda *given: launched.append(number)), ()

    monkeypatch.setattr(Launch, "_known_or_compiled", compiling)
    launch = Launch(
        module="triton.forward", name="forward", grid=(1, 1, 1), numbers=(1,), constants=(),
        options=(),
    )  # fmt: skip
    first, second = torch.zeros(8), torch.zeros(8)
    for given in ((first, None), (first, second), (first, None), (first, second)):
        launch(*given)
    assert compiled == [(False, True), (False, False)]
    assert launched == [0, 1, 0, 1]
