"""What the assembler makes of our kernels: compiled for sm_90a in a process without a GPU.

A kernel that spills in its loop, or whose products the assembler serialises, is right and slow; no
other test sees it. `make test` compiles with the Triton of the environment and with the oldest
that is supported, which it unpacks into ``build/``.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.unit.backends.machine_code import frozen_bounds, idle_barriers, problem_of

from adaattn.backends.hopper.gradient_launch import choose_gradients

pytest.importorskip("triton", reason="the kernels are compiled by Triton, on Linux")

ROOT = Path(__file__).resolve().parents[3]
OLDEST = ROOT / "build" / "triton-3.6.0"

SCRIPT = """
import json, os, sys, traceback
import triton
from tests.unit.backends.machine_code import code_of, problem_of

for line in sys.stdin:
    executor, values, os.environ["TRITON_CACHE_DIR"] = json.loads(line)
    try:
        found = {**code_of(executor, problem_of(values)), "triton": triton.__version__}
    except Exception:
        found = {"error": traceback.format_exc()}
    print("found " + json.dumps(found), flush=True)
"""
PACKED = "dict(head_dim=128, lengths_q=(1000, 3096), is_causal=True)"
LISTED = "dict(head_dim=128, is_causal=True, block_size=(128, 128), aux=Aux.LSE)"
LISTED_MASKS = [
    f"dict(head_dim={columns}, num_heads=8, mask=MaskKind.BOOLEAN, mask_shape=(4096, 4096){more})"
    for columns in (64, 128, 256)
    for more in ("", ", precision=Precision.FP16")
]
HOPPER = [
    "dict(head_dim=64)",
    "dict(head_dim=128)",
    "dict(head_dim=128, is_causal=True)",
    "dict(head_dim=64, is_causal=True, len_q=512)",
    "dict(head_dim=128, is_causal=True, precision=Precision.FP16, aux=Aux.LSE)",
    "dict(head_dim=64, mask=MaskKind.ADDITIVE)",
    "dict(head_dim=128, mask=MaskKind.ADDITIVE, mask_is_wide=True)",
    "dict(head_dim=64, lengths_q=(1000, 3096), is_causal=True)",
    "dict(head_dim=64, is_causal=True, block_size=(128, 128))",
    "dict(head_dim=128, is_causal=True, head_terms=HeadTerm.SCALE)",
    "dict(head_dim=64, block_size=(128, 128), mask=MaskKind.BOOLEAN)",
]
# A few numbers of a tile wait in local memory where the second pass, with its own reference, or
# row sums take their registers: outside of the loops over keys, some dozen accesses a tile.
HOPPER_WITH_FEW_SPILLS = [
    "dict(head_dim=256, is_causal=True)",
    "dict(head_dim=128, mask=MaskKind.ADDITIVE)",
    "dict(head_dim=128, mask=MaskKind.BOOLEAN, is_causal=True)",
    "dict(head_dim=256, mask=MaskKind.BOOLEAN)",
    *LISTED_MASKS,
    "dict(head_dim=128, is_causal=True, softcap=30.0, has_alibi=True, has_sinks=True)",
    "dict(head_dim=64, is_causal=True, window=(1000, -1), aux=Aux.ENTROPY | Aux.LSE)",
    PACKED,
    "dict(head_dim=128, block_size=(128, 128))",
    LISTED,
    "dict(head_dim=64, head_terms=HeadTerm.WINDOW)",
    "dict(head_dim=64, is_causal=True, len_q=8192)",
    "dict(head_dim=64, is_causal=True, block_size=(128, 128), aux=Aux.DROPPED_MASS)",
    "dict(head_dim=128, is_causal=True, head_terms=HeadTerm(7))",
]
MOST_SPILLS = 160

PORTABLE = [
    "dict(head_dim=64)",
    "dict(head_dim=128, is_causal=True)",
    "dict(head_dim=64, is_causal=True, window=(1000, -1), has_alibi=True, has_sinks=True)",
    "dict(head_dim=128, is_causal=True, softcap=30.0, aux=Aux.LSE | Aux.ENTROPY)",
    "dict(head_dim=64, is_causal=True, lengths_q=(1000, 3096))",
    "dict(head_dim=128, is_causal=True, block_size=(128, 128))",
    "dict(head_dim=64, block_size=(128, 128), aux=Aux.DROPPED_MASS)",
    "dict(head_dim=64, precision=Precision.FP32, len_q=2048)",
    "dict(head_dim=64, is_causal=True, head_terms=HeadTerm(7))",
    "dict(head_dim=64, precision=Precision.FP32, len_q=2048, head_terms=HeadTerm.SCALE)",
]
# Keys of 256 columns, a bias beside 128, and fp32 sums of a block beside those of all take more
# registers than there are; tiles without spills are slower.
PORTABLE_WITH_SPILLS = [
    "dict(head_dim=256)",
    "dict(head_dim=128, mask=MaskKind.ADDITIVE)",
    "dict(head_dim=128, precision=Precision.FP32, is_causal=True, len_q=2048)",
    "dict(head_dim=256, precision=Precision.FP32, len_q=2048)",
    "dict(head_dim=256, precision=Precision.FP32, len_q=2048, mask=MaskKind.ADDITIVE)",
]
# Gradients of keys and values keep the sums of both, some of them in local memory. The fastest
# tiles on a card spill in their loops, 187 and 190 times, and those that do not are slower.
FASTEST_SPILLS = 350
KEY_GRADIENTS = {
    "dict(head_dim=64)": FASTEST_SPILLS,
    "dict(head_dim=64, is_causal=True, num_heads=8, num_kv_heads=2)": FASTEST_SPILLS,
    "dict(head_dim=64, is_causal=True, lengths_q=(1000, 3096))": FASTEST_SPILLS,
    "dict(head_dim=64, dilation=3, dropout_p=0.1)": FASTEST_SPILLS,
    "dict(head_dim=64, head_terms=HeadTerm(7), block_size=(128, 128))": FASTEST_SPILLS,
    "dict(head_dim=128, is_causal=True)": MOST_SPILLS,
    "dict(head_dim=256)": FASTEST_SPILLS,
    "dict(head_dim=64, precision=Precision.FP32, len_q=2048)": MOST_SPILLS,
    "dict(head_dim=128, precision=Precision.FP32, len_q=2048)": MOST_SPILLS,
    "dict(head_dim=64, precision=Precision.FP32, len_q=100)": 0,
}
ROW_GRADIENTS = {
    "dict(head_dim=64)": 0,
    "dict(head_dim=128, is_causal=True, window=(1000, -1))": 0,
    "dict(head_dim=64, has_alibi=True, alibi_requires_grad=True, softcap=30.0)": 0,
    "dict(head_dim=128, block_size=(128, 128))": 0,
    "dict(head_dim=256)": MOST_SPILLS,
    "dict(head_dim=64, precision=Precision.FP32, len_q=2048)": 0,
    "dict(head_dim=128, precision=Precision.FP32, len_q=2048)": 0,
    "dict(head_dim=128, precision=Precision.FP32, len_q=2048, has_alibi=True,"
    " alibi_requires_grad=True, dropout_p=0.1, window=(1000, 0))": MOST_SPILLS,
}
MASK_GRADIENTS = {
    "dict(head_dim=64, mask=MaskKind.ADDITIVE)": MOST_SPILLS,
    "dict(head_dim=128, mask=MaskKind.ADDITIVE, is_causal=True)": MOST_SPILLS,
    "dict(head_dim=64, mask=MaskKind.ADDITIVE, lengths_q=(1000, 3096), dropout_p=0.1)": MOST_SPILLS,
}
GRADIENTS = [
    *(("key_gradients", values, most) for values, most in KEY_GRADIENTS.items()),
    ("value_gradients", "dict(head_dim=128, precision=Precision.FP32, len_q=2048)", MOST_SPILLS),
    *(("row_gradients", values, most) for values, most in ROW_GRADIENTS.items()),
    *(("mask_gradients", values, most) for values, most in MASK_GRADIENTS.items()),
]
# Grouped heads that take turns in a block of keys, have blocks of their own, or two kernels.
MANY_BLOCKS = "num_heads=32, num_kv_heads=8, batch=4, len_q=2048"
LONG_BLOCKS = "num_heads=16, num_kv_heads=4"
SHORT_BLOCKS = "num_heads=32, num_kv_heads=8, len_q=512, window=(63, -1), is_causal=True"
# Keys so few that a fixed order of sums is faster.
FEW_KEYS = "num_heads=32, num_kv_heads=8, batch=16, len_q=512"
# Accesses to local memory in a loop over tiles of rows: of addresses, most beside a softcap.
HOPPER_GRADIENTS = {
    "dict(head_dim=64)": 0,
    "dict(head_dim=64, is_causal=True)": 0,
    "dict(head_dim=64, precision=Precision.FP16)": 0,
    "dict(head_dim=64, len_k=1000)": 2,
    "dict(head_dim=64, is_causal=True, len_q=1000)": 2,
    "dict(head_dim=128)": 2,
    "dict(head_dim=128, is_causal=True)": 2,
    "dict(head_dim=128, is_causal=True, precision=Precision.FP16)": 2,
    "dict(head_dim=128, len_k=1000)": 4,
    "dict(head_dim=128, window=(1000, 10), len_q=1000)": 8,
    f"dict(head_dim=64, is_causal=True, {MANY_BLOCKS})": 2,
    f"dict(head_dim=128, is_causal=True, {MANY_BLOCKS})": 2,
    f"dict(head_dim=64, is_causal=True, {LONG_BLOCKS})": 2,
    f"dict(head_dim=128, is_causal=True, {LONG_BLOCKS})": 2,
    f"dict(head_dim=128, softcap=30.0, is_causal=True, {LONG_BLOCKS})": 6,
    "dict(head_dim=64, softcap=30.0)": 18,
    "dict(head_dim=128, softcap=30.0, is_causal=True)": 6,
    "dict(head_dim=128, has_alibi=True, is_causal=True)": 4,
    "dict(head_dim=64, deterministic=True)": 2,
    "dict(head_dim=128, deterministic=True, is_causal=True)": 2,
    f"dict(head_dim=64, deterministic=True, is_causal=True, {MANY_BLOCKS})": 2,
    f"dict(head_dim=64, is_causal=True, {FEW_KEYS})": 2,
    f"dict(head_dim=128, is_causal=True, {FEW_KEYS})": 2,
    f"dict(head_dim=128, {FEW_KEYS})": 2,
    f"dict(head_dim=64, deterministic=True, is_causal=True, {LONG_BLOCKS})": 2,
    f"dict(head_dim=128, deterministic=True, is_causal=True, {LONG_BLOCKS})": 2,
    "dict(head_dim=128, deterministic=True, softcap=30.0, is_causal=True)": 6,
    "dict(head_dim=64, lengths_q=(1000, 1048), is_causal=True)": 2,
    "dict(head_dim=128, lengths_q=(1000, 1048), is_causal=True)": 2,
    "dict(head_dim=128, lengths_q=(1000, 1048), is_causal=True, softcap=30.0, window=(500, 0))": 14,
    "dict(head_dim=64, lengths_q=(1000, 1048), is_causal=True, deterministic=True)": 4,
    "dict(head_dim=128, lengths_q=(1000, 1048))": 6,
    "dict(head_dim=64, mask=MaskKind.BOOLEAN, num_heads=8, mask_shape=(1, 1, 4096, 4096))": 2,
    f"dict(head_dim=64, mask=MaskKind.BOOLEAN, is_causal=True, {MANY_BLOCKS})": 4,
    f"dict(head_dim=128, mask=MaskKind.BOOLEAN, is_causal=True, {LONG_BLOCKS})": 6,
    "dict(head_dim=128, mask=MaskKind.BOOLEAN)": 6,
    "dict(head_dim=128, mask=MaskKind.BOOLEAN, is_causal=True, precision=Precision.FP16)": 4,
    "dict(head_dim=128, mask=MaskKind.BOOLEAN, num_heads=64, num_kv_heads=16, len_k=1000)": 6,
    "dict(head_dim=64, mask=MaskKind.BOOLEAN, num_heads=8, deterministic=True)": 2,
    "dict(head_dim=128, mask=MaskKind.BOOLEAN, num_heads=8, deterministic=True)": 6,
    "dict(head_dim=128, mask=MaskKind.BOOLEAN, has_alibi=True)": 6,
}
# The same of more than 128 columns, of most masks and of short blocks of grouped heads, in the two
# kernels of keys and values and of queries.
SPLIT_GRADIENTS = {
    "dict(head_dim=256)": 0,
    "dict(head_dim=256, is_causal=True)": 0,
    "dict(head_dim=256, is_causal=True, precision=Precision.FP16)": 0,
    "dict(head_dim=160, len_k=1000)": 0,
    "dict(head_dim=192, value_dim=128, is_causal=True)": 0,
    "dict(head_dim=64, value_dim=256)": 0,
    "dict(head_dim=256, is_causal=True, len_q=1000, len_k=1030, align=Align.BOTTOM_RIGHT)": 0,
    "dict(head_dim=256, window=(1000, 10), len_q=1000)": 0,
    "dict(head_dim=256, is_causal=True, num_heads=8, num_kv_heads=2)": 0,
    "dict(head_dim=256, softcap=30.0, is_causal=True)": 0,
    "dict(head_dim=256, has_alibi=True, is_causal=True)": 0,
    "dict(head_dim=256, lengths_q=(1000, 1048), is_causal=True)": 0,
    "dict(head_dim=256, lengths_q=(1000, 1048), is_causal=True, softcap=30.0, window=(500, 0))": 0,
    "dict(head_dim=256, is_causal=True, num_heads=8, num_kv_heads=2, softcap=3.0, has_alibi=True, "
    "window=(100, 0))": 8,
    f"dict(head_dim=64, {SHORT_BLOCKS})": 4,
    f"dict(head_dim=128, mask=MaskKind.BOOLEAN, {SHORT_BLOCKS})": 4,
    "dict(head_dim=64, mask=MaskKind.BOOLEAN, softcap=3.0)": 0,
    "dict(head_dim=128, mask=MaskKind.ADDITIVE, is_causal=True)": 0,
    "dict(head_dim=128, mask=MaskKind.ADDITIVE, mask_is_wide=True, num_heads=8, num_kv_heads=2)": 4,
    "dict(head_dim=128, mask=MaskKind.BOOLEAN, lengths_q=(1000, 1048), window=(500, 0))": 4,
    "dict(head_dim=64, num_heads=8, mask=MaskKind.BOOLEAN, mask_shape=(1, 1, 4096, 4096), "
    "softcap=30.0)": 0,
    "dict(head_dim=256, num_heads=8, mask=MaskKind.BOOLEAN, mask_shape=(1, 1, 4096, 4096))": 0,
    "dict(head_dim=128, mask=MaskKind.BOOLEAN, len_q=4095, is_causal=True, softcap=3.0)": 0,
    "dict(head_dim=256, mask=MaskKind.ADDITIVE)": 4,
    "dict(head_dim=256, mask=MaskKind.BOOLEAN, mask_shape=(1, 1, 1, 4096))": 0,
    "dict(head_dim=256, mask=MaskKind.ADDITIVE, mask_is_wide=True, softcap=3.0)": 16,
}
STREAMED = [
    "dict(head_dim=512)",
    "dict(head_dim=512, len_q=16384, is_causal=True)",
    "dict(head_dim=512, num_heads=8, num_kv_heads=2, window=(1000, -1), dilation=2)",
    "dict(head_dim=512, mask=MaskKind.BOOLEAN, len_q=1000)",
    "dict(head_dim=512, mask=MaskKind.ADDITIVE, dropout_p=0.1, precision=Precision.FP16)",
    "dict(head_dim=512, softcap=30.0, has_alibi=True, has_sinks=True, len_q=8192,"
    " aux=Aux.LSE | Aux.ROW_MAX | Aux.ENTROPY)",
    "dict(head_dim=512, precision=Precision.FP32, aux=Aux.LSE)",
]
SMALL = [
    f"dict(head_dim={columns}, num_heads=4, len_q={rows}, precision=Precision.{number}{more})"
    for columns, rows, number, more in (
        (512, 64, "FP32", ""),
        (8192, 64, "FP32", ""),
        (2048, 16, "FP32", ""),
        (1024, 128, "FP32", ", requires_grad=True"),
        (8192, 64, "BF16", ""),
        (512, 16, "FP16", ", num_kv_heads=1, requires_grad=True"),
    )
]
DECODE = "dict(head_dim=128, len_q=1, len_k=4096, num_heads=32, num_kv_heads=8)"
DECODE_BY_HEAD = DECODE.replace("dict(", "dict(head_terms=HeadTerm(7), ")

SHARED_BYTES = 227 * 1024
"""Of a multiprocessor, for one block."""


RUNNING: list["subprocess.Popen[str]"] = []


@pytest.fixture(scope="session", autouse=True)
def _ended() -> Iterator[None]:
    """End the processes that compile."""
    yield
    for process in RUNNING:
        process.communicate()


@cache
def compiler(triton: Path | None) -> "subprocess.Popen[str]":
    """Return a process that compiles what it reads, by one Triton; it ends when its input does."""
    first = [] if triton is None else [str(triton)]
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={
            "PATH": os.defpath,
            "PYTHONPATH": os.pathsep.join([*first, *filter(None, sys.path), str(ROOT)]),
            "HOME": tempfile.gettempdir(),
        },
    )
    RUNNING.append(process)
    return process


def compiled(
    executor: str, values: str, folder: Path, triton: Path | None = None
) -> dict[str, Any]:
    """Return what a kernel is made of, compiled in another process with its cache in a folder."""
    process = compiler(triton)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps([executor, values, str(folder)]) + "\n")
    process.stdin.flush()
    for line in process.stdout:
        if line.startswith("found "):
            found: dict[str, Any] = json.loads(line.removeprefix("found "))
            assert "error" not in found, found["error"]
            assert triton is None or found["triton"] == triton.name.removeprefix("triton-")
            return found
    raise AssertionError(f"the process that compiles ended with status {process.wait()}")


def check_hopper(found: dict[str, Any], most_spills: int) -> None:
    """Hold what every Hopper kernel must be."""
    assert found["products"] > 0
    assert found["frozen"] == []
    assert found["warnings"] == []
    assert found["idle"] == []
    assert found["loops"]
    assert [loop for loop in found["loops"] if loop["spills"]] == []
    # What all warpgroups may hold at entry: 65536 registers over 128 threads of each.
    assert found["registers"] == {2: 168, 3: 128}[found["warpgroups"]]
    assert found["spills"] <= most_spills
    assert found["shared_bytes"] <= SHARED_BYTES


@pytest.mark.parametrize(
    ("bounds", "frozen"),
    [
        ("%c0_i32 to %last", []),
        ("%first to %found", []),
        ("%c0_i32 to %less", []),
        ("%c0_i32 to %last_1", ["%last_1"]),
        ("%last_1 to %last", ["%last_1"]),
        ("%first to %less_1", ["%less_1"]),
    ],
)
def test_a_bound_that_is_the_first_tiles_is_found(bounds: str, frozen: list[str]) -> None:
    text = f"""
      %last_1 = tt.load %counts : !tt.ptr<i32>
      %out:2 = scf.for %slot = %c0_i32 to %n step %c1_i32 iter_args(%last = %last_1) -> (i32) : i32 {{
        %first = arith.muli %slot, %c2_i32 : i32
        %less = arith.subi %last, %c1_i32 : i32
        %less_1 = arith.subi %last_1, %c1_i32 : i32
        %found = tt.load %counts : !tt.ptr<i32>
        scf.for %i = {bounds} step %c1_i32  : i32 {{
        }}
        scf.yield %found : i32
      }}
"""  # noqa: E501
    assert frozen_bounds(text) == frozen


@pytest.mark.parametrize(
    ("use", "idle"),
    [
        ("", ["%ring", "%ends"]),
        ("ttg.warp_specialize(%x, %ring, %ends, %ring_2)", []),
        ("ttg.warp_specialize(%x, %ring, %ends_2)", ["%ends"]),
        ("ttng.wait_barrier %ends, %x : !ttg.memdesc<1xi64>", ["%ring"]),
        ("%at = ttg.memdesc_index %ring[%x]\n ttng.wait_barrier %at, %x", ["%ends"]),
    ],
)
def test_an_mbarrier_that_nobody_waits_at_is_found(use: str, idle: list[str]) -> None:
    text = f"""
      %q = ttg.local_alloc : () -> !ttg.memdesc<2x64x128xbf16, #shared, #smem, mutable>
      %ring = ttg.local_alloc : () -> !ttg.memdesc<2x1xi64, #shared1, #smem, mutable>
      %one = ttg.memdesc_index %ring[%c1_i32] : !ttg.memdesc<2x1xi64> -> !ttg.memdesc<1xi64>
      ttng.init_barrier %one, 2 : !ttg.memdesc<1xi64>
      %ends = ttg.local_alloc : () -> !ttg.memdesc<1xi64, #shared1, #smem, mutable>
      ttng.init_barrier %ends, 2 : !ttg.memdesc<1xi64>
      {use}
"""
    assert idle_barriers(text) == idle


@pytest.mark.parametrize("values", [*HOPPER, *HOPPER_WITH_FEW_SPILLS])
def test_products_are_wgmma_that_overlap_and_their_loops_do_not_spill(
    values: str, tmp_path: Path
) -> None:
    few = MOST_SPILLS if values in HOPPER_WITH_FEW_SPILLS else 0
    check_hopper(compiled("hopper", values, tmp_path), few)


def check_hopper_gradients(found: dict[str, Any], most_spills: int) -> None:
    """Hold what every backward kernel for Hopper GPUs must be, of both warpgroups' loops."""
    assert found["products"] > 0
    assert found["warnings"] == []
    assert found["registers"] == 168
    assert found["idle"] == []
    assert found["shared_bytes"] <= SHARED_BYTES
    loops = sorted(found["loops"], key=lambda loop: loop["instructions"])[:2]
    assert len(loops) == 2
    assert max(loop["spills"] for loop in loops) <= most_spills


@pytest.mark.parametrize(("values", "most_spills"), HOPPER_GRADIENTS.items())
def test_gradients_for_hopper_are_products_that_overlap(
    values: str, most_spills: int, tmp_path: Path
) -> None:
    check_hopper_gradients(compiled("hopper_gradients", values, tmp_path), most_spills)


def test_a_mask_in_bits_is_one_load_for_a_tile(tmp_path: Path) -> None:
    """An instruction or two take a bit to its score; byte by byte a mask had half of the loop."""
    values = "dict(head_dim=64, mask=MaskKind.BOOLEAN, num_heads=8, window=(5000, -1), len_q={})"
    loops = {}
    for rows in (4096, 448):
        found = compiled("hopper_keys", values.format(rows), tmp_path)
        loops[rows] = max(loop["instructions"] for loop in found["loops"])
    assert loops[4096] < 0.6 * loops[448]


def test_grouped_heads_share_blocks_in_each_way() -> None:
    """Else the machine code of one of them would be looked at by nobody."""
    ways = {MANY_BLOCKS: "is_grouped", LONG_BLOCKS: "heads_apart", SHORT_BLOCKS: "is_split"}
    for values in (*HOPPER_GRADIENTS, *SPLIT_GRADIENTS):
        variant = choose_gradients(problem_of(values))
        assert variant.is_split == (values in SPLIT_GRADIENTS), values
        assert all(getattr(variant, way) for shape, way in ways.items() if shape in values), values
        asked = "deterministic" in values
        assert variant.is_split or variant.is_ordered == (asked or FEW_KEYS in values), values


@pytest.mark.parametrize("kernel", ["hopper_keys", "hopper_queries"])
@pytest.mark.parametrize(("values", "most_spills"), SPLIT_GRADIENTS.items())
def test_gradients_of_split_kernels_are_products_that_overlap(
    values: str, most_spills: int, kernel: str, tmp_path: Path
) -> None:
    check_hopper_gradients(compiled(kernel, values, tmp_path), most_spills)


# Queries of 576 columns and a tile of scores are nearly all registers: a few addresses wait in
# local memory.
FUSED = {
    "dict(head_dim=512, value_dim=512)": 0,
    "dict(head_dim=320, value_dim=384, is_causal=True)": 0,
    "dict(head_dim=576, value_dim=512, is_causal=True)": 80,
}


def check_fused(found: dict[str, Any], most_spills: int) -> None:
    """Hold what each kernel that writes no scores must be."""
    assert found["products"] > 0
    assert found["warnings"] == []
    assert found["registers"] == 168
    assert found["idle"] == []
    assert found["spills"] <= most_spills
    assert found["shared_bytes"] <= SHARED_BYTES


@pytest.mark.parametrize("kernel", ["fused_sums", "fused_weights", "fused_changes"])
@pytest.mark.parametrize(("values", "most_spills"), FUSED.items())
def test_products_of_wide_heads_overlap_with_what_is_made_of_them(
    values: str, most_spills: int, kernel: str, tmp_path: Path
) -> None:
    check_fused(compiled(kernel, values, tmp_path), most_spills)


@pytest.mark.parametrize(
    ("kind", "wide", "head_dim"),
    [
        ("prepare", 32, 64),
        ("prepare", 32, 128),
        ("prepare", 32, 256),
        ("finish", 24, 64),
        ("finish", 24, 128),
    ],
)
def test_what_stands_around_them_reads_and_writes_16_bytes_at_once(
    kind: str, wide: int, head_dim: int, tmp_path: Path
) -> None:
    found = compiled(f"hopper_{kind}", f"dict(head_dim={head_dim})", tmp_path)
    assert found["spills"] == 0
    assert found["wide"] == wide


@pytest.mark.parametrize(("kernel", "values", "most_spills"), GRADIENTS)
def test_gradients_of_the_portable_kernels_are_products_in_registers(
    kernel: str, values: str, most_spills: int, tmp_path: Path
) -> None:
    found = compiled(kernel, values, tmp_path)
    assert found["products"] > 0 or (found["small_products"] > 0 and "len_q=100" in values)
    assert found["warnings"] == []
    assert found["spills"] <= most_spills
    assert found["shared_bytes"] <= SHARED_BYTES


@pytest.mark.parametrize("values", [*PORTABLE, *PORTABLE_WITH_SPILLS])
def test_portable_kernels_copy_ahead_and_multiply_by_wgmma(values: str, tmp_path: Path) -> None:
    found = compiled("triton", values, tmp_path)
    assert found["products"] > 0
    assert found["small_products"] == 0
    assert found["copies"] > 0
    assert found["shared_bytes"] <= SHARED_BYTES
    assert found["spills"] == 0 or values in PORTABLE_WITH_SPILLS


@pytest.mark.parametrize("values", [DECODE, DECODE_BY_HEAD])
def test_decoding_takes_the_products_of_a_warp(values: str, tmp_path: Path) -> None:
    found = compiled("triton", values, tmp_path)
    assert found["small_products"] > 0
    assert found["copies"] > 0
    assert found["spills"] == 0


def check_streamed(values: str, kind: str, folder: Path, triton: Path | None = None) -> None:
    """Hold what the kernels between matrix products must be: scores pass in vectors."""
    found = compiled(kind, values, folder, triton)
    assert found["spills"] == 0
    assert found["warnings"] == []
    assert found["wide"] >= 4
    assert found["shared_bytes"] <= 1024


@pytest.mark.parametrize("kind", ["softmax", "score_changes"])
@pytest.mark.parametrize("values", STREAMED)
def test_written_out_scores_are_read_in_vectors(values: str, kind: str, tmp_path: Path) -> None:
    check_streamed(values, kind, tmp_path)


@pytest.mark.parametrize("kind", ["partial_products", "slice_products"])
@pytest.mark.parametrize("values", SMALL)
def test_products_of_few_rows_are_held_in_registers(values: str, kind: str, tmp_path: Path) -> None:
    found = compiled(kind, values, tmp_path)
    assert found["small_products"] > 0
    assert found["spills"] == 0
    assert found["wide"] >= 4
    assert found["warnings"] == []


@pytest.mark.parametrize("mask", ["MaskKind.BOOLEAN", "MaskKind.ADDITIVE"])
def test_a_mask_with_rows_is_copied_ahead_beside_keys_and_values(mask: str, tmp_path: Path) -> None:
    without = compiled("triton", "dict(head_dim=64)", tmp_path)
    with_mask = compiled("triton", f"dict(head_dim=64, mask={mask})", tmp_path)
    assert with_mask["copies"] > without["copies"]
    assert with_mask["spills"] == 0


@pytest.mark.parametrize("triton", [None, OLDEST], ids=["pinned", "oldest"])
@pytest.mark.parametrize("lines", ["rows", "keys"])
@pytest.mark.parametrize("read", ["lists", "tiles"])
def test_what_reads_a_mask_once_holds_it_in_registers(
    read: str, lines: str, triton: Path | None, tmp_path: Path
) -> None:
    if triton is not None and not triton.exists():
        pytest.skip("make test unpacks Triton 3.6.0")
    values = "dict(mask=MaskKind.BOOLEAN, num_heads=8, mask_shape=(2, 1, 4096, 4096))"
    found = compiled(f"mask_{read}_of_{lines}", values, tmp_path, triton)
    assert found["spills"] == 0
    assert found["wide"] >= 2, "16 bytes at once"


@pytest.mark.skipif(not OLDEST.exists(), reason="make test unpacks Triton 3.6.0")
@pytest.mark.parametrize(
    ("executor", "values"),
    [
        ("hopper", HOPPER[0]),
        ("hopper", HOPPER[2]),
        ("hopper", PACKED),
        ("hopper", LISTED),
        *(("hopper", values) for values in LISTED_MASKS[::2]),
        ("triton", PORTABLE[1]),
        ("triton", PORTABLE[6]),
        ("triton", PORTABLE[8]),
        *(("hopper_gradients", values) for values in list(HOPPER_GRADIENTS)[1::5]),
        *(("hopper_keys", values) for values in list(SPLIT_GRADIENTS)[1::4]),
        *(("hopper_queries", values) for values in list(SPLIT_GRADIENTS)[1::3]),
        *((kind, STREAMED[5]) for kind in ("softmax", "score_changes")),
        *((kind, SMALL[1]) for kind in ("partial_products", "slice_products")),
        *((kind, list(FUSED)[1]) for kind in ("fused_sums", "fused_weights", "fused_changes")),
    ],
)
def test_the_oldest_triton_makes_the_same_of_them(
    executor: str, values: str, tmp_path: Path
) -> None:
    if values in SMALL:
        assert compiled(executor, values, tmp_path, OLDEST)["spills"] == 0
        return
    if values in STREAMED:
        check_streamed(values, executor, tmp_path, OLDEST)
        return
    found = compiled(executor, values, tmp_path, OLDEST)
    if values in FUSED:
        check_fused(found, FUSED[values])
        return
    if executor == "hopper":
        check_hopper(found, MOST_SPILLS if values in HOPPER_WITH_FEW_SPILLS else 0)
    if executor.startswith("hopper_"):
        check_hopper_gradients(found, (HOPPER_GRADIENTS | SPLIT_GRADIENTS)[values] + 4)
        return
    assert found["products"] > 0
    assert found["spills"] == 0 or values in HOPPER_WITH_FEW_SPILLS
