"""The names of Gluon that change from release to release, in one place.

Written against Triton 3.6; compiled also with 3.7 and 3.9.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language import core

__all__ = [
    "GluonASTSource",
    "aggregate",
    "barrier",
    "shaped_as",
    "tma_add",
    "tma_load",
    "tma_store",
]

aggregate = getattr(gluon, "aggregate", None) or core._aggregate
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@builtin
def tma_add(descriptor, coordinates, source, _semantic=None):
    """Adds a box of shared memory to one of global memory; Triton 3.6 has no name for it."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, coordinates, source.handle
    )


if hasattr(gl.shared_memory_descriptor, "_reinterpret"):

    @gluon.jit
    def shaped_as(buffer, descriptor):
        """A stage as the box that a descriptor copies."""
        shape: gl.constexpr = descriptor.block_type.shape
        return buffer._reinterpret(descriptor.dtype, shape, descriptor.layout)

else:  # Triton 3.9

    @gluon.jit
    def shaped_as(buffer, descriptor):
        """A stage as the box that a descriptor copies."""
        shape: gl.constexpr = descriptor.block_type.shape
        return buffer.reinterpret(descriptor.dtype, shape, descriptor.layout)
