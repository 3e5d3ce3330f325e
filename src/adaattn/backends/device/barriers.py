"""Where warps of the Hopper kernels meet beside the mbarriers that TMA tells of its copies by.

A consumer arrives at one of the hardware's named barriers without a wait and without electing a
thread; who waits takes part by a sync.

An mbarrier is made only where somebody waits at it. Triton gives the memory of others to what it
hands to other warps, and what makes the mbarrier may be written behind that.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

# Triton's own named barriers are 0 to 1 + workers; those of a kernel count from here.
FIRST_BARRIER = gl.constexpr(5)
# Threads of two consumer warpgroups and of the one warp that copies for them.
FREED_BY = gl.constexpr(288)

WRITES_DONE = gl.constexpr("cp.async.bulk.wait_group 0; mov.u32 $0, 0;")
RELEASED = gl.constexpr("fence.proxy.async.global; fence.release.gpu; mov.u32 $0, 0;")


@gluon.jit
def wait_for_writes():
    """Waits until this thread sees TMA's stores and sums; `tma.store_wait` until they are read."""
    gl.inline_asm_elementwise(WRITES_DONE, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def release_writes():
    """Has the whole GPU see what TMA has written before what this thread writes next.

    No acquire, which would empty the L1 cache. PTX 8.6, of CUDA 12.7: Triton's own is 12.8.
    """
    gl.inline_asm_elementwise(RELEASED, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def two_barriers(count: gl.constexpr):
    """Mbarriers of a ring of two stages, or of two warpgroups."""
    made = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(made.index(0), count=count)
    mbarrier.init(made.index(1), count=count)
    return made


@gluon.constexpr_function
def barrier_asm(operation, threads):
    """Arriving, without a wait, or waiting for all threads that belong to a barrier."""
    return f"bar.{operation} $1, {threads}; mov.u32 $0, 0;"


@gluon.jit
def meet(number, OPERATION: gl.constexpr, THREADS: gl.constexpr):
    """Arrives at a named barrier ("arrive"), or waits there for the others ("sync")."""
    asm: gl.constexpr = barrier_asm(OPERATION, THREADS)
    gl.inline_asm_elementwise(
        asm, "=r,r", [FIRST_BARRIER + number], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.constexpr_function
def late_arrive_asm(threads):
    """An arrive whose number depends on four row sums.

    ptxas then cannot hoist it, nor the wait for the product behind it, over the softmax.
    """
    return (
        "{.reg .pred p; .reg .u32 t; .reg .f32 x, y; add.f32 x, $8, $9; add.f32 y, $10, $11;"
        " add.f32 x, x, y; setp.eq.f32 p, x, 0fFF800000; selp.u32 t, 1, 0, p; add.u32 t, t, $4;"
        f" bar.arrive t, {threads};"
        " mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0;}"
    )


LATE_CONSTRAINTS = gl.constexpr("=r,=r,=r,=r,r,r,r,r,f,f,f,f")


@gluon.jit
def meet_late(number, sums, THREADS: gl.constexpr):
    """Arrives at a named barrier once sums of weights are there, four of each thread."""
    asm: gl.constexpr = late_arrive_asm(THREADS)
    gl.inline_asm_elementwise(
        asm, LATE_CONSTRAINTS, [FIRST_BARRIER + number, sums], dtype=gl.int32, is_pure=False, pack=4
    )


@gluon.jit
def sum_in_thread(x):
    """8 partial sums a row, all of one thread's numbers: the shuffles wait for the tile's end."""
    return gl.sum(gl.reshape(x, [64, x.shape[1] // 8, 8]), 1)
