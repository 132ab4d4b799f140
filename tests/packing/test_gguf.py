"""GGUF files: read by the package gguf, and run by transformers, which has a reader of its own.

The numbers are compared with Q8_0 as its definition has it, written down here in float64.
"""

import json
from unittest.mock import Mock

import gguf
import numpy as np
import pytest
import torch
from metrics import distance
from packed_examples import LLAMA, lively, write_run
from safetensors.torch import load_file
from tiny_models import make_model, with_slow
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from verify_examples import change_json, change_tensors

from octavo.checkpoint.files import ArtifactError
from octavo.checkpoint.folder import WriteError
from octavo.models import Llama, LlamaConfig
from octavo.models.tokenizer import ByteTokenizer
from octavo.packing.gguf_export import export_gguf

SIZES = {"vocab_size": 300, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
STRETCHED = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
KINDS = {
    "llama": {},
    "llama biased": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "llama wide heads": {"head_dim": 64},
    "llama far": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "llama stretched": {"rope_parameters": STRETCHED},
    "mistral": {"sliding_window": None},
    "qwen2": {},  # tied
    "qwen2 untied": {"tie_word_embeddings": False},
}
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
TEXT = ["The clerk's 1234 forms, größer than 99:\n\n  done! ", "It's 7 o'clock and we'll go."] * 9


def tokenizer(pre="gpt-2"):
    """A byte-level BPE of 256 bytes, two special tokens, an added word and some merges, that cuts texts as `pre`."""
    made = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    cut = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre != "gpt-2":
        split = pre_tokenizers.Split(Regex(LLAMA3 if pre == "llama-bpe" else LLAMA3.replace("{1,3}", "")), "isolated")
        cut = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    made.pre_tokenizer, made.decoder = cut, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=296, initial_alphabet=alphabet, show_progress=False, min_frequency=2)
    made.train_from_iterator(TEXT, trainer)
    made.add_special_tokens(["<bos>", "<eos>"])
    made.add_tokens(["clerk"])
    if pre == "llama-bpe":
        special = [("<bos>", made.token_to_id("<bos>"))]
        made.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=special)
    return made


def write_model(path, name, pre="gpt-2", **change):
    words = tokenizer(pre)
    ids = {"bos_token_id": words.token_to_id("<bos>"), "eos_token_id": words.token_to_id("<eos>")}
    make_model(path, name.partition(" ")[0], **SIZES | ids | KINDS[name] | change)
    words.save(str(path / "tokenizer.json"))
    stated = {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": "{{ messages }}"}
    stated |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    (path / "tokenizer_config.json").write_text(json.dumps(stated))
    return path


def q8_0(weight):
    """Blocks of 32: d = amax / 127, q = w / d rounded away from zero at one half, d itself rounded to float16."""
    blocks = weight.float().reshape(-1, 32)
    d = blocks.abs().amax(1, keepdim=True) / 127
    x = (blocks * torch.where(d == 0, 0, 1 / d)).double()
    q = torch.sign(x) * torch.floor(x.abs() + 0.5)
    return (q * d.half().double()).reshape(weight.shape).float()


def expected(folder, weights):
    """transformers' model of `folder` in float32, its numbers as the file is to have them."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for name, p in model.named_parameters():
            linear = p.ndim == 2 and not name.startswith(("lm_head", "model.embed"))
            if p.ndim == 2:
                p.copy_(q8_0(p) if linear and weights == "q8_0" else p.half().float())
    return model.eval()


@torch.no_grad()
def logits(model):
    return model(torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(3))).logits.double()


@pytest.mark.parametrize("weights", ["q8_0", "f16"])
@pytest.mark.parametrize("name", with_slow(KINDS, ("llama biased", "llama far", "llama stretched", "qwen2")))
def test_transformers_runs_what_we_write(tmp_path, name, weights):
    source = write_model(tmp_path / name, name)  # its reader takes the name "mistral" for an architecture
    report = export_gguf(source, tmp_path / "model.gguf", weights=weights)
    assert report.bytes == (tmp_path / "model.gguf").stat().st_size
    ours = expected(source, weights)
    wanted, how = logits(ours), {"gguf_file": "model.gguf", "dtype": torch.float32}
    assert wanted.std() > 0.2
    if name in ("llama biased", "llama stretched"):  # its reader knows nothing of such a Llama
        (remark,) = report.remarks
        assert "llama.cpp reads them, and transformers leaves them out" in remark
        assert f"config=AutoConfig.from_pretrained('{source}')" in remark
        assert distance(logits(AutoModelForCausalLM.from_pretrained(tmp_path, **how).eval()), wanted) > 0.1
        how["config"] = AutoConfig.from_pretrained(source)
    else:
        assert report.remarks == []
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True, **how)
    assert not [*info["missing_keys"], *info["mismatched_keys"]]
    assert theirs.config.rope_parameters["rope_theta"] == ours.config.rope_parameters["rope_theta"]
    found = dict(theirs.named_parameters())
    for key, p in ours.named_parameters():
        assert torch.equal(found[key], p), key
    assert distance(logits(theirs.eval()), wanted) < 1e-6


def fields(path):
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


def test_what_gguf_reads(tmp_path):
    source = write_model(tmp_path / "mine", "llama wide heads")
    (source / "README.md").write_text("---\ntags: [tiny]\nlicense: 'apache-2.0'\n---\n# Mine\n")
    report = export_gguf(source, tmp_path / "model.gguf")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    types = [tensor.tensor_type.name.lower() for tensor in reader.tensors]
    assert {kind: types.count(kind) for kind in types} == report.types == {"f16": 2, "q8_0": 14, "f32": 5}
    assert {tensor.name for tensor in reader.tensors} >= {"token_embd.weight", "output.weight", "blk.1.ffn_gate.weight"}
    values = fields(tmp_path / "model.gguf")
    assert (values["general.architecture"], values["general.license"]) == ("llama", "apache-2.0")
    assert values["general.file_type"] == gguf.LlamaFileType.MOSTLY_Q8_0
    wanted = {
        "context_length": 64, "embedding_length": 128, "block_count": 2, "feed_forward_length": 256, "vocab_size": 300,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 64, "rope.dimension_count": 64,
        "rope.freq_base": 10000.0,
    }  # fmt: skip
    assert {key: values[f"llama.{key}"] for key in wanted} == wanted
    assert values["llama.attention.layer_norm_rms_epsilon"] == np.float32(1e-5)
    words = tokenizer()
    size = words.get_vocab_size()
    tokens = [words.id_to_token(i) if i < size else f"[PAD{i}]" for i in range(300)]
    assert values["tokenizer.ggml.tokens"] == tokens
    kinds = dict(zip(tokens, values["tokenizer.ggml.token_type"], strict=True))
    kind = gguf.TokenType
    assert (kinds["a"], kinds["<eos>"], kinds["clerk"]) == (kind.NORMAL, kind.CONTROL, kind.USER_DEFINED)
    assert kinds["[PAD299]"] == kind.UNUSED
    assert values["tokenizer.ggml.eos_token_id"] == words.token_to_id("<eos>")
    assert values["tokenizer.chat_template"] == "{{ messages }}"


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2"])
def test_the_tokenizer_is_the_same(tmp_path, pre):
    kind = "qwen2" if pre == "qwen2" else "llama"
    export_gguf(write_model(tmp_path / "source", kind, pre), tmp_path / "model.gguf")
    values = fields(tmp_path / "model.gguf")
    assert values["tokenizer.ggml.pre"] == pre
    assert values["tokenizer.ggml.add_bos_token"] == (pre == "llama-bpe")
    original, special = tokenizer(pre), {"<bos>", "<eos>", "clerk"}
    vocabulary = {token: i for i, token in enumerate(values["tokenizer.ggml.tokens"]) if token not in special}
    merges = [tuple(pair.split(" ")) for pair in values["tokenizer.ggml.merges"]]
    rebuilt = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre == "llama-bpe"))
    rebuilt.pre_tokenizer = original.pre_tokenizer
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    for text in (TEXT[0].replace("clerk", "clark"), TEXT[1]):
        ids = original.encode(text, add_special_tokens=False).ids
        assert rebuilt.encode(text).ids == ids
        assert theirs.decode(ids) == text
        if pre == "qwen2":  # for a llama it cuts as Llama 2 would
            assert theirs.encode(text, add_special_tokens=False) == ids


def pieces(folder, drop=None, swap=False):
    """A tokenizer as Llama 2's: bytes, letters, pieces, each with all its merges; one may lack, or two be exchanged."""
    words = ["▁t", "▁th", "he", "▁the", "er", "rm", "orm", "▁f", "▁form", "▁forms", "99", "▁▁", "cl", "ler"]
    letters = sorted({c for text in TEXT for c in text.replace(" ", "▁") if c not in "öß\n"} | set("".join(words)))
    special = ["<unk>", "<s>", "</s>"]
    vocabulary = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *words, *letters]
    merges = [(w[:i], w[i:]) for w in words for i in range(1, len(w)) if {w[:i], w[i:]} <= set(vocabulary)]
    if drop is not None:
        del merges[drop]
    if swap:  # of one piece, and so no longer together
        merges.append(merges.pop(next(i for i, pair in enumerate(merges) if "".join(pair) == "▁the")))
    ids = {token: i for i, token in enumerate(vocabulary)}
    made = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.add_special_tokens(special)
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return made


def test_pieces_with_scores(tmp_path):
    source = write_model(tmp_path / "source", "mistral", vocab_size=340)
    for how in ({"drop": 2}, {"swap": True}):
        pieces(source, **how)
        with pytest.raises(ArtifactError, match="merges of the piece '.*' are incomplete or not next to each other"):
            export_gguf(source, tmp_path / "model.gguf")
    original = pieces(source)
    export_gguf(source, tmp_path / "model.gguf")
    values = fields(tmp_path / "model.gguf")
    assert values["tokenizer.ggml.model"] == "llama"
    assert values["tokenizer.ggml.add_bos_token"]
    assert values["tokenizer.ggml.add_space_prefix"]
    assert (values["tokenizer.ggml.bos_token_id"], values["tokenizer.ggml.eos_token_id"]) == (1, 2)
    kind = gguf.TokenType
    assert values["tokenizer.ggml.token_type"][:4] == [kind.UNKNOWN, kind.CONTROL, kind.CONTROL, kind.BYTE]
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")  # makes merges of pieces and scores
    for text in (*TEXT[:2], "the forms  thermal clerks 999"):
        assert theirs.encode(text, add_special_tokens=False) == original.encode(text, add_special_tokens=False).ids


def test_the_stretched_rotation_of_llama_3(tmp_path):
    source = write_model(tmp_path / "source", "llama wide heads", rope_parameters=STRETCHED)
    assert export_gguf(source, tmp_path / "model.gguf").types["f32"] == 6
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](AutoConfig.from_pretrained(source), "cpu")
    plain = 1 / 10000.0 ** (torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    factors = torch.from_numpy(tensors["rope_freqs.weight"].copy())
    assert (factors.min(), factors.max()) == (1, 8)
    assert ((factors > 1) & (factors < 8)).any()
    torch.testing.assert_close((plain / factors.double()).float(), theirs.float(), rtol=1e-6, atol=0)


def test_a_run_of_ours(tmp_path):
    config = LlamaConfig(**LLAMA | {"mlp_width": 128})
    run = write_run(tmp_path / "run", lively(Llama(config)), config.to_hf())
    with pytest.raises(ArtifactError, match="llama.cpp has no name for.*--no-tokenizer"):  # bytes alone
        export_gguf(run, tmp_path / "model.gguf")
    export_gguf(run, tmp_path / "model.gguf", tokenizer=False)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    stored = load_file(run / "step-00000007" / "model.safetensors")
    for name in ("self_attn.q_proj", "mlp.up_proj"):
        key = f"model.layers.1.{name}.weight"
        assert torch.equal(theirs.get_parameter(key), q8_0(stored[key]))


# ---- what cannot be written


def edited(change, file="config.json"):
    return lambda folder: change_json(folder / file, change)


def weight_of(value):
    return lambda folder: change_tensors(folder, lambda t: t["model.embed_tokens.weight"][5, 5].fill_(value))


@pytest.mark.parametrize(
    ("change", "how", "message"),
    [
        (edited(lambda c: c.update(model_type="gpt2")), {}, "GPT2LMHeadModel is supported"),
        (edited(lambda c: c.update(hidden_act="gelu")), {}, "has hidden_act 'gelu'"),
        (edited(lambda c: c.update(sliding_window=16)), {}, "attends to a window of 16 tokens.*set max_pos"),
        (edited(lambda c: c["rope_parameters"].update(rope_type="yarn", factor=2.0)), {}, "rope_type 'yarn'"),
        (edited(lambda c: c.pop("rms_norm_eps")), {}, "must state rms_norm_eps: GGUF needs it"),
        (edited(lambda c: c.update(quantization_config={})), {}, "is quantized already"),
        (edited(lambda c: None), {"weights": "q4_0"}, "unknown type 'q4_0' of weights: choose one of q8_0, f16"),
        (weight_of(1e5), {}, "embed_tokens.weight exceeds 65504, the largest of f16"),
        (weight_of(float("nan")), {}, "embed_tokens.weight holds inf or NaN"),
        (lambda folder: (folder / "tokenizer.json").unlink(), {}, "tokenizer.json is missing"),
        (edited(lambda t: t["model"].update(type="Unigram"), "tokenizer.json"), {}, "neither a byte-level BPE.*--no"),
        (edited(lambda t: t["model"].update(byte_fallback=True), "tokenizer.json"), {}, "treats blanks in another"),
        (edited(lambda t: t["model"].update(ignore_merges=True), "tokenizer.json"), {}, "has no name for.*gpt-2"),
        (edited(lambda t: t["model"].update(merges=[]), "tokenizer.json"), {}, "has no merges"),
        (edited(lambda t: t.update(normalizer={"type": "Lowercase"}), "tokenizer.json"), {}, "has no name for"),
        (edited(lambda t: t["model"]["vocab"].update(more=300), "tokenizer.json"), {}, "the token 300, the"),
    ],
)  # fmt: skip
def test_what_cannot_be_written(tmp_path, change, how, message):
    source = write_model(tmp_path / "source", "mistral")
    change(source)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        export_gguf(source, tmp_path / "model.gguf", **how)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_sizes_without_whole_blocks(tmp_path):
    source = write_model(tmp_path / "source", "qwen2", intermediate_size=72)
    with pytest.raises(ValueError, match=r"down_proj.weight: \[128, 72\] has no whole blocks of 32.*--scheme f16"):
        export_gguf(source, tmp_path / "model.gguf")
    assert export_gguf(source, tmp_path / "model.gguf", weights="f16").types == {"f16": 15, "f32": 11}
    with pytest.raises(FileExistsError, match="choose another file"):
        export_gguf(source, tmp_path / "model.gguf", weights="f16")


def test_a_disk_that_refuses(tmp_path, monkeypatch):
    source, error = write_model(tmp_path / "source", "llama"), OSError("8704 requested and 2432 written")
    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", Mock(side_effect=error))
    with pytest.raises(WriteError, match=r"could not write .*model.gguf: the disk is full .* free there\): make room"):
        export_gguf(source, tmp_path / "model.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_without_the_package(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(ImportError, match=r'pip install "\.\[gguf\]"'):
        export_gguf(tmp_path, tmp_path / "model.gguf")


def test_command(printed, tmp_path):
    source = write_model(tmp_path / "source", "qwen2")
    ByteTokenizer().save(source)
    out = printed("pack", source, tmp_path / "out.gguf", "--layout", "gguf", "--no-tokenizer")
    assert "qwen2, 1 tensor of f16, 14 tensors of q8_0, 11 tensors of f32" in out
    values = fields(tmp_path / "out.gguf")
    assert values["tokenizer.ggml.model"] == "none"
    assert "tokenizer.ggml.tokens" not in values
