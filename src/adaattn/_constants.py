"""Numeric constants shared by every layer. No functions, no state."""

import math
from typing import Final

LOG2_E: Final = math.log2(math.e)
"""log2(e): turns nats into bits and natural exponents into base-2 ones."""

LN_2: Final = math.log(2.0)
"""ln(2): turns bits into nats."""

TMA_WRAP: Final = 1 << 30
"""Rows whose distance, at 2^34 elements each, is none in addresses of 64 bits."""
