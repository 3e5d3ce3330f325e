"""What every test starts from: one thread, a known random state, nothing measured or learnt."""

import importlib
import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads it when it is imported: its kernels run in Python, on the CPU.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from adaattn import AttentionEvent, hardware, record_events
from adaattn.call.ledger import Ledger

# The package's attribute of that name is the function.
_PROBE = importlib.import_module("adaattn.hardware.probe")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Keep PyTorch from waiting for busy cores: on small tensors that is most of the time."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def known_seed() -> None:
    """Start each test from the same random state, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep choices apart from the tables of the machine at hand and from other tests."""
    monkeypatch.setattr(_PROBE, "timings_of", lambda facts: None)
    hardware.clear_cache()


@pytest.fixture(autouse=True)
def clock_agrees(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take approximations off probation: on tiny tensors the clock would drop every one.

    Tests of the probation itself carry the mark ``probation``.
    """
    if request.node.get_closest_marker("probation") is None:
        monkeypatch.setattr(Ledger, "_may_spend", lambda *_: True)
        monkeypatch.setattr(Ledger, "record", lambda *_: None)


@pytest.fixture
def events() -> Iterator[list[AttentionEvent]]:
    """Record the events of one test."""
    found: list[AttentionEvent] = []
    with record_events(found.append):
        yield found
