"""A runner that calls the commands in this process, as the ``adaattn`` command would."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def invoke() -> Callable[..., Any]:
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from adaattn.cli.commands import app

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(app, list(arguments))

    return run
