"""What `import adaattn` may do: almost nothing."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import adaattn

OPTIONAL = (
    "gguf",
    "plotly",
    "rich",
    "safetensors",
    "tokenizers",
    "transformers",
    "triton",
    "typer",
)

SEES = """
import json, sys, torch
before = set(sys.modules)
import adaattn
added = {name.split(".")[0] for name in set(sys.modules) - before}
print(json.dumps([sorted(added), torch.cuda.is_initialized()]))
"""

CALLS = """
import torch, adaattn
for name in adaattn.__all__:
    assert getattr(adaattn, name) is not None, name
x = torch.randn(1, 4, 24, 16)
out = adaattn.scaled_dot_product_attention(x, x[:, :2], x[:, :2], is_causal=True, enable_gqa=True)
print(tuple(out.shape), bool(torch.isfinite(out).all()))
"""


def test_importing_the_package_adds_no_optional_package_and_leaves_cuda_alone(
    fresh: Callable[..., str],
) -> None:
    added, cuda_initialised = json.loads(fresh(SEES))
    assert not set(added) & set(OPTIONAL)
    assert cuda_initialised is False


def test_attention_and_every_public_name_work_without_the_optional_packages(
    fresh: Callable[..., str],
) -> None:
    assert fresh(CALLS, blocked=OPTIONAL).split() == ["(1,", "4,", "24,", "16)", "True"]


def test_planning_is_imported_without_torch(fresh: Callable[..., str]) -> None:
    fresh("import adaattn.planning", blocked=("torch",))


def test_importing_changes_no_setting_of_torch_or_of_logging(fresh: Callable[..., str]) -> None:
    code = """
import logging, torch
def state():
    return (
        torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(), torch.backends.cuda.flash_sdp_enabled(),
        torch.get_float32_matmul_precision(), len(logging.getLogger().handlers),
        logging.getLogger("adaattn").level, id(torch.nn.functional.scaled_dot_product_attention),
    )
before = state()
import adaattn
for name in adaattn.__all__:
    getattr(adaattn, name)
assert state() == before, (before, state())
"""
    fresh(code)


def test_public_names_are_listed_once_and_dir_shows_them() -> None:
    assert len(set(adaattn.__all__)) == len(adaattn.__all__)
    assert set(adaattn.__all__) <= set(dir(adaattn))


def test_an_unknown_name_is_an_attribute_error_that_names_it(fresh: Callable[..., str]) -> None:
    code = """
import adaattn
try:
    adaattn.no_such_name
except AttributeError as error:
    assert "no_such_name" in str(error), error
else:
    raise SystemExit("no error")
"""
    fresh(code)


def test_the_tests_see_the_installed_package_unless_the_path_names_the_sources(root: Path) -> None:
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    asked = any(Path(entry).resolve() == root / "src" for entry in entries if entry)
    assert asked or root / "src" not in Path(adaattn.__file__).resolve().parents
