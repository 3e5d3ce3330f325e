"""How a head was computed."""

from adaattn.spec.enums import Method, Precision

__all__ = ["Way"]

Way = tuple[Method, Precision]
"""How a head was computed: by which method, in which number format."""
