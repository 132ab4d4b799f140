"""Comparison of tensors bit for bit."""

from typing import Any

import torch
from torch import Tensor


def bits(t: Tensor) -> Tensor:
    """The bits of a tensor as integers, so that -0 differs from 0 and a NaN equals itself."""
    return t.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


def assert_same(found: Tensor, required: Tensor) -> None:
    """Equal bits of a result on the GPU and a tensor on any device."""
    assert found.device.type == "cuda"
    assert (found.dtype, found.shape, found.is_contiguous()) == (required.dtype, required.shape, True)
    wrong = bits(found).to(required.device) != bits(required)
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} differ, the first at {wrong.nonzero()[0].tolist()}"


def assert_same_numbers(found: Tensor, required: Tensor) -> None:
    """Equal bits, but NaN may be any NaN."""
    found, nan = found.to(required.device), required.float().isnan()
    assert torch.equal(found.float().isnan(), nan)
    assert torch.equal(bits(found)[~nan], bits(required)[~nan])


def on_gpu(values: Any) -> tuple[Any, ...]:
    """The values, tensors among them moved to the GPU."""
    return tuple(v.cuda() if isinstance(v, Tensor) else v for v in values)
