"""What all kernels in Gluon share: fields of aggregates, and stages of shared memory.

Those are layouts, rings, copies, products.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

from adaattn.backends.device.gluon import shaped_as, tma_load


@gluon.constexpr_function
def set_fields(aggregate, arguments, *others):
    """Sets fields from the constructor's arguments that have their names; in capitals, constants.

    Beside the aggregate itself all are fields but those that are named.
    """
    for name, value in arguments.items():
        if name != "self" and name not in others:
            setattr(aggregate, name, gl.constexpr(value) if name.isupper() else value)


@gluon.constexpr_function
def mma_layout(num_columns):
    """Accumulators of one warpgroup: 64 rows."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, num_columns, 16]
    )


@gluon.jit
def advance(stage, phase, NUM_STAGES: gl.constexpr):
    """The next stage of a ring, and the phase of its barrier."""
    stage += 1
    if stage == NUM_STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.jit
def copy(source, full, buffer, place):
    """Begins a copy of one head's rows; columns and rows that are not there become zeros."""
    mbarrier.expect(full, source.block_type.nbytes)
    tma_load(source, place, full, shaped_as(buffer, source))


@gluon.jit
def product(left, right, ROWS: gl.constexpr, COLUMNS: gl.constexpr, layout: gl.constexpr):
    """Begins a product whose sum starts at 0."""
    zeros = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
    return warpgroup_mma(left, right, zeros, use_acc=False, is_async=True)
