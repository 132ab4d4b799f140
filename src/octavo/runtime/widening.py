"""Packed layers whose weights are widened to BF16 when a folder is opened, because they do not run in eight bits."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from octavo.artifact.packed.layouts import UNQUANTIZED_DTYPE
from octavo.artifact.packed.scales import INPUT_SCALE_NAME, SCALE_NAME, check_scale
from octavo.artifact.packed.scheme import Scheme


def widen_layers(tensors: dict[str, Tensor], names: Sequence[str], schemes: Mapping[str, Scheme]) -> None:
    """Put weight * scale in BF16 in the place of the weights of the layers `names`, and drop their scales, in place.

    Args:
        tensors: of a folder, by their names in memory. A layer that lacks its weight or its scale is left as it is.
        names: of packed layers.
        schemes: of the packed layers.

    Raises:
        ArtifactError: a scale is not positive and finite.
    """
    for name in names:
        weight, scale_name = tensors.get(f"{name}.weight"), f"{name}.{SCALE_NAME}"
        if weight is None or name not in schemes or scale_name not in tensors:
            continue
        scale = tensors.pop(scale_name)
        check_scale(scale_name, scale, Path(name))
        tensors.pop(f"{name}.{INPUT_SCALE_NAME}", None)
        tensors[f"{name}.weight"] = schemes[name].packed_weight(weight, scale).dequantize(UNQUANTIZED_DTYPE)
