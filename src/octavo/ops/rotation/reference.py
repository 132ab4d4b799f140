"""The Hadamard rotation in plain PyTorch."""

from torch import Tensor

from octavo.numerics.rotation import hadamard


def rotate_reference(x: Tensor) -> Tensor:
    """`x` rotated along its last dimension in float32, and rounded to its dtype once."""
    return hadamard(x.float()).to(x.dtype)
