"""A kernel with a race: one warpgroup reads what another writes, and nobody waits.

python -m tests.unit.backends.planted_race
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from adaattn.backends.device.gluon import barrier


@gluon.jit
def writes(out, tile, layout: gl.constexpr):
    """Store to shared memory, as 64 bits: racecheck knows no STSM."""
    tile.store(gl.arange(0, 128, layout=layout).to(gl.int64))


@gluon.jit
def reads(out, tile, layout: gl.constexpr):
    """Load it without a look at who has stored."""
    gl.store(out + gl.arange(0, 128, layout=layout), tile.load(layout))


@gluon.jit
def raced(out):
    """Let two warpgroups do so at once."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    tile = gl.allocate_shared_memory(gl.int64, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    barrier()
    gl.warp_specialize([(writes, (out, tile, layout)), (reads, (out, tile, layout))], [4], [24])


if __name__ == "__main__":
    raced[(2,)](torch.zeros(128, device="cuda", dtype=torch.int64), num_warps=4)
    torch.cuda.synchronize()
