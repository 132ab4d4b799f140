"""The oracles of the codec: ml_dtypes, numpy, and exact arithmetic."""

import ml_dtypes
import numpy as np
import torch

from octavo.numerics.formats import FORMATS, FP8_FORMATS, encode

ML_DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz, "e2m1": ml_dtypes.float4_e2m1fn, "e8m0": ml_dtypes.float8_e8m0fnu,
    "bf16": ml_dtypes.bfloat16, "fp16": np.float16, "fp32": np.float32,
}  # fmt: skip
FP8 = sorted(FP8_FORMATS)
NARROW = [*FP8, "e2m1"]
ALL_BF16 = torch.arange(1 << 16).to(torch.uint16).view(torch.bfloat16).float()


def same(actual: torch.Tensor, expected: np.ndarray) -> bool:
    """Equal as numbers, signs of zeros included; NaN equals NaN."""
    with np.errstate(invalid="ignore"):  # signalling NaNs
        a, b = actual.numpy().astype(np.float64), expected.astype(np.float64)
    nan = np.isnan(a)
    return bool((nan == np.isnan(b)).all() and (a == b)[~nan].all() and (np.signbit(a) == np.signbit(b))[~nan].all())


def all_values(name: str) -> np.ndarray:
    """The value of every code, from ml_dtypes."""
    kind = np.dtype(ML_DTYPES[name])
    codes = np.arange(1 << FORMATS[name].bits).astype(f"u{kind.itemsize}")
    with np.errstate(invalid="ignore"):
        return codes.view(kind).astype(np.float32)


def log_uniform(n: int, low: float, high: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random signs and significands, exponents uniform in [low, high]."""
    magnitude = torch.exp2(torch.empty(n, dtype=torch.float64).uniform_(low, high))
    return (magnitude * (torch.randint(2, (n,)) * 2 - 1)).to(dtype)


def code_of(values: list[float], name: str) -> list[int]:
    return encode(torch.tensor(values, dtype=torch.float64), FORMATS[name]).tolist()
