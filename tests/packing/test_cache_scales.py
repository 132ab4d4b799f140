"""The scales of a KV cache: written, read back, and refused where they are damaged.

The oracle is compressed-tensors' emulation of such a cache, and a rounding written down here.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from metrics import distance
from safetensors.torch import load_file
from tiny_models import IDS, Folders, open_theirs, outputs, same_bytes
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from verify_examples import change_config, change_tensors

import octavo
from octavo.artifact.files import ArtifactError
from octavo.artifact.packed.reader import PackedTensors
from octavo.calibration import Calibration
from octavo.kv_cache.transformers_cache import QuantizedKVCache
from octavo.packing import convert_layout, pack, unpack
from octavo.runtime import load_packed

ATTENTION = "model.layers.1.self_attn"


@contextmanager
def rounded_cache(model: Any, scales: dict[str, tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Attention of transformers' whose keys and values went through e4m3, written down without any library."""

    def rounded(x: Tensor, scale: Tensor) -> Tensor:
        return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) * scale

    names = {id(module): name for name, module in model.named_modules()}
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        k, v = (scale.to(key.dtype) for scale in scales[names[id(module)]])
        return sdpa(module, query, rounded(key, k), rounded(value, v), *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS["rounded"] = attention
    AttentionMaskInterface.register("rounded", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.set_attn_implementation("rounded")
    try:
        yield
    finally:
        model.set_attn_implementation("sdpa")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("kind", "rule"),
    [("llama", "mse"), *((kind, "amax") for kind in ("llama", "mistral", "qwen2", "qwen3", "opt"))],
)
def test_transformers_rounds_keys_and_values_by_our_scales(made: Folders, kind: str, rule: str) -> None:
    folder = made(kind, scheme="channel", kv_cache="fp8", rule=rule)
    scales, found = PackedTensors(folder).kv_scales, Calibration.load(made(kind, "calibrated"))
    assert len(scales) == 2
    for name, (k, v) in scales.items():
        assert k.shape == v.shape == (1,)
        assert float(k) == float(found.sites[f"{name}.k"].scale(rule))
        assert float(v) == float(found.sites[f"{name}.v"].scale(rule))
    quantized, plain = (open_theirs(path, torch.float32) for path in (folder, made(kind, scheme="channel")))
    assert float(quantized.get_submodule(next(iter(scales))).k_scale) == float(next(iter(scales.values()))[0])
    got, unrounded = outputs(quantized), outputs(plain)
    with rounded_cache(plain, scales):
        assert distance(got, outputs(plain)) < 1e-6
    assert 1e-3 < distance(got, unrounded) < 0.25
    assert torch.equal(outputs(load_packed(folder).model), outputs(load_packed(made(kind, scheme="channel")).model))


def test_our_cache_takes_the_scales_of_a_folder(made: Folders) -> None:
    """Token by token, so that all but the newest key and value are read from the cache."""
    folder = made("llama", scheme="channel", kv_cache="fp8")
    model = octavo.load(folder).float()
    unrounded = outputs(model)
    with rounded_cache(model, PackedTensors(folder).kv_scales):
        required = outputs(model)
    cache = QuantizedKVCache.for_model(model, 32, "fp8", scales=PackedTensors(folder).kv_scales)
    with torch.no_grad():
        steps = [model(ids, past_key_values=cache, use_cache=True).logits for ids in torch.split(IDS, 1, 1)]
    found = torch.cat(steps, 1).double()
    assert distance(found, required) < 0.1 * distance(unrounded, required)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("scheme", ["channel", "static", "mx"])
def test_a_cache_goes_with_every_scheme(made: Folders, tmp_path: Path, scheme: str) -> None:
    folder, plain = made("llama", scheme=scheme, kv_cache="fp8"), made("llama", scheme=scheme)
    stored, without = (load_file(path / "model.safetensors") for path in (folder, plain))
    names = {f"model.layers.{i}.self_attn.{x}_scale" for i in range(2) for x in "kv"}
    assert stored.keys() - without.keys() == names
    assert all(stored[name].shape == (1,) and stored[name].dtype == torch.float32 for name in names)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert config["kv_cache_scheme"] == {
        "num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True
    }  # fmt: skip
    assert json.loads((folder / "octavo.json").read_text())["calibration"]["kv_cache"] == "fp8"
    dtype = torch.bfloat16 if scheme == "mx" else torch.float32  # theirs widens mx to BF16, whatever it is asked for
    with rounded_cache(reference := open_theirs(plain, dtype), PackedTensors(folder).kv_scales):
        assert distance(outputs(open_theirs(folder, dtype)), outputs(reference)) < 1e-6
    assert convert_layout(folder, tmp_path / "again").lossless
    assert same_bytes(folder, tmp_path / "again")
    unpack(folder, tmp_path / "plain")
    open_theirs(tmp_path / "plain")


def test_transformers_saves_and_opens_it_again(made: Folders, tmp_path: Path) -> None:
    folder = made("qwen2", scheme="channel", kv_cache="fp8")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.save_pretrained(tmp_path / "saved")
    saved, original = (open_theirs(path, torch.float32) for path in (tmp_path / "saved", folder))
    assert torch.equal(outputs(saved), outputs(original))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{ATTENTION}.v_scale"), "self_attn.v_scale is missing, though a KV cache is declared"),
        (lambda t: t[f"{ATTENTION}.k_scale"].fill_(0), "self_attn.k_scale must be finite and positive, it is 0"),
        (lambda t: t[f"{ATTENTION}.k_scale"].fill_(torch.nan), "self_attn.k_scale must be finite and positive"),
        (lambda t: t.update({f"{ATTENTION}.k_scale": torch.ones(4)}), r"must be one float32 number, it is .*\[4\]"),
        (lambda t: t.update({"model.norm.k_scale": torch.ones(1)}), "model.norm has the scale of a KV cache"),
    ],
)  # fmt: skip
def test_a_damaged_cache(made: Folders, tmp_path: Path, change: Callable[..., Any], message: str) -> None:
    folder = shutil.copytree(made("llama", scheme="channel", kv_cache="fp8"), tmp_path / "bad")
    change_tensors(folder, change)
    for opened in (PackedTensors, load_packed):
        with pytest.raises(ArtifactError, match=message):
            opened(folder)


def test_scales_that_nobody_declared(made: Folders, tmp_path: Path) -> None:
    folder = shutil.copytree(made("llama", scheme="channel", kv_cache="fp8"), tmp_path / "bad")
    change_config(folder, kv_cache_scheme=None)
    with pytest.raises(ArtifactError, match="k_scale is there, but no KV cache is declared"):
        PackedTensors(folder)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"kv_cache": "int8"}, "unknown cache 'int8' of keys and values: choose fp8"),
        ({"kv_cache": "fp8"}, "--kv-cache stores scales of keys and values: give --calibration"),
        (
            {"kv_cache": "fp8", "scheme": "block", "layout": "fp8"},
            "no place for the scales of a KV cache: --layout",
        ),
    ],
)
def test_a_cache_that_cannot_be_had(made: Folders, tmp_path: Path, how: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack(made("llama"), tmp_path / "out", **how)
    assert not list(tmp_path.iterdir())


def test_an_encoder_has_no_cache(made: Folders, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no attention layers with k_proj"):
        pack(made("bert"), tmp_path / "out", kv_cache="fp8", calibration=made("bert", "calibrated"))
