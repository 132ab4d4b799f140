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
ROWS = [  # a cast, and whether there are a bias, a norm and an activation
    ("row", False, True, False), ("row", True, False, True), ("row", True, True, True), ("tensor", True, True, True),
]  # fmt: skip
HALF_ULP = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12, torch.float32: 2.0**-25}


def operands(cast: str, m: int, k: int, n: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, QTensor]:
    """x [M, K] and w [N, K]; the rows of w have very different sizes."""
    torch.manual_seed(m + k + n)
    x = torch.randn(m, k).to(dtype)
    w = torch.randn(n, k) * torch.exp2(torch.randint(-6, 3, (n, 1)))
    return x, quantize(w, CASTS[cast])


def row_operands(cast, k, n, dtype, biased, normed):
    """x [1, K] of small numbers, w [N, K], a bias [N] and the weight [K] of a norm, or None."""
    x, w = operands(cast, 1, k, n, dtype)
    x = (x * (0.1 if normed else 0.01)).to(dtype)
    return x, w, torch.randn(n).to(dtype) if biased else None, torch.randn(k).to(dtype) * 0.1 if normed else None


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


def assert_close_row(
    y: Tensor, x: Tensor, w: QTensor, bias: Tensor | None, norm: Tensor | None, eps: float, gated: bool
):
    """Each element of y [1, N] is norm(x) @ w^T + bias in float64, or its SwiGLU, rounded once to y's dtype, within the
    error of float32 sums."""
    wide_x = x.double()
    if norm is not None:
        wide_x = wide_x * norm.double() / (wide_x.square().mean() + eps).sqrt()
    sums = (x.shape[1] + 8) * 2.0**-24 * (wide_x.abs() @ torch.from_numpy(np.abs(wide(w)).T))
    exact = wide_x @ torch.from_numpy(wide(w).T) + (0 if bias is None else bias.double())
    if gated:
        (gate, up), (gate_error, up_error) = exact.chunk(2, 1), sums.chunk(2, 1)
        silu = gate * torch.sigmoid(gate)
        sums = 1.1 * gate_error * (up.abs() + up_error) + silu.abs() * (up_error + 2.0**-20 * up.abs())
        exact = silu * up
    bound = sums + (HALF_ULP[y.dtype] * 2 + 2.0**-20) * exact.abs() + 2.0**-24 * (y.dtype == torch.float16)
    assert ((y.cpu().double() - exact).abs() <= bound).all()
