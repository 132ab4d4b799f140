"""The packed folder's specification, against compressed-tensors' own reading of it."""

import copy
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig

from octavo.checkpoint.files import ArtifactError
from octavo.checkpoint.layouts import Packing, get_layout, quantization_config, read_packing
from octavo.checkpoint.scheme import SCHEMES, suspected
from octavo.ops import quantize

WHERE, PAGE = Path("config.json"), Path(__file__).parents[2] / "docs" / "format.md"
LINEARS = ["a.q_proj", "a.o_proj", "b.down_proj", "lm_head"]


def packing(scheme="channel", **others):
    """Of all linears but the last."""
    names = {name: others.get(name.rpartition(".")[2], scheme) for name in LINEARS[:-1]}
    return Packing(get_layout("compressed-tensors"), {name: SCHEMES[own] for name, own in names.items()})


def read(config):
    return read_packing({"quantization_config": json.loads(json.dumps(config))}, LINEARS, WHERE, ())


def test_targets_are_names_patterns_or_the_class():
    config = quantization_config(packing("block", o_proj="channel"), LINEARS)
    config["config_groups"]["group_0"]["targets"] = ["re:.*(q|down)_proj$"]
    assert read(config) == packing("block", o_proj="channel")
    config["config_groups"]["group_0"]["targets"] = ["re:.*q_proj$"]
    with pytest.raises(ArtifactError, match="no group of config_groups has b.down_proj"):
        read(config)


def test_the_examples_of_the_page_are_what_is_written():
    described = [
        get_layout(layout).describe({"q_proj": SCHEMES[scheme]}, ["lm_head"], False)
        for layout, scheme in (("compressed-tensors", "channel"), ("fp8", "block"), ("modelopt", "static"))
    ]
    beside = get_layout("modelopt").side_files(described[-1])
    examples = re.findall(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert [json.loads(example) for example in examples] == [*described, *beside.values()]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_remarks_of_other_writers_are_accepted(scheme):
    config = quantization_config(packing(scheme), LINEARS)
    theirs = QuantizationConfig.model_validate(config).model_dump(mode="json")
    theirs["config_groups"]["group_0"]["weights"]["observer"] = "minmax"
    assert set(theirs) > set(config)  # so they do add something
    assert read(theirs | {"version": "0.20.0"}) == packing(scheme)


def changed(config, path, value):
    config = copy.deepcopy(config)
    inner = config
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return config


GROUP = ("config_groups", "group_0")
WEIGHTS = (*GROUP, "weights")


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("quant_method",), "gptq", "quant_method is 'gptq'"),
        *[
            ((*GROUP, "targets"), value, f"group_0.targets must be a list of names, got {re.escape(repr(value))}")
            for value in (128, True, "Linear", [float("nan")], [["Linear"]], {"a": 1})
        ],
        (("format",), "pack-quantized", "format is 'pack-quantized'"),
        (("quantization_status",), "frozen", "quantization_status is 'frozen'"),
        (("kv_cache_scheme",), {"num_bits": 8}, "kv_cache_scheme.type is None, required 'float'"),
        (("kv_cache_scheme",), "static", "kv_cache_scheme is 'static'"),
        ((*WEIGHTS, "num_bits"), 4, "nearest is channel, but .*weights.num_bits is 4, required 8"),
        ((*WEIGHTS, "strategy"), "attn_head", "weights.strategy is 'attn_head', required"),
        ((*GROUP, "input_activations", "dynamic"), False, "input_activations.dynamic is False"),
        (("config_groups",), {}, "config_groups must hold groups"),
        (("config_groups", "group_1"), {"targets": ["Linear"]}, "group_1.weights is None"),
        (("transform_config",), {"rotate": 1}, "transform_config is"),
        (("ignore",), "lm_head", "ignore must be a list"),
    ],
)
def test_another_packing_is_refused_by_setting(path, value, named):
    with pytest.raises(ArtifactError, match=named):
        read(changed(quantization_config(packing(), LINEARS), path, value))


@pytest.mark.parametrize("scheme", ["channel", "tensor", "block", "group32"])
def test_weights_alone_are_read_with_the_scales_of_other_schemes(scheme):
    config = changed(quantization_config(packing(scheme), LINEARS), (*GROUP, "input_activations"), None)
    if scheme == "group32":
        with pytest.raises(ArtifactError, match="nearest is group32, but .*input_activations is None"):
            read(config)
        return
    (found,) = set(read(config).schemes.values())
    assert found.inputs is None
    assert found.weight == SCHEMES[scheme].weight
    assert read(quantization_config(read(config), LINEARS)) == read(config)


# ---- Scales that are the reciprocals of what they should be


def packed(scheme, size):
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)) * size
    return quantize(weight, SCHEMES[scheme].weight)


# Standard deviations: far below and far above those of trained layers
@pytest.mark.parametrize("size", [1e-4, 0.02, 1.0, 20.0])
@pytest.mark.parametrize("scheme", ["channel", "tensor", "block", "mx", "group64"])
def test_reciprocal_scales_are_told_from_right_ones(scheme, size):
    right = packed(scheme, size)
    if right.scale.dtype == torch.float32:
        wrong = replace(right, scale=1 / right.scale)
    else:
        wrong = replace(right, scale=(254 - right.scale.view(torch.uint8)).view(right.scale.dtype))
    for looks, q in (([], right), (["w"], wrong)):
        assert suspected([("w", q.scale)], lambda _, q=q: q.dequantize()) == looks


def test_large_scales_of_small_data_and_one_layer_of_huge_weights_are_no_suspicion():
    data, scale = torch.full((4, 32), 0.5), torch.full((4, 1), 2.0)
    assert suspected([("small", scale)], lambda _: data * scale) == []
    huge, plain = packed("channel", 500.0), packed("channel", 0.02)
    weights = {"huge": huge, "a": plain, "b": plain}
    scales = [(name, q.scale) for name, q in weights.items()]
    assert suspected(scales, lambda name: weights[name].dequantize()) == []
    assert suspected(scales[:1], lambda name: weights[name].dequantize()) == ["huge"]
