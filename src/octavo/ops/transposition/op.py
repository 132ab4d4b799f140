"""The byte transpose: checks, the registered operation, and the choice between the kernel and the reference."""

from typing import Any

import torch
from torch import Tensor

from octavo.ops.checks import check_tensor, eager_check
from octavo.ops.inductor import operation
from octavo.ops.transposition.reference import transpose_reference
from octavo.ops.triton_support import has_kernels

KERNEL_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


def transpose(
    data: Tensor, shift: Tensor | None = None, after: Tensor | None = None, place: Tensor | None = None
) -> Tensor:
    """Transpose an eight-bit matrix.

    Args:
        data: [M, K], an eight-bit float dtype.
        shift: int32 [M], not negative: row m is divided by 2^shift[m] on the way.
        after: a tensor of the backward pass, which is not read. It keeps compiled code from transposing in the forward
            pass and saving the result: of a sharded weight, that would keep all bytes on every rank.
        place: int32 [M'], the row of data that becomes each column of the result, or -1 for a column of zeros
            (`octavo.ops.aligned_groups`). None takes all rows in order.

    Returns:
        [K, M], or [K, M'] with `place`, contiguous, the same dtype.

    Raises:
        ValueError: for another shape or dtype.
    """
    _check(data, shift, place)
    result: Tensor = _transpose(data, shift, after, place)
    return result


@eager_check
def _check(data: Tensor, shift: Tensor | None, place: Tensor | None) -> None:
    if data.ndim != 2 or data.element_size() != 1:
        raise ValueError(f"transpose takes a matrix of an eight-bit format, got {data.dtype} {list(data.shape)}")
    if shift is not None and (shift.dtype != torch.int32 or shift.shape != data.shape[:1]):
        raise ValueError(f"shift must be int32 [{data.shape[0]}], got {shift.dtype} {list(shift.shape)}")
    check_tensor("place", place, (0 if place is None else place.numel(),), torch.int32)


def _transposes(data: Tensor, *rest: Any) -> bool:
    return data.numel() > 0 and has_kernels(data.device) and data.dtype in KERNEL_DTYPES


@operation("transpose", _transposes)
def _transpose(data: Tensor, shift: Tensor | None, after: Tensor | None, place: Tensor | None) -> Tensor:
    if not _transposes(data):
        return transpose_reference(data, shift, place)
    from octavo.ops.transposition import kernel

    return kernel.transpose(data.contiguous(), shift, place)


@_transpose.register_fake
def _(data: Tensor, shift: Tensor | None, after: Tensor | None, place: Tensor | None) -> Tensor:
    _check(data, shift, place)
    return data.new_empty((data.shape[1], data.shape[0] if place is None else place.shape[0]))
