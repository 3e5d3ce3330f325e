"""The names of Gluon that change from release to release, in one place.

Written against Triton 3.6, compiled also with 3.7 and 3.9.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language import core

__all__ = ["GluonASTSource", "aggregate", "barrier", "tma_load", "tma_store"]

aggregate = getattr(gluon, "aggregate", None) or core._aggregate
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
