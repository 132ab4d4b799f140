"""A model of the sums of Hopper's FP8 tensor cores: how much precision they lose."""

import torch
from torch import Tensor

from octavo.numerics import QTensor
from octavo.numerics.codec import widen

INSTRUCTION_K = 32  # elements of the reduction that one FP8 tensor-core instruction sums


def tensor_core_mm(a: QTensor, b: QTensor, *, bits: int = 14, promote_every: int | None = 128) -> Tensor:
    """a [M, K] @ b [N, K]^T as float32 [M, N], summed as Hopper's FP8 tensor cores do.

    Each instruction adds 32 products to an accumulator of which about 14 significant bits survive, truncated; every
    `promote_every` elements (None: never, "fast accumulation") the accumulator is added to a float32 sum and cleared.

    Source of the figures: DeepSeek-V3 technical report (arXiv:2412.19437), section 3.3.2. This models their size, not
    the circuit: the true alignment of the products inside an instruction is not public.
    """
    if not (a.granularity.outer and b.granularity.outer):
        raise ValueError(f"the model takes tensor or row scales, got {a.granularity.name} and {b.granularity.name}")
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
