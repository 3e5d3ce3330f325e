"""The names that users import: there, documented, and of the promised shape, with nothing optional.

The list below is the promise. A name that is renamed or moved fails here first.
"""

import importlib
import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adaattn.attention.statistics import AttentionStatistics

PROMISED = {
    "adaattn.attention.base": ("BaseAttention",),
    "adaattn.attention.config": ("AttentionConfig",),
    "adaattn.attention.dense": ("DenseAttention",),
    "adaattn.attention.adaptive_rank": ("AdaptiveRankAttention",),
    "adaattn.attention.adaptive_precision": ("AdaptivePrecisionAttention",),
    "adaattn.attention.adaattn": ("AdaAttention",),
    "adaattn.kernels.flash_attention": (
        "FlashAttentionConfig",
        "flash_attention_forward",
        "AdaptiveFlashAttention",
    ),
    "adaattn.kernels.cuda_utils": (
        "CUDAManager",
        "fused_scaled_dot_product_attention",
        "adaptive_attention_kernel",
        "memory_efficient_attention",
        "AttentionKernelManager",
    ),
    "adaattn.linalg": ("entropy", "low_rank", "precision"),
}
NAMES = [f"{module}.{name}" for module, names in PROMISED.items() for name in names]

OPTIONAL = (
    "gguf",
    "numpy",
    "plotly",
    "rich",
    "safetensors",
    "tokenizers",
    "transformers",
    "triton",
    "typer",
)

PRELUDE = """
import torch
from adaattn import Precision
from adaattn.attention.dense import DenseAttention
x = torch.randn(2, 10, 64)
q, k, v = (torch.randn(1, 4, 16, 32) for _ in range(3))
"""

EXAMPLE = """
import torch
from adaattn.attention.adaattn import AdaAttention
x = torch.randn(2, 128, 512)
attn = AdaAttention(embed_dim=512, num_heads=8, enable_gpu_optimization=True)
output, weights = attn(x, x, x)
ratio = attn.get_statistics()['flash_ratio']
assert output.shape == x.shape and weights is None and ratio == 1.0, ratio
from adaattn.kernels.flash_attention import AdaptiveFlashAttention
embed_dim, num_heads = 512, 8
flash = AdaptiveFlashAttention(embed_dim, num_heads, precision_mode="auto", enable_flash=True)
output, weights = flash(x, x, x)
found = flash.get_flash_statistics()
assert (found["flash_calls"], found["fallback_calls"]) == (1, 0), found
assert "peak_memory_bytes" in found
"""

REQUIRED = inspect.Parameter.empty
"""A parameter without a default."""

MULTIHEAD = {"embed_dim": REQUIRED, "num_heads": REQUIRED, "dropout": 0.0, "bias": True}
TENSORS = dict.fromkeys(("query", "key", "value"), REQUIRED)
POSITIONAL: dict[str, dict[str, Any]] = {
    "adaattn.attention.dense.DenseAttention": MULTIHEAD,
    "adaattn.attention.adaptive_rank.AdaptiveRankAttention": MULTIHEAD,
    "adaattn.attention.adaptive_precision.AdaptivePrecisionAttention": MULTIHEAD,
    "adaattn.attention.adaattn.AdaAttention": MULTIHEAD,
    "adaattn.kernels.flash_attention.AdaptiveFlashAttention": {
        "embed_dim": REQUIRED,
        "num_heads": REQUIRED,
        "precision_mode": "auto",
        "enable_flash": True,
    },
    "adaattn.kernels.flash_attention.flash_attention_forward": TENSORS | {"config": None},
    "adaattn.kernels.cuda_utils.fused_scaled_dot_product_attention": TENSORS
    | {"attn_mask": None, "dropout_p": 0.0, "is_causal": False},
    "adaattn.kernels.cuda_utils.adaptive_attention_kernel": TENSORS,
    "adaattn.kernels.cuda_utils.memory_efficient_attention": TENSORS
    | {"attn_bias": None, "p": 0.0, "scale": None},
    "adaattn.kernels.cuda_utils.CUDAManager": {"device": None},
    "adaattn.kernels.cuda_utils.AttentionKernelManager": {"device": None},
}
KEYWORDS = {
    "adaattn.attention.adaattn.AdaAttention": {"enable_gpu_optimization": True},
    "adaattn.attention.adaptive_rank.AdaptiveRankAttention": {"error_budget": 0.01},
    "adaattn.attention.adaptive_precision.AdaptivePrecisionAttention": {
        "policy": "balanced",
        "precision_mode": "auto",
    },
    "adaattn.kernels.cuda_utils.adaptive_attention_kernel": {"rank": None, "precision": None},
    "adaattn.kernels.cuda_utils.memory_efficient_attention": {"memory_budget_bytes": None},
}
DEVICE_FACTS = {
    "compute_capability",
    "free_memory_bytes",
    "max_threads_per_block",
    "memory_budget_bytes",
    "optimal_block_size",
    "supports_bf16",
    "supports_fp16",
    "total_memory_bytes",
}


def thing(path: str) -> Any:
    """Return what a dotted path names."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def table(root: Path) -> list[tuple[str, str]]:
    """Return (name, line of use) of each row of the documented table."""
    page = (root / "docs" / "names.md").read_text(encoding="utf-8")
    inside = page.partition("<!-- promised names")[2].partition("<!-- end of the promised")[0]
    return re.findall(r"^\| `(adaattn[\w.]+)` \| [^|`]+ \| `([^`]+)` \|$", inside, re.MULTILINE)


def test_the_documented_table_is_the_promise(root: Path) -> None:
    assert [name for name, _ in table(root)] == NAMES


@pytest.mark.parametrize("module", PROMISED)
def test_the_names_of_a_module_are_there_and_work_without_any_optional_package(
    root: Path, fresh: Callable[..., str], module: str
) -> None:
    names = PROMISED[module]
    uses = dict(table(root))
    lines = [f"from {module} import {name}" for name in names]
    lines += [PRELUDE, *(uses[f"{module}.{name}"] for name in names)]
    lines += [f"print('done', {module!r}, torch.cuda.is_initialized())"]
    assert fresh("\n".join(lines), blocked=OPTIONAL).split() == ["done", module, "False"]


@pytest.mark.parametrize("package", ["adaattn.attention", "adaattn.kernels", "adaattn.models"])
def test_importing_a_package_loads_nothing_optional_and_leaves_cuda_alone(
    fresh: Callable[..., str], package: str
) -> None:
    code = f"""
import json, sys, torch
before = set(sys.modules)
import {package}
added = {{name.split(".")[0] for name in set(sys.modules) - before}}
print(json.dumps([sorted(added), torch.cuda.is_initialized()]))
"""
    added, cuda_initialised = json.loads(fresh(code))
    assert "adaattn" in added
    assert not set(added) & set(OPTIONAL)
    assert cuda_initialised is False


def test_the_promised_examples_run_word_for_word(root: Path, fresh: Callable[..., str]) -> None:
    fresh(EXAMPLE, blocked=OPTIONAL)
    page = (root / "docs" / "names.md").read_text(encoding="utf-8")
    for line in (
        "attn = AdaAttention(embed_dim=512, num_heads=8, enable_gpu_optimization=True)",
        "output, weights = attn(x, x, x)",
        "attn.get_statistics()['flash_ratio']",
    ):
        assert line in EXAMPLE
        assert line.replace("'", '"') in page  # the formatter's quotes


@pytest.mark.parametrize("path", POSITIONAL)
def test_arguments_that_may_be_given_by_place_keep_their_places_and_defaults(path: str) -> None:
    parameters = list(inspect.signature(thing(path)).parameters.values())
    wanted = POSITIONAL[path]
    found = {item.name: item.default for item in parameters[: len(wanted)]}
    assert list(found.items()) == list(wanted.items())
    assert all(item.kind is item.POSITIONAL_OR_KEYWORD for item in parameters[: len(wanted)])


@pytest.mark.parametrize("path", KEYWORDS)
def test_keywords_keep_their_names_and_defaults(path: str) -> None:
    parameters = inspect.signature(thing(path)).parameters
    wanted = KEYWORDS[path]
    assert {name: parameters[name].default for name in wanted} == wanted


def test_the_base_class_is_abstract_and_the_modules_are_of_it() -> None:
    base = thing("adaattn.attention.base.BaseAttention")
    assert inspect.isabstract(base)
    modules = [thing(path) for path, places in POSITIONAL.items() if "embed_dim" in places]
    assert len(modules) == 5
    assert all(issubclass(module, base) for module in modules)
    assert not any(inspect.isabstract(module) for module in modules)


def test_the_device_manager_is_one_for_a_device_and_tells_what_it_promises() -> None:
    manager = thing("adaattn.kernels.cuda_utils.CUDAManager")
    assert manager("cpu") is manager("cpu")
    assert set(dir(manager)) >= DEVICE_FACTS


def test_every_statistic_is_explained(root: Path) -> None:
    page = (root / "docs" / "statistics.md").read_text(encoding="utf-8")
    explained = set(re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", page, re.MULTILINE))
    names = {name for cell in explained for name in re.findall(r"`(\w+)`", cell)}
    keys = set(AttentionStatistics().to_dict())
    assert keys - names == set(), "not explained"
    assert names - keys <= {"switches", "last_rank", "mean_entropy_bits", "mean_effective_rank"}
