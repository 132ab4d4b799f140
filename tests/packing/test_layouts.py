"""The layouts that vLLM alone opens, and the scales of a KV cache: written, read back, and converted.

Oracles: what vLLM and ModelOpt say (`VLLM` below is the shape and name of every scale as their loaders want it, from
their sources), compressed-tensors' emulation for the cache, and bytes for what must not change.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from metrics import distance
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from typer.testing import CliRunner

import octavo
from octavo.artifact.files import ArtifactError
from octavo.artifact.packed.reader import PackedTensors
from octavo.calibration import Calibration, calibrate
from octavo.evaluation import PromptOptions
from octavo.kv_cache.transformers_cache import QuantizedKVCache
from octavo.models.tokenizer import ByteTokenizer
from octavo.packing import convert_layout, pack, unpack
from octavo.runtime import load_packed
from octavo_cli.app import app

SIZES = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64, "eos_token_id": 0,
    "bos_token_id": None,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": None},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": {"head_dim": 32},
    "OPT": {"ffn_dim": 256, "word_embed_proj_dim": 128},
}
Folders = Callable[..., Path]
# The suffix and shape of what lies beside a weight [256, 128], by layout and scheme, as vLLM's loaders want it.
VLLM: dict[tuple[str, str], dict[str, tuple[int, ...]]] = {
    ("modelopt", "static"): {"weight_scale": (), "input_scale": ()},
    ("modelopt", "channel"): {"weight_scale": (256,)},
    ("modelopt", "block"): {"weight_scale": (2, 1, 1, 1)},
    ("autofp8", "static"): {"weight_scale": (), "input_scale": ()},
    ("autofp8", "tensor"): {"weight_scale": ()},
}
UP, ATTENTION = "model.layers.1.mlp.up_proj", "model.layers.1.self_attn"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """made(kind) is a model, made(kind, "calibrated") its calibration, and made(kind, scheme=...) a packing."""
    root = tmp_path_factory.mktemp("layouts")
    (root / "text.txt").write_text(
        "\n\n".join(f"{i} times {j} is {i * j}, said the clerk." for i in range(9) for j in range(9))
    )

    def make(kind: str, what: str = "", **how: Any) -> Path:
        folder = root / " ".join([kind, what, *(f"{key}={value}" for key, value in how.items())]).strip()
        if folder.exists():
            return folder
        if how:
            pack(make(kind), folder, calibration=make(kind, "calibrated"), **how)
        elif what:
            calibrate(make(kind), [str(root / "text.txt")], folder, prompts=PromptOptions(16, 32))
        else:
            torch.manual_seed(0)
            config = getattr(transformers, f"{kind}Config")(**SIZES | KINDS[kind])
            model = getattr(transformers, f"{kind}ForCausalLM")(config)
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p.copy_(torch.randn_like(p) * p.shape[-1] ** -0.5 if p.ndim == 2 and "emb" not in name else p)
            model.bfloat16().save_pretrained(folder)
            ByteTokenizer().save(folder)
        return folder

    return make


def theirs(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


IDS = torch.randint(256, (2, 24), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def logits(model: nn.Module, **how: Any) -> Tensor:
    out: Any = model(IDS, **how)
    return (out if isinstance(out, Tensor) else out.logits).double()


def same_bytes(a: Path, b: Path) -> bool:
    first, second = (load_file(folder / "model.safetensors") for folder in (a, b))
    return first.keys() == second.keys() and all(
        t.dtype == second[name].dtype
        and t.shape == second[name].shape
        and torch.equal(t.reshape(-1).view(torch.uint8), second[name].reshape(-1).view(torch.uint8))
        for name, t in first.items()
    )


# ---- a cache of keys and values


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
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", ["amax", "mse"])
def test_transformers_rounds_keys_and_values_by_our_scales(made: Folders, kind: str, rule: str) -> None:
    folder = made(kind, scheme="channel", kv_cache="fp8", rule=rule)
    scales, found = PackedTensors(folder).kv_scales, Calibration.load(made(kind, "calibrated"))
    assert len(scales) == 2
    for name, (k, v) in scales.items():
        assert k.shape == v.shape == (1,)
        assert float(k) == float(found.sites[f"{name}.k"].scale(rule))
        assert float(v) == float(found.sites[f"{name}.v"].scale(rule))
    quantized, plain = theirs(folder), theirs(made(kind, scheme="channel"))
    assert float(quantized.get_submodule(next(iter(scales))).k_scale) == float(next(iter(scales.values()))[0])
    got, unrounded = logits(quantized), logits(plain)
    with rounded_cache(plain, scales):
        assert distance(got, logits(plain)) < 1e-6
    assert 1e-3 < distance(got, unrounded) < 0.25
    assert torch.equal(logits(load_packed(folder).model), logits(load_packed(made(kind, scheme="channel")).model))


def test_our_cache_takes_the_scales_of_a_folder(made: Folders) -> None:
    """Token by token, so that all but the newest key and value are read from the cache."""
    folder = made("Llama", scheme="channel", kv_cache="fp8")
    model = octavo.load(folder).float()
    unrounded = logits(model)
    with rounded_cache(model, PackedTensors(folder).kv_scales):
        required = logits(model)
    cache = QuantizedKVCache.for_model(model, 32, "fp8", scales=PackedTensors(folder).kv_scales)
    with torch.no_grad():
        steps = [model(ids, past_key_values=cache, use_cache=True).logits for ids in torch.split(IDS, 1, 1)]
    found = torch.cat(steps, 1).double()
    assert distance(found, required) < 0.1 * distance(unrounded, required)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("scheme", ["channel", "tensor", "static", "block", "mx"])
def test_a_cache_goes_with_every_scheme(made: Folders, tmp_path: Path, scheme: str) -> None:
    folder, plain = made("Llama", scheme=scheme, kv_cache="fp8"), made("Llama", scheme=scheme)
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
    with rounded_cache(reference := theirs(plain, dtype), PackedTensors(folder).kv_scales):
        assert distance(logits(theirs(folder, dtype)), logits(reference)) < 1e-6
    assert convert_layout(folder, tmp_path / "again").lossless
    assert same_bytes(folder, tmp_path / "again")
    unpack(folder, tmp_path / "plain")
    theirs(tmp_path / "plain")


def test_transformers_saves_and_opens_it_again(made: Folders, tmp_path: Path) -> None:
    folder = made("Qwen2", scheme="channel", kv_cache="fp8")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(theirs(tmp_path / "saved")), logits(theirs(folder)))


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
    folder = shutil.copytree(made("Llama", scheme="channel", kv_cache="fp8"), tmp_path / "bad")
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for opened in (PackedTensors, load_packed):
        with pytest.raises(ArtifactError, match=message):
            opened(folder)


def test_scales_that_nobody_declared(made: Folders, tmp_path: Path) -> None:
    folder = shutil.copytree(made("Llama", scheme="channel", kv_cache="fp8"), tmp_path / "bad")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = None
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ArtifactError, match="k_scale is there, but no KV cache is declared"):
        PackedTensors(folder)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"kv_cache": "int8"}, "unknown cache 'int8' of keys and values: choose fp8"),
        ({"kv_cache": "fp8"}, "--kv-cache stores those of K and V: give --calibration"),
        (
            {"kv_cache": "fp8", "scheme": "block", "layout": "fp8"},
            "no place for the scales of a KV cache: --layout",
        ),
    ],
)
def test_a_cache_that_cannot_be_had(made: Folders, tmp_path: Path, how: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack(made("Llama"), tmp_path / "out", **how)
    assert not list(tmp_path.iterdir())


def test_an_encoder_has_no_cache(made: Folders, tmp_path: Path) -> None:
    torch.manual_seed(0)
    transformers.BertModel(transformers.BertConfig(**SIZES)).save_pretrained(tmp_path / "bert")
    ByteTokenizer().save(tmp_path / "bert")
    (tmp_path / "text.txt").write_text("\n\n".join(f"{i} and {i + 1} are {2 * i + 1}" for i in range(40)))
    calibrate(tmp_path / "bert", [str(tmp_path / "text.txt")], tmp_path / "seen", prompts=PromptOptions(8, 16))
    with pytest.raises(ValueError, match="has no attention layers with k_proj"):
        pack(tmp_path / "bert", tmp_path / "out", kv_cache="fp8", calibration=tmp_path / "seen")


# ---- modelopt and autofp8


@pytest.mark.parametrize("kind", ["Llama", "Qwen2"])
@pytest.mark.parametrize(("layout", "scheme"), VLLM)
def test_names_and_shapes_are_those_that_vllm_reads(made: Folders, kind: str, layout: str, scheme: str) -> None:
    folder = made(kind, scheme=scheme, layout=layout, kv_cache="fp8")
    stored = load_file(folder / "model.safetensors")
    beside = {name.removeprefix(f"{UP}."): tuple(t.shape) for name, t in stored.items() if name.startswith(UP)}
    assert beside == {"weight": (256, 128), **VLLM[layout, scheme]}
    cache = {name: t for name, t in stored.items() if name.endswith(("k_scale", "v_scale"))}
    dot = {"modelopt": ("k_proj.", "v_proj."), "autofp8": ("", "")}[layout]
    assert set(cache) == {f"model.layers.{i}.self_attn.{dot[j]}{'kv'[j]}_scale" for i in range(2) for j in range(2)}
    assert all(t.dtype == torch.float32 and t.shape == () for t in cache.values())
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    if layout == "autofp8":
        activations = {"static": "static", "tensor": "dynamic"}[scheme]
        assert config == {
            "quant_method": "fp8", "activation_scheme": activations, "ignored_layers": ["lm_head"],
            "kv_cache_scheme": "static",
        }  # fmt: skip
        return
    algorithm = {"static": "FP8", "channel": "FP8_PER_CHANNEL_PER_TOKEN", "block": "FP8_PB_WO"}[scheme]
    assert (config["quant_method"], config["quant_algo"], config["ignore"]) == ("modelopt", algorithm, ["lm_head"])
    assert (config["kv_cache_scheme"]["type"], config["kv_cache_scheme"]["num_bits"]) == ("float", 8)
    beside = json.loads((folder / "hf_quant_config.json").read_text())
    assert beside["quantization"] == {
        "quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]
    }  # fmt: skip


@pytest.mark.parametrize("cache", [None, "fp8"])
@pytest.mark.parametrize(("layout", "scheme"), VLLM)
def test_there_and_back_again_changes_no_bit(
    made: Folders, tmp_path: Path, layout: str, scheme: str, cache: str | None
) -> None:
    plain, packed = (
        made("Llama", scheme=scheme, layout=name, kv_cache=cache) for name in ("compressed-tensors", layout)
    )
    assert convert_layout(plain, tmp_path / "there", layout=layout).lossless
    assert convert_layout(tmp_path / "there", tmp_path / "back").lossless
    assert same_bytes(tmp_path / "there", packed)
    assert same_bytes(tmp_path / "back", plain)
    assert json.loads((tmp_path / "there" / "config.json").read_text()) == json.loads(
        (packed / "config.json").read_text()
    )
    assert (tmp_path / "there" / "hf_quant_config.json").exists() == (layout == "modelopt")
    assert not (tmp_path / "back" / "hf_quant_config.json").exists()
    assert torch.equal(logits(load_packed(packed).model), logits(load_packed(plain).model))
    for name, (k, v) in PackedTensors(packed).kv_scales.items():
        assert (k, v) == PackedTensors(plain).kv_scales[name]
    unpack(packed, tmp_path / "from packed")
    unpack(plain, tmp_path / "from plain")
    assert same_bytes(tmp_path / "from packed", tmp_path / "from plain")


@pytest.mark.parametrize("file", ["config.json", "hf_quant_config.json"])
def test_folders_as_modelopt_writes_them(made: Folders, tmp_path: Path, file: str) -> None:
    """Scales [1], layers left out by patterns, the configuration in either file, a name in small letters."""
    folder = shutil.copytree(made("Llama", scheme="static", layout="modelopt", kv_cache="fp8"), tmp_path / "theirs")
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: t.reshape(1) if t.ndim == 0 else t for name, t in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= {"quant_algo": "fp8", "ignore": ["lm_head*", "vision*"]}
    if file != "config.json":
        del config["quantization_config"]
        beside = json.loads((folder / file).read_text())
        beside["quantization"]["exclude_modules"] = ["lm_head*"]
        (folder / file).write_text(json.dumps(beside))
    (folder / "config.json").write_text(json.dumps(config))
    assert "lm_head" in PackedTensors(folder).ignored
    before = made("Llama", scheme="static", layout="modelopt", kv_cache="fp8")
    assert torch.equal(logits(load_packed(folder).model), logits(load_packed(before).model))
    convert_layout(folder, tmp_path / "again", layout="autofp8")
    load_packed(tmp_path / "again")


@pytest.mark.parametrize("names", ["kv_scale", "output_scale"])
def test_folders_as_autofp8_writes_them(made: Folders, tmp_path: Path, names: str) -> None:
    folder = shutil.copytree(made("Llama", scheme="static", layout="autofp8", kv_cache="fp8"), tmp_path / "theirs")
    tensors = load_file(folder / "model.safetensors")
    ours = PackedTensors(folder).kv_scales
    for name, (k, v) in ours.items():
        del tensors[f"{name}.k_scale"], tensors[f"{name}.v_scale"]
        if names == "kv_scale":
            tensors[f"{name}.kv_scale"] = k.clone()
        else:
            tensors |= {f"{name}.k_proj.output_scale": k.clone(), f"{name}.v_proj.output_scale": v.clone()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]["kv_cache_scheme"]
    (folder / "config.json").write_text(json.dumps(config))
    for name, (k, v) in PackedTensors(folder).kv_scales.items():
        assert (k, v) == (ours[name][0], ours[name][names == "output_scale"])
    load_packed(folder)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"layout": "modelopt", "scheme": "tensor"}, "modelopt holds the schemes static, channel, block, not tensor"),
        (
            {"layout": "autofp8", "scheme": "channel"},
            "autofp8 holds the schemes static, tensor, not channel: --sc",
        ),
        ({"layout": "autofp8", "scheme": "mx"}, "or --layout compressed-tensors, which holds any"),
        (
            {"layout": "modelopt", "scheme": "channel", "layers": {"*.o_proj": "block"}},
            "modelopt holds one scheme in a model, not block and channel",
        ),
    ],
)
def test_what_a_layout_does_not_hold(made: Folders, tmp_path: Path, how: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack(made("Llama"), tmp_path / "out", **how)
    if "layers" not in how:
        source = made("Llama", scheme=how["scheme"], kv_cache="fp8")
        with pytest.raises(ValueError, match=message):
            convert_layout(source, tmp_path / "out", layout=how["layout"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        ("modelopt", {"quant_algo": "NVFP4"}, "quant_algo is 'NVFP4', octavo runs FP8, FP8_PER_CHANNEL_PER_TOKEN"),
        (
            "modelopt",
            {"kv_cache_scheme": {"num_bits": 4, "type": "float"}},
            "num_bits is 4, required 8",
        ),
        ("modelopt", {"ignore": "lm_head"}, "ignore must be a list of module names, got 'lm_head'"),
        ("autofp8", {"activation_scheme": "token"}, "activation_scheme is 'token', required 'dynamic'"),
        ("autofp8", {"ignored_layers": ["lm_head", "re:.*up_proj"]}, "up_proj.input_scale has no place in the model"),
        ("autofp8", {"weight_block_size": [64, 64]}, r"weight_block_size is \[64, 64\], required \[128, 128\]"),
    ],
)
def test_another_packing_is_refused(
    made: Folders, tmp_path: Path, layout: str, change: dict[str, Any], message: str
) -> None:
    folder = shutil.copytree(made("Llama", scheme="static", layout=layout, kv_cache="fp8"), tmp_path / "bad")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ArtifactError, match=message):
        load_packed(folder)


def test_scales_of_another_shape_are_refused(made: Folders, tmp_path: Path) -> None:
    folder = shutil.copytree(made("Llama", scheme="block", layout="modelopt", kv_cache="fp8"), tmp_path / "bad")
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{UP}.weight_scale"] = torch.ones(1, 2, 1, 1)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for opened in (PackedTensors, load_packed):
        with pytest.raises(ArtifactError, match=r"up_proj"):
            opened(folder)


# ---- the command line


@pytest.mark.parametrize(("scheme", "said"), [("group32", True), ("channel", False)])
def test_who_does_not_open_groups_is_said(made: Folders, tmp_path: Path, scheme: str, said: bool) -> None:
    done = CliRunner().invoke(app, ["pack", str(made("Llama")), str(tmp_path / "out"), "--scheme", scheme])
    assert done.exit_code == 0, done.output
    assert ("not for vLLM" in done.output) == said


def test_commands(made: Folders, tmp_path: Path) -> None:
    run, out = CliRunner().invoke, tmp_path / "out"
    calibrated, source = str(made("Llama", "calibrated")), str(made("Llama"))
    done = run(
        app,
        ["pack", source, str(out), "--layout", "modelopt", "--scheme", "static", "--calibration", calibrated,
         "--kv-cache", "fp8", "--tensor-parallel", "1,2,4"],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "for vLLM and TensorRT-LLM: transformers computes nonsense" in done.output
    listed = json.loads(run(app, ["inspect", str(out), "--json"]).output)
    assert listed["layout"] == "modelopt"
    rows = {row["tensor"]: row for row in listed["tensors"]}
    k, v = PackedTensors(out).kv_scales[ATTENTION]
    assert rows[f"{ATTENTION}.k_proj.k_scale"]["least"] == float(k)
    assert rows[f"{ATTENTION}.v_proj.v_scale"]["largest"] == float(v)
    assert rows[f"{UP}.weight"]["input_scale"] > 0
    assert listed["bytes"] == sum(row["bytes"] for row in listed["tensors"])
    assert "kv cache" in run(app, ["inspect", str(out)], env={"COLUMNS": "200"}).output
    converted = run(app, ["convert-layout", str(out), str(tmp_path / "again"), "--layout", "autofp8"])
    assert "no weight changed" in converted.output
    wrong = run(app, ["pack", source, str(tmp_path / "no"), "--tensor-parallel", "two"])
    assert isinstance(wrong.exception, ValueError)
    assert "such as 1,2,4,8, got 'two'" in str(wrong.exception)
