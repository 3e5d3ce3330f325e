"""What a call hands to the Hopper kernel, with the kernel replaced: no GPU, no Triton."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from adaattn.backends import hopper
from adaattn.backends.allocation import output_like
from adaattn.backends.block_list import BlockList
from adaattn.backends.device.launch import address_of
from adaattn.backends.hopper import forward, gradients, prepared, views
from adaattn.backends.hopper.launch import Variant, choose
from adaattn.backends.hopper.mask_lists import Tiles
from adaattn.backends.interface import Result, Tensors, num_taken
from adaattn.backends.operator_arguments import taken_apart
from adaattn.errors import ExecutorError
from adaattn.spec import AttentionProblem, Aux, HeadGroup, MaskKind, Precision, Scheme
from adaattn.testing import make_problem, make_tensors, with_tensors

GROUP = HeadGroup(capability="hopper", scheme=Scheme.of(Precision.BF16))
NUM_POINTERS = 8
NUM_DESCRIBED = 5
# Behind the number of blocks, the stream and the descriptors, one of them that of a staged mask.
STAGED = 2 + 4
FIRST_POINTER = STAGED + 1
FIRST_SCALAR = FIRST_POINTER + NUM_POINTERS
# Behind 13 sizes and the slopes' stride.
MASK_STRIDES = FIRST_SCALAR + 14
STARTS = MASK_STRIDES + 4
LISTS = STARTS + 2
SEQUENCES = LISTS + 3


class Launches:
    """Stands for compiled kernels: keeps what they are launched with."""

    def __init__(self) -> None:
        self.variants: list[Variant] = []
        self.arguments: list[tuple[Any, ...]] = []
        self.copied: list[tuple[torch.Tensor, ...]] = []

    def __call__(self, variant: Variant, device: torch.device) -> Any:
        self.variants.append(variant)

        def bind(views: tuple[Any, ...]) -> Any:
            """Return a launch whose arguments have views in the place of tensors."""
            described = (*views, None)[:NUM_DESCRIBED]

            def launch(num_blocks: int, stream: int, copied: tuple[Any, ...], *rest: Any) -> None:
                assert len(copied) == len(views)
                self.copied.append(copied)
                self.arguments.append((num_blocks, stream, *described, *rest))

            return launch

        return bind


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    found = Launches()
    monkeypatch.setattr(prepared, "_compiled", found)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    forward.bound.cache_clear()
    prepared._LISTED.clear()
    return found


def _problem(**values: Any) -> AttentionProblem:
    return make_problem(**({"precision": Precision.BF16, "head_dim": 64, "len_q": 300} | values))


def _run(problem: AttentionProblem, tensors: Tensors) -> Result:
    return hopper.run(tensors, problem, GROUP)


def test_row_outputs_are_made_where_they_are_asked_for(launches: Launches) -> None:
    problem = _problem(aux=Aux.LSE | Aux.ENTROPY, value_dim=32)
    result = _run(problem, make_tensors(problem))
    assert result.output.shape == (1, 2, 300, 32)
    assert result.output.dtype is torch.bfloat16
    assert result.lse is not None
    assert result.lse.shape == (1, 2, 300)
    assert result.lse.dtype is torch.float32
    assert result.entropy is not None
    assert result.row_max is None
    assert launches.variants[0].has_lse
    assert not launches.variants[0].has_row_max


def test_the_result_lies_in_memory_as_the_query_does(launches: Launches) -> None:
    problem = _problem(value_dim=32)
    tensors = make_tensors(problem)
    turned = tensors.query.transpose(1, 2).contiguous().transpose(1, 2)
    output = _run(problem, replace(tensors, query=turned)).output
    assert output.transpose(1, 2).is_contiguous()
    assert _run(problem, tensors).output.is_contiguous()


def test_strides_of_single_elements_are_made_what_tma_takes(launches: Launches) -> None:
    problem = _problem(num_heads=1, len_q=1, len_k=64)
    tensors = make_tensors(problem)
    odd = tensors.query.as_strided(tensors.query.shape, (3, 5, 7, 1))
    _run(problem, replace(tensors, query=odd))
    for _, strides in launches.arguments[0][2:STAGED]:
        assert strides[3] == 1
        assert all(step > 0 and step % 8 == 0 for step in strides[:3])


def test_an_address_that_tma_cannot_read_is_copied(launches: Launches) -> None:
    problem = _problem()
    tensors = make_tensors(problem)
    _run(problem, tensors)
    wide = torch.zeros(tensors.query.numel() + 8, dtype=torch.bfloat16)
    odd = wide[1 : 1 + tensors.query.numel()].view_as(tensors.query)
    assert odd.data_ptr() % 16
    assert odd.stride() == tensors.query.stride()
    for name in ("query", "key", "value"):
        _run(problem, with_tensors(tensors, **{name: odd}))
        assert all(item.data_ptr() % 16 == 0 for item in launches.copied[-1])
    assert views.readable(tensors.query) is tensors.query
    assert len(launches.variants) == 1


def test_a_second_call_of_a_layout_prepares_nothing(launches: Launches) -> None:
    problem = _problem(is_causal=True)
    call = hopper.direct(problem, GROUP)
    assert call is not None
    tensors = make_tensors(problem)
    for _ in range(3):
        call(tensors.query, tensors.key, tensors.value, None)
    longer = make_tensors(replace(problem, len_k=301))
    call(longer.query, longer.key, longer.value, None)
    assert len(launches.variants) == 2
    assert len(launches.arguments) == 4
    tiles = {it.tensor.data_ptr() for it in prepared._LISTED.values()}
    assert all(arguments[FIRST_POINTER + 3] in tiles for arguments in launches.arguments)


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((2, 3, 300, 300), (3 * 300 * 300, 300 * 300, 300, 1)),
        ((1, 1, 1, 300), (0, 0, 0, 1)),
        ((2, 1, 1, 300), (300, 0, 0, 1)),
        ((300, 300), (0, 0, 300, 1)),
        ((2, 1, 300, 1), (300, 0, 1, 0)),
    ],
)
def test_masks_are_read_where_they_lie(
    launches: Launches, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    full = (1,) * (4 - len(shape)) + shape
    problem = _problem(batch=2, num_heads=3, mask=MaskKind.BOOLEAN, mask_shape=full)
    tensors = make_tensors(replace(problem, mask=MaskKind.NONE, mask_shape=()))
    mask = torch.ones(shape, dtype=torch.bool)
    call = hopper.direct(problem, GROUP)
    assert call is not None
    call(tensors.query, tensors.key, tensors.value, mask)
    assert launches.arguments[0][MASK_STRIDES : MASK_STRIDES + 4] == strides
    assert launches.arguments[0][FIRST_POINTER + 5] == mask.data_ptr()
    assert launches.variants[0].mask_has_rows is (full[2] > 1)
    assert launches.variants[0].mask_is_dense is (full[3] > 1)


@pytest.mark.parametrize(
    ("mask", "is_aligned"),
    [
        (torch.ones(1, 1, 32, 32), True),
        (torch.ones(1, 1, 32, 40)[..., :32], False),
        (torch.ones(1, 1, 1, 33), True),
        (torch.ones(64)[1:33].view(1, 1, 1, 32), False),
        (torch.ones(1, 1, 32, 32).mT, False),
    ],
)
def test_two_numbers_of_a_mask_are_read_at_once_only_where_rows_are_aligned(
    mask: torch.Tensor, is_aligned: bool
) -> None:
    assert prepared.is_aligned(mask) is is_aligned


def test_a_list_of_tiles_is_made_once_and_never_while_a_graph_is_captured(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = _problem(is_causal=True)
    tensors = make_tensors(problem)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    _run(problem, tensors)
    assert not launches.variants[-1].has_tiles
    assert not prepared._LISTED
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    _run(problem, tensors)
    assert launches.variants[-1].has_tiles
    assert len(prepared._LISTED) == 1
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    _run(problem, tensors)
    assert len(launches.variants) == 2


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP16])
def test_a_softcap_comes_in_the_units_of_its_tanh(launches: Launches, precision: Precision) -> None:
    problem = _problem(softcap=20.0, scale=0.5, precision=precision)
    _run(problem, make_tensors(problem))
    scale, cap = launches.arguments[0][FIRST_SCALAR : FIRST_SCALAR + 2]
    log2_e = 1 / torch.log(torch.tensor(2.0, dtype=torch.float64)).item()
    exponent = 1.0 if precision is Precision.BF16 else 2 * log2_e
    assert scale == pytest.approx(0.5 / 20 * exponent)
    assert cap == pytest.approx(20 * log2_e)


def test_bounds_of_packed_sequences_stay_on_the_device(launches: Launches) -> None:
    lengths = (100, 150, 50)
    problem = make_problem(lengths_q=lengths, precision=Precision.BF16, head_dim=64)
    tensors = make_tensors(problem, lengths_q=lengths)
    assert tensors.cu_seqlens_q is not None
    _run(problem, tensors)
    (arguments,), (variant,) = launches.arguments, launches.variants
    assert variant.is_packed
    assert not variant.has_tiles
    assert arguments[STARTS] == tensors.cu_seqlens_q.data_ptr()
    assert arguments[SEQUENCES] == 3
    longer = replace(tensors, cu_seqlens_q=torch.tensor([0, 10, 20, 30, 300], dtype=torch.int32))
    _run(replace(problem, num_sequences=4), longer)
    assert launches.arguments[1][SEQUENCES] == 4


@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (2, 1), (2, 4)])
def test_lists_of_blocks_are_read_where_they_lie(
    launches: Launches, shape: tuple[int, int]
) -> None:
    problem = _problem(batch=2, num_heads=4, len_k=500, block_size=(128, 128), most_blocks=7)
    counts = torch.ones(*shape, 3, dtype=torch.int32)
    blocks = BlockList(counts=counts, indices=torch.arange(7).int().expand(*shape, 3, 7))
    _run(problem, replace(make_tensors(problem), blocks=blocks))
    (arguments,) = launches.arguments
    assert arguments[LISTS] == counts.data_ptr()
    by_batch, by_head = 3 * shape[1] * (shape[0] > 1), 3 * (shape[1] > 1)
    # Of seven numbers no more count than there are blocks of keys.
    assert arguments[SEQUENCES + 1 : SEQUENCES + 7] == (by_batch, by_head, 128, 7, 4, 4)
    assert launches.variants[0].list_ratio == 128 // launches.variants[0].tiling.block_n


@pytest.mark.parametrize("value_dim", [64, 32])
@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 0, 1), (2, 1, 0)], ids=str)
def test_the_result_has_the_order_of_the_query_whatever_that_is(
    launches: Launches, order: tuple[int, ...], value_dim: int
) -> None:
    problem = _problem(batch=3, num_heads=4, value_dim=value_dim)
    tensors = make_tensors(problem)
    back = [order.index(dim) for dim in range(3)]
    turned = tensors.query.permute(*order, 3).contiguous().permute(*back, 3)
    output = _run(problem, replace(tensors, query=turned)).output
    assert output.shape == (3, 4, 300, value_dim)
    assert output.permute(*order, 3).is_contiguous()
    assert output.stride() == output_like(turned, value_dim).stride()


def test_what_tma_cannot_read_is_copied_in_a_graph_whose_layouts_nobody_knew() -> None:
    wide = torch.zeros(1, 2, 300, 68, dtype=torch.bfloat16)
    for odd in (wide[..., :64], wide[..., ::2][..., :32]):
        assert views.made_readable(odd).is_contiguous()
    single = wide[:, :1, :1, :64]
    assert views.made_readable(single) is single


@pytest.mark.parametrize("value_dim", [64, 32])
@pytest.mark.parametrize("kind", ["expanded", "odd steps", "odd start"])
@pytest.mark.usefixtures("launches")
def test_outputs_of_queries_that_are_copied_lie_as_graphs_are_told(
    kind: str, value_dim: int
) -> None:
    problem = _problem(value_dim=value_dim, batch=2, num_heads=3, len_q=300)
    tensors = make_tensors(problem)
    wide = torch.zeros(2, 300, 3, 68, dtype=torch.bfloat16).transpose(1, 2)
    query = {
        "expanded": tensors.query[:1].expand(2, -1, -1, -1),
        "odd steps": wide[..., :64],
        "odd start": torch.cat((wide, wide), -1)[..., 4:68],
    }[kind]
    given = (query, tensors.key, tensors.value, *[None] * 7)
    words = (*taken_apart(problem), *[None] * 4)
    operator = torch.ops.adaattn.hopper.default
    torch.library.opcheck(operator, (*given, *words), test_utils="test_faketensor")


def test_a_graph_has_one_operator(launches: Launches) -> None:
    problem = _problem(value_dim=32, is_causal=True)
    tensors = make_tensors(problem)
    given = (tensors.query, tensors.key, tensors.value, *[None] * 7)
    words = (*taken_apart(problem), *[None] * 4)
    operator = torch.ops.adaattn.hopper.default
    torch.library.opcheck(operator, (*given, *words), test_utils="test_faketensor")

    def attend(query: torch.Tensor) -> torch.Tensor:
        return _run(problem, replace(tensors, query=query)).output

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert compiled(tensors.query).shape == (1, 2, 300, 32)
    assert launches.arguments


def test_what_cannot_be_compiled_is_an_error_that_auto_steps_down_from() -> None:
    """Here there is no CUDA device at all; without Triton, or with a broken one, it is the same."""
    variant = choose(_problem())
    with pytest.raises(ExecutorError, match="the Hopper kernel cannot be compiled here"):
        prepared._compiled.__wrapped__(variant, torch.device("cpu"))


def _lying(query: torch.Tensor, *others: Any) -> tuple[Any, ...]:
    return query.shape, query.stride(), *others


class Looked:
    """Says how a tensor lies, and counts how often it was asked."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, *given: Any) -> tuple[Any, ...]:
        self.times += 1
        return _lying(*given)


def _layouts(*kept: torch.Tensor) -> views.Layouts[int]:
    found: views.Layouts[int] = views.Layouts(views.made_readable)
    for number, tensor in enumerate(kept):
        found.keep(_lying(tensor, None), number)
    return found


def test_a_layout_that_comes_again_is_found_without_asking_for_shapes() -> None:
    first, other = torch.zeros(2, 8), torch.zeros(4, 8)
    layouts, looked = _layouts(first, other), Looked()
    assert [layouts.again((torch.zeros(2, 8),), looked) for _ in range(6)] == [0] * 6
    assert looked.times == 2  # only what comes twice in a row is compared with
    assert layouts.again((other,), looked) == 1
    assert layouts.again((first,), looked) == 0
    assert looked.times == 4


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(8, 2).t(),
        torch.zeros(2, 8, dtype=torch.float64)[:, ::2],
        torch.zeros(3, 8),
        torch.zeros(2, 9)[:, :8],
    ],
    ids=["turned", "of another size", "of other rows", "of other steps"],
)
def test_tensors_that_lie_otherwise_are_not_taken_for_those_that_came_again(
    other: torch.Tensor,
) -> None:
    first = torch.zeros(2, 8)
    layouts = _layouts(first)
    for _ in range(3):
        assert layouts.again((first,), _lying) == 0
    assert layouts.again((other,), _lying) is None
    assert layouts.again((first,), _lying) == 0


def test_what_comes_again_at_an_address_that_tma_cannot_read_is_not_found() -> None:
    wide = torch.zeros(2 * 8 + 1)
    aligned, odd = wide[:16].view(2, 8), wide[1:].view(2, 8)
    layouts = _layouts(aligned)
    for _ in range(3):
        assert layouts.again((aligned,), _lying) == 0
    assert layouts.again((odd,), _lying) is None


def test_a_mask_begins_where_it_can_be_read_and_numbers_anywhere() -> None:
    wide = torch.zeros(2 * 8 + 1)
    aligned, odd = wide[:16].view(2, 8), wide[1:].view(2, 8)
    layouts: views.Layouts[int] = views.Layouts(views.made_readable)

    def lying(query: torch.Tensor, *others: torch.Tensor | None) -> tuple[Any, ...]:
        return tuple(None if item is None else item.stride() for item in (query, *others))

    layouts.keep(lying(aligned, aligned), 0)
    for _ in range(3):
        assert layouts.again((aligned,), lying, aligned) == 0
    assert layouts.again((aligned,), lying, odd) is None
    layouts = views.Layouts(views.made_readable)
    layouts.keep(lying(aligned, None, aligned), 0)
    for _ in range(3):
        assert layouts.again((aligned,), lying, None, aligned) == 0
        assert layouts.again((aligned,), lying, None, odd) == 0


def test_guards_look_at_what_is_beside_too() -> None:
    first = torch.zeros(2, 8)
    layouts: views.Layouts[int] = views.Layouts(views.made_readable)

    def lying(query: torch.Tensor, *others: torch.Tensor | None) -> tuple[Any, ...]:
        return tuple(None if item is None else (item.shape, item.dtype) for item in others)

    beside = torch.zeros(4), torch.zeros(4)
    layouts.keep(lying(first, None, *beside), 0)
    for _ in range(3):
        assert layouts.again((first,), lying, None, *beside) == 0
    assert layouts.again((first,), lying, None, beside[0], torch.zeros(5)) is None
    assert layouts.again((first,), lying, None, beside[0].double(), beside[1]) is None


@pytest.mark.parametrize("module", [forward, gradients], ids=["forward", "backward"])
def test_launches_depend_on_how_masks_and_starts_lie(module: Any) -> None:
    heads = [torch.zeros(1, 2, 8, 16)] * (3 if module is forward else 5)
    absent = [None] * (4 if module is forward else 3)
    row = torch.zeros(8 * 8 + 8, dtype=torch.bfloat16)
    masks = [row[start : start + 64].view(8, 8) for start in (0, 1, 8)]
    found = [module._layout(*heads, mask, *absent) for mask in masks]
    assert found[0] == found[2] != found[1]
    starts = torch.zeros(3, 2, dtype=torch.int32)
    strided, dense = starts[:, 0], starts[:, 0].contiguous()
    found = [module._layout(*heads, *absent, which, dense) for which in (strided, dense)]
    assert found[0] != found[1]


def test_what_no_launch_depends_on_makes_no_guards_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where gradients are followed at every other call."""
    made: list[object] = []
    honest = views.guards
    monkeypatch.setattr(views, "guards", lambda given: made.append(given) or honest(given))
    first, followed = torch.zeros(2, 8), torch.zeros(2, 8, requires_grad=True)
    layouts = _layouts(first)
    for _ in range(5):
        assert layouts.again((first,), _lying) == layouts.again((followed,), _lying) == 0
    assert len(made) == 1


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize(
    "values",
    [
        {"is_causal": True},
        {"mask": MaskKind.ADDITIVE},
        {"mask": MaskKind.BOOLEAN},
        {"is_causal": True, "has_sinks": True, "has_alibi": True},
        {"is_causal": True, "lengths_q": (170, 1, 65)},
    ],
    ids=["plain", "bias", "boolean", "sinks and ALiBi", "packed"],
)
def test_repeated_calls_are_found_again(
    launches: Launches, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], trains: bool
) -> None:
    """By both passes; a call like one before is launched with the same numbers."""
    found: list[bool] = []
    honest = views.Layouts.again

    def again(self: Any, *given: Any) -> Any:
        one = honest(self, *given)
        found.append(one is not None)
        return one

    monkeypatch.setattr(views.Layouts, "again", again)
    stand_in = Launches()
    monkeypatch.setattr(gradients, "_compiled", lambda *given: [stand_in(*given)] * 3)
    gradients.backward_of.cache_clear()
    problem = _problem(**values, requires_grad=trains)
    call = hopper.direct(problem, GROUP)
    tensors = make_tensors(problem, lengths_q=values.get("lengths_q", ()))
    given = tensors.as_direct()[: num_taken(problem)]
    for _ in range(4):
        output = call(*given)
        if trains:
            torch.autograd.grad(output, tensors.query, torch.ones_like(output))
    assert found == [False, *[True] * 3] if not trains else [False, False, *[True] * 6]
    assert len(launches.arguments) == 4
    numbers = [those[FIRST_SCALAR:] for those in launches.arguments]
    assert numbers == numbers[:1] * 4
    # Where mask, sinks and slopes begin.
    beside = [those[FIRST_SCALAR - 3 : FIRST_SCALAR] for those in launches.arguments]
    assert beside == [tuple(map(address_of, given[3:6])) + (0,) * (3 - len(given[3:6]))] * 4


def test_each_mask_of_a_layout_is_read_by_its_own_tiles(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the launch is found again, which is one for all of them."""
    made: dict[int, Tiles] = {}
    asked: list[int] = []

    def packed(mask: torch.Tensor, block: tuple[int, int] | None) -> Tiles:
        asked.append(id(mask))
        lines = (-(-1024 // size) for size in block or ())
        return made.setdefault(
            id(mask),
            Tiles(
                torch.zeros(1, 1, 16, 128 * 16, dtype=torch.int32),
                torch.zeros(1, 1, next(lines), dtype=torch.int32),
                torch.zeros(1, 1, 8, next(lines), dtype=torch.int32),
                torch.zeros(1, 8, 128, dtype=torch.int8),
            ),
        )

    monkeypatch.setattr(forward, "packed_tiles", packed)
    problem = _problem(
        num_heads=4, len_q=1024, mask=MaskKind.BOOLEAN, mask_shape=(1, 1, 1024, 1024)
    )
    call, tensors = hopper.direct(problem, GROUP), make_tensors(problem)
    assert tensors.mask is not None
    masks = tensors.mask, tensors.mask.clone()
    order = (0, 0, 0, 0, 1, 0, 1, 1)
    for which in order:
        call(tensors.query, tensors.key, tensors.value, masks[which])
    assert asked == [id(masks[which]) for which in order]
    assert len(launches.variants) == 1
    assert launches.variants[0].packs_mask
    for which, those in zip(order, launches.arguments, strict=True):
        tiles = made[id(masks[which])]
        assert those[FIRST_SCALAR - 3] == address_of(tiles.words)
        assert those[LISTS : LISTS + 3] == tuple(map(address_of, tiles[1:]))


@pytest.mark.parametrize("elsewhere", [False, True])
def test_both_passes_are_launched_on_the_device_of_their_tensors(
    launches: Launches, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    entered: list[torch.device] = []

    @contextmanager
    def device(which: torch.device) -> Iterator[None]:
        entered.append(which)
        # There they are not elsewhere.
        for module in (forward, gradients):
            monkeypatch.setattr(module, "is_elsewhere", lambda tensor: False)
        yield
        for module in (forward, gradients):
            monkeypatch.setattr(module, "is_elsewhere", lambda tensor: elsewhere)

    monkeypatch.setattr(torch.cuda, "device", device)
    for module in (forward, gradients):
        monkeypatch.setattr(module, "is_elsewhere", lambda tensor: elsewhere)
    monkeypatch.setattr(gradients, "_compiled", lambda *given: [launches(*given)] * 3)
    gradients.backward_of.cache_clear()
    problem = _problem(is_causal=True, requires_grad=True)
    call, tensors = hopper.direct(problem, GROUP), make_tensors(problem)
    for _ in range(3):  # the last ones are found again
        entered.clear()
        output = call(tensors.query, tensors.key, tensors.value, None)
        assert len(entered) == elsewhere
        torch.autograd.grad(output, tensors.query, torch.ones_like(output))
        assert len(entered) == 2 * elsewhere
