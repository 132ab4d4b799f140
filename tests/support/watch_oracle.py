"""The numbers of a watch in numpy float64 and ml_dtypes."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from codec_oracle import ML_DTYPES
from quantize_oracle import expanded, oracle_scale

Array = np.ndarray
BY_OPERAND = ("amax", "rms", "scale", "smallest_scale", "saturated", "flushed", "sqnr", "kurtosis", "crest")


def describe(x: Array, cast=None, scale: Array | None = None) -> dict[str, float]:
    """The fields of a record of a finite matrix x, float32, which `cast` quantizes, by its own scale or a known one."""
    wide = x.astype(np.float64)
    amax, rms = np.abs(wide).max(), math.sqrt((wide**2).mean())
    central = wide - wide.mean()
    found = {
        "amax": amax, "rms": rms, "crest": amax / rms, "kurtosis": (central**4).mean() / (central**2).mean() ** 2,
        "zero_rows": (~wide.any(1)).mean(),
    }  # fmt: skip
    if cast is None:
        return found
    blocks = oracle_scale(x, cast) if scale is None else scale
    each = expanded(blocks, cast, x.shape).astype(np.float64)
    kind = ML_DTYPES[cast.format]
    largest = float(ml_dtypes.finfo(kind).max)
    numbers = np.clip(x * (1 / each.astype(np.float32)), -largest, largest).astype(kind).astype(np.float64)
    return found | {
        "scale": blocks.max(), "smallest_scale": blocks[blocks > 2.0**-126].min(),
        "saturated": (np.abs(wide) > each * largest * (1 + 1e-6)).mean(),
        "flushed": ((numbers == 0) & (wide != 0)).mean(),
        "sqnr": 10 * math.log10((wide**2).sum() / ((wide - numbers * each) ** 2).sum()),
    }  # fmt: skip


def check(found, expected: dict[str, float]) -> None:
    """A record has these numbers."""
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=2e-6, abs=1e-7), name


def binades(x: Array) -> list[float]:
    """The share of elements in each of the 40 binades from that of amax down."""
    exponents = [math.floor(math.log2(abs(v))) for v in x.astype(np.float64).flat if v]
    top = max(exponents)
    below = [min(top - e, 39) for e in exponents]
    return [below.count(k) / x.size for k in range(40)]


def matrix(rows: int = 48, columns: int = 80, spread: float = 3.0, seed: int = 0) -> torch.Tensor:
    """Numbers of many sizes: rows of different size, outliers, zeros, and a row of zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x *= torch.exp2(torch.randn(rows, 1, generator=generator) * spread)
    x[torch.rand(x.shape, generator=generator) < 0.02] *= 200
    x[torch.rand(x.shape, generator=generator) < 0.02] *= 1e-6
    x[torch.rand(x.shape, generator=generator) < 0.05] = 0
    x[3] = 0
    return x
