"""Comparison of tensors bit for bit."""

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from octavo.numerics import QTensor


def bits(t: Tensor) -> Tensor:
    """The bits of a tensor as integers, so that -0 differs from 0 and a NaN equals itself."""
    return t.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


def tensors_of(result) -> list[Tensor]:
    parts = [[x.data, x.scale.contiguous()] if isinstance(x, QTensor) else x for x in tree_leaves(result)]
    return [t for t in tree_leaves(parts) if isinstance(t, Tensor)]


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Equal bits of a result on the GPU and a tensor on any device."""
    assert (actual.device.type, actual.is_contiguous()) == ("cuda", True)
    assert_same_numbers(actual, expected, nan=False)


def assert_same_numbers(actual: Tensor, expected: Tensor, *, nan: bool = True) -> None:
    """Equal bits. `nan`: NaN may be any NaN."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    actual = actual.to(expected.device)
    wrong = (bits(actual) != bits(expected)) & ~(actual.float().isnan() & expected.float().isnan() & nan)
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} differ, the first at {wrong.nonzero()[0].tolist()}"


def on_gpu(values) -> tuple:
    return tuple(v.cuda() if isinstance(v, Tensor) else v for v in values)
