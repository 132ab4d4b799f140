"""The settings of several writers, and the numbers that they stand for."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize as theirs_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

from octavo.artifact.packed.scheme import SCHEMES, Scheme
from octavo.verification.layer_spec import LayerSpec, SpecError, read_specs
from octavo.verification.numbers import round_input, widen

EIGHT = {"num_bits": 8, "type": "float", "symmetric": True}
NAMES = ["a.q_proj", "a.gate", "lm_head"]


def one(settings: dict[str, Any], name: str = "a.q_proj") -> LayerSpec | None:
    return read_specs(settings, NAMES)[0][name]


def compressed(weights: dict[str, Any], inputs: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": EIGHT | weights, "input_activations": inputs and EIGHT | inputs}
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"],
    } | more  # fmt: skip


@pytest.mark.parametrize(
    ("weights", "inputs", "spec", "shape"),
    [
        ({"strategy": "channel"}, {"strategy": "token", "dynamic": True}, LayerSpec.per_channel("token"), (256, 1)),
        ({"strategy": "tensor"}, {"strategy": "tensor", "dynamic": False}, LayerSpec.per_tensor("static"), (1,)),
        ({"strategy": "tensor"}, {"strategy": "tensor", "dynamic": True}, LayerSpec.per_tensor("tensor"), (1,)),
        ({"strategy": "group", "group_size": 64}, None, LayerSpec(1, 64, "none"), (256, 6)),
        (
            {"strategy": "block", "block_structure": [128, 128]},
            {"strategy": "group", "group_size": 128, "dynamic": True},
            LayerSpec(128, 128, "token", 128), (2, 3),
        ),
        ({"type": "int", "strategy": "channel"}, None, LayerSpec.per_channel("none", integers=True), (256, 1)),
    ],
)  # fmt: skip
def test_compressed_tensors(weights: Any, inputs: Any, spec: LayerSpec, shape: tuple[int, ...]) -> None:
    assert one(compressed(weights, inputs)) == spec
    assert one(compressed(weights, inputs), "lm_head") is None
    assert spec.scale_shapes(256, 384)[0] == shape


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=str)
def test_a_scheme_is_called_by_its_name(scheme: Scheme) -> None:
    settings = compressed(dict(scheme.weight_arguments), None, format=scheme.format)
    settings["config_groups"]["group_0"]["input_activations"] = scheme.input_arguments
    assert str(one(settings)) == scheme.name


def test_a_quantization_without_a_name_is_described() -> None:
    assert str(LayerSpec(1, 64, "none")) == "1x64, input none"
    assert str(LayerSpec.per_tensor("tensor")) == "tensor, input tensor"
    pow2 = {"quant_method": "fp8", "activation_scheme": "dynamic", "scale_fmt": "ue8m0"}
    assert str(one(pow2 | {"weight_block_size": [128, 128]})) == "block, pow2 inputs"


def test_other_layouts() -> None:
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"]}
    assert one(fp8 | {"weight_block_size": [128, 128]}) == LayerSpec(128, 128, "token", 128, scale="weight_scale_inv")
    assert one(fp8) == LayerSpec.per_tensor("token", flat=True)
    assert one(fp8 | {"activation_scheme": "static"}) == LayerSpec.per_tensor("static", flat=True)
    modelopt = {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_*"]}
    assert one(modelopt) == LayerSpec.per_tensor("static", flat=True)
    assert one(modelopt, "lm_head") is None
    assert one(modelopt | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}) == LayerSpec.per_channel("token", flat=True)
    assert LayerSpec.per_tensor("static", flat=True).scale_shapes(8, 8)[0] == ()
    blocks = one(modelopt | {"quant_algo": "fp8_pb_wo"})
    assert blocks == LayerSpec(128, 128, "token", 128, flat=True)
    assert blocks.scale_shapes(256, 128) == [(2, 1, 1, 1), (2, 1)]
    scale = torch.tensor([2.0, 3.0]).view(2, 1, 1, 1)
    assert widen(torch.ones(256, 128), scale, blocks)[[0, 127, 128, 255], 5].tolist() == [2, 2, 3, 3]
    with pytest.raises(SpecError, match="quant_algo must be one of FP8, .* it is 'NVFP4'"):
        one(modelopt | {"quant_algo": "NVFP4"})


def test_targets_by_name_come_before_patterns_and_classes() -> None:
    groups = {
        str(i): {"targets": targets, "weights": EIGHT | {"strategy": strategy}}
        for i, (targets, strategy) in enumerate(
            ((["Linear"], "tensor"), (["re:.*q_proj", "re:.*gate"], "channel"), (["a.gate"], "tensor"))
        )
    }
    specs, unused = read_specs(compressed({}, None, config_groups=groups, ignore=["re:lm.*", "gone"]), NAMES)
    assert [spec and spec.rows for spec in specs.values()] == [1, 0, None]
    assert unused == ["gone"]
    with pytest.raises(SpecError, match="neither config_groups nor ignore has lm_head"):
        read_specs(compressed({}, None, config_groups={"1": groups["1"]}, ignore=[]), NAMES)


def test_widening() -> None:
    data = torch.randn(6, 8).to(torch.float8_e4m3fn)
    scale = torch.rand(3, 2) + 0.5
    actual = widen(data, scale, LayerSpec(2, 4, "none"))
    for i in range(6):
        for j in range(8):
            assert actual[i, j] == data[i, j].float() * scale[i // 2, j // 4]
    exponents = torch.randint(100, 140, (6, 2), dtype=torch.uint8)
    actual = widen(data, exponents, LayerSpec(1, 4, "none", exponents=True))
    assert actual[5, 7] == data[5, 7].float() * 2.0 ** (int(exponents[5, 1]) - 127)


ARGUMENTS: list[tuple[LayerSpec, dict[str, Any]]] = [
    (LayerSpec.per_channel("token"), {"strategy": "token"}),
    (LayerSpec.per_channel("tensor"), {"strategy": "tensor"}),
    (LayerSpec.per_channel("token", group=128), {"strategy": "group", "group_size": 128}),
    (
        LayerSpec(1, 32, "token", 32, exponents=True),
        {"strategy": "group", "group_size": 32, "scale_dtype": torch.uint8, "zp_dtype": torch.uint8},
    ),
]


@pytest.mark.parametrize(("spec", "arguments"), ARGUMENTS)
def test_inputs_are_rounded_as_compressed_tensors_rounds_them(spec: LayerSpec, arguments: dict[str, Any]) -> None:
    x = torch.randn(3, 5, 256) * torch.logspace(-3, 3, 5)[:, None]
    x[1, 2] = 0
    args = QuantizationArgs(**EIGHT | arguments | {"dynamic": True})
    scale, zero = compute_dynamic_scales_and_zp(x, args, torch.nn.Module())
    q = theirs_quantize(x, scale, zero, args, dtype=None)
    wide = scale.repeat_interleave(spec.group, -1) if spec.group else scale
    assert torch.equal(round_input(x, spec), q.float() * wide)


def test_static_inputs_saturate() -> None:
    x = torch.linspace(-1200, 1200, 4001)[None]
    actual = round_input(x, LayerSpec.per_tensor("static"), torch.tensor([2.0]))
    expected = np.clip(x.numpy() / 2, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * 2
    assert np.array_equal(actual.numpy(), expected)
    assert float(actual.max()) == 896


def test_powers_of_two_are_rounded_up() -> None:
    x = torch.zeros(4, 32)
    x[0, 3], x[1, 3], x[2, 3] = 448, 449, 1e-3
    x[0, 4] = x[1, 4] = 2**-9  # the smallest number at a scale of 1, and 0 at 2
    actual = round_input(x, LayerSpec(1, 32, "token", 32, exponents=True))
    assert actual[0, 3:5].tolist() == [448, 2**-9]
    assert actual[1, 3:5].tolist() == [448, 0]  # 224 * 2
    assert float(actual[2, 3]) == pytest.approx(1e-3, rel=2**-4)
    assert not actual[3].any()
