"""What every test starts from: two threads and a known random state."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def two_threads() -> None:
    """Keep PyTorch from oversubscribing a machine that runs other things."""
    torch.set_num_threads(2)


@pytest.fixture(autouse=True)
def known_seed() -> None:
    """Start each test from the same random state, whatever ran before it."""
    torch.manual_seed(0)
