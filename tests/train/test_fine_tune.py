"""Fine-tuning a model of transformers from a local folder."""

import json
import math
import os
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tiny_models import make_model, with_slow
from verify_examples import change_settings, change_tensors

from octavo.checkpoint.files import ArtifactError
from octavo.inference.opening import load_packed
from octavo.nn.delayed import histories
from octavo.packing import pack
from octavo.train.config import ConfigError
from octavo.train.supervision import recipe_layers


@pytest.fixture(params=["llama", "qwen2"])
def source(request, made, tmp_path):
    """A folder with a tiny model in BF16, as models are published, and a tokenizer. Qwen2 has biases, and is tied."""
    return shutil.copytree(made(request.param), tmp_path / "source")


@pytest.mark.parametrize("source", with_slow(["llama", "qwen2"]), indirect=True)
def test_a_run_of_saved_weights_opens_in_transformers_and_resumes_bit_for_bit(begin, go_on, records, source, tmp_path):
    trainer = begin(model=str(source), out=str(tmp_path / "whole"), sample=8)
    assert len(recipe_layers(trainer.model)) == 14  # all linear layers but the head
    published = load_file(source / "model.safetensors")
    for name, p in trainer.model.named_parameters():
        assert p.dtype == torch.float32
        assert torch.equal(p, published[name].float()), name
    assert math.isfinite(trainer.run().evaluation_loss)
    losses = list(records(tmp_path / "whole").values())
    assert losses[7] < losses[0] < 6
    checkpoint = tmp_path / "whole" / "step-00000008"
    saved = load_file(checkpoint / "model.safetensors")
    assert {name: t.shape for name, t in saved.items()} == {name: t.shape for name, t in published.items()}

    opened = shutil.copytree(tmp_path / "whole" / "model", tmp_path / "opened")
    shutil.copy(checkpoint / "model.safetensors", opened)
    model = transformers.AutoModelForCausalLM.from_pretrained(opened, dtype=torch.float32)
    for (name, found), (_, trained) in zip(model.named_parameters(), trainer.model.named_parameters(), strict=True):
        assert torch.equal(found, trained), name
    assert transformers.AutoTokenizer.from_pretrained(opened).encode("octavo") == list(b"octavo")

    begin(model=str(source), sample=8).run()
    shutil.rmtree(tmp_path / "run" / "step-00000008")
    shutil.rmtree(source)
    trainer = go_on(tmp_path / "run")
    assert trainer.state.step == 4
    trainer.run()
    assert records(tmp_path / "run") == records(tmp_path / "whole")
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (tmp_path / "run" / "step-00000008" / name).read_bytes() == (checkpoint / name).read_bytes()


# The rest does not depend on the family.
llama_only = pytest.mark.parametrize("source", ["llama"], indirect=True)


@llama_only
def test_the_run_describes_no_weights_that_it_does_not_have(begin, source, tmp_path):
    """A large model comes in several files, with an index of them. What was folded is for `octavo pack`."""
    transformers.AutoModelForCausalLM.from_pretrained(source).save_pretrained(source, max_shard_size="20KB")
    assert (source / "model.safetensors.index.json").is_file()
    copied = {"LICENSE", "octavo.json", "modules.json", "1_Pooling/config.json", "additional_chat_templates/tool.jinja"}
    for name in (*copied, "1_Pooling/pytorch_model.bin"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text('[{"path": "1_Pooling"}]')
    with pytest.raises(ArtifactError, match=r"pytorch_model.bin is a pickle"):
        begin(model=str(source), steps=3)
    assert not (tmp_path / "run").exists()
    (source / "1_Pooling" / "pytorch_model.bin").unlink()
    begin(model=str(source), steps=3).run()
    folder = tmp_path / "run" / "model"
    described = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    own = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert described == copied | own


def describe(source, **changes):
    change_settings(source / "config.json", **changes)


def cut_vocabulary(source):
    names = ("model.embed_tokens.weight", "lm_head.weight")
    change_tensors(source, lambda weights: weights.update({n: weights[n][:100].clone() for n in names}))
    describe(source, vocab_size=100)


def diverge(source):
    """Its logits are NaN, which are not those of a causal model either."""
    change_tensors(source, lambda weights: weights[UP][3, 5].fill_(math.nan))


def remove_tokenizer(source):
    for file in source.glob("tokenizer*"):
        file.unlink()


def ask_for_code(source):
    describe(source, model_type="mine", auto_map={"AutoConfig": "code.MyConfig", "AutoModelForCausalLM": "code.My"})
    (source / "code.py").write_text("raise SystemExit('this code was run')")


UP = "model.layers.1.mlp.up_proj.weight"
REFUSED = [  # what is done to the folder, settings, the error, and what it must contain
    (lambda source: None, {"context": 65}, ConfigError, ["context", "64 positions", "65"]),
    (lambda source: make_model(source, "mpt"), {"context": 65}, ConfigError, ["context", "64 positions", "65"]),
    (lambda source: make_model(source, "bert masked"), {}, ConfigError, ["source is a BertLMHeadModel", "not causal"]),
    (cut_vocabulary, {}, ConfigError, ["100 rows", f"token {ord('v')}"]),
    (diverge, {}, ArtifactError, [f"{UP} holds inf or NaN", "/source"]),
    (lambda source: os.truncate(source / "model.safetensors", 100_000), {}, ArtifactError, ["truncated", "/source"]),
    (remove_tokenizer, {}, FileNotFoundError, ["no tokenizer in", "/source", "tokenizer.json"]),
    (lambda source: describe(source, model_type="mine"), {}, ConfigError, ["model_type 'mine'", "does not implement"]),
    (lambda source: describe(source, model_type="vit"), {}, ConfigError, ["no causal language", "octavo.convert"]),
    (lambda folder: None, {"layers": 3}, ConfigError, ["layers 3 requires a model from random weights", "leave"]),
    (lambda folder: None, {"tokenizer": "bpe"}, ConfigError, ["tokenizer bpe requires a model from random weights"]),
    (lambda source: change_tensors(source, lambda w: w.pop(UP)), {}, ConfigError, ["lacks weights", UP, "1 in all"]),
    (lambda source: describe(source, tie_word_embeddings=True), {}, ConfigError, ["which differ", "ties them: set"]),
    (ask_for_code, {}, ValueError, ["auto_map", "runs no code"]),
]


@llama_only
@pytest.mark.parametrize(("spoil", "changes", "error", "essentials"), REFUSED)
def test_what_cannot_be_trained_is_refused(begin, source, tmp_path, monkeypatch, spoil, changes, error, essentials):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("transformers asks whether to run the code"))
    spoil(source)
    with pytest.raises(error) as caught:
        begin(model=str(source), **changes)
    assert [each for each in essentials if each not in str(caught.value)] == []
    assert not (tmp_path / "run").exists()


@llama_only
def test_settings_that_are_not_given_fit_the_model_and_transformers_says_nothing(begin, source, tmp_path, capfd):
    transformers.utils.logging.enable_progress_bar()
    trainer = begin(model=str(source), context=None, learning_rate=None, min_learning_rate=None, warmup=None)
    assert "Loading weights" not in "".join(capfd.readouterr())
    assert transformers.utils.logging.is_progress_bar_enabled()
    config = trainer.config
    assert (config.context, config.learning_rate, config.warmup) == (64, 2e-5, 0)
    written = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (written["context"], written["learning_rate"]) == (64, 2e-5)
    assert written["derived"] == ["decay_steps", "kv_heads", "learning_rate", "min_learning_rate", "warmup"]


# --- Fine-tuning with the recipe delayed, whose first scales come from a calibration


def test_the_first_step_has_the_scales_of_the_calibration(begin, go_on, made, tmp_path):
    calibration = str(made("llama", "calibrated"))
    trainer = begin(model=str(made("llama")), recipe="delayed", calibration=calibration, steps=3)
    found = dict(histories(trainer.model))
    inputs = {name: history for name, history in found.items() if name.endswith(".x")}
    assert len(inputs) == 14
    for name, history in inputs.items():
        assert history.ready
        assert history.steps == 2, "one entry for each batch of the calibration"
        weight = found[name.replace(".x", ".w")]
        assert (weight.ready, weight.steps) == (True, 1)
        assert not found[name.replace(".x", ".dy")].ready
    trainer.run()
    resumed = go_on(tmp_path / "run", "--steps", "4")
    assert all(history.steps == 5 for name, history in histories(resumed.model) if name.endswith(".x"))


def test_the_first_step_has_the_stored_scales_of_a_packed_folder(begin, made):
    packed = made("llama", scheme="static")
    trainer = begin(model=str(made("llama")), recipe="delayed", calibration=str(packed), steps=3)
    found = {name.removesuffix(".histories.x"): h for name, h in histories(trainer.model) if name.endswith(".x")}
    stored = load_file(packed / "model.safetensors")
    assert len(found) == 14
    for name, history in found.items():  # with the recipe's room for twice the amax
        assert float(history.scale) == pytest.approx(2 * float(stored[f"{name}.input_scale"]))


def test_the_calibration_must_fit(settings, begin, made, tmp_path):
    model, calibration = made("llama"), made("llama", "calibrated")
    for given in ({"recipe": "rowwise", "model": str(model)}, {"recipe": "delayed", "model": "llama"}):
        said = f"and the calibrated model; got recipe {given['recipe']} and model {given['model']}"
        with pytest.raises(ConfigError, match=said):
            settings(**given, calibration=str(calibration))
    with pytest.raises(FileNotFoundError, match="calibration.json"):
        begin(model=str(model), recipe="delayed", calibration=str(tmp_path / "absent"))
    with pytest.raises(ArtifactError, match="is a calibration of another model than"):
        begin(model=str(made("qwen2")), recipe="delayed", calibration=str(calibration))


# ---- GPT-2 of transformers, whose linear layers are `Conv1D`, from fine-tuning to the packed folder


gpt2_only = pytest.mark.parametrize("source", ["gpt2"], indirect=True)


@gpt2_only
@pytest.mark.parametrize("recipe", ["rowwise", "bf16"])
def test_it_trains_under_its_own_names_and_packs(begin, go_on, records, source, tmp_path, recipe):
    begin(model=str(source), recipe=recipe, context=None, steps=4, seed=3).run()
    trainer = go_on(tmp_path / "run", "--steps", "5")
    trainer.run()
    losses = list(records(tmp_path / "run").values())
    assert losses[4] < losses[0] - 0.2
    published = load_file(source / "model.safetensors")
    saved = load_file(tmp_path / "run" / "step-00000005" / "model.safetensors")
    assert {name: t.shape for name, t in saved.items()} == {name: t.shape for name, t in published.items()}
    pack(tmp_path / "run", tmp_path / "packed")
    packed = load_packed(tmp_path / "packed").model
    tokens = torch.arange(32)[None] + 97
    with torch.no_grad():
        found, trained = packed(tokens), trainer.model.eval()(tokens).logits
    found = getattr(found, "logits", found).float()
    assert (found - trained).norm() < 0.1 * trained.norm()


@gpt2_only
def test_what_a_run_left_in_bf16_and_its_scales_are_found_under_its_names(begin, source, tmp_path):
    trainer = begin(model=str(source), recipe="delayed", steps=4, skip=("transformer.h.0.mlp.*",))
    trainer.run()
    pack(tmp_path / "run", tmp_path / "packed")
    packed = load_file(tmp_path / "packed" / "model.safetensors")
    dtypes = {layer: packed[f"model.decoder.layers.{layer}.fc1.weight"].dtype for layer in (0, 1)}
    assert dtypes == {0: torch.bfloat16, 1: torch.float8_e4m3fn}
    history = trainer.model.get_submodule("transformer.h.1.attn.c_attn").histories["w"]
    for part in "qkv":
        scale = packed[f"model.decoder.layers.1.self_attn.{part}_proj.weight_scale"]
        assert torch.equal(scale.view(()), history.scale.view(()))
