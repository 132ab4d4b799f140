"""The gradient of the input of packed layers on CUDA, eager and compiled, against the dequantized weight in float64."""

import pytest
import torch
from hopper import ONLY_HOPPER
from packed_layers import gradients, packed_layer, worst_row

pytestmark = [
    pytest.mark.gpu,
    ONLY_HOPPER,
    pytest.mark.filterwarnings("ignore"),  # the compiler's own
]


@pytest.mark.parametrize("scheme", ["channel", "tensor", "static", "block"])
def test_the_gradient_is_that_of_the_dequantized_weight(scheme: str) -> None:
    layer = packed_layer(scheme).cuda()
    eager, expected = gradients(layer, torch.bfloat16)
    assert worst_row(eager, expected) > 26
    layer.compile(fullgraph=True)
    compiled, _ = gradients(layer, torch.bfloat16)
    assert worst_row(compiled, expected) > 26
