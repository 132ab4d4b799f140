"""Quantized operands of every granularity in a preset, their numbers in float64, and the error of a product."""

import math

import numpy as np
import torch

from octavo.numerics import TENSOR, Cast, QTensor, group
from octavo.ops import quantize
from octavo.ops.dispatch import MX, SQUARE, STRIP
from octavo.recipe import ROW_W, ROW_X

# Every pair of casts that a preset gives to one of its GEMMs, by granularity.
PAIRS = {
    "tensor": (Cast(granularity=TENSOR), Cast(granularity=TENSOR)),
    "tensor-e5m2": (Cast("e5m2", TENSOR), Cast(granularity=TENSOR)),
    "row": (ROW_X, ROW_W),
    "row-gradient": (Cast(scale="pow2"), ROW_W),
    "row-pow2": (Cast("e5m2", scale="pow2"), Cast(scale="pow2")),
    "tensor-pow2": (Cast(granularity=TENSOR, scale="pow2"), Cast(granularity=TENSOR, scale="pow2")),
    "row-e5m2": (Cast("e5m2", scale="pow2"), Cast()),
    "strip-square": (Cast(granularity=STRIP), Cast(granularity=SQUARE)),
    "square-strip": (Cast(granularity=SQUARE), Cast(granularity=STRIP)),
    "strip-strip": (Cast(granularity=STRIP), Cast(granularity=STRIP)),
    "mx": (Cast(granularity=MX, scale="e8m0"), Cast(granularity=MX, scale="e8m0")),
    "group32": (Cast(granularity=group(32)), Cast(granularity=group(32))),
    "group64": (Cast(granularity=group(64)), Cast(granularity=group(64))),
    "group64-e5m2": (Cast("e5m2", group(64)), Cast(granularity=group(64))),
    "group96": (Cast(granularity=group(96)), Cast(granularity=group(96))),
    "fnuz": (Cast("e5m2fnuz"), Cast("e4m3fnuz")),
    "mixed": (Cast(granularity=group(7)), Cast(granularity=TENSOR)),
}


def operands(pair: str, m: int, k: int, n: int) -> tuple[QTensor, QTensor]:
    """a [M, K] and b [N, K], rows of very different size."""
    torch.manual_seed(m + k + n)
    a = torch.randn(m, k) * torch.exp2(torch.randint(-12, 13, (m, 1)))
    b = torch.randn(n, k) * torch.exp2(torch.randint(-4, 5, (n, 1)))
    return quantize(a, PAIRS[pair][0]), quantize(b, PAIRS[pair][1])


def wide(q: QTensor) -> np.ndarray:
    """What the operand stands for, in float64, scales laid out by numpy."""
    scale = q.scale.double().numpy()
    for axis, b in enumerate(q.granularity.block(tuple(q.shape))):
        scale = scale.repeat(b, axis).take(range(q.shape[axis]), axis)
    return q.data.double().numpy() * scale


def wide_in_bf16(q: QTensor) -> np.ndarray:
    """`wide`, rounded to float32 and then to BF16: the operand of a BF16 product."""
    return torch.from_numpy(wide(q)).float().bfloat16().double().numpy()


def worst_row(y: torch.Tensor, exact: np.ndarray) -> float:
    """The largest relative error of a row."""
    error = np.linalg.norm(y.double().numpy() - exact, axis=1)
    size = np.linalg.norm(exact, axis=1)
    assert not error[size == 0].any()  # a row that underflowed in quantization is zero
    return float((error[size > 0] / size[size > 0]).max())


# ---- on a GPU

ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
PROMOTED = 4 * 4 * 2.0**-13


def on_gpu(q: QTensor) -> QTensor:
    return QTensor(q.data.cuda(), q.scale.cuda(), q.format, q.granularity)


def row_norm(y: np.ndarray) -> np.ndarray:
    return np.linalg.norm(y, axis=1)


def errors_and_bounds(y, a, b, bias, fast, widen=wide):
    """The error of each row of y and its bound, from the operands on the CPU, whose numbers `widen` gives."""
    wide_a, wide_b = widen(a), widen(b)
    product = wide_a @ wide_b.T
    exact = product if bias is None else product + bias.double().numpy()
    loss = PROMOTED + (2.0**-13 * math.ceil(a.shape[1] / 32) if fast else 0)
    gemm_dtype = y.dtype if a.granularity.outer else torch.bfloat16
    bound = ROUNDOFF[gemm_dtype] * row_norm(product) + loss * row_norm(np.sqrt(wide_a**2 @ (wide_b**2).T))
    # The scales are two products in float32. A bias, or another dtype than the GEMM's, rounds once more.
    bound += 2.0**-22 * row_norm(product)
    if bias is not None or gemm_dtype != y.dtype:
        bound += ROUNDOFF[y.dtype] * row_norm(exact)
    return row_norm(y.cpu().double().numpy() - exact), bound
