"""The reference reads KV caches and the layouts of other writers."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from verify_examples import change_config, change_tensors, run_verify

from octavo.calibration import calibrate
from octavo.evaluation import PromptOptions
from octavo.evaluation.metrics import LogitQuality
from octavo.hf.meta_model import transformers_meta_model
from octavo.packing import pack
from octavo.verification.checks import check_folder
from octavo.verification.files import CheckpointFiles, read_files
from octavo.verification.kv_cache import cache_scales
from octavo.verification.reference import PackedLayers
from octavo.verification.streamed_model import StreamedModel, required_by


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "opt"])
def test_keys_and_values_are_rounded_as_transformers_does(models: dict[str, Path], tmp_path: Path, name: str) -> None:
    calibrate(models[name], [str(models["text"])], tmp_path / "c", prompts=PromptOptions(8, 64))
    plain, cached = tmp_path / "plain", tmp_path / "cached"
    pack(models[name], plain)
    pack(models[name], cached, calibration=tmp_path / "c", kv_cache="fp8")
    change_tensors(
        cached, lambda t: t.update({key: 9 * s for key, s in t.items() if key.endswith(("k_scale", "v_scale"))})
    )
    before, after = (run_verify(folder, models[name], models["text"]) for folder in (plain, cached))
    assert not after.findings
    assert "keys and values are rounded by the folder's scales, as its cache does" in after.remarks
    transformers, octavo = after.readers[:2]
    assert (transformers.outcome, octavo.outcome) == ("agrees", "agrees")
    assert transformers.distance is not None
    assert transformers.distance < 1e-5
    assert isinstance(before.quality, LogitQuality)
    assert isinstance(after.quality, LogitQuality)
    assert before.quality.kl.value < after.quality.kl.value < 2


def test_scales_of_keys_and_values_have_many_names(models: dict[str, Path], tmp_path: Path) -> None:
    calibrate(models["llama"], [str(models["text"])], tmp_path / "c", prompts=PromptOptions(8, 64))
    options = {"scheme": "static", "calibration": tmp_path / "c", "kv_cache": "fp8"}
    for layout in ("compressed-tensors", "modelopt", "autofp8"):
        pack(models["llama"], tmp_path / layout, layout=layout, **options)
    scales = cache_scales(read_files(tmp_path / "compressed-tensors"))
    assert list(scales) == [f"model.layers.{layer}.self_attn" for layer in range(2)]
    assert cache_scales(read_files(tmp_path / "modelopt")) == scales
    assert cache_scales(read_files(tmp_path / "autofp8")) == scales

    def rename(tensors: dict[str, Tensor]) -> None:
        for name in scales:
            tensors[f"{name}.kv_scale"] = tensors.pop(f"{name}.k_scale")
            del tensors[f"{name}.v_scale"]

    change_tensors(tmp_path / "autofp8", rename)
    assert cache_scales(read_files(tmp_path / "autofp8")) == {name: (k, k) for name, (k, _) in scales.items()}
    change_tensors(tmp_path / "autofp8", lambda tensors: tensors.pop("model.layers.1.self_attn.kv_scale"))
    assert cache_scales(read_files(tmp_path / "autofp8")) == {}


def test_layouts_of_other_writers(models: dict[str, Path], tmp_path: Path) -> None:
    """ModelOpt and AutoFP8 name and shape the scale of a tensor in their own way, and store scales of a KV cache."""
    calibrate(models["mistral"], [str(models["text"])], tmp_path / "c", prompts=PromptOptions(8, 64))
    pack(models["mistral"], tmp_path / "ours", scheme="static", calibration=tmp_path / "c")
    ours = read_files(tmp_path / "ours")
    meta_model = partial(transformers_meta_model, ours.config, tmp_path / "ours")
    required = required_by(meta_model())
    ids = torch.randint(256, (2, 20))

    def logits(files: CheckpointFiles) -> Tensor:
        layers = check_folder(files, required)
        assert not files.findings, [str(finding) for finding in files.findings]
        assert len(layers) == 14
        return StreamedModel(meta_model(), files.get, files.shapes, PackedLayers(files, layers, "cpu"))(ids)

    expected = logits(ours)
    for name, settings, cache in (
        ("modelopt", {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": {"num_bits": 8}}, "k_proj.k"),
        ("autofp8", {"quant_method": "fp8", "activation_scheme": "static"}, "kv"),
    ):
        theirs = shutil.copytree(tmp_path / "ours", tmp_path / name)
        change_config(theirs, config_groups=None, format=None, quantization_status=None, **settings)

        def flatten(tensors: dict[str, Tensor], cache: str = cache) -> None:
            tensors.update({key: t.reshape(()) for key, t in tensors.items() if key.endswith("_scale")})
            tensors[f"model.layers.0.self_attn.{cache}_scale"] = torch.tensor(0.5)

        change_tensors(theirs, flatten)
        assert torch.equal(logits(read_files(theirs)), expected)
    side = shutil.copytree(tmp_path / "modelopt", tmp_path / "side")
    config = json.loads((side / "config.json").read_text())
    ignored = config.pop("quantization_config")["ignore"]
    (side / "config.json").write_text(json.dumps(config))
    settings = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ignored}
    (side / "hf_quant_config.json").write_text(json.dumps({"quantization": settings}))
    assert torch.equal(logits(read_files(side)), expected)
