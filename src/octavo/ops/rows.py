"""Rows of many matrices at a time: quantized by row, or added up; and the words of many tensors, added up.

These are functions for eager code, not operations of PyTorch: they write into memory of the caller.

The quantization takes two steps and two launches: amax of each row, then the bytes. Between the steps the caller
computes the scales, which may depend on rows that other ranks hold. Where most scales are those of the row's own amax,
the first step writes the bytes too, and the second writes only those of other rows. The kernels equal the references,
byte for byte.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.numerics.formats import cast as cast_to
from octavo.numerics.qtensor import ROW, Cast
from octavo.numerics.scaling import scale_from_amax
from octavo.ops.launching import FORMATS, LONGEST_ROW, RowBatch, has_kernels


def row_amaxes(batch: RowBatch, amax: Tensor, data: Tensor | None, cast: Cast) -> None:
    """Write the amax of each row, inf where a number is not finite, into `amax`, float32 [rows of the batch].

    The bytes by the scale of each row's own amax are written into `data` [rows of the batch, K], if it is given. The
    relative floor of the cast is ignored.
    """
    if _has_kernel(batch, cast):
        _run_kernel("row_amaxes", amax.device, batch, amax, data, cast)
        return
    for x, start in zip(batch.matrices, batch.starts, strict=True):
        if x.numel():
            amax[start : start + x.shape[0]] = ROW.amax(x.float()).abs().view(-1).nan_to_num(torch.inf, torch.inf)
    if data is not None:
        scale = scale_from_amax(amax, cast.fmt, power_of_two=cast.power_of_two)
        cast_rows_reference(batch, scale, data, cast)


def cast_rows(batch: RowBatch, scale: Tensor, written: Tensor | None, data: Tensor, cast: Cast) -> None:
    """Write the bytes of each row by its `scale`, float32 [rows of the batch], into `data` [rows of the batch, K].

    Numbers beyond the format's max saturate. `written` has the scales by which `data` was written before; a row whose
    scale is the same is skipped. A ValueError unless all are contiguous: the kernel would write other memory.
    """
    for name, t in (("scale", scale), ("written", written), ("data", data)):
        if t is not None and not t.is_contiguous():
            raise ValueError(f"cast_rows needs a contiguous {name}, not strides {t.stride()}: call .contiguous()")
    if _has_kernel(batch, cast):
        _run_kernel("cast_rows", data.device, batch, scale, written, data, cast)
    else:
        cast_rows_reference(batch, scale, data, cast)


def cast_rows_reference(batch: RowBatch, scale: Tensor, data: Tensor, cast: Cast) -> None:
    inv_scale = (1 / scale).view(-1, 1)
    for x, start in zip(batch.matrices, batch.starts, strict=True):
        rows = slice(start, start + x.shape[0])
        data[rows].view(torch.uint8).copy_(cast_to(x.float() * inv_scale[rows], cast.fmt).view(torch.uint8))


def _has_kernel(batch: RowBatch, cast: Cast) -> bool:
    first = batch.matrices[0]
    fits = batch.longest > 0 and 0 < first.shape[1] <= LONGEST_ROW
    return fits and cast.format in FORMATS and has_kernels(first.device)


def _run_kernel(name: str, device: torch.device, *args: Any) -> Any:
    """The result of a function of `octavo.ops.kernels.rows`. Triton launches on the current device."""
    with torch.cuda.device(device):
        return getattr(import_module("octavo.ops.kernels.rows"), name)(*args)


def add_rows(rows: Tensor, total: Tensor, *, mean: bool) -> None:
    """Write the sums over the rows of BF16 [R, N], or their means, into `total` float32 [N], both contiguous.

    On a GPU the rows are added in their order.
    """
    if rows.numel() and has_kernels(rows.device):
        _run_kernel("add_rows", rows.device, rows, total, mean)
    else:
        reduce = torch.mean if mean else torch.sum
        reduce(rows, 0, dtype=torch.float32, out=total)


def word_sums(tensors: Sequence[Tensor]) -> Tensor:
    """int64 [tensors]: of each, the sum of its words of 64 bits modulo 2^64, each multiplied by a number of its place.

    These numbers are odd, so a word that changes alone always changes the sum. They differ from place to place, so
    words that are exchanged nearly always do. Zeros fill up the last word. On a GPU all tensors take one launch.
    """
    device = tensors[0].device
    if not has_kernels(device, (8, 0)) or any(t.device != device for t in tensors):
        return torch.stack([word_sum_reference(t).to(device) for t in tensors])
    return _run_kernel("word_sums", device, tensors)


WORDS = 2**19  # that the reference adds up at a time, in 4 MiB


def word_sum_reference(tensor: Tensor) -> Tensor:
    data = tensor.contiguous().view(-1).view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for start in range(0, len(data), 8 * WORDS):
        part = data[start : start + 8 * WORDS]
        words = F.pad(part, (0, -len(part) % 8)).view(torch.int64)
        factors = torch.arange(start // 8, start // 8 + len(words), device=data.device) * 0x1E3779B97F4A7C15
        total += (words * ((factors ^ (factors >> 31)) | 1)).sum()
    return total
