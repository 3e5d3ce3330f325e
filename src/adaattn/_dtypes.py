"""The one mapping between torch dtypes and `Precision`."""

import torch

from adaattn.errors import DTypeError
from adaattn.spec import Precision

TORCH_DTYPES: dict[Precision, torch.dtype] = {
    Precision.FP64: torch.float64,
    Precision.FP32: torch.float32,
    Precision.BF16: torch.bfloat16,
    Precision.FP16: torch.float16,
    Precision.FP8_E4M3: torch.float8_e4m3fn,
    Precision.FP8_E5M2: torch.float8_e5m2,
    Precision.INT8: torch.int8,
}

_PRECISIONS = {dtype: precision for precision, dtype in TORCH_DTYPES.items()}
_COMPUTE = (Precision.FP64, Precision.FP32, Precision.BF16, Precision.FP16)


def precision_of(dtype: torch.dtype, *, subject: str = "query") -> Precision:
    """Return the precision of a dtype that attention takes as input.

    Raises:
        DTypeError: the dtype is not float64, float32, bfloat16 or float16.
    """
    precision = _PRECISIONS.get(dtype)
    if precision not in _COMPUTE:
        raise DTypeError.got(
            f"dtype of {subject}", "float64, float32, bfloat16 or float16", dtype, "cast it"
        )
    return precision


def torch_dtype(precision: Precision) -> torch.dtype:
    """Return the torch dtype that stores a precision.

    Raises:
        DTypeError: torch has no dtype for it (int4).
    """
    try:
        return TORCH_DTYPES[precision]
    except KeyError:
        raise DTypeError.got("precision", "one that torch stores", precision.label) from None
