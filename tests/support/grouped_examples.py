"""Ragged groups, quantized operands for grouped GEMMs, and the product of each group in float64."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from gemm_examples import PAIRS, PROMOTED, ROUNDOFF, row_norm, wide
from gpus import poison
from torch import Tensor

from octavo.numerics import FORMATS, QTensor
from octavo.ops import quantize

SIZES = {"ragged": [7, 0, 33, 16, 1], "one": [0, 0, 64, 0], "none at the ends": [0, 31, 2, 0], "aligned": [32, 16, 48]}
GROUPED_PAIRS = ["row", "strip-square", "strip-strip", "group64", "group32", "mx"]


def offsets_of(sizes: list[int]) -> Tensor:
    return torch.tensor(sizes).cumsum(0).to(torch.int32)


def results(module, x: Tensor, index: Tensor, weight: Tensor, dy: Tensor) -> list[Tensor]:
    """The output of a module of experts, and the gradients of x, the weights and both matrices."""
    leaves = (x, weight, module.gate_up_proj, module.down_proj)
    for leaf in leaves:
        leaf.grad = None
    if x.is_cuda:
        poison()
    y = module(x, index, weight)
    y.backward(dy)
    return [y.detach(), *(leaf.grad for leaf in leaves)]


def exact_experts(x: Tensor, weight: Tensor, w_in: Tensor, w_out: Tensor, index: Tensor) -> Tensor:
    """The output [T, K] of SwiGLU experts in the dtype of x, expert by expert."""
    y = torch.zeros_like(x)
    for e in range(len(w_in)):
        token, slot = (index == e).nonzero(as_tuple=True)
        gate, up = (x[token] @ w_in[e].t()).chunk(2, 1)
        y = y.index_add(0, token, weight[token, slot, None] * ((F.silu(gate) * up) @ w_out[e].t()))
    return y


def rows_of(sizes: list[int]) -> list[slice]:
    ends = np.cumsum(sizes)
    return [slice(int(end - size), int(end)) for size, end in zip(sizes, ends, strict=True)]


def operands(sizes: list[int], k: int, n: int, spare: int = 0, pair: str = "row") -> tuple[QTensor, QTensor, Tensor]:
    """a [M, K] with rows of very different size and `spare` rows behind the groups, b [E, N, K], and the offsets."""
    torch.manual_seed(k + n)
    m = sum(sizes) + spare
    a = torch.randn(m, k) * torch.exp2(torch.randint(-12, 13, (m, 1)))
    b = torch.randn(len(sizes), n, k) * torch.exp2(torch.randint(-4, 5, (len(sizes), n, 1)))
    cast_a, cast_b = PAIRS[pair]
    return quantize(a, cast_a), stacked([quantize(matrix, cast_b) for matrix in b]), offsets_of(sizes)


def gradient_operands(sizes, formats, n=96, k=80):
    """h [n, M] and x_t [k, M] with NaN behind the groups, between them the scale [E, n, 1], and the offsets."""
    torch.manual_seed(0)
    rows = sum(sizes)
    both = [torch.randn(size, rows + 32) for size in (n, k)]
    for each in both:
        each[:, rows:] = torch.nan
    h, x_t = (each.to(FORMATS[fmt].dtype) for each, fmt in zip(both, formats, strict=True))
    return h, torch.rand(len(sizes), n, 1) + 0.1, x_t, offsets_of(sizes)


def quantized_columns(sizes: list[int], pair: str, n: int = 96, k: int = 80) -> tuple[QTensor, QTensor, Tensor]:
    """Of dw: dy [n, M] and x [k, M] with scales along the M columns of groups, and the offsets."""
    torch.manual_seed(0)
    dy, x = (torch.randn(size, sum(sizes)) * torch.exp2(torch.randint(-12, 13, (size, 1))) for size in (n, k))
    return quantize(dy, PAIRS[pair][0]), quantize(x, PAIRS[pair][1]), offsets_of(sizes)


def stacked(matrices: list[QTensor]) -> QTensor:
    """Matrices [N, K] as one tensor [E, N, K]."""
    data, scale = (
        torch.stack([t.view(torch.uint8) for t in parts]).view(parts[0].dtype)  # torch.stack lacks float8 dtypes
        for parts in ([q.data for q in matrices], [q.scale for q in matrices])
    )
    return QTensor(data, scale, matrices[0].format, matrices[0].granularity)


def exact(a, b, sizes, power=1, widen=wide):
    """y [M, N] of the numbers that `widen` gives, or of a power of them, in float64; zeros behind the groups."""
    wide_a, wide_b = (widen(q) ** power for q in (a, b))
    y = np.zeros((wide_a.shape[0], wide_b.shape[1]))
    for e, rows in enumerate(rows_of(sizes)):
        y[rows] = wide_a[rows] @ wide_b[e].T
    return y


def exact_dw(h: Tensor, scale: Tensor, x_t: Tensor, sizes: list[int]) -> np.ndarray:
    """dw [E, N, K] of the same operands in float64."""
    wide_h, wide_x = h.double().numpy(), x_t.double().numpy()
    products = [wide_h[:, columns] @ wide_x[:, columns].T for columns in rows_of(sizes)]
    return np.stack(products) * scale.double().numpy()


def exact_columns(a, b, sizes, power=1, widen=wide):
    """dw [E, N, K] of operands with scales along M, as `exact`."""
    wide_a, wide_b = (widen(q) ** power for q in (a, b))
    return np.stack([wide_a[:, columns] @ wide_b[:, columns].T for columns in rows_of(sizes)])


def row_error_bound(product: np.ndarray, size: np.ndarray, terms: int, fast: bool) -> np.ndarray:
    """The largest error of a row, from the product and the size of a sum of independent terms."""
    loss = PROMOTED + (2.0**-13 * math.ceil(terms / 32) if fast else 0)
    return (ROUNDOFF[torch.bfloat16] + 2.0**-21) * row_norm(product) + loss * row_norm(size)
