"""Casts, sizes and errors that the tests of norms and activations share."""

import torch

from octavo.numerics import TENSOR, Cast, History, group

SIZES = [(1, 1), (3, 5), (17, 130), (129, 257)]
DTYPES = [torch.bfloat16, torch.float32]
CASTS = [Cast(), Cast(scale="pow2"), Cast("e5m2")]
REFUSED = [
    Cast(scale="e8m0"),
    Cast(relative_floor=0.1),
    Cast(rounding="stochastic"),
    Cast(granularity=group(32)),
    Cast(granularity=TENSOR),
    Cast(granularity=TENSOR, history=History()),
]
NEAR = 1e-6  # the error that float32 may have, relative to the magnitudes of the numbers that are added
FLOAT = "torch.float32 or torch.bfloat16 or torch.float16"
