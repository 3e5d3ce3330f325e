"""The executors that planner tests choose from."""

from dataclasses import replace

import pytest

from adaattn.backends import capabilities
from adaattn.spec import Capability


@pytest.fixture(scope="session")
def executors() -> tuple[Capability, ...]:
    """What the executors declare, the same on every machine that runs the tests."""
    return tuple(replace(item, unavailable="") for item in capabilities() if item.backend != "flex")
