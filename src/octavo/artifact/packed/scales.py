"""The scales of packed layers: the forms that they have in files, and the one form in memory.

In memory the scale of a weight is `<layer>.weight_scale` and the scale of a static input is `<layer>.input_scale`, with
the shape and dtype of `octavo.artifact.packed.scheme`. Programs write the same numbers in several forms. All of these
are read:

| | in files |
|---|---|
| dtype | float32, bfloat16 and float16, widened exactly; E8M0, as float8_e8m0fnu or as uint8 exponents e + 127 |
| one scale for a tensor | [1], [] or [1, 1] |
| one scale for each output channel | [N, 1] or [N] |
| one scale for each block | [N / 128, K / 128], rounded up; or [N / 128, 1, K / 128, 1] |
| names | weight_scale or weight_scale_inv (which multiplies, too); input_scale or activation_scale |

A tensor of any other shape or dtype is kept unchanged, and the check of the folder names it.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from octavo.artifact.files import ArtifactError
from octavo.artifact.packed.scheme import Scheme
from octavo.numerics import TENSOR

SCALE_NAME, INPUT_SCALE_NAME = "weight_scale", "input_scale"
OTHER_NAMES = {"weight_scale_inv": SCALE_NAME, "activation_scale": INPUT_SCALE_NAME}
_ZERO_POINTS = ("weight_zero_point", "input_zero_point")
_UNUSED = ("output_scale", "q_scale", "prob_scale", *_ZERO_POINTS)


def widen_scale(scale: Tensor) -> Tensor:
    """Convert a scale to float32, exactly. uint8 is read as exponents of E8M0. Any other dtype is left unchanged."""
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    known = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
    return scale.float() if scale.dtype in known else scale


def read_number(scale: Tensor) -> Tensor:
    """A scale of one number as float32 [1]. More than one number keeps its shape."""
    scale = widen_scale(scale)
    return scale.reshape(1) if scale.numel() == 1 else scale


def read_scale(scale: Tensor, leaf: str, scheme: Scheme) -> Tensor:
    """Convert a scale from a file to the shape and dtype that it has in memory.

    Args:
        scale: of any dtype and shape in the table above.
        leaf: "weight_scale" or "input_scale".
        scheme: of its layer.
    """
    if leaf == INPUT_SCALE_NAME or scheme.weight.granularity == TENSOR:
        return read_number(scale)
    if scheme.weight.scale != "e8m0":
        scale = widen_scale(scale)
    elif scale.dtype == torch.float8_e8m0fnu:
        scale = scale.view(torch.uint8)
    if scale.ndim == 4 and scale.shape[1] == scale.shape[3] == 1:
        return scale[:, 0, :, 0]
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    return scale.unsqueeze(1) if scale.ndim == 1 else scale


def unused_scales(names: Iterable[str], get: Callable[[str], Tensor], where: Path) -> list[str]:
    """The tensors among `names` that other programs write beside the scales and that no layer reads: the scales of
    outputs, queries and attention probabilities, and zero points that are zero.

    Args:
        names: of the tensors in the files, without the scales of a cache of keys and values.
        get: returns a tensor by its name.
        where: the folder, for the message.

    Raises:
        ArtifactError: a zero point is not zero.
    """
    unused = [name for name in names if name.rpartition(".")[2] in _UNUSED]
    for name in unused:
        if name.endswith(_ZERO_POINTS) and bool((get(name).float() != 0).any()):
            raise ArtifactError(f"{where}: {name} is not zero, and octavo runs symmetric packings alone")
    return unused


def check_scale(name: str, scale: Tensor, where: Path) -> None:
    """Raise an ArtifactError, which names the scale, unless its values (float32, or uint8 exponents of E8M0) are finite
    and positive."""
    advice = "the folder is damaged or of another model: pack it again"
    if bool(is_positive(scale)):
        return
    if scale.dtype == torch.uint8:
        raise ArtifactError(f"{where}: {name} holds 255, the NaN of E8M0; {advice}")
    if not bool(scale.isfinite().all()):
        raise ArtifactError(f"{where}: {name} holds inf or NaN; {advice}")
    raise ArtifactError(f"{where}: {name} must be positive, its least is {scale.min():g}; {advice}")


def is_positive(scale: Tensor) -> Tensor:
    """Whether all values of a scale are finite and positive: bool, of no dimension, on the device of `scale`."""
    if scale.dtype == torch.uint8:
        return (scale != 255).all()
    least, largest = torch.aminmax(scale)
    return (least > 0) & (largest < torch.inf)
