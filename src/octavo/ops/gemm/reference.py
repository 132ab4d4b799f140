"""The scaled GEMM in plain PyTorch, exact but for the order of its float32 sums; and a model of the tensor core's.

The product of two E4M3 or E5M2 numbers has at most eight significant bits: float32 holds it exactly, so emulation
rounds only where sums do. A scale that is constant along the reduction multiplies the result; others multiply the
operand first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.numerics.codec import widen
from octavo.numerics.granularity import Granularity
from octavo.numerics.qtensor import QTensor

INSTRUCTION_K = 32  # elements of the reduction that one FP8 tensor-core instruction sums


def scaled_mm(
    a: Tensor, scale_a: Tensor, layout_a: Granularity, b: Tensor, scale_b: Tensor, layout_b: Granularity
) -> Tensor:
    """(a * scale_a) @ (b * scale_b)^T as float32 [M, N], from a [M, K] and b [N, K]."""
    scale_a, scale_b = scale_a.float(), scale_b.float()
    with torch.autocast(a.device.type, enabled=False):  # it would run this product in BF16
        y = _operand(a, scale_a, layout_a) @ _operand(b, scale_b, layout_b).t()  # [M,K] @ [N,K]^T
    if layout_a.outer:
        y *= scale_a
    if layout_b.outer and not bool((scale_b == 1).all()):  # ones where the scale was folded into a
        y *= scale_b.t()
    return y


def _operand(data: Tensor, scale: Tensor, layout: Granularity) -> Tensor:
    wide = widen(data)
    return wide if layout.outer else wide.mul_(layout.expand(scale, tuple(data.shape)))


def tensor_core_mm(a: QTensor, b: QTensor, *, bits: int = 14, promote_every: int | None = 128) -> Tensor:
    """a [M, K] @ b [N, K]^T as float32 [M, N], summed as Hopper's FP8 tensor cores do: to study what that costs.

    Each instruction adds 32 products to an accumulator of which about 14 significant bits survive, truncated; every
    `promote_every` elements (None: never, "fast accumulation") the accumulator is added to a float32 sum and cleared.

    Source of the figures: DeepSeek-V3 technical report (arXiv:2412.19437), section 3.3.2. This models their size, not
    the circuit: the true alignment of the products inside an instruction is not public.
    """
    if not (a.layout.outer and b.layout.outer):
        raise ValueError(f"the model takes tensor or row scales, got {a.layout.name} and {b.layout.name}")
    if promote_every is not None and (promote_every < 1 or promote_every % INSTRUCTION_K):
        raise ValueError(f"promote_every must be a positive multiple of {INSTRUCTION_K}, got {promote_every}")
    x, w = widen(a.data), widen(b.data)
    total = x.new_zeros(x.shape[0], w.shape[0])
    partial = torch.zeros_like(total)
    for k in range(0, x.shape[1], INSTRUCTION_K):
        if promote_every is not None and k % promote_every == 0:
            total, partial = total + partial, torch.zeros_like(total)
        with torch.autocast(x.device.type, enabled=False):
            products = x[:, k : k + INSTRUCTION_K] @ w[:, k : k + INSTRUCTION_K].t()
        partial = _truncate(partial + products, bits)
    return (total + partial) * a.scale * b.scale.t()


def _truncate(x: Tensor, bits: int) -> Tensor:
    """float32 `x` with its significand cut to `bits` bits, the implied one included."""
    return (x.view(torch.int32) & -(1 << (24 - bits))).view(torch.float32)
