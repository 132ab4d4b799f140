"""The packed folder's specification, against compressed-tensors' own reading of it."""

import copy
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import QuantizationConfig, QuantizationType
from transformers import FineGrainedFP8Config
from transformers.quantizers.auto import AutoQuantizationConfig

from octavo.checkpoint.files import ArtifactError, read_json
from octavo.checkpoint.layouts import Packing, get_layout, quantization_config, read_packing
from octavo.checkpoint.run import RunFolder
from octavo.checkpoint.scheme import SCHEMES, check_tensors, looks_reciprocal, suspected
from octavo.numerics import QTensor
from octavo.ops import quantize

WHERE, PAGE = Path("config.json"), Path(__file__).parents[2] / "docs" / "format.md"
LINEARS = ["a.q_proj", "a.o_proj", "b.down_proj", "lm_head"]


def packing(scheme: str = "channel", layout: str = "compressed-tensors", **others: str) -> Packing:
    """Of all linears but the last."""
    names = {name: others.get(name.rpartition(".")[2], scheme) for name in LINEARS[:-1]}
    return Packing(get_layout(layout), {name: SCHEMES[own] for name, own in names.items()})


def read(config: dict[str, Any]) -> Packing:
    return read_packing({"quantization_config": json.loads(json.dumps(config))}, LINEARS, WHERE)


@pytest.mark.parametrize(
    ("scheme", "strategies", "form"),
    [
        ("channel", ("channel", "token"), "float-quantized"),
        ("tensor", ("tensor", "token"), "float-quantized"),
        ("static", ("tensor", "tensor"), "float-quantized"),
        ("block", ("block", "group"), "float-quantized"),
        ("mx", ("group", "group"), "mxfp8-quantized"),
    ],
)
def test_compressed_tensors_reads_what_we_mean(scheme: str, strategies: tuple[str, str], form: str) -> None:
    config = quantization_config(packing(scheme), LINEARS)
    theirs = QuantizationConfig.model_validate(json.loads(json.dumps(config)))
    assert (theirs.quant_method, theirs.format, theirs.ignore) == ("compressed-tensors", form, ["lm_head"])
    assert theirs.quantization_status == "compressed"
    assert theirs.kv_cache_scheme is None
    (group,) = theirs.config_groups.values()
    assert group.targets == ["Linear"]
    assert group.output_activations is None
    assert infer_module_format(torch.nn.Linear, group) == form
    for args, strategy, dynamic in zip(
        (group.weights, group.input_activations), strategies, (False, scheme != "static"), strict=True
    ):
        assert (args.num_bits, args.type, args.symmetric) == (8, QuantizationType.FLOAT, True)
        assert (args.strategy, args.dynamic) == (strategy, dynamic)
    assert group.weights.block_structure == ([128, 128] if scheme == "block" else None)
    assert (group.weights.group_size, group.input_activations.group_size) == {
        "mx": (32, 32), "block": (None, 128)
    }.get(scheme, (None, None))  # fmt: skip
    assert read(config) == packing(scheme)


def test_several_schemes_are_groups_of_named_layers() -> None:
    mixed = packing("block", o_proj="channel")
    theirs = QuantizationConfig.model_validate(quantization_config(mixed, LINEARS))
    assert [group.targets for group in theirs.config_groups.values()] == [["a.q_proj", "b.down_proj"], ["a.o_proj"]]
    assert theirs.format == "float-quantized"
    assert read(quantization_config(mixed, LINEARS)) == mixed
    formats = packing("mx", o_proj="channel")
    config = quantization_config(formats, LINEARS)
    assert config["format"] == "mixed-precision"
    assert [group["format"] for group in config["config_groups"].values()] == ["mxfp8-quantized", "float-quantized"]
    assert read(config) == formats


def test_targets_are_names_patterns_or_the_class() -> None:
    config = quantization_config(packing("block", o_proj="channel"), LINEARS)
    config["config_groups"]["group_0"]["targets"] = ["re:.*(q|down)_proj$"]
    assert read(config) == packing("block", o_proj="channel")
    config["config_groups"]["group_0"]["targets"] = ["re:.*q_proj$"]
    with pytest.raises(ArtifactError, match="no group of config_groups has b.down_proj"):
        read(config)


def test_transformers_reads_the_fp8_layout() -> None:
    config = quantization_config(packing("block", "fp8"), LINEARS)
    theirs = AutoQuantizationConfig.from_dict(dict(config))
    assert isinstance(theirs, FineGrainedFP8Config)
    assert list(theirs.weight_block_size) == [128, 128]
    assert theirs.activation_scheme == "dynamic"
    assert theirs.modules_to_not_convert == ["lm_head"]
    assert read(config) == packing("block", "fp8")
    assert get_layout("fp8").rename("a.q_proj.weight_scale") == "a.q_proj.weight_scale_inv"
    assert packing(layout="fp8").names_in_memory("a.q_proj.weight_scale_inv") == ["a.q_proj.weight_scale"]
    assert get_layout("compressed-tensors").rename("a.q_proj.weight_scale") == "a.q_proj.weight_scale"


def test_the_examples_of_the_page_are_what_is_written() -> None:
    described = [
        get_layout(layout).describe({"q_proj": SCHEMES[scheme]}, ["lm_head"], False)
        for layout, scheme in (("compressed-tensors", "channel"), ("fp8", "block"), ("modelopt", "static"))
    ]
    beside = get_layout("modelopt").side_files(described[-1])
    examples = re.findall(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert [json.loads(example) for example in examples] == [*described, *beside.values()]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_remarks_of_other_writers_are_accepted(scheme: str) -> None:
    config = quantization_config(packing(scheme), LINEARS)
    theirs = QuantizationConfig.model_validate(config).model_dump(mode="json")
    theirs["config_groups"]["group_0"]["weights"]["observer"] = "minmax"
    assert set(theirs) > set(config)  # so they do add something
    assert read(theirs | {"version": "0.20.0"}) == packing(scheme)


def _set(*path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(config: dict[str, Any]) -> None:
        for key in path[:-1]:
            config = config[key]
        config[path[-1]] = value

    return change


GROUP = ("config_groups", "group_0")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_set("quant_method", value="gptq"), "quant_method is 'gptq'"),
        *[
            (
                _set(*GROUP, "targets", value=value),
                f"group_0.targets must be a list of names, got {re.escape(repr(value))}",
            )
            for value in (128, True, "Linear", [float("nan")], [["Linear"]], {"a": 1})
        ],
        (_set("format", value="pack-quantized"), "format is 'pack-quantized'"),
        (_set("quantization_status", value="frozen"), "quantization_status is 'frozen'"),
        (_set("kv_cache_scheme", value={"num_bits": 8}), "kv_cache_scheme.type is None, required 'float'"),
        (_set("kv_cache_scheme", value="static"), "kv_cache_scheme is 'static'"),
        (_set(*GROUP, "weights", "num_bits", value=4), "nearest is channel, but .*weights.num_bits is 4, required 8"),
        (_set(*GROUP, "weights", "strategy", value="attn_head"), "weights.strategy is 'attn_head', required"),
        (_set(*GROUP, "weights", "group_size", value=128), "weights.group_size is 128"),
        (_set(*GROUP, "input_activations", "dynamic", value=False), "input_activations.dynamic is False"),
        (_set(*GROUP, "targets", value=["re:.*q_proj"]), "no group of config_groups has a.o_proj"),
        (_set("config_groups", value={}), "config_groups must hold groups"),
        (_set("config_groups", "group_1", value={"targets": ["Linear"]}), "group_1.weights is None"),
        (_set("transform_config", value={"rotate": 1}), "transform_config is"),
        (_set("ignore", value="lm_head"), "ignore must be a list"),
    ],
)
def test_another_packing_is_refused_by_setting(change: Callable[[dict[str, Any]], None], named: str) -> None:
    config = copy.deepcopy(quantization_config(packing(), LINEARS))
    change(config)
    with pytest.raises(ArtifactError, match=named):
        read(config)


@pytest.mark.parametrize("scheme", ["channel", "tensor", "block"])
def test_weights_alone_are_read_with_the_scales_of_other_schemes(scheme: str) -> None:
    config = quantization_config(packing(scheme), LINEARS)
    _set(*GROUP, "input_activations", value=None)(config)
    (found,) = set(read(config).schemes.values())
    assert found.inputs is None
    assert found.weight == SCHEMES[scheme].weight
    assert read(quantization_config(read(config), LINEARS)) == read(config)


def test_groups_of_weights_alone_are_refused() -> None:
    config = quantization_config(packing("group32"), LINEARS)
    _set(*GROUP, "input_activations", value=None)(config)
    with pytest.raises(ArtifactError, match="nearest is group32, but .*input_activations is None"):
        read(config)


def test_no_packed_model() -> None:
    with pytest.raises(ArtifactError, match="octavo pack MODEL OUT"):
        read_packing({"architectures": ["LlamaForCausalLM"]}, LINEARS, WHERE)


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "q.weight": torch.randn(4, 8).to(torch.float8_e4m3fn),
        "q.weight_scale": torch.rand(4, 1) + 0.5,
        "norm.weight": torch.ones(8, dtype=torch.bfloat16),
    }


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("q.weight", None, "q.weight is missing"),
        ("k.weight", torch.ones(2), "k.weight has no place"),
        ("q.weight", torch.ones(8, 4).to(torch.float8_e4m3fn), r"q.weight must have shape \[4, 8\]"),
        ("q.weight", torch.ones(4, 8, dtype=torch.bfloat16), "q.weight must be torch.float8_e4m3fn, the file has"),
        ("q.weight", torch.full((4, 8), torch.nan).to(torch.float8_e4m3fn), "q.weight holds inf or NaN"),
        ("q.weight_scale", torch.ones(4), "q.weight_scale must have shape"),
        ("q.weight_scale", torch.ones(4, 1, dtype=torch.bfloat16), "q.weight_scale must be torch.float32"),
        ("q.weight_scale", torch.tensor([[1.0], [torch.nan], [1], [1]]), "q.weight_scale holds inf or NaN"),
        ("q.weight_scale", torch.tensor([[1.0], [torch.inf], [1], [1]]), "q.weight_scale holds inf or NaN"),
        ("q.weight_scale", torch.tensor([[1.0], [0], [1], [1]]), "q.weight_scale must be positive, its least is 0"),
        ("q.weight_scale", torch.tensor([[1.0], [-2], [1], [1]]), "q.weight_scale must be positive, its least is -2"),
        ("norm.weight", torch.full((8,), torch.inf, dtype=torch.bfloat16), "norm.weight holds inf or NaN"),
    ],
)
def test_wrong_tensors_are_refused_by_name(name: str, value: torch.Tensor | None, message: str) -> None:
    required = {key: t.to("meta") for key, t in tensors().items()}
    found = tensors()
    check_tensors(found, required, WHERE)
    if value is None:
        del found[name]
    else:
        found[name] = value
    with pytest.raises(ArtifactError, match=rf"{message}.*pack it again"):
        check_tensors(found, required, WHERE)


def test_json_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(FileNotFoundError, match=r"config.json is missing"):
        read_json(path)
    for content, message in (("{", "not valid JSON"), ("[1]", "must hold a JSON object, got list")):
        path.write_text(content)
        with pytest.raises(ArtifactError, match=message):
            read_json(path)


# ---- Scales that are the reciprocals of what they should be


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


# ---- The checkpoints of a run's folder, among other things that lie there


def test_only_folders_with_the_name_of_a_step_are_checkpoints(tmp_path):
    run = RunFolder(tmp_path)
    for name in ("step-00000004", "step-00000012", "step-100000000", "step-abc1", "step-12", "step-00000008.old7"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000099").write_text("a file")
    assert [run.step_of(path) for path in run.checkpoints()] == [4, 12, 100_000_000]
