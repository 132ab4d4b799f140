"""Do the scales of a packed weight look reciprocal?

A scale multiplies: w = data * scale, and data fill e4m3 up to 448. So a scale is amax / 448, and above 1 only where
weights exceed 448. Weights of trained linear layers are about 1; where a writer stores 448 / amax instead, the scales
are far above 1. A layer is suspected if both hold: the median of its scales is above 1, and its largest weight above
448. Scales that are right raise no suspicion unless a layer's weights exceed 448 in most of its blocks.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

_LARGEST = 448.0


def looks_reciprocal(scale: Tensor, weight: Callable[[], Tensor]) -> bool:
    """Whether the scales of a packed weight, in floating point, are probably 1 / scale. `weight` gives data * scale;
    it is called only where the scales are large."""
    return float(scale.float().median()) > 1 and float(weight().abs().max()) > _LARGEST


def reciprocal_warning(names: list[str], layers: int) -> str:
    """What to say where the scales of `names`, of so many packed layers, look reciprocal."""
    return (
        f"the weight scales of {names[0]} ({len(names)} of {layers} packed layers) look reciprocal: multiplied by "
        f"them, weights exceed {_LARGEST:g}, and weights of trained layers are about 1. A scale must multiply. Run "
        "octavo verify against the model that the folder was packed from"
    )
