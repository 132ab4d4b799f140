"""Verifying right folders: every reader agrees with the bytes, and budgets are held against the quality."""

import shutil

import pytest
import torch
from other_writers import know_caches
from packed_examples import most_alive, small_shards
from safetensors.torch import load_file, save_file
from tiny_models import IDS, IMAGE_MODELS, MODELS, QUICK, make_model, with_slow
from torch import nn
from transformers import FNetConfig, FNetModel, SegformerConfig, SegformerForImageClassification
from verify_examples import change_settings, change_tensors, complaints, run_verify

import octavo
from octavo.calibration import calibrate
from octavo.checkpoint.files import ShardReader, read_json
from octavo.checkpoint.scheme import SCHEMES
from octavo.evaluation.metrics import Budget, EmbeddingQuality
from octavo.evaluation.prompts import PromptOptions
from octavo.hf.meta_model import MetaModel, compute_buffers, transformers_meta_model
from octavo.packing import convert_layout, pack
from octavo.packing.transforms import fold
from octavo.verification import verify
from octavo.verification.stored_files import CheckpointFiles

DOWN = "model.layers.0.mlp.down_proj"
# Decoders that are not fused, and mixtures whose experts are packed.
UNFUSED = ("falcon", "bloom", "mpt", "mamba", "hyv4", "rwkv")  # FalconLinear; no max_position_embeddings; deepseekv32
MIXTURES = ("phimoe", "laguna", "deepseekv32", "hunyuan moe")
ENDLESS = ("bloom", "mamba", "t5", "t5 encoder", "t5 trunk")  # that state no largest number of positions
# Models whose outputs are hidden states, not logits.
ENCODERS = ("bert", "bert masked", "roberta", "xlm roberta masked", "t5 encoder", "t5 trunk", "bart trunk")
# RoBERTa's first position is 2, so 66 positions are for 64 tokens: the prompts are as long as the model can see.
# transformers widens packed weights in a hook of the whole model, and an encoder's outputs are those of a part.
# gptneox has other names of tensors in its files, and gemma2 a buffer beside the weight of its embedding.
# Linear layers of phimoe and laguna have other names in the files; deepseekv32 and hunyuan cast an input to the dtype
# of a weight; a convolution of olmo is three tensors in the files; the settings of bamba have an infinite number; the
# tied weight of xlm roberta has the name of the embedding in the files, and that of the head in the model.
CHANNEL = [
    "mistral", "qwen2", "qwen3", "opt", "gpt2", "gptneox", "gemma2", "jamba", "olmo hybrid", "bamba", *UNFUSED, "t5",
    "bart", *ENCODERS, "mixtral", "qwen3moe", "whisper", *IMAGE_MODELS,
]  # fmt: skip
FP8 = ("llama", "qwen2", "bert", "t5", "bart", "mixtral", "qwen3moe", "vit", "whisper")
SEVERAL = {"*.down_proj": "mx", "*.layers.0.*": "channel"}  # the first that matches counts
FOLDERS = [
    *(("llama", {"scheme": scheme}) for scheme in SCHEMES),
    ("llama", {"scheme": "mx", "layers": {"*.o_proj": "channel", "*.down_proj": "block"}}),
    ("llama", {"scheme": "block", "layers": SEVERAL, "skip": ("*.layers.1.mlp.*",)}),
    *((name, {"scheme": "channel"}) for name in CHANNEL),
    *((name, {"scheme": "channel", "experts": True}) for name in MIXTURES),
    *((name, {"scheme": "tensor"}) for name in ("mistral", "opt", "gpt2")),
    ("gpt2", {"pow2": True}),
    *((name, {"scheme": "static"}) for name in ("mistral", "qwen2", "qwen3", "opt", "bert", "laguna")),
    ("qwen2", {"scheme": "block"}),
    *((name, {"scheme": "block", "layout": "fp8"}) for name in FP8),
    *((name, {"scheme": "mx"}) for name in ("mistral", "qwen2", "qwen3", "opt", "bert", "gemma2", "vit")),
    ("vit", {"scheme": "group64"}),
    *((name, {"scheme": "weight"}) for name in ("mixtral", "glm4moe")),  # transformers keeps their experts in BF16
    *((name, {"scheme": "int8"}) for name in ("opt", "mixtral", "qwen3moe", "deepseekv3", "vit")),
    *((name, {"scheme": "channel", "kv_cache": "fp8"}) for name in ("llama", "mistral", "qwen2", "qwen3", "opt")),
    *(("llama", {"scheme": scheme, "kv_cache": "fp8"}) for scheme in ("static", "mx")),
    *(("mistral", {"scheme": "static", "kv_cache": "fp8", "rule": rule}) for rule in ("percentile", "mse")),
]
ONCE = [row for row in FOLDERS if row[0] in (QUICK if row[1] == {"scheme": "channel"} else ("llama",))]
# transformers' emulation in float32 has the numbers of the reference. These round some inputs at a tie to the other
# side: OPT's decoder layers flatten their MLP's input to [T, K], which compressed-tensors scales as one tensor.
TIES = {"opt": 2e-3, "gpt2": 2e-3, "bart": 1e-3}
ROUGH = ("jamba", "olmo hybrid", "hyv4", "mixtral", "qwen3moe", "deepseekv3")  # whose outputs rounding moves far
BROKEN_READER = "dinov2"  # transformers 5.23 opens no quantized folder of its type


def check_agreement(report):
    """No finding, and the readers: transformers and Octavo agree, and vLLM is not installed."""
    assert not report.findings
    readers = [(reader.name, reader.outcome) for reader in report.readers]
    assert readers == [("transformers", "agrees"), ("octavo", "agrees"), ("vllm", "not run")]
    return report.readers


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("name", "options"), with_slow(FOLDERS, ONCE), ids=str)
def test_every_reader_computes_what_the_bytes_say(made, monkeypatch, name, options):
    know_caches(monkeypatch)
    cached, with_text = "kv_cache" in options, name not in (*IMAGE_MODELS, "whisper")
    calibration = made(name, "calibrated") if cached or options.get("scheme") == "static" else None
    report = (run_verify if with_text else verify)(made(name, **options), made(name), calibration=calibration)
    if name == BROKEN_READER:
        assert [reader.outcome for reader in report.readers] == ["failed", "agrees", "not run"]
        assert "target_patterns" in report.readers[0].note
        return
    transformers, octavo, vllm = check_agreement(report)
    in_float32, rough = transformers.note.startswith("emulated in float32"), name in (*ROUGH, *MIXTURES)
    assert transformers.distance < (TIES.get(name, 1e-5) if in_float32 else transformers.tolerance)
    assert 0 < transformers.tolerance < (0.35 if rough else 0.25)
    assert 0 < octavo.distance < (octavo.tolerance if rough or cached else 0.12)
    assert vllm.note == "not installed"
    assert report.remarks == ["keys and values are rounded by the folder's scales, as its cache does"] * cached
    assert 0.5 < report.sizes["packed"] / report.sizes["packed_bf16"] < (0.57 if "group" in str(options) else 0.53)
    if with_text:
        check_quality(name, options, report)


def check_quality(name, options, report):
    """The quality that packing left, of the model and of each layer that ran: all but the head of an encoder."""
    if options.keys() == {"scheme"}:
        assert {layer.spec for layer in report.layers} == {options["scheme"]}
    names = [layer.name for layer in report.layers]  # state-space layers read that of dt_proj without a call
    assert not any(layer.endswith((".dt_proj", ".weights_proj")) for layer in names)
    if name in UNFUSED:
        assert len(names) == {"mamba": 6, "rwkv": 14, "hyv4": 22}.get(name, 8)
    ran = [layer.output_sqnr for layer in report.layers if layer.output_sqnr is not None]
    assert len(ran) == len(names) - name.endswith("masked")
    assert 25 < min(ran) <= max(ran) < {"int8": 45, "weight": 33}.get(options.get("scheme", ""), 32)
    quality, int8 = report.quality, report.int8
    assert quality.prompts == (2 if name in ENDLESS else 9)
    assert isinstance(quality, EmbeddingQuality) == (name in ENCODERS)
    if name in ENCODERS:
        assert 0.99 < quality.least <= quality.cosine.value < int8.cosine.value < 1
    else:
        assert 0 < quality.kl.value < 0.1
        assert quality.top1.value > 0.7
        assert 0 < int8.kl.value < quality.kl.value * (1.1 if options.get("scheme") == "int8" else 1)


def test_what_was_packed_from_a_run(packed):
    report = run_verify(packed["gpt2"].packed, packed["gpt2"].run)
    check_agreement(report)
    assert len(report.layers) == 12  # on disk, q, k and v are three
    assert 0 < report.quality.kl.value < 0.2


def test_budgets(made):
    """In one report those that are held and those that are not."""

    def check(name, *budgets):
        return run_verify(made(name, scheme="channel"), made(name), budgets=list(budgets))

    report = check("llama", Budget("kl", 1e-4), Budget("kl", 1), Budget("ppl", -0.9), Budget("ppl", 1))
    assert [(finding.kind, finding.where) for finding in report.findings] == [("budget", "kl"), ("budget", "ppl")]
    assert "the limit is kl=0.0001" in str(report.findings[0])
    (finding,) = check("bert", Budget("cosine", 0.9), Budget("cosine", 0.99999999)).findings
    assert (finding.kind, finding.where) == ("budget", "cosine")
    assert "the limit is cosine=1" in str(finding)
    with pytest.raises(ValueError, match="a budget is measured on text: give --data"):
        verify(made("llama", scheme="channel"), made("llama"), budgets=[Budget("kl", 1)])
    with pytest.raises(ValueError, match="budgets of kl and ppl are for language models, those of cosine for encoders"):
        check("bert", Budget("kl", 1))
    with pytest.raises(ValueError, match="those of cosine for encoders"):
        check("llama", Budget("cosine", 0.9))


def test_without_data(made, tmp_path):
    with small_shards(100_000):
        written = pack(made("opt"), tmp_path / "out", layers={"*.out_proj": "block"})
    stages = set()
    report = verify(tmp_path / "out", made("opt"), progress=lambda done, total, doing: stages.add(doing))
    check_agreement(report)
    assert report.quality is None
    whole = [sum(t.nbytes for t in ShardReader(path).specs.values()) for path in (tmp_path / "out", made("opt"))]
    assert list(report.sizes.values()) == [written.packed_bytes, written.bf16_bytes, *whole]
    assert all(layer.output_sqnr is None and layer.weight_sqnr for layer in report.layers)
    assert stages == {"reading tensors", "comparing weights", "opening with every reader"}


def test_folded_weights_are_compared_by_their_outputs(made, tmp_path):
    """The fold multiplies the rows of up_proj and divides the columns of down_proj: the same function."""
    folded = shutil.copytree(made("llama"), tmp_path / "folded")

    def fold(tensors):
        factor = torch.exp2(torch.randint(-2, 3, (256,)).float()).bfloat16()
        tensors["model.layers.0.mlp.up_proj.weight"] *= factor[:, None]
        tensors["model.layers.0.mlp.down_proj.weight"] /= factor

    change_tensors(folded, fold)
    pack(folded, tmp_path / "out")
    assert not run_verify(tmp_path / "out", made("llama")).ok
    change_settings(tmp_path / "out" / "octavo.json", folded=["smooth"])
    report = run_verify(tmp_path / "out", made("llama"))
    assert report.ok
    assert "something was folded into the weights" in report.remarks[0]
    (tmp_path / "out" / "octavo.json").unlink()
    assert verify(tmp_path / "out", made("llama"), folded=True).ok
    assert report.quality.kl.value < 0.1


def test_weights_are_compared_with_those_of_the_folded_model(made, tmp_path, no_readers):
    fold(made("llama"), tmp_path / "folded", rotate=True)
    pack(tmp_path / "folded", tmp_path / "out")
    assert not verify(tmp_path / "out", tmp_path / "folded").remarks
    change_tensors(tmp_path / "out", lambda t: t[f"{DOWN}.weight_scale"][0].div_(2))
    (finding,) = verify(tmp_path / "out", tmp_path / "folded").findings
    assert finding.where == f"{DOWN}.weight"
    assert "are not compared with MODEL's" in verify(tmp_path / "out", made("llama")).remarks[0]


def test_bytes_that_another_program_rounds_in_another_way_are_counted(made, tmp_path, no_readers):
    """Neither octavo.json nor the header of the file is there then."""

    def off_by_one(tensors):
        codes = tensors[f"{DOWN}.weight"].view(torch.uint8).view(-1)[::64]
        codes -= (codes & 127).clamp(max=1)

    for lost in ("octavo.json", "header"):
        folder = shutil.copytree(made("llama", scheme="channel"), tmp_path / lost)
        change_tensors(folder, off_by_one)
        assert f"{DOWN}.weight" in [finding.where for finding in verify(folder, made("llama")).findings]
        if lost == "octavo.json":
            (folder / lost).unlink()
        else:
            save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors", {"format": "pt"})
        report = verify(folder, made("llama"))
        assert report.ok
        (remark,) = report.remarks
        assert "bytes are not MODEL's weight / scale rounded to nearest" in remark
        assert f"most in {DOWN}.weight" in remark
        change_tensors(folder, lambda t: t[f"{DOWN}.weight_scale"][0].div_(2))
        assert "1 of 128 scales are not" in str(verify(folder, made("llama")).findings)


def test_what_convert_layout_copies_is_judged_and_what_it_casts_is_not(made, tmp_path, no_readers):
    convert_layout(made("llama", scheme="block"), tmp_path / "copied", layout="fp8")
    convert_layout(made("llama", scheme="block"), tmp_path / "cast", scheme="channel")
    for name in ("copied", "cast"):
        report = verify(tmp_path / name, made("llama"))
        assert report.ok
        assert [("rounded to nearest" in remark) for remark in report.remarks] == [True] * (name == "cast")
    change_tensors(tmp_path / "copied", lambda t: t[f"{DOWN}.weight"].view(torch.uint8)[0].bitwise_xor_(1))
    assert "bytes are not MODEL's" in str(verify(tmp_path / "copied", made("llama")).findings)


def test_a_layer_far_below_its_neighbours_is_named(tmp_path, no_readers):
    """Its bytes are right: MODEL's weight has a column that is larger than the others, which integers cannot hold."""
    model = make_model(tmp_path / "model", "llama", num_hidden_layers=4)
    change_tensors(model, lambda t: t["model.layers.2.mlp.down_proj.weight"][:, 7].mul_(30))
    pack(model, tmp_path / "out", scheme="int8")
    report = verify(tmp_path / "out", model)
    assert report.ok
    (remark,) = report.remarks
    assert remark.startswith("model.layers.2.mlp.down_proj.weight has ")


def test_stored_scales_without_a_calibration_and_of_another(made, tmp_path, no_readers):
    folder = shutil.copytree(made("llama", scheme="static", kv_cache="fp8"), tmp_path / "packed")
    how = {"against": made("llama"), "calibration": made("llama", "calibrated")}
    assert verify(folder, **how).remarks == []
    assert "(18 stored scales) was not judged: give --calibration" in verify(folder, made("llama")).remarks[0]
    (tmp_path / "text.txt").write_text("Another text, of other words. " * 40)
    calibrate(made("llama"), [str(tmp_path / "text.txt")], tmp_path / "other", prompts=PromptOptions(16, 64))
    stale = verify(folder, made("llama"), calibration=tmp_path / "other").findings
    assert len(stale) > 9
    assert {finding.kind for finding in stale} == {"scale"}
    with pytest.raises(ValueError, match="is a calibration of another model than"):
        verify(made("qwen2", scheme="channel"), made("qwen2"), calibration=made("llama", "calibrated"))
    with pytest.raises(ValueError, match="that it was packed from: give --against"):
        verify(folder, calibration=made("llama", "calibrated"))
    (folder / "octavo.json").unlink()  # by an unknown rule
    assert verify(folder, **how).remarks == []
    change_tensors(folder, lambda t: t["model.layers.1.self_attn.k_scale"].mul_(10))
    (remark,) = verify(folder, **how).remarks
    assert remark.startswith("model.layers.1.self_attn.k_scale is ")


def test_weights_are_widened_one_at_a_time(made, tmp_path, monkeypatch, no_readers):
    """While prompts run, a layer's weights are freed before the next layer's are read."""
    most = most_alive(monkeypatch, [CheckpointFiles, ShardReader], "proj.weight")
    run_verify(made("llama", scheme="channel"), made("llama"))
    assert most == [1]  # MODEL's weight, while the packed weight of the same layer is read


# ---- Right folders of every family, scheme and layout: `verify` has no finding, and no remark that something is off


@pytest.mark.usefixtures("no_readers")
@pytest.mark.parametrize("name", with_slow([*MODELS, *IMAGE_MODELS]))
def test_families(made, name):
    short = name in ("esm", "swin v2")  # a layer has 8 inputs, or 2, which mx does not divide
    for scheme in ("channel", "int8", "mx")[: 2 if short else 3]:
        assert complaints(made(name, scheme=scheme), made(name)) == []


# ---- Models that readers treat specially


@pytest.mark.parametrize("name", UNFUSED)
def test_models_that_the_engine_does_not_serve_generate_all_the_same(made, name):
    with pytest.warns(UserWarning, match="generate runs on transformers' own loop"):
        ids = octavo.load(made(name, scheme="channel")).generate(IDS[:1], max_new_tokens=4, min_new_tokens=4)
    assert ids.shape == (1, 28)
    if name == "mamba":
        with pytest.raises(ValueError, match="MambaForCausalLM casts an input to the dtype of its head: leave head="):
            octavo.load(made(name, scheme="channel"), head="rowwise")


def test_layers_of_other_names_are_found_by_transformers(made, tmp_path):
    """In several schemes, and in a folder that was made of another."""
    pack(made("laguna"), tmp_path / "mixed", experts=True, layers={"*.down_proj": "tensor", "*.o_proj": "tensor"})
    convert_layout(made("phimoe", scheme="channel", experts=True), tmp_path / "converted", scheme="tensor")
    for name, folder in (("laguna", "mixed"), ("phimoe", "converted")):
        check_agreement(verify(tmp_path / folder, made(name)))


def test_a_model_that_cannot_run_is_named(tmp_path):
    """FNet transforms in BF16, which no CPU does."""
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    FNetModel(FNetConfig(**sizes)).save_pretrained(tmp_path / "model")
    pack(tmp_path / "model", tmp_path / "out")
    report = verify(tmp_path / "out", tmp_path / "model")
    (finding,) = map(str, report.findings)
    assert finding == "config.json: transformers cannot run the model (RuntimeError: Unsupported dtype BFloat16)"
    assert report.not_run


def test_right_bytes_of_a_model_whose_inputs_are_not_stated(tmp_path):
    SegformerForImageClassification(SegformerConfig(depths=[1] * 4)).save_pretrained(tmp_path / "model")
    pack(tmp_path / "model", tmp_path / "out")
    report = verify(tmp_path / "out", tmp_path / "model")
    assert (report.ok, report.verdict) == (True, "the bytes are right; no reader was tried")
    assert report.remarks[0].startswith("no reader was tried: the config.json of a SegformerForImage")


def test_a_token_of_a_mixture_takes_another_expert(tmp_path):
    """The files of Granite's mixtures hold stacks, as its modules do."""
    make_model(tmp_path / "model", "granite moe", seed=3)
    pack(tmp_path / "model", tmp_path / "out", scheme="weight")
    check_agreement(verify(tmp_path / "out", tmp_path / "model"))


def test_a_router_with_a_forward_of_its_own(tmp_path):
    """That of Llama 4 is a linear layer that gives two tensors."""
    make_model(tmp_path / "model", "llama4")
    pack(tmp_path / "model", tmp_path / "out")
    assert "octavo" in [each.name for each in verify(tmp_path / "out").readers if each.outcome == "agrees"]


def test_the_reference_convolves_in_float32(made, monkeypatch):
    """On a GPU, TF32 would move the reference by more than a reader of the scheme `weight` may differ."""
    seen = []

    def conv2d(*args, **kwargs):
        seen.append(torch.backends.cudnn.allow_tf32)
        return torch.conv2d(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "conv2d", conv2d)
    monkeypatch.setattr("octavo.verification.verifier.try_readers", lambda *_: iter(()))
    verify(made("vit", scheme="weight"), made("vit"))
    assert seen == [False] * 4  # the references
    assert torch.backends.cudnn.allow_tf32


def test_t5_packed_by_a_program_that_packs_every_layer(made, tmp_path, monkeypatch):
    """transformers' code casts the input of `wo` to the dtype of its weight, so `octavo.load` widens the weight."""
    with monkeypatch.context() as patch:
        patch.setattr(MetaModel, "kept_wide", lambda *_: [])
        packed = pack(made("t5 encoder"), tmp_path / "out", scheme="channel").packed
    assert "encoder.block.0.layer.1.DenseReluDense.wo" in packed
    assert verify(tmp_path / "out", made("t5 encoder")).ok
    with pytest.warns(UserWarning, match=r"DenseReluDense.wo \(2 such layers\) is packed, and its weight is widened"):
        octavo.load(tmp_path / "out")


def test_weights_that_are_filled_are_not_initialized_again(made):
    folder = made("gemma2")
    model = transformers_meta_model(read_json(folder / "config.json"), folder).model
    embedding = model.get_input_embeddings()
    embedding.weight = nn.Parameter(torch.ones(embedding.weight.shape))
    with pytest.raises(RuntimeError, match="Gemma2TextScaledWordEmbedding would be initialized again"):
        compute_buffers(model, "cpu")
    assert torch.equal(embedding.weight, torch.ones_like(embedding.weight))


def test_a_folder_without_a_tokenizer(made, tmp_path):
    model = shutil.copytree(made("llama"), tmp_path / "model", ignore=shutil.ignore_patterns("tokenizer*"))
    pack(model, tmp_path / "out")
    report = verify(tmp_path / "out", model)
    check_agreement(report)
    assert any("has no tokenizer" in remark for remark in report.remarks)
