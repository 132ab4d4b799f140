"""Packed folders as other programs write them: one by compressed-tensors itself, the others from the published layouts.

Every function takes a folder to make and returns what each packed weight is in float64, by the name of its layer,
computed here and by no code of Octavo's.
"""

import json
from pathlib import Path

import pytest
import torch
from compressed_tensors import quantization
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.modeling import kvcache
from compressed_tensors.quantization.lifecycle import apply, initialize
from safetensors.torch import save_file
from tiny_models import make_model, open_theirs
from torch import Tensor, nn

from octavo.inference.transformers_cache import CACHE

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
Weights = dict[str, Tensor]


def make_source(folder: Path):
    """A Llama in BF16, saved by transformers, whose layers are not all whole blocks."""
    return open_theirs(make_model(folder, "llama", intermediate_size=192, num_key_value_heads=2))


def linears(model: nn.Module) -> dict[str, Tensor]:
    """The weights that are packed, in float64."""
    found = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and name != "lm_head"}
    return {name: m.weight.detach().double() for name, m in found.items()}


def know_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let compressed-tensors quantize the keys and values of attentions, whatever transformers calls the argument.
    Its release 0.20 knows the names before transformers 5.24, and leaves keys and values alone there."""

    def pass_on(module, args: list, kwargs: dict):
        module.kv_cache.add_past_key_values(kwargs.get(CACHE))
        return args, kwargs | {CACHE: module.kv_cache}

    monkeypatch.setattr(kvcache, "_kv_cache_attention_hook", pass_on)
    for where in (apply, initialize):
        monkeypatch.setattr(where, "is_cached_attention_module", lambda module: hasattr(module, "k_proj"))


def compressed_tensors(folder: Path, preset: str, *, kv_cache: bool = False) -> Weights:
    """As compressed-tensors compresses a model; scales are in BF16, the model's dtype."""
    model = make_source(folder)
    cache = quantization.QuantizationArgs(num_bits=8, type="float", strategy="tensor", dynamic=False, symmetric=True)
    groups = {"group_0": quantization.preset_name_to_scheme(preset, ["Linear"])}
    kept = {"ignore": ["lm_head"], "kv_cache_scheme": cache if kv_cache else None}
    config = quantization.QuantizationConfig(config_groups=groups, **kept)
    with pytest.MonkeyPatch.context() as patch:
        know_caches(patch)
        quantization.apply_quantization_config(model, config)
        compressor = ModelCompressor.from_pretrained_model(model)
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            if name == "weight_scale":
                scale = _block_amax(module.weight.detach(), tuple(p.shape)) / 448
                p.data.copy_(torch.exp2(scale.log2().ceil()) if preset == "MXFP8" else scale)
            elif name.endswith("_scale"):
                p.data.fill_(0.03125)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))
    state = model.state_dict()
    return {
        name.removesuffix(".weight"): t.double() * spread(state[f"{name}_scale"], tuple(t.shape))
        for name, t in state.items()
        if t.dtype == E4M3 and name.endswith(".weight")
    }


def _steps(shape: tuple[int, ...], grid: tuple[int, ...]) -> list[int]:
    """How many rows and columns share a scale, of a matrix of `shape` with so many scales each way."""
    every = ((size, 1, 32, 128) for size in shape)
    return [
        next(step for step in steps if -(-size // step) == count)
        for steps, size, count in zip(every, shape, grid, strict=True)
    ]


def _block_amax(w: Tensor, grid: tuple[int, ...]) -> Tensor:
    """The largest magnitude of each block of w [N, K], float32 [grid]; [1] is one block."""
    rows, columns = _steps(tuple(w.shape), grid if len(grid) == 2 else (1, 1))
    parts = [[part.abs().max() for part in strip.split(columns, 1)] for strip in w.split(rows, 0)]
    return torch.tensor(parts, dtype=torch.float32).reshape(grid)


def spread(scale: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The scale of each element in float64: of one number, or of a grid; uint8 are exponents."""
    wide = torch.exp2(scale.double() - 127) if scale.dtype == torch.uint8 else scale.float().double()
    wide = wide if wide.ndim == 2 else wide.reshape(1, 1)
    rows, columns = _steps(shape, tuple(wide.shape))
    return wide.repeat_interleave(rows, 0)[: shape[0]].repeat_interleave(columns, 1)[:, : shape[1]]


def published(
    folder, config, grid, *, dtype=torch.float32, pow2=False, name="weight_scale", shape=lambda shape: shape,
    beside=(), change=lambda tensors: None, key="quantization_config", side_file=None,
):  # fmt: skip
    """Make a folder whose weights are cast here. `config` stands in config.json under `key`; `grid` is one of GRIDS;
    `dtype`, `pow2`, `name` and `shape` are of the scale; `beside` are other tensors of each packed layer, and `change`
    edits all tensors; `side_file` is the content of hf_quant_config.json."""
    model = make_source(folder)
    tensors = {k: t.detach().contiguous() for k, t in model.state_dict().items()}
    weights: Weights = {}
    for layer, w in linears(model).items():
        scale = (_block_amax(w, GRIDS[grid](*w.shape)) / 448).clamp(min=1e-8)
        scale = (torch.exp2(scale.log2().ceil()) if pow2 else scale).to(dtype)
        full = spread(scale, tuple(w.shape))
        data = (w / full).float().clamp(-448, 448).to(E4M3)
        weights[layer] = data.double() * full
        tensors |= {f"{layer}.weight": data, f"{layer}.{name}": scale.reshape(shape(tuple(scale.shape)))}
        tensors |= {f"{layer}.{leaf}": t.clone() for leaf, t in dict(beside).items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | ({key: config} if config else {})))
    if side_file is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(side_file))
    return weights


# How many scales a weight [N, K] has: one, one for each channel, or one for each block of 128 x 128 or less at the end.
GRIDS = {"one": lambda n, k: (1,), "channel": lambda n, k: (n, 1), "square": lambda n, k: (-(-n // 128), -(-k // 128))}
INPUT = torch.tensor(0.03125)
_BITS = {"num_bits": 8, "type": "float", "symmetric": True}
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}


def group(weights: dict, inputs: dict) -> dict:
    described = {"targets": ["Linear"], "weights": _BITS | weights, "input_activations": _BITS | inputs}
    return {"group_0": described | {"output_activations": None}}


CHANNEL = group({"strategy": "channel"}, {"strategy": "token", "dynamic": True})
TENSOR = group({"strategy": "tensor"}, {"strategy": "tensor", "dynamic": False})
OLD_BLOCKS = group(
    {"strategy": "block", "block_structure": "128x128"}, {"strategy": "group", "group_size": 128, "dynamic": True}
)


def _attentions(names: dict[str, float]):
    """What adds scales of a cache to every attention layer."""
    scales = {f"{i}.self_attn.{leaf}": value for i in range(2) for leaf, value in names.items()}
    added = {f"model.layers.{key}": torch.tensor(value, dtype=torch.bfloat16) for key, value in scales.items()}
    return lambda tensors: tensors.update(added)


def _ct(config_groups: dict, **more) -> dict:
    stated = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"]}
    return stated | {"quantization_status": "compressed", "config_groups": config_groups} | more


_CACHE = _BITS | {"strategy": "tensor", "dynamic": False}
_NORMS = ["lm_head", "model.norm", *(f"model.layers.{i}.input_layernorm" for i in range(2))]
_STATIC = {"quant_method": "fp8", "activation_scheme": "static"}

WRITERS = {
    "compressed-tensors FP8": lambda at: compressed_tensors(at, "FP8"),
    "compressed-tensors FP8 and cache": lambda at: compressed_tensors(at, "FP8", kv_cache=True),
    "compressed-tensors FP8_DYNAMIC": lambda at: compressed_tensors(at, "FP8_DYNAMIC"),
    "compressed-tensors FP8_BLOCK": lambda at: compressed_tensors(at, "FP8_BLOCK"),
    "compressed-tensors MXFP8": lambda at: compressed_tensors(at, "MXFP8"),
    "compressed-tensors of 2024": lambda at: published(
        at, {"quant_method": "compressed-tensors", "format": "naive-quantized", "config_groups": OLD_BLOCKS,
             "ignore": ["re:.*lm_head"], "sparsity_config": {"format": "dense", "global_sparsity": 0.1},
             "global_compression_ratio": 1.2}, "square", key="compression_config", dtype=torch.float16,
    ),
    "no status, no ignore, vectors": lambda at: published(
        at, {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": CHANNEL}, "channel",
        shape=lambda shape: shape[:1],
    ),
    "single numbers, outputs' scales, zero points": lambda at: published(
        at, _ct(TENSOR), "one", shape=lambda shape: (),
        beside={"input_scale": INPUT.bfloat16().reshape(1, 1), "output_scale": INPUT,
                "weight_zero_point": torch.zeros(1, dtype=torch.int8)},
    ),
    "cache in k_proj.output_scale": lambda at: published(
        at, _ct(CHANNEL, kv_cache_scheme=_CACHE), "channel", dtype=torch.bfloat16,
        change=_attentions({"k_proj.output_scale": 0.0625, "v_proj.output_scale": 0.125}),
    ),
    "DeepSeek": lambda at: published(at, BLOCKS | {"scale_fmt": "ue8m0"}, "square", pow2=True, name="weight_scale_inv"),
    "DeepSeek, E8M0": lambda at: published(
        at, BLOCKS | {"scale_fmt": "ue8m0"}, "square", pow2=True, dtype=E8M0, name="weight_scale_inv"
    ),
    "Qwen3": lambda at: published(
        at, BLOCKS | {"modules_to_not_convert": _NORMS}, "square", dtype=torch.bfloat16, name="weight_scale_inv"
    ),
    "transformers, static": lambda at: published(
        at, _STATIC | {"weight_block_size": None, "scale_fmt": "float", "modules_to_not_convert": ["lm_head"]}, "one",
        shape=lambda shape: (), name="weight_scale_inv", beside={"activation_scale": INPUT},
    ),
    "ModelOpt": lambda at: published(
        at, {}, "one", shape=lambda shape: (), beside={"input_scale": INPUT},
        change=_attentions({"k_proj.k_scale": 0.0625, "v_proj.v_scale": 0.125}),
        side_file={"producer": {"name": "modelopt", "version": "0.29"}, "quantization": {
            "quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", "*router*"]}},
    ),
    "ModelOpt in config.json": lambda at: published(
        at, {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO", "exclude_modules": ["lm_head*"],
             "kv_cache_quant_algo": None}, "square", shape=lambda shape: (shape[0], 1, shape[1], 1),
        dtype=torch.bfloat16,
    ),
}  # fmt: skip
CACHES = {
    "compressed-tensors FP8 and cache": (0.03125, 0.03125),
    "cache in k_proj.output_scale": (0.0625, 0.125),
    "ModelOpt": (0.0625, 0.125),
}
