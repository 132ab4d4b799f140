"""Packed layers in the format of AMD's MI300: the same numbers, by emulation. The device is said to take FNUZ."""

from pathlib import Path

import pytest
import torch
from operation_counts import operations
from packed_layers import gradients, packed_layer, worst_row
from runtime_examples import ARCHITECTURES, logits, make_model
from torch import nn

import octavo
from octavo.artifact.packed.scheme import SCHEMES
from octavo.ops.gpu_architecture import ARCHITECTURES as GPUS
from octavo.packing import pack
from octavo.runtime import fnuz
from octavo.runtime.fnuz import fnuz_data, scheme_on, use_formats_of
from octavo.runtime.gemm_path import find_gemm

CPU = torch.device("cpu")
OUTER = ["channel", "tensor", "static"]


@pytest.fixture
def mi300(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fnuz, "takes_fnuz", lambda place: True)


def test_every_byte_is_half_the_number() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    wide, half = codes.float(), fnuz_data(codes).float()
    assert torch.equal(half.isnan(), wide.isnan())
    finite = ~wide.isnan()
    assert torch.equal(2 * half[finite], wide[finite])


@pytest.mark.parametrize("scheme", OUTER)
def test_a_layer_holds_the_same_weight_and_computes_in_fnuz(mi300: None, scheme: str) -> None:
    layer, model = packed_layer(scheme), nn.Sequential(packed_layer(scheme))
    use_formats_of(model, CPU)
    own = model[0]
    assert own.weight.dtype == torch.float8_e4m3fnuz
    assert torch.equal(own.packed_weight().dequantize(), layer.packed_weight().dequantize())
    x = torch.randn(33, own.in_features)
    operand = own.operand(x)
    assert operand.data.dtype == torch.float8_e4m3fnuz
    if scheme == "static":  # the same grid: only the scale has another factor
        assert torch.equal(own(x), layer(x))
        assert own.input_limit < 1.1 * layer.input_limit
    assert worst_row(own(x), (x @ layer.packed_weight().dequantize().T + layer.bias).double()) > 22
    actual, expected = gradients(own)
    assert worst_row(actual, expected) > 40  # dx is computed with the widened weight


@pytest.mark.parametrize("scheme", OUTER)
def test_a_frozen_layer_is_static(mi300: None, scheme: str) -> None:
    layer = packed_layer(scheme)
    use_formats_of(nn.Sequential(layer), CPU)
    x = torch.randn(16, layer.in_features)
    before = layer(x)
    layer.freeze_input(x.abs().max())
    assert worst_row(layer(x), before.double()) > 18


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_model_is_opened_in_fnuz(mi300: None, tmp_path: Path, name: str) -> None:
    make_model(name).save_pretrained(tmp_path / "model")
    pack(tmp_path / "model", tmp_path / "packed")
    model = octavo.load(tmp_path / "packed")
    dtypes = {tensor.dtype for tensor in model.state_dict().values()}
    assert torch.float8_e4m3fnuz in dtypes
    assert torch.float8_e4m3fn not in dtypes
    assert "octavo::scaled_mm" in operations(lambda: logits(model))
    exact = logits(make_model(name)).double()
    error = (logits(model).double() - exact).norm() / exact.norm()
    assert error < 0.2


def test_the_gemm_of_an_mi300() -> None:
    mi300, mi350 = GPUS["mi300"], GPUS["mi350"]
    for name, scheme in SCHEMES.items():
        assert scheme_on(scheme, mi350) is scheme
        assert scheme_on(scheme, CPU) is scheme
        cast, backend = find_gemm(scheme_on(scheme, mi300), mi300)
        assert (backend.name == "hipblaslt") == (name in OUTER)
        assert (cast is None) == (name not in (*OUTER, "int8"))
