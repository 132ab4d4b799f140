"""Casts, sizes and errors that the tests of norms and activations share."""

import torch
from bits import bits

from octavo.numerics import TENSOR, Cast, History, QTensor, group

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


def assert_nan_in_one_row(q: QTensor, clean: QTensor, row: int) -> None:
    """Scale and data of one row are NaN, and all others as without that."""
    others = torch.arange(q.shape[0]) != row
    for one, other in ((q.data, clean.data), (q.scale, clean.scale)):
        assert one[row].float().isnan().all()
        assert torch.equal(bits(one)[others], bits(other)[others])
