"""Inputs and packed weights of every granularity for the weight-only GEMM, and the bound of its error."""

import numpy as np
import torch
from gemm_examples import wide
from grouped_examples import offsets_of, rows_of, stacked
from torch import Tensor

from octavo.numerics import ROW, TENSOR, Cast, QTensor, block, group
from octavo.ops import quantize

CASTS = {
    "row": Cast(granularity=ROW),
    "tensor": Cast(granularity=TENSOR),
    "block": Cast(granularity=block(128, 128)),
    "group32": Cast(granularity=group(32)),
    "group128": Cast(granularity=group(128)),
    "mx": Cast(granularity=group(32), scale="e8m0"),
}
GROUPED_CASTS = [name for name in CASTS if name != "tensor"]
HALF_ULP = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12, torch.float32: 2.0**-25}


def operands(cast: str, m: int, k: int, n: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, QTensor]:
    """x [M, K] and w [N, K]; the rows of w have very different sizes."""
    torch.manual_seed(m + k + n)
    x = torch.randn(m, k).to(dtype)
    w = torch.randn(n, k) * torch.exp2(torch.randint(-6, 3, (n, 1)))
    return x, quantize(w, CASTS[cast])


def grouped_operands(cast, sizes, k, n, dtype=torch.bfloat16):
    """x [M, K] with 3 rows behind the groups, w [E, N, K], and the offsets."""
    x, _ = operands(cast, sum(sizes) + 3, k, n, dtype)
    return x, stacked([operands(cast, i, k, n)[1] for i in range(len(sizes))]), offsets_of(sizes)


def assert_close_in_groups(y: Tensor, x: Tensor, w: QTensor, sizes: list[int], *, rounded_weight: bool = False) -> None:
    for e, rows in enumerate(rows_of(sizes)):
        if sizes[e]:
            matrix = QTensor(w.data[e], w.scale[e], w.format, w.granularity)
            assert_close(y[rows], x[rows], matrix, rounded_weight=rounded_weight)


def assert_close(y: Tensor, x: Tensor, w: QTensor, bias: Tensor | None = None, *, rounded_weight: bool = False) -> None:
    """Each element of y is x @ w^T + bias in float64, rounded once to y's dtype, within the error of a float32 sum.
    rounded_weight: each element of the weight is rounded to y's dtype as well."""
    exact = x.double().numpy() @ wide(w).T
    total = np.abs(x.double().numpy()) @ np.abs(wide(w)).T
    if bias is not None:
        exact, total = exact + bias.double().numpy(), total + np.abs(bias.double().numpy())
    half_ulp = 2 * HALF_ULP[y.dtype]  # of a number just above a power of two
    sums = (x.shape[1] + 4) * 2.0**-24 + (half_ulp if rounded_weight else 0)
    error, bound = np.abs(y.cpu().double().numpy() - exact), half_ulp * np.abs(exact) + sums * total
    assert np.isfinite(error).all()
    assert (error <= bound + 2.0**-25 * (y.dtype == torch.float16)).all(), (error / np.maximum(bound, 1e-30)).max()
