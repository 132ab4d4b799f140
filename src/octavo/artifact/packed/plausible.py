"""A check for scales of packed weights that look reciprocal.

A scale multiplies: w = data * scale, and the data use e4m3 up to 448. So a scale is amax / 448, which is above 1 only
if weights exceed 448. Weights of trained linear layers are about 1. A writer that stores 448 / amax instead has scales
far above 1. A layer is suspect if the median of its scales is above 1 and its largest weight is above 448. A writer
makes this error in every layer, so a folder is suspect if more than half of its layers are. Correct scales are suspect
only if weights exceed 448 in most blocks of most layers.
"""

from collections.abc import Callable, Iterable

from torch import Tensor

_LARGEST = 448.0


def looks_reciprocal(scale: Tensor, weight: Callable[[], Tensor]) -> bool:
    """Whether the scales of a packed weight, in floating point, are probably reciprocal. `weight()` returns
    data * scale and is called only if the scales are large."""
    return float(scale.float().median()) > 1 and float(weight().abs().max()) > _LARGEST


def suspected(layers: Iterable[tuple[str, Tensor, Callable[[], Tensor]]]) -> list[str]:
    """The packed layers whose scales look reciprocal, if they are more than half of `layers`. Each of these has a name,
    its scales, and a function that returns its weight. One layer at a time is in memory."""
    found = {name: looks_reciprocal(scale, weight) for name, scale, weight in layers}
    return [name for name, looks in found.items() if looks] if 2 * sum(found.values()) > len(found) else []


def reciprocal_warning(names: list[str], layers: int) -> str:
    """The warning if the scales of `names`, of `layers` packed layers, look reciprocal."""
    return (
        f"the weight scales of {names[0]} ({len(names)} of {layers} packed layers) look reciprocal: multiplied by "
        f"them, weights exceed {_LARGEST:g}, and weights of trained layers are about 1. A scale must multiply. Run "
        "octavo verify against the model that the folder was packed from"
    )
