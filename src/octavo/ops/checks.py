"""The checks of casts and tensors that the operations share."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from octavo.numerics.cast import Cast

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def eager_check(check: Callable[..., None]) -> Callable[..., None]:
    """`check` in eager code, skipped while torch.compile traces: the operation's fake implementation runs it then.

    A traced check turns the dynamic sizes that it compares into constants, on which PyTorch 2.11 fails inside an
    autograd Function.
    """

    @wraps(check)
    def run(*args: Any) -> None:
        if not torch.compiler.is_dynamo_compiling():
            check(*args)

    return run


def check_row_cast(operation: str, cast: Cast) -> None:
    """Raise ValueError unless `cast` is by row, rounded to nearest, with float32 scales and no relative floor.

    A cast with a history has granularity tensor, so it is refused too.
    """
    if not cast.by_row or cast.rounding != "nearest" or cast.relative_floor or cast.scale == "e8m0":
        raise ValueError(
            f"{operation} takes a cast by row, rounded to nearest, with scale 'fp32' or 'pow2', no relative floor and "
            f"no history, got {cast}: change the cast, or run the operation in PyTorch and use octavo.ops.quantize"
        )


def check_matrix(operation: str, x: Tensor) -> None:
    """Raise ValueError unless `x` is a matrix of a dtype in FLOATS."""
    if x.ndim != 2 or x.dtype not in FLOATS:
        raise ValueError(f"{operation} takes a matrix of float32, bfloat16 or float16, got {x.dtype} {list(x.shape)}")


def check_tensor(name: str, t: Tensor | None, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    """Raise ValueError unless `t` is None or has this shape and one of these dtypes."""
    if t is not None and (t.shape != shape or t.dtype not in dtypes):
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"{name} must be {expected} {list(shape)}, got {t.dtype} {list(t.shape)}")
