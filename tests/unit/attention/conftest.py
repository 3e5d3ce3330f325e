"""Modules whose heads have a known rank, on a machine that is invented."""

from collections.abc import Callable, Sequence

import pytest
import torch

from adaattn import HardwareFacts
from adaattn.attention.base import BaseAttention
from adaattn.testing import fake_facts

Pretend = Callable[[str], HardwareFacts]
Plant = Callable[..., None]


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Pretend:
    """Return a function that makes calls plan for an invented machine."""

    def plan_for(machine: str) -> HardwareFacts:
        facts = fake_facts(machine)
        monkeypatch.setattr("adaattn.hardware.probe", lambda device: facts)
        return facts

    return plan_for


@pytest.fixture
def plant() -> Plant:
    """Return a function that gives some heads of a module projections of a low rank."""

    def into(module: BaseAttention, heads: Sequence[int], rank: int, *, noise: float = 0.0) -> None:
        size, dim = module.head_dim, module.embed_dim
        with torch.no_grad():
            for part in range(3):
                for head in heads:
                    start = part * dim + head * size
                    low = torch.randn(size, rank) @ torch.randn(rank, dim)
                    low /= (rank * dim) ** 0.5
                    low += noise * torch.randn(size, dim) / dim**0.5
                    module.in_proj_weight[start : start + size] = low

    return into
