"""The reference reads KV caches and the layouts of other writers."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from tiny_models import Folders
from torch import Tensor
from verify_examples import change_config, change_tensors, run_verify

from octavo.evaluation.metrics import LogitQuality
from octavo.hf.meta_model import transformers_meta_model
from octavo.verification.checks import check_folder
from octavo.verification.files import CheckpointFiles, read_files
from octavo.verification.kv_cache import cache_scales
from octavo.verification.reference import PackedLayers
from octavo.verification.streamed_model import StreamedModel, required_by


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_keys_and_values_are_rounded_as_transformers_does(made: Folders, tmp_path: Path, name: str) -> None:
    plain = made(name, scheme="channel")
    cached = shutil.copytree(made(name, scheme="channel", kv_cache="fp8"), tmp_path / "cached")
    change_tensors(
        cached, lambda t: t.update({key: 9 * s for key, s in t.items() if key.endswith(("k_scale", "v_scale"))})
    )
    before, after = (run_verify(folder, made(name)) for folder in (plain, cached))
    assert not after.findings
    assert "keys and values are rounded by the folder's scales, as its cache does" in after.remarks
    transformers, octavo = after.readers[:2]
    assert (transformers.outcome, octavo.outcome) == ("agrees", "agrees")
    assert transformers.distance is not None
    assert transformers.distance < 1e-5
    assert isinstance(before.quality, LogitQuality)
    assert isinstance(after.quality, LogitQuality)
    assert before.quality.kl.value < after.quality.kl.value < 2


def test_scales_of_keys_and_values_have_many_names(made: Folders, tmp_path: Path) -> None:
    ours, modelopt, autofp8 = (
        made("llama", scheme="static", layout=layout, kv_cache="fp8")
        for layout in ("compressed-tensors", "modelopt", "autofp8")
    )
    scales = cache_scales(read_files(ours))
    assert list(scales) == [f"model.layers.{layer}.self_attn" for layer in range(2)]
    assert cache_scales(read_files(modelopt)) == scales
    assert cache_scales(read_files(autofp8)) == scales
    renamed = shutil.copytree(autofp8, tmp_path / "renamed")

    def rename(tensors: dict[str, Tensor]) -> None:
        for name in scales:
            tensors[f"{name}.kv_scale"] = tensors.pop(f"{name}.k_scale")
            del tensors[f"{name}.v_scale"]

    change_tensors(renamed, rename)
    assert cache_scales(read_files(renamed)) == {name: (k, k) for name, (k, _) in scales.items()}
    change_tensors(renamed, lambda tensors: tensors.pop("model.layers.1.self_attn.kv_scale"))
    assert cache_scales(read_files(renamed)) == {}


def test_layouts_of_other_writers(made: Folders, tmp_path: Path) -> None:
    """ModelOpt and AutoFP8 name and shape the scale of a tensor in their own way, and store scales of a KV cache."""
    folder = made("mistral", scheme="static")
    ours = read_files(folder)
    meta_model = partial(transformers_meta_model, ours.config, folder)
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
        theirs = shutil.copytree(folder, tmp_path / name)
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
