"""Packed layers in the format of AMD's MI300, E4M3FNUZ, whose GEMMs take no other.

Its exponents are biased by one more than those of E4M3, so the same byte is half the number, and the scale is doubled:

    data * scale = fnuz(data) * (2 * scale)        exact for every byte

Two codes differ: FNUZ has no -0, whose code is its NaN, and E4M3's codes of NaN are numbers there. Nothing of this has
run on an MI300.
"""

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn

from octavo.artifact.packed.scheme import Scheme
from octavo.ops.gpu_architecture import Place, takes_fnuz
from octavo.runtime.packed_linear import PackedLinear

_MAGNITUDE, _NAN, _MINUS_ZERO = 0x7F, 0x7F, 0x80  # of the codes of E4M3; the last is NaN in FNUZ


def scheme_on(scheme: Scheme, place: Place) -> Scheme:
    """`scheme` as a layer runs it on a device: on an MI300 in FNUZ if its scales are by row or tensor."""
    by_row_or_tensor = scheme.weight.granularity.outer and scheme.weight.format == "e4m3"
    return _in_fnuz(scheme) if scheme.inputs is not None and by_row_or_tensor and takes_fnuz(place) else scheme


def use_formats_of(model: nn.Module, device: torch.device) -> None:
    """Rewrite the packed layers of `model` in the format that the GEMMs of `device` take."""
    for layer in model.modules():
        if isinstance(layer, PackedLinear) and (scheme := scheme_on(layer.scheme, device)) is not layer.scheme:
            layer.scheme = scheme
            layer.weight, layer.weight_scale = fnuz_data(layer.weight), 2 * layer.weight_scale
            layer.input_scale = None if layer.input_scale is None else 2 * layer.input_scale


def fnuz_data(data: Tensor) -> Tensor:
    """E4M3 data as E4M3FNUZ data of half the numbers; -0 becomes 0, and NaN stays NaN."""
    codes = data.view(torch.uint8)
    nan = codes & _MAGNITUDE == _NAN
    codes = codes.masked_fill(codes == _MINUS_ZERO, 0).masked_fill(nan, _MINUS_ZERO)
    return codes.view(torch.float8_e4m3fnuz)


@cache
def _in_fnuz(scheme: Scheme) -> Scheme:
    assert scheme.inputs is not None
    weight, inputs = (replace(cast, format="e4m3fnuz") for cast in (scheme.weight, scheme.inputs))
    return replace(scheme, weight=weight, inputs=inputs)
