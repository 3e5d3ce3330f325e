"""Our kernels through the public call on a GPU: waiting, CUDA graphs, compilers, autocast, fp32.

What they compute is in `tests/unit/test_semantics.py`; these hold how they are called. A test of a
kernel that this GPU cannot run is skipped. `make test-gpu` runs them.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from adaattn import AuxRequest
from adaattn import scaled_dot_product_attention as attend
from adaattn.backends import capability_named, load
from adaattn.backends.streamed.fused_launch import Fused, Kind
from adaattn.backends.triton.launch import has_room, is_halved
from adaattn.spec import Feature, HeadGroup, MaskKind, Precision
from adaattn.testing import assert_matches, assert_training_matches, make_problem, make_tensors

DEVICE = "cuda"
BACKENDS = ("triton", "hopper", "streamed")
WIDE = ("streamed",)
"""Those of head dimensions above 256."""

Draw = Callable[..., list[torch.Tensor]]
LENGTHS = (48, 64, 200, 333)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="it calls kernels on a GPU"),
]

CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "causal window with a softcap": {"is_causal": True, "window": (30, 0), "softcap": 30.0},
    "to the end": {"is_causal": True, "align": "bottom_right"},
}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Return the name of one of our kernels that this GPU can run."""
    name: str = request.param
    capability = capability_named(name)
    if capability.unavailable:
        pytest.skip(capability.unavailable)
    if DEVICE == "cuda":
        found, most = torch.cuda.get_device_capability(), capability.max_compute_capability
        if found < capability.min_compute_capability or (most != (0, 0) and found > most):
            pytest.skip(f"{name} is not for compute capability {found}")
    return name


@pytest.fixture
def operator(backend: str) -> str:
    """Return the name of one that a compiler's graph can hold."""
    if not hasattr(torch.ops.adaattn, backend):
        pytest.skip(f"{backend} is no operator: a graph cannot hold it")
    torch._dynamo.reset()
    return backend


@pytest.fixture
def draw(request: pytest.FixtureRequest) -> Draw:
    """Return what draws q, k and v of as many columns as the test's kernels are for."""
    used = "backend" in request.fixturenames and request.getfixturevalue("backend") in WIDE
    return partial(drawn, 320 if used else 64)


def drawn(
    dim: int, len_q: int = 256, len_k: int | None = None, dtype: torch.dtype = torch.bfloat16
) -> list[torch.Tensor]:
    """Return q, k and v of 8 query heads and 2 key heads."""
    sizes = (8, len_q), (2, len_k or len_q), (2, len_k or len_q)
    return [torch.randn(1, *size, dim, device=DEVICE, dtype=dtype) for size in sizes]


def held_to_the_definition(found: torch.Tensor, tensors: list[torch.Tensor], **given: Any) -> None:
    """Hold a result against the definition in fp64, eager PyTorch in its dtype as the yardstick."""
    exact = attend(*(item.double() for item in tensors), backend="reference", **given)
    eager = attend(*tensors, backend="reference", **given)
    assert_matches(found, exact, eager, summands=tensors[1].shape[2] + tensors[1].shape[3])


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Raise where the host waits for the device."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(action="ignore"):  # it says that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", CALLS)
def test_a_bound_call_does_not_wait(name: str, backend: str, draw: Draw) -> None:
    tensors, one = draw(), draw(1, 3000)
    mask = torch.ones(256, 256, device=DEVICE, dtype=torch.bool).tril()
    settings: list[tuple[list[torch.Tensor], dict[str, Any]]] = [
        (tensors, CALLS[name]),
        (tensors, {"attn_mask": mask}),
        (one, {}),
    ]
    for given, keywords in settings:
        attend(*given, enable_gqa=True, backend=backend, **keywords)
    with waiting_is_an_error():
        for given, keywords in settings * 3:
            attend(*given, enable_gqa=True, backend=backend, **keywords)


@pytest.mark.parametrize("sizes", [(256, 256), (1, 3000)], ids=["square", "decoding"])
@pytest.mark.parametrize("name", ["plain", "to the end"])
def test_a_graph_replays_with_other_numbers_in_its_tensors(
    name: str, sizes: tuple[int, int], backend: str, draw: Draw
) -> None:
    tensors = draw(*sizes)
    keywords = CALLS[name] | {"enable_gqa": True}
    attend(*tensors, backend=backend, **keywords)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = attend(*tensors, backend=backend, **keywords)
    for _ in range(3):
        for item in tensors:
            item.normal_()
        output.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        held_to_the_definition(output, tensors, **keywords)
        assert torch.equal(output, attend(*tensors, backend=backend, **keywords))


@pytest.mark.parametrize("name", CALLS)
def test_one_compiled_graph_serves_every_length(name: str, operator: str, draw: Draw) -> None:
    keywords = CALLS[name] | {"enable_gqa": True, "backend": operator}

    def call(*items: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = attend(*items, **keywords)
        return result

    compiled = torch.compile(call, fullgraph=True, dynamic=True)
    with torch.no_grad():
        compiled(*draw(96))
        with torch.compiler.set_stance("fail_on_recompile"):
            for length in LENGTHS:
                tensors = draw(length)
                assert torch.equal(compiled(*tensors), call(*tensors))


@pytest.mark.parametrize("louder", [1.0, 300.0], ids=["usual", "beyond a reference"])
@pytest.mark.parametrize("name", ["plain", "causal", "to the end"])
def test_wide_heads_write_no_scores_on_hopper(
    name: str, louder: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("it is for compute capability 9.0")
    made: list[Kind] = []
    usual = Fused.__call__

    def noting(self: Fused, *given: Any, **others: Any) -> None:
        made.append(self._kind)
        usual(self, *given, **others)

    monkeypatch.setattr(Fused, "__call__", noting)
    query, key, value = drawn(320, 1100, 1300)
    key[:, :, :50] *= louder
    keywords = CALLS[name] | {"enable_gqa": True}
    found = attend(query, key, value, backend="streamed", **keywords)
    held_to_the_definition(found, [query, key, value], **keywords)
    assert set(made) == {Kind.SUMS}
    tensors = [item.requires_grad_() for item in (query, key, value)]
    attend(*tensors, backend="streamed", **keywords).sum().backward()
    assert set(made) == set(Kind)
    assert all(item.grad is not None and bool(item.grad.isfinite().all()) for item in tensors)


class Attending(torch.nn.Module):
    """Attention by one of the kernels."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.backend = backend

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return causal attention [B, Hq, S, D]."""
        result: torch.Tensor = attend(
            query, key, value, is_causal=True, enable_gqa=True, backend=self.backend
        )
        return result


def test_an_exported_program_serves_every_length(operator: str, draw: Draw) -> None:
    length = torch.export.Dim("length", min=2, max=4096)
    module = Attending(operator)
    with torch.no_grad():
        program = torch.export.export(
            module, tuple(draw(96)), dynamic_shapes=({2: length}, {2: length}, {2: length})
        )
        for size in LENGTHS:
            tensors = draw(size)
            assert torch.equal(program.module()(*tensors), module(*tensors))


def test_autocast_is_a_cast_of_the_inputs(backend: str, draw: Draw) -> None:
    tensors = draw(dtype=torch.float32)
    narrow = [item.bfloat16() for item in tensors]
    for keywords in CALLS.values():
        given = keywords | {"enable_gqa": True, "backend": backend}
        expected = attend(*narrow, **given)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            for _ in range(2):  # the second is a bound call
                found = attend(*tensors, **given)
                assert found.dtype is torch.bfloat16
                assert torch.equal(found, expected)


def by_head() -> dict[str, Any]:
    """Return numbers of each of 8 heads."""
    near = torch.tensor([[0, 0], [20, -1], [63, 3], [300, 0]] * 2, device=DEVICE)
    near[5] = -1
    scale = torch.rand(8, device=DEVICE) / 8
    return {"scale": scale, "window": near, "softcap": torch.tensor([0.0, 30.0] * 4).to(DEVICE)}


@pytest.mark.parametrize("sizes", [(256, 256), (1, 3000)], ids=["square", "decoding"])
@pytest.mark.parametrize("name", ["plain", "causal", "to the end"])
def test_heads_of_different_numbers_are_one_launch_that_waits_for_nothing(
    name: str, sizes: tuple[int, int], backend: str, draw: Draw
) -> None:
    if not capability_named(backend).features & Feature.HEAD_TERMS:
        pytest.skip(f"{backend} takes one number for all heads")
    tensors = draw(*sizes)
    given = CALLS[name] | {"enable_gqa": True} | by_head()
    held_to_the_definition(attend(*tensors, backend=backend, **given), tensors, **given)
    with waiting_is_an_error():
        for _ in range(3):
            attend(*tensors, backend=backend, **given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = attend(*tensors, backend=backend, **given)
    given["scale"].mul_(1.5)
    given["window"][1].fill_(7)
    graph.replay()
    torch.cuda.synchronize()
    held_to_the_definition(output, tensors, **given)


def test_a_compiled_graph_holds_numbers_of_each_head(operator: str, draw: Draw) -> None:
    if not capability_named(operator).features & Feature.HEAD_TERMS:
        pytest.skip(f"{operator} takes one number for all heads")

    def call(*items: torch.Tensor, **given: Any) -> torch.Tensor:
        result: torch.Tensor = attend(*items, enable_gqa=True, backend=operator, **given)
        return result

    with torch.no_grad():
        compiled = torch.compile(call, fullgraph=True, dynamic=True)
        for length in LENGTHS:
            tensors, given = draw(length), by_head()
            assert torch.equal(compiled(*tensors, **given), call(*tensors, **given))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [(16, 16), (64, 64), (3, 100)], ids=str)
def test_few_rows_are_computed_in_a_graph_and_without_waiting(
    sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    if capability_named("small").unavailable:
        pytest.skip(capability_named("small").unavailable)
    len_q, len_k = sizes
    tensors = [
        torch.randn(1, 4, length, 2048, device=DEVICE, dtype=dtype)
        for length in (len_q, len_k, len_k)
    ]
    given = {"is_causal": True, "align": "bottom_right", "backend": "small"}
    expected = attend(*tensors, **given)
    with waiting_is_an_error():
        output = attend(*tensors, **given)
    assert torch.equal(output, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = attend(*tensors, **given)
    for _ in range(3):
        for item in tensors:
            item.normal_()
        output.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        held_to_the_definition(output, tensors, is_causal=True, align="bottom_right")


AGREED = 1e-5
"""How far fp32 on a GPU may be from fp32 on a CPU: the project's promise to its users."""


@pytest.mark.parametrize("executor", ["auto", "triton"])
@pytest.mark.parametrize("sizes", [(256, 256), (1, 3000)], ids=["square", "decoding"])
@pytest.mark.parametrize("name", CALLS)
def test_fp32_on_a_gpu_agrees_with_a_cpu(
    name: str, sizes: tuple[int, int], executor: str, draw: Draw
) -> None:
    if capability_named("triton").unavailable and executor == "triton":
        pytest.skip(capability_named("triton").unavailable)
    tensors = [item.cpu() for item in draw(*sizes, dtype=torch.float32)]
    keywords = CALLS[name] | {"enable_gqa": True}
    on_cpu = attend(*tensors, **keywords)
    on_gpu = attend(*(item.to(DEVICE) for item in tensors), backend=executor, **keywords).cpu()
    held_to_the_definition(on_cpu, tensors, **keywords)
    held_to_the_definition(on_gpu, tensors, **keywords)
    assert float((on_gpu - on_cpu).abs().max()) <= AGREED


@pytest.mark.parametrize("columns", [64, 128])
@pytest.mark.parametrize(
    "given",
    [
        {"is_causal": True, "len_q": 700},
        {"num_kv_heads": 4, "window": (500, 90)},
        {"lengths_q": (700, 0, 557), "is_causal": True},
        {"len_q": 512, "block_size": (16, 16)},
        {"mask": MaskKind.BOOLEAN, "softcap": 5.0, "has_sinks": True, "sinks_require_grad": True},
        {"len_q": 1200, "dilation": 3},
    ],
    ids=["causal", "groups in a window", "packed", "blocks", "mask", "dilation"],
)
def test_gradients_in_fp32_are_of_halves(given: dict[str, Any], columns: int) -> None:
    if columns > 64 and not has_room():
        pytest.skip("its shared memory ends at 64 columns")
    values: dict[str, Any] = {"num_heads": 16, "len_q": 600, "head_dim": columns} | given
    lengths = {key: values.pop(key) for key in ("lengths_q",) if key in values}
    problem = make_problem(
        precision=Precision.FP32, requires_grad=True, device_type=DEVICE, **lengths, **values
    )
    assert is_halved(problem)
    run = partial(load("triton"), group=HeadGroup(capability="triton"))
    assert_training_matches(run, make_tensors(problem, **lengths), problem)


@pytest.mark.parametrize("first", [False, True], ids=["without, then with", "with, then without"])
@pytest.mark.parametrize("name", ["streamed", "small"])
def test_the_gradient_of_the_log_sum_exp_may_come_and_go(name: str, first: bool) -> None:
    """What a kernel was compiled without was once missing, or read at address 0, ever after."""
    if capability_named(name).unavailable:
        pytest.skip(capability_named(name).unavailable)
    tensors = [it.requires_grad_() for it in drawn(512, 16, dtype=torch.float32)]
    wide = [it.detach().double().requires_grad_() for it in tensors]

    def gradients(
        given: list[torch.Tensor], backend: str, with_lse: bool
    ) -> tuple[torch.Tensor, ...]:
        asked = {"backend": backend, "enable_gqa": True, "return_aux": AuxRequest(lse=True)}
        output, aux = attend(*given, **asked)
        total = output.sum() + (aux.lse.sum() if with_lse else 0.0)
        return torch.autograd.grad(total, given)

    for with_lse in (first, not first):
        found = gradients(tensors, name, with_lse)
        exact = gradients(wide, "reference", with_lse)
        eager = gradients(tensors, "reference", with_lse)
        for which in zip(found, exact, eager, strict=True):
            assert_matches(*which, summands=64 * 512)
