"""The scales of the backward GEMMs in plain PyTorch."""

import torch
from torch import Tensor

from octavo.numerics.scaling import quotient, scale_exponent, scale_mantissa


def fold_scales_reference(s_x: Tensor, s_g: Tensor, s_w: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The fields of `FoldedScales`."""
    exponent = (scale_exponent(s_x) + scale_exponent(s_g)).view(-1)  # [T] of c
    largest = exponent.amax() if len(exponent) else exponent.new_zeros(())
    c_max = torch.exp2(largest.float()).view(1, 1)
    dw = c_max if s_w is None else quotient(c_max, s_w)
    return quotient(s_g, scale_mantissa(s_x)), largest - exponent, dw
