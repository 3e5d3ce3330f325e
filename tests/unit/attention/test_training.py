"""Modules that adapt, in training: gradients, checkpointing, AMP, compilation, DDP."""

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # after init_process_group, its defaults keep the group
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from adaattn import (
    AttentionEvent,
    HeadGroup,
    LowRank,
    Method,
    Plan,
    Precision,
    Scheme,
    record_events,
)
from adaattn.attention.adaattn import AdaAttention
from adaattn.attention.adaptive_precision import AdaptivePrecisionAttention
from adaattn.attention.adaptive_rank import AdaptiveRankAttention
from adaattn.attention.base import BaseAttention
from adaattn.attention.dense import DenseAttention
from adaattn.cache import KVCache
from adaattn.errors import ArgumentError
from adaattn.testing import assert_matches, fake_facts

EMBED, HEADS, LENGTH = 128, 2, 4096
BUDGET = 0.02


def gradients(module: BaseAttention, x: torch.Tensor, call: Any = None) -> list[torch.Tensor]:
    """Return the gradients of input and parameters for a fixed random direction."""
    x = x.detach().requires_grad_()
    output = (module if call is None else call)(x)
    output = output[0] if isinstance(output, tuple) else output
    generator = torch.Generator().manual_seed(1)
    direction = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    wanted = [x, *module.parameters()]
    return list(torch.autograd.grad((output * direction.to(output.dtype)).sum(), wanted))


def dense_exactly(module: BaseAttention, x: torch.Tensor) -> torch.Tensor:
    """Return the output of dense attention with the same parameters in float64."""
    dense = DenseAttention(module.config.embed_dim, module.config.num_heads, dtype=torch.float64)
    dense.load_state_dict(module.state_dict())
    output: torch.Tensor = dense(x.double())[0]
    return output


@pytest.fixture
def planted(pretend: Callable[[str], Any], plant: Callable[..., None]) -> AdaptiveRankAttention:
    """Both heads of rank 6 and a little noise, on a machine where that pays in training."""
    pretend("cpu")
    module = AdaptiveRankAttention(EMBED, HEADS, error_budget=BUDGET, measure_every=2)
    plant(module, range(HEADS), rank=6, noise=0.002)
    return module


def test_gradients_under_low_rank_are_those_of_dense_attention_within_the_budget(
    planted: AdaptiveRankAttention,
) -> None:
    x = torch.randn(1, LENGTH, EMBED)
    found = gradients(planted, x)
    assert planted.get_statistics()["share_by_method"] == {"low_rank": 1.0}
    dense = DenseAttention(EMBED, HEADS, dtype=torch.float64)
    dense.load_state_dict(planted.state_dict())
    for gradient, right in zip(found, gradients(dense, x.double()), strict=True):
        assert (gradient - right).norm() <= BUDGET * right.norm()


@pytest.mark.parametrize("heads_dim", [3, 4])
def test_gradcheck_holds_in_a_small_double_case(heads_dim: int) -> None:
    """Three tokens are of rank 3, so low rank of three columns loses nothing in any direction."""
    group = HeadGroup(
        capability="low_rank",
        method=LowRank(rank=3, value_rank=3),
        scheme=Scheme.of(Precision.FP64),
    )
    module = AdaptiveRankAttention(2 * heads_dim, 2, dtype=torch.float64)
    module.runner.plan = Plan(groups=(group,), num_heads=2, error_budget=0.01)
    x = torch.randn(1, 3, 2 * heads_dim, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda item: module(item)[0], (x,))
    assert set(module.get_statistics()["share_by_method"]) == {"low_rank"}


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_gives_the_same_gradients_and_counts_each_call_once(
    planted: AdaptiveRankAttention, use_reentrant: bool
) -> None:
    x = torch.randn(1, LENGTH, EMBED)
    twin = copy.deepcopy(planted)

    def recomputed(item: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(lambda y: planted(y)[0], item, use_reentrant=use_reentrant)
        return out

    if use_reentrant:  # its autograd function supports backward() alone
        x_ours = x.clone().requires_grad_()
        output = recomputed(x_ours)
        direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
        output.backward(direction)
        x_theirs = x.clone().requires_grad_()
        theirs = twin(x_theirs)[0]
        theirs.backward(direction)
        ours = [x_ours.grad, *(item.grad for item in planted.parameters())]
        expected = [x_theirs.grad, *(item.grad for item in twin.parameters())]
    else:
        ours, expected = gradients(planted, x, recomputed), gradients(twin, x)
    assert all(map(torch.equal, ours, expected))
    statistics = planted.get_statistics()
    assert statistics["calls"] == 1
    assert statistics["recomputed_calls"] == 1


def test_outlier_tokens_leave_gradients_finite_and_near_those_of_dense_attention(
    pretend: Callable[[str], Any],
) -> None:
    """A call within its budget and its audit once had infinite gradients."""
    pretend("cpu")
    budget, dim = 0.05, 64
    basis = torch.linalg.qr(torch.randn(dim, dim))[0]
    x = 2 * torch.randn(1, LENGTH, 8) @ basis[:, :8].mT + 2 * basis[:, 0]
    for place in range(4):  # each along a direction of its own, and of nobody else
        x[0, 997 * place] = 560**0.5 * basis[:, 8 + place]
    module = AdaptiveRankAttention(dim, 1, error_budget=budget, ranks=(8,))
    with torch.no_grad():
        kept = basis[:, :8] @ basis[:, :8].mT
        module.in_proj_weight.copy_(torch.cat([torch.eye(dim), torch.eye(dim), kept]))
    found = gradients(module, x)
    assert module.get_statistics()["share_by_method"] == {"low_rank": 1.0}
    dense = DenseAttention(64, 1, dtype=torch.float64)
    dense.load_state_dict(module.state_dict())
    for gradient, right in zip(found, gradients(dense, x.double()), strict=True):
        assert gradient.isfinite().all()
        assert (gradient - right).norm() <= 2 * budget * right.norm()


def test_a_cache_in_a_recomputed_pass_is_refused() -> None:
    """Its tokens were appended twice, and the gradients were those of another computation."""
    module = DenseAttention(32, 2)
    cache = KVCache(1)
    x = torch.randn(1, 10, 32, requires_grad=True)
    output = checkpoint(
        lambda item: module(item, is_causal=True, cache=cache.layer(0))[0], x, use_reentrant=True
    )
    with pytest.raises(ArgumentError, match="cache in a recomputed forward pass"):
        output.sum().backward()
    assert cache.length == 10


def test_training_steps_lower_the_loss_and_keep_auditing(
    planted: AdaptiveRankAttention,
) -> None:
    optimiser = torch.optim.SGD(planted.parameters(), lr=0.5)
    x, target = torch.randn(1, LENGTH, EMBED), 0.1 * torch.randn(1, LENGTH, EMBED)
    losses = []
    for _ in range(6):
        optimiser.zero_grad()
        loss = (planted(x)[0] - target).square().mean()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    statistics = planted.get_statistics()
    assert statistics["measured_calls"] == 3
    assert statistics["max_audited_error"] <= BUDGET


@pytest.mark.parametrize("kind", [AdaptiveRankAttention, AdaptivePrecisionAttention, AdaAttention])
class TestEveryKind:
    """What each adaptive module must bear."""

    def test_autocast_computes_in_its_format(self, kind: type[BaseAttention]) -> None:
        module = kind(32, 4)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output, _ = module(torch.randn(2, 20, 32))
        assert output.dtype is torch.bfloat16
        assert module.get_statistics()["share_by_precision"] == {"bf16": 1.0}
        output.float().sum().backward()
        assert all(item.grad is not None for item in module.parameters())

    def test_a_compiled_module_is_one_graph_with_the_same_numbers_and_counts_nothing(
        self, kind: type[BaseAttention]
    ) -> None:
        module = kind(32, 4)
        compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
        x = torch.randn(2, 20, 32, requires_grad=True)
        output, _ = compiled(x)
        assert module.get_statistics()["calls"] == 0
        assert_matches(output, dense_exactly(module, x), module(x)[0], summands=20 + 32)
        torch._dynamo.reset()

    def test_with_a_plan_it_compiles_into_one_graph(self, kind: type[BaseAttention]) -> None:
        module = kind(32, 4)
        q = torch.randn(2, 4, 20, 8)
        module.runner.plan = module.runner.decision(q, q, q).plan
        compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
        x = torch.randn(2, 20, 32)
        eager = module(x)[0]
        assert_matches(compiled(x)[0], dense_exactly(module, x), eager, summands=20 + 32)
        torch._dynamo.reset()

    def test_a_copy_and_a_pickle_run_like_the_original(
        self, kind: type[BaseAttention], tmp_path: Path
    ) -> None:
        module = kind(32, 4)
        x = torch.randn(2, 20, 32)
        expected, _ = module(x)
        torch.save(module, tmp_path / "module.pt")
        loaded = torch.load(tmp_path / "module.pt", weights_only=False)
        for other in (copy.deepcopy(module), loaded):
            assert torch.equal(other(x)[0], expected)
            assert other.get_statistics()["calls"] == 2
        assert module.get_statistics()["calls"] == 1

    def test_double_precision_and_half_are_kept(self, kind: type[BaseAttention]) -> None:
        for dtype in (torch.float64, torch.bfloat16):
            output, _ = kind(32, 4, dtype=dtype)(torch.randn(2, 20, 32, dtype=dtype))
            assert output.dtype is dtype


def _tokens(rank: int) -> torch.Tensor:
    """Return tokens that span few dimensions on the first rank, and all of them on the second."""
    generator = torch.Generator().manual_seed(rank)
    if rank:
        return torch.randn(1, LENGTH, 64, generator=generator)
    few = torch.randn(1, LENGTH, 6, generator=generator)
    return few @ torch.randn(6, 64, generator=generator) / 6**0.5


def _module() -> AdaptiveRankAttention:
    torch.manual_seed(0)
    return AdaptiveRankAttention(64, 1, error_budget=BUDGET)


def _gloo_threads() -> list[str]:
    """Return the names of this process's threads that belong to Gloo."""
    names = [comm.read_text().strip() for comm in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if "gloo" in name]


def _train_rank(rank: int, folder: str) -> None:
    """One process of two: a step of DDP on its half of the batch."""
    torch.set_num_threads(1)
    from adaattn import hardware
    from adaattn.call.ledger import Ledger

    facts = fake_facts("cpu")
    hardware.probe = lambda device: facts  # type: ignore[assignment]
    Ledger._may_spend = lambda *_: True  # type: ignore[method-assign]
    Ledger.record = lambda *_: None  # type: ignore[method-assign]
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    module = _module()
    wrapped = DistributedDataParallel(module)
    output, _ = wrapped(_tokens(rank))
    output.square().mean().backward()
    torch.save([item.grad for item in module.parameters()], f"{folder}/gradients{rank}.pt")
    torch.save(module.get_statistics()["share_by_method"], f"{folder}/own{rank}.pt")
    whole = module.get_statistics().gather()
    torch.save((whole["calls"], whole["share_by_method"]), f"{folder}/whole{rank}.pt")
    del wrapped, output
    gc.collect()
    dist.destroy_process_group()
    # A thread that drops a tensor while Python shuts down would abort the process.
    assert not _gloo_threads()


def test_data_parallel_ranks_may_differ_in_their_plans_and_agree_on_gradients(
    tmp_path: Path,
) -> None:
    mp.spawn(_train_rank, args=(str(tmp_path),), nprocs=2)
    own = [torch.load(tmp_path / f"own{rank}.pt") for rank in range(2)]
    assert own == [{"low_rank": 1.0}, {"exact": 1.0}]
    whole = (2, {"low_rank": 0.5, "exact": 0.5})
    assert [torch.load(tmp_path / f"whole{rank}.pt") for rank in range(2)] == [whole, whole]
    first, second = (torch.load(tmp_path / f"gradients{rank}.pt") for rank in range(2))
    assert all(map(torch.equal, first, second))
    dense = DenseAttention(64, 1, dtype=torch.float64)
    dense.load_state_dict(_module().state_dict())
    for rank in range(2):
        (dense(_tokens(rank).double())[0].square().mean() / 2).backward()
    for gradient, parameter in zip(first, dense.parameters(), strict=True):
        assert parameter.grad is not None
        assert (gradient - parameter.grad).norm() <= BUDGET * parameter.grad.norm()


def test_low_rank_runs_under_autocast_and_its_gradients_reach_the_parameters(
    pretend: Callable[[str], Any], plant: Callable[..., None]
) -> None:
    pretend("cpu")
    module = AdaptiveRankAttention(EMBED, HEADS, error_budget=0.05)
    plant(module, range(HEADS), rank=6)
    x = torch.randn(1, LENGTH, EMBED)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, _ = module(x)
    assert output.dtype is torch.bfloat16
    statistics = module.get_statistics()
    assert statistics["share_by_precision"] == {"bf16": 1.0}
    assert statistics["share_by_method"] == {"low_rank": 1.0}
    output.float().square().mean().backward()
    for item in module.parameters():
        assert item.grad is not None and item.grad.isfinite().all()
        assert item.grad.dtype is torch.float32


def test_a_compiled_module_is_exact_and_so_are_its_gradients(
    planted: AdaptiveRankAttention,
) -> None:
    """Nothing can be measured in a graph: only a plan lets it approximate."""
    dense = DenseAttention(EMBED, HEADS)
    dense.load_state_dict(planted.state_dict())
    wide = copy.deepcopy(dense).double()
    x = torch.randn(1, LENGTH, EMBED)
    compiled = torch.compile(planted, backend="aot_eager", fullgraph=True)
    for found, expected, yardstick in zip(
        gradients(planted, x, compiled),
        gradients(wide, x.double()),
        gradients(dense, x),
        strict=True,
    ):
        assert_matches(found, expected, yardstick, summands=LENGTH + EMBED)
    torch._dynamo.reset()


def test_a_compiled_module_with_a_low_rank_plan_gives_the_eager_numbers_and_gradients(
    planted: AdaptiveRankAttention,
) -> None:
    x = torch.randn(1, LENGTH, EMBED)
    events: list[AttentionEvent] = []
    with record_events(events.append):
        planted(x)
    planted.runner.plan = events[0].decision.plan
    assert {group.method.kind for group in planted.runner.plan.groups} == {Method.LOW_RANK}
    compiled = torch.compile(planted, backend="aot_eager", fullgraph=True)
    ours, theirs = gradients(planted, x, compiled), gradients(planted, x)
    for found, expected in zip(ours, theirs, strict=True):
        assert_matches(found, expected.double(), expected, summands=LENGTH + EMBED)
    torch._dynamo.reset()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_input_that_is_not_finite_is_recomputed_exactly_too(
    planted: AdaptiveRankAttention, use_reentrant: bool
) -> None:
    """The recomputation in backward once raised what the forward pass had mended."""
    x = torch.randn(1, LENGTH, EMBED)
    x[0, 5] = torch.nan
    x.requires_grad_()
    output = checkpoint(lambda item: planted(item)[0], x, use_reentrant=use_reentrant)
    output.sum().backward()
    assert x.grad is not None and x.grad.isnan().any()
    assert planted.get_statistics()["calls"] == 1
