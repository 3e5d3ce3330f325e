"""What a launch hands over for kernels that Triton compiles here, in a process without a GPU.

The driver is a stand-in: it keeps what is loaded and launched. Under Triton's interpreter, in which
other tests run these kernels, nothing is compiled.
"""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels are compiled by Triton, on Linux")

SCRIPT = """
import json
from types import SimpleNamespace

import torch
import triton.compiler.compiler as compiler
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

loaded, launched = [], []


class Launcher:
    def __init__(self, source, metadata):
        self.types = list(source.signature.values())

    def __call__(self, *given):
        launched.append((self.types, given[9:]))


def load(name, *others):
    loaded.append(name)
    return "module", "function", 100, 0, 1024


driver.set_active(SimpleNamespace(
    get_current_device=lambda: 0,
    get_current_stream=lambda device: 0,
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
    launcher_cls=Launcher,
    utils=SimpleNamespace(load_binary=load),
))
compiler.max_shared_mem = lambda device: 1 << 20

from adaattn import hardware
from adaattn.backends.triton import executor
from adaattn.spec import Aux, MaskKind, Precision
from adaattn.testing import make_problem, make_tensors

usual = {"batch": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 64, "len_q": 256, "len_k": 256}
usual |= {"precision": Precision.FP16}
cases = {
    "plain": {},
    "numbers that Triton makes constants where it may": {"len_q": 1, "len_k": 1, "scale": 1.0},
    "split keys": {"len_q": 1, "len_k": 8192},
    "mask, slopes, statistics": {
        "has_alibi": True, "mask": MaskKind.ADDITIVE, "mask_shape": (1, 1, 256, 256),
        "aux": Aux.LSE | Aux.ENTROPY},
}
executor.probe = lambda name: SimpleNamespace(num_processors=132, compute_capability=(9, 0))


def run(values):
    problem = make_problem(**(usual | values))
    tensors = make_tensors(problem)
    executor.run(tensors, problem, None)


found = {}
for name, values in cases.items():
    launched.clear()
    for _ in range(2):
        run(values)
    found[name] = [(types, [type(it).__name__ for it in given]) for types, given in launched]
before = len(loaded)
hardware.clear_cache()
run({})
print("found " + json.dumps({"cases": found, "loaded": before, "again": len(loaded) - before}))
"""

KINDS = {"i64": "int", "i32": "int", "fp32": "float"}


def test_types_are_those_of_what_is_handed_over_and_nothing_is_loaded_twice() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", SCRIPT]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    (line,) = (it for it in process.stdout.splitlines() if it.startswith("found "))
    found: dict[str, Any] = json.loads(line.removeprefix("found "))
    for name, launches in found["cases"].items():
        assert len(launches) == (4 if name == "split keys" else 2), name
        for types, given in launches:
            assert [KINDS[it] for it in types] == given, name
    assert found["loaded"] > 0
    assert found["again"] == 0
