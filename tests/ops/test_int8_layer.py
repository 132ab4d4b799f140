"""A layer in INT8 as `octavo.load` runs it."""

import torch
from operation_counts import operations
from packed_layers import packed_layer, worst_row

from octavo.numerics import QTensor


def test_compiled_it_gives_the_same() -> None:
    layer, x = packed_layer("int8"), torch.randn(5, 256).bfloat16()
    with torch.no_grad():
        y = layer(x)
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), y)
    seen = operations(lambda: layer(x))
    assert (seen["octavo::int8_mm"], seen["octavo::quantize"]) == (1, 1)


def test_its_output_is_that_of_its_operands() -> None:
    layer, x = packed_layer("int8").float(), torch.randn(5, 256)
    operand = layer.operand(x)
    assert isinstance(operand, QTensor)
    assert layer.bias is not None
    exact = operand.dequantize().double() @ layer.packed_weight().dequantize().double().t() + layer.bias.double()
    assert worst_row(layer(x), exact) > 120
    assert layer.weight.dtype == torch.int8


def test_frozen_it_becomes_static() -> None:
    layer, x = packed_layer("int8"), torch.randn(5, 256)
    before = layer(x)
    layer.freeze_input(x.abs().max())
    assert layer.weight.dtype == torch.float8_e4m3fn
    assert worst_row(layer(x), before.double()) > 18
