"""Fixed tiny models whose packed bytes are known, written without Octavo so that any version of it can pack them.

The weights follow from NumPy's raw PCG64 stream by exact arithmetic, so every machine writes the same files. The
calibration of a model is written by formula too: no forward pass is run, and no rounding of a sum enters.
"""

import hashlib
import json
import re
import zlib
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

SIZES = {
    "vocab_size": 64, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 32, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
GLU = SIZES | {"num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 256, "tie_word_embeddings": True}
NARROW = GLU | {"num_attention_heads": 2}  # head_dim is hidden_size / num_attention_heads
GPT2 = {
    "vocab_size": 64, "n_embd": 128, "n_layer": 2, "n_head": 2, "n_positions": 32, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
# Name -> the class of transformers, config.json, and the dtype of the files.
MODELS = {
    "llama": ("LlamaForCausalLM", NARROW, torch.bfloat16),
    "llama untied": ("LlamaForCausalLM", NARROW | {"tie_word_embeddings": False}, torch.float32),
    "mistral": ("MistralForCausalLM", GLU, torch.bfloat16),
    "qwen2": ("Qwen2ForCausalLM", NARROW, torch.bfloat16),
    "qwen3": ("Qwen3ForCausalLM", GLU, torch.float16),
    "gemma2": ("Gemma2ForCausalLM", GLU, torch.bfloat16),
    "opt": ("OPTForCausalLM", SIZES | {"ffn_dim": 256, "word_embed_proj_dim": 128}, torch.bfloat16),
    "gpt2": ("GPT2LMHeadModel", GPT2, torch.float32),
    "bert": ("BertModel", SIZES | {"intermediate_size": 256}, torch.bfloat16),
}
SCHEMES = ("channel", "tensor", "static", "block", "mx", "group32", "group64", "group128")
LAYOUTS = {"compressed-tensors": SCHEMES, "fp8": ("block",), "modelopt": ("static", "channel", "block")}
RECIPES = ("bf16", "tensorwise", "rowwise", "rowwise_dw_bf16", "delayed", "blockwise", "mxfp8", "groupwise")


def model_cases(name: str) -> dict[str, dict]:
    """The packings of one of MODELS: name -> options of `pack`."""
    packings = [(layout, scheme) for layout, schemes in LAYOUTS.items() for scheme in schemes]
    found: list[dict] = [{"layout": layout, "scheme": scheme} for layout, scheme in packings]
    for layout, schemes in LAYOUTS.items():
        cache = {} if layout == "fp8" or name == "bert" else {"kv_cache": "fp8"}
        found.append({"layout": layout, "scheme": schemes[0], "skip": ("*.1.*",), **cache})
    found.append({"scheme": "tensor", "share": False})
    found.append({"scheme": "mx", "layers": {"*.0.*": "tensor"}, "shard_bytes": 100_000})
    if name == "llama":  # the choice of scales knows no architecture
        cached = [(layout, scheme) for layout, scheme in packings if layout == "modelopt"]
        found += [{"layout": layout, "scheme": scheme, "kv_cache": "fp8"} for layout, scheme in cached]
        found += [{"scheme": scheme, "pow2": True} for scheme in SCHEMES]
        found += [{"scheme": scheme, "weights": "mse", "pow2": pow2} for scheme in SCHEMES for pow2 in (False, True)]
        found += [{"scheme": scheme, "weights": "mse", "share": False} for scheme in ("tensor", "static")]
        found += [{"scheme": "static", "kv_cache": "fp8", "rule": rule} for rule in ("percentile", "mse")]
    return named(found)


def run_cases(name: str) -> dict[str, dict]:
    """The packings of runs that trained one of MODELS: name -> the recipe, and options of `pack`."""
    if name == "qwen2":  # fine-tuned
        return named([{"recipe": "rowwise"}])
    found: list[dict] = [{"recipe": recipe} for recipe in RECIPES]
    found += [{"recipe": recipe, "share": True} for recipe in ("tensorwise", "delayed")]
    found.append({"recipe": "delayed", "layout": "modelopt"})
    return named(found)


def named(found: list[dict]) -> dict[str, dict]:
    """The same cases by name; a name lists the options."""
    return {", ".join(f"{key} {value}" for key, value in how.items()): how for how in found}


def write_model(folder: Path, name: str) -> Path:
    dtype = MODELS[name][2]
    folder.mkdir(parents=True)
    write_config(folder, name)
    save_file({key: t.to(dtype) for key, t in weights(name).items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


def write_config(folder: Path, name: str) -> None:
    kind, sizes, _ = MODELS[name]
    model_type = re.split("For|LM|Model", kind)[0].lower()
    (folder / "config.json").write_text(json.dumps({"architectures": [kind], "model_type": model_type, **sizes}))


def write_run(folder: Path, name: str, recipe: str) -> Path:
    """A run of `octavo train` at step 7, of our Llama or a fine-tuned model, with the scales of delayed scaling."""
    checkpoint = folder / "step-00000007"
    (folder / "model").mkdir(parents=True)
    checkpoint.mkdir()
    model = "llama" if name.startswith("llama") else "/a/folder/that/is/gone"
    settings = {"model": model, "recipe": recipe, "skip": ["*.1.self_attn.*"]}
    (folder / "config.json").write_text(json.dumps(settings))
    write_config(folder / "model", name)
    save_file(weights(name), checkpoint / "model.safetensors")
    histories = {}
    for layer in linears(name):
        for operand in ("x", "w"):
            history = f"{layer}.histories.{operand}"
            histories[f"{history}.scale"] = amplitudes(history, 1).reshape(1, 1) / 448
            histories[f"{history}.steps"] = torch.tensor(7)
    save_file(histories, checkpoint / "state.safetensors")
    return folder


def weights(name: str) -> dict[str, Tensor]:
    """The float32 tensors of one of MODELS. Llama has no element that is subnormal in e4m3: between two scales that
    differ by a power of two, such elements alone decide, and with them the order of a floating-point sum."""
    kind, sizes, _ = MODELS[name]
    made = getattr(transformers, kind)
    with torch.device("meta"):
        model = made(made.config_class(**sizes))
    octaves = 8 if name.startswith("llama") else 24
    return {key: numbers(f"{name} {key}", tuple(p.shape), octaves) for key, p in model.named_parameters()}


def numbers(seed: str, shape: tuple[int, ...], octaves: int) -> Tensor:
    """Numbers of either sign, exact in float32. Their magnitudes span `octaves`, and 3 more from row to row."""
    raw = random_raw(seed, shape)
    mantissa = (1 + (raw >> 48) * 2.0**-16) * (1 - 2.0 * (raw & 1))
    exponent = (raw >> 8) % octaves + (np.arange(shape[0]) % 4).reshape(-1, *[1] * (len(shape) - 1))
    size = 1 - zlib.crc32(seed.encode()) % 32 / 64  # tensors that share a scale differ in their largest elements
    return torch.from_numpy(np.ldexp(mantissa * size, -exponent).astype(np.float32))


def amplitudes(seed: str, count: int) -> Tensor:
    """Magnitudes from 2^-7 to 2, exact in BF16: float32 [count]."""
    raw = random_raw(seed, (count,))
    return torch.from_numpy(np.ldexp(1 + (raw >> 56) / 128, raw % 8 - 7).astype(np.float32))


def random_raw(seed: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random integers from 0 to 2^63 - 1; NumPy keeps this stream the same in every version."""
    raw = np.random.PCG64(zlib.crc32(seed.encode())).random_raw(int(np.prod(shape)))
    return (raw >> np.uint64(1)).astype(np.int64).reshape(shape)


def linears(name: str) -> list[str]:
    """The linear layers of one of MODELS; GPT-2 is packed as OPT."""
    found = [key.removesuffix(".weight") for key in weights("opt" if name == "gpt2" else name) if ".weight" in key]
    return [layer for layer in found if re.search(r"_proj$|\.fc[12]$|\.(query|key|value|dense)$", layer)]


def write_calibration(folder: Path, model: Path, name: str) -> Path:
    """A calibration of the folder `model`, with statistics by formula and a site for each linear layer."""
    folder.mkdir()
    sites = {f"{layer}.input": {"kind": "input", "layers": [layer]} for layer in linears(name)}
    for layer in linears(name):
        if layer.endswith(".k_proj"):
            attention = layer.removesuffix(".k_proj")
            sites |= {f"{attention}.{kind[0]}": {"kind": kind, "layers": []} for kind in ("key", "value")}
    digest = hashlib.sha256()
    for path in (model / "config.json", model / "model.safetensors"):
        digest.update(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    described = {
        "format_version": 1, "model_hash": digest.hexdigest(), "settings": {}, "versions": {}, "prompts": 2,
        "tokens": 64, "sites": sites,
    }  # fmt: skip
    (folder / "calibration.json").write_text(json.dumps(described))
    tensors = {f"{site}.{leaf}": t for site in sites for leaf, t in statistics(site).items()}
    save_file(tensors, folder / "calibration.safetensors")
    return folder


def statistics(site: str) -> dict[str, Tensor]:
    """The statistics of a site of one channel that 64 tokens have passed, by the names of calibration.safetensors."""
    seen = amplitudes(site, 64)
    bins = seen.bfloat16().view(torch.int16).long()
    first, largest = int(bins.min()), seen.max()
    return {
        "tokens": torch.tensor(64),
        "channel_amax": largest.reshape(1),
        "history": largest.reshape(1).clone(),
        "histogram": torch.bincount(bins - first),
        "first_bin": torch.tensor(first),
    }


def digest_folder(folder: Path) -> str:
    """The first 16 hexadecimal digits of SHA-256 over the names and the contents of all files but the model card. JSON,
    the headers of safetensors files included, is without the keys that `stable` leaves out."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.name != "README.md"):
        digest.update(path.name.encode())
        if path.suffix == ".json":
            digest.update(json.dumps(stable(json.loads(path.read_text()))).encode())
            continue
        content = path.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        digest.update(json.dumps(stable(json.loads(content[8:start]))).encode() + content[start:])
    return digest.hexdigest()[:16]


def stable(content):
    """A JSON value without the keys that depend on the version or the machine. It also lacks the keys that `pack` did
    not write yet when the digests were made: not_linear, checksums, and of an OPT num_key_value_heads."""
    if isinstance(content, list):
        return [stable(value) for value in content]
    if not isinstance(content, dict):
        return content
    left_out = ["octavo_version", "producer", "sqnr_gain_db", "not_linear", "checksums"]
    if content.get("model_type") == "opt":
        left_out.append("num_key_value_heads")
    return {key: stable(value) for key, value in content.items() if key not in left_out}
