"""Quantization block by block in numpy and ml_dtypes, and matrices to quantize."""

import math

import ml_dtypes
import numpy as np
import torch
from codec_oracle import FP8, ML_DTYPES

from octavo.numerics import ROW, TENSOR, Cast, QTensor, block, group
from octavo.recipe import PRESETS

KINDS = {name: ML_DTYPES[name] for name in FP8}


def casts_of_the_presets() -> list[Cast]:
    """Each cast that some preset names and that rounds to nearest, once."""
    gemms = [gemm for preset in PRESETS.values() for gemm in (preset().y, preset().dx, preset().dw) if gemm is not None]
    casts = dict.fromkeys(cast for gemm in gemms for cast in (gemm.a, gemm.b))
    return [cast for cast in casts if cast.rounding == "nearest"]


OTHERS = [
    Cast("e4m3fnuz"),
    Cast("e5m2fnuz", block(2, 3)),
    Cast(scale="e8m0"),
    Cast(granularity=group(7), relative_floor=0.1),
]
CASTS = [*casts_of_the_presets(), *OTHERS]
SHAPES = [(1, 1), (3, 5), (17, 130), (129, 257), (0, 7), (5, 0), (0, 0)]


def name_of(cast: Cast) -> str:
    parts = [cast.format, cast.granularity.name, cast.scale]
    return "-".join(parts + (["floor"] if cast.relative_floor else []) + (["history"] if cast.history else []))


def block_sizes(cast: Cast, shape: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of a block; one at least."""
    if cast.granularity == TENSOR:
        return max(shape[0], 1), max(shape[1], 1)
    return cast.granularity.rows, cast.granularity.cols or max(shape[1], 1)


def oracle_scale(x: np.ndarray, cast: Cast) -> np.ndarray:
    """One float32 scale a block, [M, K] -> [blocks down, blocks across]; a row, or a tensor, of nothing is a block."""
    (m, k), (r, c) = x.shape, block_sizes(cast, x.shape)
    m, k = (max(m, 1) if cast.granularity == TENSOR else m), (k if cast.granularity.cols else max(k, 1))
    amax = np.empty((math.ceil(m / r), math.ceil(k / c)), np.float32)
    for i, j in np.ndindex(amax.shape):
        amax[i, j] = np.abs(x[i * r : (i + 1) * r, j * c : (j + 1) * c]).max(initial=0)
    top, least = np.float32(ml_dtypes.finfo(ML_DTYPES[cast.format]).max), np.float32(2.0**-126)
    if cast.scale == "e4m3":  # NVFP4
        if not amax.any():
            return np.full_like(amax, 0.125)
        divisor = np.float32(448 * 6) * (np.float32(1) / amax.max(initial=least))
        stored = np.minimum(amax / top * divisor, np.float32(448)).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        return np.where(stored == 0, np.float32(0.125), stored) / divisor
    if cast.scale == "e8m0_floor":  # MX
        exponent = np.floor(np.log2(np.maximum(amax, least).astype(np.float64))) - 2
        return np.maximum(np.exp2(exponent), least, dtype=np.float32)
    scale = np.maximum(amax / top, least)
    if cast.relative_floor:
        scale = np.maximum(scale, scale.max(initial=0) * np.float32(cast.relative_floor))
    if cast.scale != "fp32":
        scale = np.exp2(np.ceil(np.log2(scale.astype(np.float64)))).astype(np.float32)
    return scale


def inverse(scale: np.ndarray, cast: Cast, shape: tuple[int, int]) -> np.ndarray:
    """What each element of [M, K] is multiplied by."""
    return expanded(np.float32(1) / scale, cast, shape)


def expanded(scale: np.ndarray, cast: Cast, shape: tuple[int, int]) -> np.ndarray:
    r, c = block_sizes(cast, shape)
    return scale.repeat(r, 0).repeat(c, 1)[: shape[0], : shape[1]]


def oracle(x: np.ndarray, cast: Cast) -> tuple[np.ndarray, np.ndarray]:
    scale = oracle_scale(x, cast)
    if cast.format == "e2m1":  # held in e4m3
        numbers = (x / expanded(scale, cast, x.shape)).astype(ML_DTYPES["e2m1"]).astype(KINDS["e4m3"])
        return numbers.view(np.uint8), scale
    top = np.float32(ml_dtypes.finfo(KINDS[cast.format]).max)
    shrunk = np.clip(x * inverse(scale, cast, x.shape), -top, top)
    return shrunk.astype(KINDS[cast.format]).view(np.uint8), scale


def check(q: QTensor, data: np.ndarray, scale: np.ndarray, cast: Cast) -> None:
    """`q` is of this cast, each byte and each scale is the oracle's, and each number their product."""
    assert (q.format, q.granularity) == (cast.fmt, cast.granularity)
    assert q.scale.dtype == (torch.float8_e8m0fnu if cast.scale in ("e8m0", "e8m0_floor") else torch.float32)
    assert np.array_equal(q.scale.float().numpy(), scale)
    assert np.array_equal(q.data.view(torch.uint8).numpy(), data)
    assert np.array_equal(q.dequantize().numpy(), q.data.float().numpy() * expanded(scale, cast, q.data.shape))


def assert_rounds_to(q: QTensor, value: torch.Tensor, near: torch.Tensor, cast: Cast) -> None:
    """Codes and scales of `q` are those of `value` (float64), or of a number within `near` of it."""
    assert (q.format, q.granularity, q.scale.dtype) == (cast.fmt, ROW, torch.float32)
    value, near = value.numpy(), near.numpy()
    scale = q.scale.numpy()
    low, high = oracle_scale(np.maximum(np.abs(value) - near, 0), cast), oracle_scale(np.abs(value) + near, cast)
    assert ((low <= scale) & (scale <= high)).all()
    factor, top = inverse(scale, cast, value.shape), q.format.max
    low, high = (np.clip(v * factor, -top, top).astype(KINDS[cast.format]) for v in (value - near, value + near))
    actual = q.data.view(torch.uint8).numpy()
    certain = low.view(np.uint8) == high.view(np.uint8)
    assert np.array_equal(actual[certain], low.view(np.uint8)[certain])
    wide, low, high = (v.astype(np.float32) for v in (actual.view(low.dtype), low, high))
    assert ((low <= wide) & (wide <= high)).all()
    plain = near < 1e-4 * np.abs(value)  # where little cancels
    assert ((low != high) & plain).sum() <= 5 + plain.sum() / 100  # else this would prove little


def matrix(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows and columns of very different size, a zero row, and some zeros and negative zeros."""
    torch.manual_seed(shape[0] * 1000 + shape[1])
    x = torch.randn(shape) * torch.exp2(torch.randint(-9, 10, (shape[0], 1)))
    x *= torch.exp2(torch.randint(-4, 5, (shape[1],)))
    x[torch.rand(shape) < 0.05] = -0.0
    if shape[0] > 2:
        x[1] = 0
    return x.to(dtype)
