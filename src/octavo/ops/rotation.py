"""The Hadamard rotation of the rows of a tensor."""

from torch import Tensor

from octavo.numerics.scaling import block_size, hadamard
from octavo.ops.launching import LONGEST_ROW, has_kernels, shared_memory
from octavo.ops.registration import FLOATS, operation


def rotate(x: Tensor, after: Tensor | None = None) -> Tensor:
    """`x` [..., n] rotated along its last dimension (`octavo.numerics.hadamard`), same shape and dtype.

    It is computed in float32 and rounded once. The rotation is symmetric: the gradient of x is dy, rotated. `after` is
    that of `octavo.ops.transpose`.
    """
    return _rotate(x, after)


def rotate_reference(x: Tensor) -> Tensor:
    return hadamard(x.float()).to(x.dtype)


def _check(x: Tensor) -> None:
    if x.ndim == 0 or x.dtype not in FLOATS:
        got = f"{x.dtype} {list(x.shape)}"
        raise ValueError(f"rotate takes a tensor [..., n] of float32, bfloat16 or float16, got {got}")


def _rotates(x: Tensor) -> bool:
    """True where a GPU's shared memory holds a block, or the longest part of a block, in float32."""
    size = block_size(x.shape[-1])
    if x.numel() == 0 or not 1 < size <= LONGEST_ROW**2 or not has_kernels(x.device, (8, 0)):
        return False
    return size > LONGEST_ROW or 4 * size <= shared_memory(x.device)


_rotate = operation(check=_check, like=lambda x: x.new_empty(x.shape), runs=_rotates, after=True)(rotate_reference)
