"""Scales that are the reciprocals of what they should be."""

from dataclasses import replace

import pytest
import torch

from octavo.artifact.packed.plausible import looks_reciprocal, suspected
from octavo.artifact.packed.scheme import SCHEMES
from octavo.numerics import QTensor
from octavo.ops import quantize

SIZES = (1e-4, 0.02, 1.0, 20.0)  # standard deviations: far below and far above those of trained layers


def packed(scheme: str, size: float) -> QTensor:
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)) * size
    return quantize(weight, SCHEMES[scheme].weight)


def reciprocal(weight: QTensor) -> QTensor:
    if weight.scale.dtype == torch.float32:
        return replace(weight, scale=1 / weight.scale)
    return replace(weight, scale=(254 - weight.scale.view(torch.uint8)).view(weight.scale.dtype))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["channel", "tensor", "block", "mx", "group64"])
def test_reciprocal_scales_are_told_from_right_ones(scheme: str, size: float) -> None:
    right = packed(scheme, size)
    wrong = reciprocal(right)
    assert not looks_reciprocal(right.scale, right.dequantize)
    assert looks_reciprocal(wrong.scale, wrong.dequantize)


def test_large_scales_of_small_data_are_right() -> None:
    data, scale = torch.full((4, 32), 0.5), torch.full((4, 1), 2.0)
    assert not looks_reciprocal(scale, lambda: data * scale)


def test_a_layer_of_huge_weights_among_others_is_no_suspicion() -> None:
    huge, plain = packed("channel", 500.0), packed("channel", 0.02)
    weights = [("huge", huge), ("a", plain), ("b", plain)]
    assert looks_reciprocal(huge.scale, huge.dequantize)
    assert suspected((name, q.scale, q.dequantize) for name, q in weights) == []
    assert suspected((name, q.scale, q.dequantize) for name, q in weights[:1]) == ["huge"]
