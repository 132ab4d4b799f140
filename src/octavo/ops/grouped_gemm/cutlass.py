"""The grouped GEMM on Hopper's tensor cores: the CUTLASS kernels of `torch.nn.functional.scaled_grouped_mm`.

They take the second operand with the bytes of the reduction adjacent. The reduction over ragged groups takes no empty
group, and sizes in multiples of 16 bytes.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType


def grouped_mm(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, offsets: Tensor, *, fast: bool) -> Tensor:
    """Same as `grouped_mm_reference`, in BF16, for a contiguous a; rows behind the groups are not written."""
    return _scaled_grouped_mm(a, b.transpose(1, 2), scale_a.reshape(-1), scale_b.squeeze(-1), offsets, fast)


def grouped_mm_dw(a: Tensor, scale: Tensor, b: Tensor, offsets: Tensor, *, fast: bool) -> Tensor:
    """Same as `grouped_mm_dw_reference`, in BF16, for contiguous operands."""
    ones = torch.ones(offsets.shape[0] * b.shape[0], dtype=torch.float32, device=b.device)
    return _scaled_grouped_mm(a, b.t(), scale.reshape(-1), ones, offsets, fast)


def _scaled_grouped_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offsets: Tensor, fast: bool) -> Tensor:
    row, functional = ScalingType.RowWise, cast(Any, F)  # PyTorch's stub lacks the function
    y: Tensor = functional.scaled_grouped_mm(
        a, b, scale_a, row, scale_b, row, offs=offsets, output_dtype=torch.bfloat16, use_fast_accum=fast
    )
    return y
