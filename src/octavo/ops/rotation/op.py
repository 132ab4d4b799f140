"""The Hadamard rotation: checks, the registered operation, and the choice between the kernel and the reference."""

from torch import Tensor

from octavo.numerics.rotation import block_size
from octavo.ops.checks import FLOATS, eager_check
from octavo.ops.inductor import operation
from octavo.ops.rotation.reference import rotate_reference
from octavo.ops.triton_support import LONGEST_ROW, has_kernels, shared_memory


def rotate(x: Tensor, after: Tensor | None = None) -> Tensor:
    """`x` [..., n] rotated along its last dimension (`octavo.numerics.hadamard`), same shape and dtype.

    It is computed in float32 and rounded once. The rotation is symmetric: the gradient of x is dy, rotated. `after` is
    that of `octavo.ops.transpose`.

    Raises:
        ValueError: x has no dimension, or another dtype than float32, bfloat16 and float16.
    """
    _check(x)
    result: Tensor = _rotate(x, after)
    return result


@eager_check
def _check(x: Tensor) -> None:
    if x.ndim == 0 or x.dtype not in FLOATS:
        got = f"{x.dtype} {list(x.shape)}"
        raise ValueError(f"rotate takes a tensor [..., n] of float32, bfloat16 or float16, got {got}")


def _rotates(x: Tensor, after: Tensor | None) -> bool:
    """Whether the kernel runs: where a GPU's registers hold a block, and its shared memory a block in float32."""
    size = block_size(x.shape[-1])
    if x.numel() == 0 or not 1 < size <= LONGEST_ROW or not has_kernels(x.device, (8, 0)):
        return False
    return 4 * size <= shared_memory(x.device)


@operation("rotate", _rotates)
def _rotate(x: Tensor, after: Tensor | None) -> Tensor:
    if not _rotates(x, after):
        return rotate_reference(x.contiguous())
    from octavo.ops.rotation import kernel

    return kernel.rotate(x.contiguous())


@_rotate.register_fake
def _(x: Tensor, after: Tensor | None) -> Tensor:
    _check(x)
    return x.new_empty(x.shape)
