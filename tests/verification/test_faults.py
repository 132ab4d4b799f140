"""Faults, each planted in a right folder: `verify` finds it, names the tensor, the layer or the setting, and runs
nothing.

The folders have no checksums, so each is found by what the bytes and the settings mean.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_examples import small_shards
from safetensors.torch import load_file, save_file
from tiny_models import Folders, folder_maker, make_model, with_slow
from torch import Tensor
from verify_examples import change_config, change_json, change_tensors

from octavo.packing import pack
from octavo.verification import verify

pytestmark = pytest.mark.usefixtures("no_readers")
ATTENTION, DOWN = "model.layers.1.self_attn", "model.layers.1.mlp.down_proj"
Q, K, V, OUT = (f"{ATTENTION}.{leaf}_proj" for leaf in "qkvo")
EXPERT = "model.layers.0.block_sparse_moe.experts.{}.w1"
ROUTER = "model.layers.0.block_sparse_moe.gate"
NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"
SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
E4M3 = torch.float8_e4m3fn
Models = Callable[[str], tuple[Path, Path, Path | None]]
Damage = Callable[[Path, Path], Any]
"""Damages a folder; the second path is MODEL."""
# Name -> the model of tiny_models, its sizes, and options of `pack`.
WIDE = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 8}
FOLDERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "channel": ("llama", WIDE, {"scheme": "channel"}),
    "tensor": ("llama", WIDE, {"scheme": "tensor", "share": False}),
    "block": ("llama", WIDE, {"scheme": "block"}),
    "fp8": ("llama", WIDE, {"scheme": "block", "layout": "fp8"}),
    "mx": ("llama", WIDE, {"scheme": "mx"}),
    "static": ("llama", WIDE, {"scheme": "static", "kv_cache": "fp8"}),
    "shards": ("llama", WIDE, {"scheme": "channel"}),
    "experts": ("mixtral", {}, {"scheme": "channel", "experts": True}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """models(name) is one of FOLDERS, MODEL, and its calibration if the folder has stored scales. Each is made once."""
    makers = {name: folder_maker(tmp_path_factory.mktemp(name), **sizes) for name, (_, sizes, _) in FOLDERS.items()}

    def find(name: str) -> tuple[Path, Path, Path | None]:
        (kind, _, how), make = FOLDERS[name], makers[name]
        with small_shards(100_000 if name == "shards" else 10**9):
            return make(kind, **how), make(kind), make(kind, "calibrated") if how["scheme"] == "static" else None

    return find


# ---- Faults.


def edit(change: Callable[[dict[str, Tensor]], Any]) -> Damage:
    return lambda folder, model: change_tensors(folder, change)


def replaced(name: str, function: Callable[[Tensor], Tensor]) -> Damage:
    return edit(lambda tensors: tensors.update({name: function(tensors[name].clone())}))


def renamed(old: str, new: str) -> Damage:
    return edit(lambda tensors: tensors.update({new: tensors.pop(old)}))


def changed(name: str, change: Callable[[Tensor], Any], place: Any = ...) -> Damage:
    """Change a tensor, or a part of it; of e4m3 its bytes."""

    def function(tensor: Tensor) -> Tensor:
        numbers = tensor.view(torch.uint8) if tensor.dtype == E4M3 else tensor
        numbers[place] = change(numbers[place])
        return tensor

    return replaced(name, function)


def times(name: str, factor: float, place: Any = ...) -> Damage:
    return changed(name, lambda scale: scale * factor, place)


def put(name: str, place: Any, value: float) -> Damage:
    return changed(name, lambda _: value, place)


def swapped(*names: tuple[str, str]) -> Damage:
    def change(tensors: dict[str, Tensor]) -> None:
        for a, b in names:
            tensors[a], tensors[b] = tensors[b].clone(), tensors[a].clone()

    return edit(change)


def layers_swapped(a: str, b: str) -> Damage:
    return swapped(*((a + leaf, b + leaf) for leaf in (W, SCALE)))


def rows_swapped(t: Tensor) -> Tensor:
    """An eight-bit tensor cannot be indexed."""
    return t.view(torch.uint8)[[1, 0, *range(2, len(t))]].view(t.dtype)


def cast_again(name: str, cast: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Damage:
    """Write the bytes cast(w, s, q) of MODEL's weight w, with the scale s and the bytes q that the folder has."""

    def damage(folder: Path, model: Path) -> None:
        w = load_file(model / SINGLE)[name + W].float()
        change_tensors(folder, lambda found: found.update({name + W: cast(w, found[name + SCALE], found[name + W])}))

    return damage


def rounded_to_odd(w: Tensor, s: Tensor, even: Tensor) -> Tensor:
    """One byte, of a weight / scale halfway between two numbers, is the odd one."""
    other = (2 * w / torch.exp2(s.float() - 127).repeat_interleave(32, 1) - even.float()).clamp(-448, 448)
    odd = other.to(E4M3)
    halfway = (odd.float() == other) & (odd.view(torch.uint8).int() - even.view(torch.uint8).int()).abs().eq(1)
    place = tuple(halfway.nonzero()[0])
    even.view(torch.uint8)[place] = odd.view(torch.uint8)[place]
    return even


def noisy(share: float) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Another checkpoint of the model."""
    noise = torch.Generator().manual_seed(0)
    return lambda w, s, _: ((w + share * w.std() * torch.randn(w.shape, generator=noise)) / s).clamp(-448, 448).to(E4M3)


def truncated(w: Tensor, s: Tensor, _: Tensor) -> Tensor:
    """Toward zero: the next number down where rounding to nearest goes up."""
    x = w / s
    q = x.clamp(-448, 448).to(E4M3)
    up = q.float().abs() > x.abs()
    return (q.view(torch.uint8) - up.to(torch.uint8)).view(E4M3)


def in_json(name: str, change: Callable[[dict[str, Any]], Any]) -> Damage:
    return lambda folder, model: change_json(folder / name, change)


def setting(**values: Any) -> Damage:
    return in_json(CONFIG, lambda config: config.update(values))


def quantization(**settings: Any) -> Damage:
    return lambda folder, model: change_config(folder, **settings)


def group(change: Callable[[dict[str, Any]], Any]) -> Damage:
    return in_json(CONFIG, lambda config: change(config["quantization_config"]["config_groups"]["group_0"]))


def labelled(kind: str = "float", **weights: Any) -> Damage:
    label = group(lambda found: found["weights"].update(weights, type=kind))
    return lambda *folder: (label(*folder), quantization(format=f"{kind}-quantized")(*folder))


def index(change: Callable[[dict[str, str]], Any]) -> Damage:
    return in_json(INDEX, lambda content: change(content["weight_map"]))


def removed(name: str) -> Damage:
    return lambda folder, model: min(folder.glob(name)).unlink()


def written(name: str, content: bytes) -> Damage:
    return lambda folder, model: (folder / name).write_bytes(content)


def cut(folder: Path, model: Path) -> None:
    path = folder / SINGLE
    os.truncate(path, path.stat().st_size - 100)


def written_twice(folder: Path, model: Path) -> None:
    """All tensors of the first shard are in the second, too."""
    [first, second, *_] = sorted(folder.glob("model-*"))
    names = json.loads((folder / INDEX).read_text())["weight_map"]
    save_file({name: torch.zeros(1) for name, file in names.items() if file in (first.name, second.name)}, second)


W, SCALE = ".weight", ".weight_scale"
UNFIT = "1 of 256 scales do not fit their bytes"
EXIT = b"cbuiltins\nexit\n(tR."  # a pickle that ends the program that loads it
BAD_FILE = "is truncated or not a safetensors file"
# What fails -> the folder, the damage, the kind of finding, what it is about, and what its message says.
FAULTS: dict[str, tuple[str, Damage, str, str, str]] = {
    # files
    "the file is cut": ("channel", cut, "file", SINGLE, BAD_FILE),
    "no tensors": ("channel", removed(SINGLE), "file", SINGLE, "the folder has no tensors"),
    "half of config.json": ("channel", written(CONFIG, b"{"), "file", CONFIG, "is not valid JSON"),
    "another encoding": ("channel", written(CONFIG, b"\xff\xfe{"), "file", CONFIG, "is not valid JSON"),
    "a list": ("channel", written(CONFIG, b"[]"), "file", CONFIG, "must hold a JSON object, it holds list"),
    "no config.json": ("channel", removed(CONFIG), "file", CONFIG, "is missing"),
    "a pickle": ("channel", written("training.bin", b"x"), "pickle", "training.bin", "not opened: move it elsewhere"),
    "a pickle alone": ("channel", lambda *at: (removed(SINGLE)(*at), written("pytorch_model.bin", EXIT)(*at)), "pickle",
        "pytorch_model.bin", "is a pickle, which can run code, and was not opened"),
    "an older index": ("channel", written(INDEX, b'{"weight_map": {"a": "b.safetensors"}}'), "file", INDEX,
        "does not name model.safetensors, beside which vLLM reads what it names: move it elsewhere"),
    "an empty index": ("shards", written(INDEX, b"{}"), "file", INDEX, "must map the name of each tensor"),
    "a file above": ("shards", index(lambda files: files.update({Q + W: "../../s.safetensors"})), "file", INDEX,
        "'../../s.safetensors', which is outside of the"),
    "a pickle in the index": ("shards", index(lambda files: files.update({Q + W: "model.bin"})), "file", INDEX,
        "'model.bin', which is not a safetensors"),
    "a tensor not listed": ("shards", index(lambda files: files.pop(NORM)), "tensor", NORM, "does not list it"),
    "a tensor listed alone": ("shards", index(lambda files: files.update({"model.extra": files[NORM]})), "tensor",
        "model.extra", "is missing in model-"),
    "a shard is missing": ("shards", removed("model-*"), "file", "model-00001-of-00016.safetensors",
        f"is missing, and {INDEX} names it"),
    "a shard is written twice": ("shards", written_twice, "tensor", EMBEDDING, "is in two files, model-00001"),
    # scales and bytes
    "a row's scale +2 %": ("channel", times(DOWN + SCALE, 1.02, 5), "weights", DOWN + W, "1 of 256 scales are not: [5"),
    "a tensor's scale +2 %": ("tensor", times(Q + SCALE, 1.02), "weights", Q + W, "1 of 1 scales are not"),
    "a block's scale +2 %": ("block", times(DOWN + SCALE, 1.02, (0, 1)), "weights", DOWN + W,
        "1 of 4 scales are not: [0, 1] is"),
    "huge scales": ("channel", times(Q + SCALE, 1e31), "weights", Q + W, "256 of 256 scales are"),
    "an exponent of MX + 1": ("mx", changed(Q + SCALE, lambda s: s + 1, (9, 1)), "weights", Q + W,
        "1 of 2048 scales are not: [9, 1] is"),
    "an exponent of MX - 1": ("mx", changed(Q + SCALE, lambda s: s - 1, (9, 1)), "weights", Q + W,
        "1 of 2048 scales are not: [9, 1] is"),
    "block scales transposed": ("block", replaced(OUT + SCALE, lambda s: s.T), "weights", OUT + W, "scales are not"),
    "reciprocal scales": ("channel", replaced(Q + SCALE, lambda s: 1 / s), "weights", Q + W, "the scale is reciprocal"),
    "reciprocal exponents": ("mx", replaced(Q + SCALE, lambda s: 254 - s), "weights", Q + W, "the scale is reciprocal"),
    "1 byte in 1000 off by a code": ("channel", changed(DOWN + W, lambda codes: codes ^ 1, (slice(None, None, 4), 7)),
        "weights", DOWN + W, "64 of 65536 bytes are not MODEL's weight / scale rounded to nearest: ["),
    "one byte is rounded to odd": ("mx", cast_again(Q, rounded_to_odd), "weights", Q + W,
        "1 of 65536 bytes are not MODEL's"),
    "truncated": ("channel", cast_again(Q, truncated), "weights", Q + W, "scales are not"),
    "a checkpoint with 1 % of noise": ("channel", cast_again(Q, noisy(0.01)), "weights", Q + W, "bytes are not"),
    # without MODEL
    "a row is zero": ("channel", put(DOWN + W, 0, 0), "weights", DOWN + W, UNFIT),
    "the largest byte of a row": ("channel", changed(DOWN + W, lambda codes: codes - 8 * (codes & 127 == 126), 0),
        "weights", DOWN + W, UNFIT),
    "a row's scale x 2^-9": ("channel", times(DOWN + SCALE, 2.0**-9, 5), "weights", DOWN + W, UNFIT),
    "a row's scale x 2^9": ("channel", times(DOWN + SCALE, 2.0**9, 5), "weights", DOWN + W, "255 of 256 scales do not"),
    "a block of MX is zero": ("mx", put(DOWN + W, 0, 0), "weights", DOWN + W, "8 of 2048 scales do not fit"),
    # stored scales
    "k_scale x 1.3": ("static", times(f"{ATTENTION}.k_scale", 1.3), "scale", f"{ATTENTION}.k_scale", "the calibration"),
    "k_scale and v_scale swapped": ("static", swapped((f"{ATTENTION}.k_scale", f"{ATTENTION}.v_scale")), "scale",
        f"{ATTENTION}.k_scale", f"{ATTENTION}.v: keys and values are swapped"),
    "input_scale +2 %": ("static", times(f"{Q}.input_scale", 1.02), "scale", f"{Q}.input_scale", "calibration gives"),
    # what the folder says about its model
    "tokenizer's ids exchanged": ("channel", in_json("tokenizer.json", lambda found: found["model"].update(
        vocab={token: i ^ 1 for token, i in found["model"]["vocab"].items()})), "config", "tokenizer.json",
        "256 entries are not MODEL's"),
    "eos of generation": ("channel", in_json("generation_config.json", lambda found: found.update(eos_token_id=7)),
        "config", "generation_config.json", "eos_token_id is 7, MODEL has 0"),
    "no eos": ("channel", lambda *at: (removed("generation_config.json")(*at), in_json(CONFIG, lambda found:
        found.pop("eos_token_id"))(*at)), "config", CONFIG, "eos_token_id is 2, MODEL has 0"),
    "a file beside the weights": ("shards", written("b.safetensors", b""), "", "", "b.safetensors is not of the model"),
    "no eos of generation": ("channel", in_json("generation_config.json", lambda found: found.pop("eos_token_id")), "",
        "", "generation_config.json lacks eos_token_id, which MODEL has"),
    "a normalizer": ("channel", in_json("tokenizer.json", lambda found: found.update(normalizer={"type": "Strip"})), "",
        "", "the normalizer of the tokenizer is not MODEL's"),
    "a chat template": ("channel", written("chat_template.jinja", b"{{ messages }}"), "", "", "the chat_template of"),
    "a label without inputs, a legal scheme": ("channel", group(lambda found: found.update(input_activations=None)), "",
        "", "was packed by channel, and config.json says weight"),
    # tensors
    "too small": ("channel", replaced(DOWN + W, lambda w: w[:128]), "tensor", DOWN + W, "must have shape [256, 256]"),
    "q and k swapped": ("channel", layers_swapped(Q, K), "weights", Q + W, "the bytes are not MODEL's weight"),
    "experts swapped": ("experts", layers_swapped(EXPERT.format(1), EXPERT.format(2)), "weights", EXPERT.format(1) + W,
        "the bytes are not"),
    "an element of a norm": ("channel", put(NORM, 4, 1.5), "weights", NORM, "is not MODEL's"),
    "the router": ("experts", replaced(ROUTER + W, rows_swapped), "weights", ROUTER + W, "is not MODEL's, rounded to"),
    "no norm": ("channel", renamed(NORM, "model.norm.w"), "tensor", NORM, "is missing, and the model needs it"),
    "no scale": ("fp8", renamed(f"{Q}.weight_scale_inv", f"{Q}.scale"), "scale", f"{Q}.weight_scale_inv", "is missing"),
    "no input_scale": ("static", renamed(f"{Q}.input_scale", f"{Q}.s"), "scale", f"{Q}.input_scale", "is missing"),
    "a weight in BF16": ("channel", replaced(Q + W, lambda w: w.float().bfloat16()), "config", Q + W,
        f"is stored in BF16, and the list of ignored modules lacks {Q}"),
    # numbers
    "a scale is negative": ("block", put(DOWN + SCALE, (0, 1), -1), "scale", DOWN + SCALE, "1 of 4 are negative"),
    "an exponent is NaN": ("mx", put(Q + SCALE, (0, 0), 255), "scale", Q + SCALE, "1 of 2048 are NaN (255)"),
    "an input_scale is zero": ("static", put(f"{Q}.input_scale", 0, 0), "scale", f"{Q}.input_scale", "1 of 1 are zero"),
    "a norm is inf": ("channel", put(NORM, 4, torch.inf), "tensor", NORM, "must be finite: 1 of 256"),
    # what quantization_config ignores
    "the head is not ignored": ("channel", quantization(ignore=[]), "", "", "list of ignored modules lacks lm_head"),
    "a packed layer is ignored": ("channel", quantization(ignore=["lm_head", Q]), "config", Q + W,
        "list of ignored modules has"),
    "the scheme of the KV cache removed": ("static", quantization(kv_cache_scheme=None), "tensor",
        f"{ATTENTION}.k_scale", "has no place"),
}  # fmt: skip


def of_channel(kind: str, where: str, faults: dict[str, tuple[Damage, str]]) -> None:
    """Add faults of the folder "channel": what fails -> the damage, and what the message says."""
    FAULTS.update({name: ("channel", damage, kind, where, message) for name, (damage, message) in faults.items()})


of_channel("config", CONFIG, {
    "no model": (written(CONFIG, b'{"a": 1}'), "transformers cannot build the model"),
    "rope_theta": (in_json(CONFIG, lambda config: config["rope_parameters"].update(rope_theta=100_000.0)),
        "rope_parameters.rope_theta is 100000.0, MODEL has 10000.0"),
    "a window": (setting(layer_types=["sliding_attention"] * 2, sliding_window=4), "MODEL has ['full_attention', "),
    "head count": (setting(num_attention_heads=16, num_key_value_heads=16, head_dim=16),
        "num_attention_heads is 16, MODEL has 8"),
    "an own head is tied": (setting(tie_word_embeddings=True), "tie_word_embeddings"),
    "no such layer is ignored": (quantization(ignore=["lm_head", "model.layers.7.o"]),
        "has 'model.layers.7.o', which no module of the model has"),
    "no pattern is ignored": (quantization(ignore=["re:("]), "'(' is not a regular expression: missing )"),
    "ignore is a word": (quantization(ignore="lm_head"), "must be a list of names of"),
    "status": (quantization(quantization_status="frozen"), "quantization_status must be"),
    "gptq": (quantization(quant_method="gptq"),
        "quant_method must be one of compressed-tensors, fp8, modelopt, torchao, it is 'gptq'"),
    "AutoFP8": (quantization(quant_method="fp8", activation_scheme="dynamic"),
        "must state a weight_block_size, or null: this is AutoFP8"),
    "NVFP4": (quantization(quant_method="modelopt", quant_algo="NVFP4"), "quant_algo must be one of FP8, "),
    "torchao's int4": (quantization(quant_method="torchao", quant_type={"default": {"_type": "Int4", "_data": 3}}),
        "must be one Float8Dyn"),
    "packed words": (quantization(format="pack-quantized"), "format must be one of float-quantized"),
    "format of integers": (quantization(format="int-quantized"),
        "format is 'int-quantized', and the weights of config_groups have the type float"),
    "no groups": (quantization(config_groups={}), "must hold groups, it is {}"),
    "a group that is none": (quantization(config_groups={"g": 3}),
        "config_groups.g must have targets (names) and weights, it is 3"),
    "four bits": (labelled(num_bits=4), "must have num_bits 8, type float or int, and symmetric true; it has 4"),
    "an unknown strategy": (labelled(strategy="diagonal"), "strategy must be tensor, channel, group"),
})  # fmt: skip
of_channel("scale", Q + SCALE, {
    "scales too few": (replaced(Q + SCALE, lambda s: s[:64]), "must have shape [256, 1]"),
    "scales in float64": (replaced(Q + SCALE, Tensor.double), "it is F64"),
    "labelled block": (labelled(strategy="block", block_structure=[64, 64]), "must have shape [4, 4]"),
    "labelled tensor": (labelled(strategy="tensor"), "must have shape [1]"),
    "labelled exponents": (labelled(scale_dtype="torch.uint8"), "must be U8 or F8_E8M0, it is F32"),
    "the scale of another layout": (renamed(Q + SCALE, f"{Q}.weight_scale_inv"), "another layout"),
    "a scale is NaN": (put(Q + SCALE, (3, 0), torch.nan), "1 of 256 are NaN"),
    "a scale is inf": (put(Q + SCALE, (3, 0), torch.inf), "1 of 256 are inf"),
    "a scale is zero": (put(Q + SCALE, (3, 0), 0), "1 of 256 are zero"),
    "a scale is tiny": (put(Q + SCALE, (3, 0), 1e-44), "1 of 256 are below 2^-127, and 1 / scale overflows"),
})  # fmt: skip
of_channel("tensor", Q + W, {
    "labelled int8": (labelled("int"), "must be I8, it is F8_E4M3"),
    "labelled groups of 48": (labelled(strategy="group", group_size=48), "not a multiple of its blocks of 1 x 48"),
    "e5m2": (replaced(Q + W, lambda w: w.float().to(torch.float8_e5m2)), "must be F8_E4M3"),
    "a byte is NaN": (put(Q + W, (5, 5), 0xFF), "must be finite: 1 of 65536 are NaN"),
})  # fmt: skip
# Of several layers or settings: they have more than two findings.
SPREAD = {name for name in FAULTS if name.startswith("labelled ")}
SPREAD |= {"a shard is written twice", "head count", "the scheme of the KV cache removed"}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_found_and_named(models: Models, name: str, tmp_path: Path) -> None:
    made, damage, kind, where, message = FAULTS[name]
    folder, model, calibration = models(made)
    bad = shutil.copytree(folder, tmp_path / "bad")
    damage(bad, model)
    report = verify(bad) if " scales do not" in message else verify(bad, model, calibration=calibration)
    if not kind:  # a setting that some programs take: reported
        assert any(message in remark for remark in report.remarks), report.remarks
        return
    found = [f"{finding.kind} {finding}" for finding in report.findings]
    assert any(line.startswith(f"{kind} {where}: ") and message in line for line in found), found
    assert len(found) <= 2 or name in SPREAD, found
    assert report.not_run


@pytest.mark.parametrize("kind", FOLDERS)
def test_the_folders_are_right_before(models: Models, kind: str) -> None:
    folder, model, calibration = models(kind)
    report = verify(folder, model, calibration=calibration)
    assert (report.findings, report.remarks) == ([], [])
    assert verify(folder).findings == []


def uneven(tensors: dict[str, Tensor]) -> None:
    """A row of zeros, a small and a large one, and a group of zeros."""
    w = tensors[DOWN + W]
    w[1], w[2], w[3], w[:, 64:128] = 0, w[2] / 300, w[3] * 200, 0


BOTH = {"weights": "mse", "pow2": True}


@pytest.mark.parametrize("options", with_slow([BOTH, {"weights": "mse"}, {"pow2": True}, {}], (BOTH, {})))
def test_rows_of_any_size_fit_their_scales(models: Models, tmp_path: Path, options: dict[str, Any]) -> None:
    model = shutil.copytree(models("channel")[1], tmp_path / "model")
    change_tensors(model, uneven)
    for scheme in ("channel", "int8", "block", "group64", "mx"):
        pack(model, tmp_path / scheme, scheme=scheme, **options)
        assert verify(tmp_path / scheme).findings == []


def test_a_damaged_model_is_the_users_error(models: Models, tmp_path: Path) -> None:
    folder, model, _ = models("channel")
    cut(bad := shutil.copytree(model, tmp_path / "model"), bad)
    with pytest.raises(ValueError, match=BAD_FILE):
        verify(folder, bad)
    with pytest.raises(FileNotFoundError, match=f"there is no folder {tmp_path / 'none'}: give a packed folder .GGUF"):
        verify(tmp_path / "none", model)


def test_another_model(models: Models, made: Folders, tmp_path: Path) -> None:
    """It has the same sizes, other sizes, or another architecture, or is not packed."""
    folder, model, _ = models("block")
    for other, message in (
        (make_model(tmp_path / "a", "llama", seed=1, **WIDE), "the bytes are not MODEL's weight"),
        (make_model(tmp_path / "b", "llama", **WIDE, intermediate_size=384), "MODEL has shape [384, 256], the folder"),
        (made("opt"), "MODEL has no such tensor: the folder is of another model"),
    ):
        assert any(message in str(finding) for finding in verify(folder, other).findings)
    (finding,) = verify(model, model).findings
    assert str(finding).endswith("must have a quantization_config, as octavo pack writes it, and has None")
