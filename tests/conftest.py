"""What every test starts from: one thread, a known random state, nothing measured or learnt."""

import importlib
import importlib.util
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads it when it is imported: its kernels run in Python, on the CPU.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from adaattn import AttentionEvent, hardware, record_events
from adaattn.call.ledger import Ledger

# The package's attribute of that name is the function.
_PROBE = importlib.import_module("adaattn.hardware.probe")

_UNIT = Path(__file__).parent / "unit"
_BACKENDS = _UNIT / "backends"
SIMULATED = {
    *(_BACKENDS / name for name in ("hopper", "streamed", "triton")),
    *(_BACKENDS / name for name in ("test_block_list.py", "test_head_terms.py")),
}
"""Folders and files of tests that run kernels in Python."""

COUNTED = 4
"""Cases of another test in which lines are counted: that takes twice the time."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all but the first cases of each test: lines are counted in those alone."""
    seen: Counter[str] = Counter()
    for item in items:
        function = item.nodeid.split("[")[0]
        counted = 1 if SIMULATED & {item.path, item.path.parent} else COUNTED
        if seen[function] >= counted:
            item.add_marker("uncounted")
        seen[function] += 1


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Count no lines where a test is marked: kernels that run in Python take twice as long then.

    pytest-cov's own mark hands over to a second tracer where tests are run in several processes.
    """
    tracer = sys.gettrace()
    if item.get_closest_marker("uncounted"):
        sys.settrace(None)
    try:
        return (yield)
    finally:
        sys.settrace(tracer)


def _interprets() -> bool:
    """Return whether Triton is there, and its kernels run in Python."""
    return not torch.cuda.is_available() and importlib.util.find_spec("triton") is not None


@pytest.fixture(scope="session", autouse=True)
def interpreter_is_quick() -> Iterator[None]:
    """Spare Triton's interpreter more than half of its time, with the same numbers.

    It replaces all of ``triton.language`` when a kernel starts, puts it back when the kernel ends,
    and in between replaces it again for each call of a device function, which changes nothing. It
    works out whether a sum of integers overflows, and tells nobody: asserts are for debugging. And
    it makes a table of all types for each value that it makes.
    """
    if not _interprets():
        yield
        return
    from triton.language import standard
    from triton.runtime import interpreter

    patch_all = interpreter._patch_lang
    of_kernel = interpreter._LangPatchScope()

    def replace_once(function: Any) -> Any:
        nonlocal of_kernel
        if of_kernel._changes:  # what its end puts back
            return interpreter._LangPatchScope()
        of_kernel = patch_all(function)
        of_kernel._changes += patch_all(standard.sum.fn)._changes  # of the language's own functions
        return of_kernel

    find = interpreter._get_np_dtype
    types: dict[str, Any] = {}

    def numpy_type(dtype: Any) -> Any:
        if dtype.name not in types:
            types[dtype.name] = find(dtype)
        return types[dtype.name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", replace_once)
        builder = interpreter.interpreter_builder
        assert not builder.options.debug
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        patch.setattr(interpreter, "_get_np_dtype", numpy_type)
        yield


@pytest.fixture(scope="session", autouse=True)
def interpreter_rounds_once() -> Iterator[None]:
    """Have Triton's interpreter round a fused product and sum of fp32 once, as a GPU does.

    It rounds both, so that what a kernel takes back of one rounding would be nothing here.
    """
    if not _interprets():
        yield
        return
    from triton.runtime import interpreter

    def fused(builder: Any, x: Any, y: Any, z: Any) -> Any:
        # fp64 holds such products whole.
        exact = x.data.astype("float64") * y.data + z.data
        return interpreter.TensorHandle(exact.astype(z.data.dtype), z.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_fma", fused)
        yield


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
