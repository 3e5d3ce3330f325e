"""What every test starts from: one thread and a known random state."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Keep PyTorch from waiting for busy cores: on small tensors that is most of the time."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def known_seed() -> None:
    """Start each test from the same random state, whatever ran before it."""
    torch.manual_seed(0)
