"""Arrays in a page: base64 of little-endian numbers, which elements.js decodes when it needs them."""

import base64
from typing import Any

import numpy as np


def to_base64(values: np.ndarray[Any, Any], dtype: str) -> str:
    """The values in C order as base64 of `dtype`, such as "<u2"."""
    return base64.b64encode(np.ascontiguousarray(values, dtype=dtype).tobytes()).decode()
