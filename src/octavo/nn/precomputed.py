"""What several layers make of one input, computed before they are called: their stand-in for that input."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Branches:
    """The outputs of the layers that a norm feeds, on their way through a module that calls each of them.

    Given in the place of their input to attention code that we did not write: a layer of ours that gets it returns its
    own output. It has that input's shape [..., K], dtype and device, and is no tensor.
    """

    def __init__(self, x: Tensor, layers: Sequence[nn.Module], outputs: Sequence[Tensor]) -> None:
        self.shape: torch.Size = x.shape
        self.dtype: torch.dtype = x.dtype
        self.device: torch.device = x.device
        self.pairs = tuple(zip(layers, outputs, strict=True))

    def output_of(self, layer: nn.Module) -> Tensor:
        """The output [..., N] of `layer`."""
        for known, y in self.pairs:
            if known is layer:
                return y
        raise RuntimeError(
            f"a norm was fused with {len(self.pairs)} layers, and another one was given its output: {layer}"
        )
