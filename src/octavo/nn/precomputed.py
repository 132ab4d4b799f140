"""The outputs of several layers of one input, computed together and passed in place of that input."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class PrecomputedProjections:
    """q, k and v, passed to the attention of another library in place of the input x that they were computed from.

    The attention calls its projections with this object, and each converted projection returns its own output. The
    object has the dtype and device of x, and is not a tensor. Its shape is [..., K], that of x: of all tokens for which
    there are outputs, where x has one rank's part of a sequence.
    """

    def __init__(self, x: Tensor, layers: Sequence[nn.Module], outputs: Sequence[Tensor]) -> None:
        batch = next((y.shape[:-1] for y in outputs), x.shape[:-1])
        self.shape = torch.Size((*batch, x.shape[-1]))
        self.ndim = len(self.shape)
        self.dtype: torch.dtype = x.dtype
        self.device: torch.device = x.device
        self.pairs = tuple(zip(layers, outputs, strict=True))

    def output_of(self, layer: nn.Module) -> Tensor:
        for known, y in self.pairs:
            if known is layer:
                return y
        raise RuntimeError(
            f"a norm was fused with {len(self.pairs)} layers, and another one was given its output: {layer}"
        )
