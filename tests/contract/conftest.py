"""What the contract tests share: where the project is, and a fresh interpreter."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import adaattn

_BLOCK = """
import sys
for _name in {blocked!r}:
    sys.modules[_name] = None
"""


@pytest.fixture(scope="session")
def root() -> Path:
    return Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def sources(root: Path) -> dict[Path, str]:
    """Every Python file of the package, by its path from the project's root."""
    files = sorted((root / "src" / "adaattn").rglob("*.py"))
    return {file.relative_to(root): file.read_text(encoding="utf-8") for file in files}


@pytest.fixture
def fresh(tmp_path: Path) -> Callable[..., str]:
    """Run code in a new interpreter, some modules made impossible to import."""

    def run(code: str, *, blocked: tuple[str, ...] = ()) -> str:
        if blocked:
            code = _BLOCK.format(blocked=blocked) + code
        # The child sees the package that this process sees, from whatever folder it starts in.
        package = Path(adaattn.__file__).resolve().parents[1]
        environment = {
            **os.environ,
            "ADAATTN_CACHE": str(tmp_path / "cache"),
            "PYTHONPATH": str(package),
        }
        done = subprocess.run(
            [sys.executable, "-W", "error::DeprecationWarning:adaattn", "-c", code],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run
