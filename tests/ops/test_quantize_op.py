"""Inputs that the operations of quantization refuse."""

import pytest
import torch

from octavo.numerics import TENSOR, Cast
from octavo.ops import quantize, quantize_scaled


@pytest.mark.parametrize(
    "x", [torch.ones(4), torch.ones(2, 3, 4), torch.ones(4, 4).int(), torch.tensor(1.0), torch.ones(2, 2).double()]
)
def test_only_matrices_of_floats_are_taken(x):
    """Rounding float64 to float32 first would be a second, silent rounding."""
    for call in (lambda: quantize(x, Cast()), lambda: quantize_scaled(x, torch.ones(1, 1), Cast(granularity=TENSOR))):
        with pytest.raises(ValueError, match="takes a matrix of float32, bfloat16 or float16, got"):
            call()


@pytest.mark.parametrize("bad", [torch.ones(4, 1), torch.ones(1, 6, dtype=torch.float64)])
def test_a_factor_of_the_wrong_shape_or_dtype_is_refused(bad):
    x = torch.ones(4, 6)
    with pytest.raises(ValueError, match=r"column_scale must be torch.float32 \[1, 6\]"):
        quantize(x, Cast(), column_scale=bad)
    with pytest.raises(ValueError, match=r"mantissa_of must be torch.float32 \[4, 1\]"):
        quantize(x, Cast(), mantissa_of=bad.t())
