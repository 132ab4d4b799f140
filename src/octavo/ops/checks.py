"""What the doors ask of casts and tensors, and how they refuse what is otherwise."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.numerics.cast import Cast
from octavo.numerics.granularity import ROW

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check_row_cast(operation: str, cast: Cast) -> None:
    """Raise ValueError unless format and kind of scale are all there is to `cast`, the scale being float32.

    A history is refused with the granularity: only a scale of the whole tensor has one.
    """
    if cast.granularity != ROW or cast.rounding != "nearest" or cast.relative_floor or cast.scale == "e8m0":
        raise ValueError(
            f"{operation} takes a cast by row, rounded to nearest, with scale 'fp32' or 'pow2', no relative floor and "
            f"no history, got {cast}: change the cast, or run the operation in PyTorch and use octavo.ops.quantization"
        )


def check_matrix(taker: str, x: Tensor) -> None:
    """Raise ValueError unless `x` is a matrix of one of FLOATS."""
    if x.ndim != 2 or x.dtype not in FLOATS:
        raise ValueError(f"{taker} takes a matrix of float32, bfloat16 or float16, got {x.dtype} {list(x.shape)}")


def check_tensor(name: str, t: Tensor | None, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    """Raise ValueError unless `t`, where it is given, has this shape and one of these dtypes."""
    if t is not None and (t.shape != shape or t.dtype not in dtypes):
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"{name} must be {wanted} {list(shape)}, got {t.dtype} {list(t.shape)}")
