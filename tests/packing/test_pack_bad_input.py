"""Sources and options that cannot be packed, and tensors that no model has."""

import json
import re
import shutil
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from tiny_models import make_model, same_bytes
from transformers import OpenAIGPTConfig, OpenAIGPTLMHeadModel
from verify_examples import change_settings, change_tensors

from octavo.checkpoint.files import ArtifactError
from octavo.checkpoint.scheme import SCHEMES
from octavo.numerics import QTensor
from octavo.ops import quantize
from octavo.packing import pack
from octavo.packing.options import check_degrees


def test_layers_that_are_stored_transposed_are_refused(tmp_path):
    sizes = {"vocab_size": 64, "n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 16}
    OpenAIGPTLMHeadModel(OpenAIGPTConfig(**sizes)).save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r"no layer that can be packed \(transformer.h.0.attn.c_attn: a Conv1D stores"):
        pack(tmp_path / "model", tmp_path / "out")


def test_float64_is_packed_and_what_the_model_has_no_place_for_is_left_out(made, tmp_path):
    old, name = shutil.copytree(made("llama"), tmp_path / "old"), "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_tensors(old, lambda found: found.update({n: t.double() for n, t in found.items()} | {name: torch.ones(16)}))
    assert pack(old, tmp_path / "out").left_out == [name]
    assert same_bytes(tmp_path / "out", made("llama", scheme="channel"))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"scheme": "rowwise"}, "unknown scheme 'rowwise': choose one of channel, tensor, static, block, mx, group32"),
        ({"layout": "gptq"}, "unknown layout 'gptq': choose one of compressed-tensors, fp8"),
        ({"layout": "torchao"}, "octavo reads the layout torchao alone: choose one of compressed-tensors, fp8"),
        ({"layout": "fp8"}, "the layout fp8 holds the scheme block alone, not channel"),
        ({"layers": {"*.nothing": "block"}}, r"'\*.nothing' matches no packed layer"),
        ({"skip": ["*.nothing"]}, "matches no linear layer"),
        ({"step": 3}, "is a model, not a run of octavo train"),
        ({"skip": ["*.1.*.k_proj"]}, "self_attn.q_proj need one scheme, .*q_proj channel, .*k_proj BF16: name"),
        ({"layers": {"*.gate_proj": "block"}}, "need .* they have .*up_proj channel, .*gate_proj block: name"),
        ({"weights": "best"}, "unknown rule 'best' for weights: choose one of amax, mse"),
        ({"input_scales": {"other": torch.ones(1)}}, "input_scales has no scale of model.layers.0.self_attn.q_proj"),
        ({"input_scales": {"a": torch.zeros(1)}}, "the scale of a must be one positive number"),
        ({"input_scales": {"a": torch.tensor([torch.inf])}}, "the scale of a must be one positive number"),
        ({"input_scales": {"a": torch.ones(2)}}, "the scale of a must be one positive number"),
        ({"kv_cache": "int8"}, "unknown cache 'int8' of keys and values: choose fp8"),
        ({"kv_cache": "fp8"}, "--kv-cache stores scales of keys and values: give --calibration"),
        ({"kv_cache": "fp8", "scheme": "block", "layout": "fp8"}, "no place for the scales of a KV cache: --layout"),
        ({"layout": "modelopt", "scheme": "tensor"}, "modelopt holds the schemes static, channel, block, not tensor"),
        ({"layout": "modelopt", "layers": {"*.o_proj": "block"}}, "modelopt holds one scheme in a model, not block"),
    ],
)
def test_what_cannot_be_asked_for(made, tmp_path, how, message):
    with pytest.raises(ValueError, match=message):
        pack(made("llama"), tmp_path / "out", **how)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("kind", "said", "options", "others", "fitting"),
    [("llama", r"k_proj: \[64, 128\]", 3, 3, 8), ("deepseekv3", r"q_a_proj: \[32, 128\]", 10, 22, 5)],
)
def test_sizes_that_a_scheme_cannot_have(tmp_path, kind, said, options, others, fitting):
    """One message names all of the layers and what is fused with them, few by few, and packing as it says works."""
    source = make_model(tmp_path / "source", kind, num_key_value_heads=2, moe_intermediate_size=64)
    how = {"scheme": "block", "experts": kind != "llama"}
    with pytest.raises(ValueError, match=f"{said} is no multiple of 128 x 128.* {others} other layers cannot") as error:
        pack(source, tmp_path / "out", **how)
    globs = re.findall(r"--layer '(\S+)=channel'", str(error.value))
    assert len(globs) == options
    report = pack(source, tmp_path / "out", layers=dict.fromkeys(globs, "channel"), **how)
    blocks = [name for name, scheme in report.packed.items() if scheme == "block"]
    assert len(blocks) == fitting
    with pytest.raises(ValueError, match=r"pack by channel \(--scheme channel\)"):
        pack(source, tmp_path / "none", skip=blocks, **how)


def test_sources_that_cannot_be_packed(made, tmp_path):
    models = dict.fromkeys(["other", "old", "adapted", "large"], "llama") | {"untied": "qwen2"}
    models |= {"without expert": "mixtral", "greedy": "mixtral"}
    for name, model in models.items():
        shutil.copytree(made(model), tmp_path / name)
    (tmp_path / "adapted" / "adapter_config.json").write_text("{}")
    embedding, expert = "model.embed_tokens.weight", "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    change_tensors(tmp_path / "without expert", lambda t: t.pop(expert))
    change_settings(tmp_path / "greedy" / "config.json", num_experts_per_tok=5)
    change_tensors(tmp_path / "untied", lambda t: t.update({"lm_head.weight": 2 * t[embedding]}))
    change_tensors(tmp_path / "large", lambda t: t.update({"model.norm.weight": torch.full((128,), 3.4e38)}))
    change_tensors(tmp_path / "old", lambda t: t.update({"embed_out.weight": t.pop("lm_head.weight")}))
    change_settings(tmp_path / "other" / "config.json", intermediate_size=384)
    for name, message in (
        ("other", "is not of the model that its config.json describes.*must have shape"),
        ("adapted", r"adapters beside its model \(adapter_config.json\).*merge them"),
        ("large", "model.norm.weight has numbers beyond the range of torch.bfloat16, in which .*: make them smaller"),
        ("untied", "holds model.embed_tokens.weight and lm_head.weight, which differ.*set tie_word_embeddings"),
        ("without expert", f"{expert} is missing"),
        ("greedy", r"config\.json: num_experts_per_tok must be at most .*, got 5 of 4"),
        ("old", r"lacks lm_head.weight \(1 in all\), and has embed_out.weight.*with the new names"),
    ):
        with pytest.raises(ArtifactError, match=message):
            pack(tmp_path / name, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*"))
    change_tensors(tmp_path / "untied", lambda t: t.update({"lm_head.weight": t[embedding].clone()}))
    assert same_bytes(pack(tmp_path / "untied", tmp_path / "out").folder, made("qwen2", scheme="channel"))


@pytest.mark.parametrize(
    ("kind", "named", "message"),
    [
        ("speech_to_text", "Speech2TextModel", "describes a Speech2TextModel, whose inputs Octavo does not know"),
        ("wav2vec2", "Wav2Vec2Model", "describes a Wav2Vec2Model, whose inputs"),  # has no embedding at all
        ("vit", None, "must state architectures, the class of a model that is not causal"),
    ],
)
def test_a_config_that_describes_no_model_of_ours(tmp_path, kind, named, message):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "architectures": named and [named]}))
    with pytest.raises(ArtifactError, match=message):
        pack(tmp_path, tmp_path / "out")


# ---- Which models can be split over several devices, against a split that is really made


def check(scheme: str, leaf: str, size: tuple[int, int], degree: int, **config: int) -> None:
    name, heads = f"model.layers.0.{leaf}", {"num_attention_heads": 8, "num_key_value_heads": 4}
    check_degrees({name: SCHEMES[scheme]}, {name: size}, heads | config, [degree])


def can_be_cut(q: QTensor, by: int, degree: int) -> bool:
    """Whether each device's part of data and scales is, by itself, the same part of the numbers."""
    shared = q.granularity.cols is None and by == 1  # a scale a row goes to every device
    if q.data.shape[by] % degree or (not shared and q.scale.shape[by] % degree):
        return False
    scales = [q.scale] * degree if shared else q.scale.chunk(degree, by)
    parts = zip(q.data.chunk(degree, by), scales, q.dequantize().chunk(degree, by), strict=True)
    try:
        return all(torch.equal(QTensor(d, s, q.format, q.granularity).dequantize(), whole) for d, s, whole in parts)
    except ValueError:
        return False


@pytest.mark.parametrize("scheme", ["channel", "tensor", "block", "mx", "group64", "weight"])
def test_a_split_is_legal_where_it_can_be_made(scheme):
    for size in [(256, 512), (512, 256), (1024, 1024), (384, 128), (128, 96 * 4)]:
        q = quantize(torch.randn(size), SCHEMES[scheme].weight)
        for degree, (leaf, by) in product([1, 2, 4, 8], [("mlp.up_proj", 0), ("mlp.down_proj", 1)]):
            legal = (scheme == "tensor" and size[by] % degree == 0) or can_be_cut(q, by, degree)
            said = rf"{leaf}: \[{size[0]}, {size[1]}\] over {degree} devices"
            with nullcontext() if legal else pytest.raises(ValueError, match=said):
                check(scheme, leaf, size, degree)


@pytest.mark.parametrize(
    ("scheme", "leaf", "size", "degree", "config", "message"),
    [
        ("channel", "self_attn.q_proj", 1024, 16, {}, "8 heads of attention do not divide over 16.*degree of 1, 2, 4"),
        ("channel", "self_attn.q_proj", 1024, 6, {"num_attention_heads": 12}, "4 heads of keys and values neither div"),
        ("channel", "self_attn.q_proj", 1024, 0, {}, "1 device or more, not 0"),
        ("block", "self_attn.k_proj", 512, 8, {}, ""),  # 4 heads of 128 rows: two devices have the same one
        ("block", "self_attn.k_proj", 256, 8, {}, r"k_proj: \[256, 1024\] over 8 devices gives each 64 rows.*of 128"),
        ("channel", "score", 64, 1, {}, ""),
        ("channel", "score", 64, 2, {}, "score: how readers split this layer over 2 devices is not known"),
    ],
)
def test_heads_stay_whole(scheme, leaf, size, degree, config, message):
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        check(scheme, leaf, (size, 1024), degree, **config)


def test_pack_refuses_before_it_writes(tmp_path):
    make_model(tmp_path / "source", "llama", hidden_size=256, intermediate_size=384, num_hidden_layers=1, head_dim=64)
    with pytest.raises(ValueError, match=r"gate_proj.*2 devices gives each 192 rows.*'\*.gate_proj=channel' --layer"):
        pack(tmp_path / "source", tmp_path / "out", scheme="block", tensor_parallel=[1, 2])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
    pack(tmp_path / "source", tmp_path / "out", scheme="block", layers={"*.mlp.*": "channel"}, tensor_parallel=[1, 2])
