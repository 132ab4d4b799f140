"""The packed folder's specification, against compressed-tensors' own reading of it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig, QuantizationStrategy, QuantizationType

from octavo.artifact.packed import check_tensors, quantization_config, read_ignore, read_json
from octavo.artifact.tensors import ArtifactError

WHERE = Path("config.json")


def test_compressed_tensors_reads_what_we_mean() -> None:
    read = QuantizationConfig.model_validate(json.loads(json.dumps(quantization_config(["lm_head"]))))
    assert (read.quant_method, read.format, read.ignore) == ("compressed-tensors", "float-quantized", ["lm_head"])
    assert read.quantization_status == "compressed"
    assert read.kv_cache_scheme is None
    (group,) = read.config_groups.values()
    assert group.targets == ["Linear"]
    assert group.output_activations is None
    for args, strategy, dynamic in (
        (group.weights, QuantizationStrategy.CHANNEL, False),
        (group.input_activations, QuantizationStrategy.TOKEN, True),
    ):
        assert (args.num_bits, args.type, args.symmetric) == (8, QuantizationType.FLOAT, True)
        assert (args.strategy, args.dynamic) == (strategy, dynamic)


def test_ignore_travels() -> None:
    config = {"quantization_config": quantization_config(["a.b", "lm_head"])}
    assert read_ignore(json.loads(json.dumps(config)), WHERE) == ["a.b", "lm_head"]


def test_remarks_of_other_writers_are_accepted() -> None:
    theirs = QuantizationConfig.model_validate(quantization_config(["lm_head"])).model_dump(mode="json")
    theirs["config_groups"]["group_0"]["weights"]["observer"] = "minmax"
    assert set(theirs) > set(quantization_config([]))  # so they do add something
    assert read_ignore({"quantization_config": theirs | {"version": "0.20.0"}}, WHERE) == ["lm_head"]


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
        (_set("quant_method", value="fp8"), "quant_method is 'fp8'"),
        (_set("format", value="int-quantized"), "format is 'int-quantized'"),
        (_set("quantization_status", value="frozen"), "quantization_status is 'frozen'"),
        (_set("kv_cache_scheme", value={"num_bits": 8}), "kv_cache_scheme is"),
        (_set(*GROUP, "weights", "num_bits", value=4), "weights.num_bits is 4, required 8"),
        (_set(*GROUP, "weights", "strategy", value="block"), "weights.strategy is 'block', required 'channel'"),
        (_set(*GROUP, "weights", "group_size", value=128), "weights.group_size is 128"),
        (_set(*GROUP, "input_activations", value=None), "input_activations is None"),
        (_set(*GROUP, "input_activations", "dynamic", value=False), "input_activations.dynamic is False"),
        (_set(*GROUP, "targets", value=["re:.*proj"]), "targets is"),
        (_set("config_groups", "group_1", value={"targets": ["Linear"]}), "group_1 is"),
        (_set("transform_config", value={"rotate": 1}), "transform_config is"),
        (_set("ignore", value="lm_head"), "ignore must be a list"),
    ],
)
def test_another_packing_is_refused_by_setting(change: Callable[[dict[str, Any]], None], named: str) -> None:
    config = copy.deepcopy(quantization_config([]))
    change(config)
    with pytest.raises(ArtifactError, match=named):
        read_ignore({"quantization_config": config}, WHERE)


def test_no_packed_model() -> None:
    with pytest.raises(ArtifactError, match="octavo pack RUN OUT"):
        read_ignore({"architectures": ["LlamaForCausalLM"]}, WHERE)


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
