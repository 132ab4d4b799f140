"""The changes of one weight by folding, exact but for one rounding at the end.

    y[T,N] = x[T,K] @ w[N,K]^T        x' = x A,  y' = y B        =>        w' = B^T w A^-T

A and B are diagonal or orthogonal. So a weight changes along its inputs (every row alike), along its outputs (every
column alike, and a bias [N] as a column does), or both:

    scaled      x' = x / s        times s along the inputs of the readers of x, 1 / s along the outputs of its writer
    rotated     x' = x S H        along both: times the random signs S, then Hadamard's H (`octavo.numerics.hadamard`)

Steps run in float64, on a part of the weight at a time. Between inputs and outputs the weight is in float32.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from octavo.numerics import hadamard

Step = Callable[[Tensor], Tensor]
_PART = 2**20  # elements in float64 at once: 8 MB


def scaled(factors: Tensor) -> Step:
    """Multiply the last dimension by `factors` [n]."""
    return lambda x: x * factors.to(x.dtype)


def rotated(size: int, signs: Tensor | None = None) -> Step:
    """Multiply each run of `size` along the last dimension by `signs` [size], if given, and by a Hadamard matrix.

    Sylvester's matrix of order a * b is the Kronecker product of those of a and b. So a run viewed as X [a, b] becomes
    H_a X H_b: two small GEMMs, ten times faster than a pass over the weight for each doubling.
    """
    order = block_of(size)
    a = 2 ** (order.bit_length() // 2)
    left, right = (hadamard(torch.eye(n, dtype=torch.float64)) for n in (a, order // a))

    def step(x: Tensor) -> Tensor:
        if signs is not None:
            x = (x.unflatten(-1, (-1, size)) * signs.to(x.dtype)).flatten(-2)  # type: ignore[no-untyped-call]
        turned = x.reshape(-1, order // a) @ right.to(x.dtype)
        return (left.to(x.dtype) @ turned.view(-1, a, order // a)).view(x.shape)

    return step


def block_of(size: int) -> int:
    """The order of the Hadamard blocks for `size`: the largest power of two that divides it."""
    return size & -size


def random_signs(n: int, seed: int) -> Tensor:
    """Random signs, float32 [n], the same on every machine for one seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, (n,), generator=generator).mul(2).sub(1).float()


@dataclass(eq=False)
class Change:
    """The steps of one tensor: a weight [N, K], or a vector [N] (a bias, a norm's weight), which has only outputs."""

    inputs: list[Step] = field(default_factory=list)
    outputs: list[Step] = field(default_factory=list)

    def apply(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """The changed tensor, of the same shape, in `dtype`."""
        if tensor.ndim == 1:
            return _in_parts(tensor[None], self.outputs, dtype)[0]
        between = torch.float32 if self.outputs else dtype
        changed = _in_parts(tensor, self.inputs, between)
        return _in_parts(changed.t(), self.outputs, dtype).t().contiguous() if self.outputs else changed


def _in_parts(tensor: Tensor, steps: Sequence[Step], dtype: torch.dtype) -> Tensor:
    """Apply `steps` along the last dimension of tensor[M, n], some rows at a time."""
    out = torch.empty(tensor.shape, dtype=dtype)
    rows = max(1, _PART // max(tensor.shape[1], 1))
    for part, into in zip(torch.split(tensor, rows), torch.split(out, rows), strict=True):
        wide = part.double()
        for step in steps:
            wide = step(wide)
        into.copy_(wide)
    return out


def smoothing_factors(x_amax: Tensor, w_amax: Tensor, alpha: float) -> Tensor:
    """SmoothQuant's s = x_amax^alpha / w_amax^(1 - alpha), float32 [n], each rounded to a power of two.

    Args:
        x_amax: the amax of each channel of the tensor, float32 [n].
        w_amax: the amax of each column of the weights that read the tensor, float32 [n].
        alpha: how much of the tensor's outliers moves to the weights, 0 to 1.

    A power of two changes exponents and no mantissa, so the folded model is the same to the bit. A channel that is 0 in
    either gets the factor 1.
    """
    log2 = alpha * x_amax.double().log2() - (1 - alpha) * w_amax.double().log2()
    return torch.where((x_amax > 0) & (w_amax > 0), log2.round().exp2(), torch.ones_like(log2)).float()
