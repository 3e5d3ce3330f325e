"""What the assembler makes of the Hopper kernel: compiled for sm_90a in a process without a GPU.

A kernel that spills in its loop, or whose products the assembler serialises, is right and slow; no
other test sees it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import json, sys
from adaattn.backends.hopper.launch import choose
from adaattn.spec import Aux, MaskKind, Precision
from adaattn.testing import make_problem
from adaattn.testing.machine_code import machine_code

values = eval(sys.argv[1])
problem = make_problem(**({"precision": Precision.BF16, "len_q": 4096} | values))
variant = choose(problem)
found = machine_code(variant)
loops = [(loop.instructions, loop.spills) for loop in found.loops]
print(json.dumps({
    "registers": found.registers, "products": found.products, "spills": found.spills,
    "warnings": found.warnings, "loops": loops, "warpgroups": variant.tiling.warpgroups,
}))
"""

WITHOUT_SPILLS = [
    "dict(head_dim=64)",
    "dict(head_dim=128)",
    "dict(head_dim=128, is_causal=True)",
    "dict(head_dim=64, is_causal=True, len_q=512)",
    "dict(head_dim=128, is_causal=True, precision=Precision.FP16, aux=Aux.LSE)",
    "dict(head_dim=128, mask=MaskKind.ADDITIVE)",
]
# A few numbers of a tile wait in local memory where the second pass, with its own reference, or
# row sums take their registers: outside of the loops over keys, some dozen accesses a tile.
WITH_FEW = [
    "dict(head_dim=256, is_causal=True)",
    "dict(head_dim=128, is_causal=True, softcap=30.0, has_alibi=True, has_sinks=True)",
    "dict(head_dim=64, is_causal=True, window=(1000, -1), aux=Aux.ENTROPY | Aux.LSE)",
]
MOST_SPILLS = 160


def _compiled(values: str, folder: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, values],
        capture_output=True,
        text=True,
        check=False,
        env={
            "PATH": os.defpath,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "TRITON_CACHE_DIR": str(folder),
            "HOME": str(folder),
        },
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("values", [*WITHOUT_SPILLS, *WITH_FEW])
def test_products_are_wgmma_that_overlap_and_their_loops_do_not_spill(
    values: str, tmp_path: Path
) -> None:
    found = _compiled(values, tmp_path)
    assert found["products"] > 0
    assert found["warnings"] == []
    assert found["loops"]
    assert [loop for loop in found["loops"] if loop[1]] == []
    # What all warpgroups may hold at entry: 65536 registers over 128 threads of each.
    assert found["registers"] == {2: 168, 3: 128}[found["warpgroups"]]
    assert found["spills"] <= (MOST_SPILLS if values in WITH_FEW else 0)
