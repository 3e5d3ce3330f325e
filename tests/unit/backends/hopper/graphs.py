"""A CUDA graph of a step, for tests on a card."""

from collections.abc import Callable
from typing import TypeVar

import torch

_T = TypeVar("_T")


def recorded(step: Callable[[], _T]) -> tuple[torch.cuda.CUDAGraph, _T]:
    """Return a graph of a step and what that writes, after some runs that compile."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        return graph, step()
