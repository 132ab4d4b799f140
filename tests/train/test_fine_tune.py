"""Fine-tuning a model of transformers from a local folder."""

import json
import math
import shutil

import pytest
import torch
from calibration_examples import write_model
from safetensors.torch import load_file, save_file

from octavo.artifact.files import ArtifactError
from octavo.models.tokenizer import ByteTokenizer
from octavo.train.config import ConfigError

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 64, "max_position_embeddings": 32, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


@pytest.fixture(params=["Llama", "Qwen2"])
def source(request, tmp_path):
    """A folder with a tiny model in BF16, as models are published, and a tokenizer. Qwen2 has biases, and is tied."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{request.param}Config")(**SIZES, tie_word_embeddings=request.param == "Qwen2")
    model = getattr(transformers, f"{request.param}ForCausalLM")(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "source")
    ByteTokenizer().save(tmp_path / "source")
    return tmp_path / "source"


def test_steps_from_the_saved_weights_under_their_names(begin, records, source, tmp_path):
    trainer = begin(model=str(source), steps=3)
    published = load_file(source / "model.safetensors")
    for name, p in trainer.model.named_parameters():
        assert p.dtype == torch.float32
        assert torch.equal(p, published[name].float()), name
    result = trainer.run()
    assert math.isfinite(result.evaluation_loss)
    losses = list(records(tmp_path / "run").values())
    assert losses[2] < losses[0] < 6
    saved = load_file(tmp_path / "run" / "step-00000003" / "model.safetensors")
    assert saved.keys() == published.keys()
    assert {name: t.shape for name, t in saved.items()} == {name: t.shape for name, t in published.items()}


def test_linear_layers_run_in_fp8_and_the_head_does_not(begin, source):
    names = {name for name, m in begin(model=str(source)).model.named_modules() if hasattr(m, "recipe")}
    attention, mlp = [f"self_attn.{p}_proj" for p in "qkvo"], [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
    assert names == {f"model.layers.{layer}.{part}" for layer in (0, 1) for part in attention + mlp}


def test_checkpoint_opens_in_transformers(begin, source, tmp_path):
    trainer = begin(model=str(source), steps=3, sample=8)
    trainer.run()
    opened = tmp_path / "opened"
    shutil.copytree(tmp_path / "run" / "model", opened)
    shutil.copy(tmp_path / "run" / "step-00000003" / "model.safetensors", opened)
    model = transformers.AutoModelForCausalLM.from_pretrained(opened, dtype=torch.float32)
    for (name, found), (_, trained) in zip(model.named_parameters(), trainer.model.named_parameters(), strict=True):
        assert torch.equal(found, trained), name
    assert transformers.AutoTokenizer.from_pretrained(opened).encode("octavo") == list(b"octavo")


def test_resumes_bit_for_bit_when_the_source_is_gone(begin, go_on, records, source, tmp_path):
    begin(model=str(source), out=str(tmp_path / "whole")).run()
    begin(model=str(source)).run()
    shutil.rmtree(tmp_path / "run" / "step-00000008")
    shutil.rmtree(source)
    trainer = go_on(tmp_path / "run")
    assert trainer.state.step == 4
    trainer.run()
    assert records(tmp_path / "run") == records(tmp_path / "whole")
    for name in ("model.safetensors", "optimizer.safetensors"):
        found = (tmp_path / "run" / "step-00000008" / name).read_bytes()
        assert found == (tmp_path / "whole" / "step-00000008" / name).read_bytes()


# The rest does not depend on the family.
llama_only = pytest.mark.parametrize("source", ["Llama"], indirect=True)


@llama_only
def test_recomputing_activations_does_not_change_the_run(begin, records, source, tmp_path):
    for recompute in (False, True):
        out = str(tmp_path / f"{recompute}")
        begin(model=str(source), recipe="delayed", steps=3, checkpoint_activations=recompute, out=out).run()
    assert records(tmp_path / "True") == records(tmp_path / "False")


@llama_only
def test_a_relative_folder_is_remembered_from_anywhere(begin, go_on, source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    begin(model="source", steps=4).run()
    shutil.rmtree(source)
    monkeypatch.chdir("/")
    assert go_on(tmp_path / "run", "--steps", "5").run().step == 5


@llama_only
def test_the_run_describes_no_weights_that_it_does_not_have(begin, source, tmp_path):
    """A large model comes in several files, with an index of them."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    model.save_pretrained(source, max_shard_size="20KB")
    assert (source / "model.safetensors.index.json").is_file()
    begin(model=str(source), steps=3).run()
    described = sorted(path.name for path in (tmp_path / "run" / "model").iterdir())
    assert described == ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]


def refuses(begin, tmp_path, error, *essentials, **overrides):
    with pytest.raises(error) as caught:
        begin(**overrides)
    for essential in essentials:
        assert str(essential) in str(caught.value)
    assert not (tmp_path / "run").exists()


@llama_only
def test_context_beyond_the_positions(begin, source, tmp_path):
    refuses(begin, tmp_path, ConfigError, "context", "32 positions", "33", model=str(source), context=33)


@llama_only
def test_tokenizer_larger_than_the_vocabulary(begin, source, tmp_path):
    config = json.loads((source / "config.json").read_text()) | {"vocab_size": 100}
    weights = load_file(source / "model.safetensors")
    cut = {name: weights[name][:100].clone() for name in ("model.embed_tokens.weight", "lm_head.weight")}
    save_file(weights | cut, source / "model.safetensors", {"format": "pt"})
    (source / "config.json").write_text(json.dumps(config))
    refuses(begin, tmp_path, ConfigError, "100 rows", f"token {ord('v')}", model=str(source))


@llama_only
def test_folder_without_a_model(begin, source, tmp_path):
    (source / "config.json").unlink()
    refuses(begin, tmp_path, ConfigError, "config.json", source, model=str(source))


def test_an_encoder_is_refused_because_it_sees_the_answer(begin, tmp_path):
    source = write_model(tmp_path / "source", "bert masked")
    says = ("BertLMHeadModel", "not causal", "earlier tokens", "choose such a model", source)
    refuses(begin, tmp_path, ConfigError, *says, model=str(source), recipe="bf16")


@llama_only
def test_a_model_that_has_diverged(begin, source, tmp_path):
    """Its logits are NaN, which are not those of a causal model either."""
    weights = load_file(source / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = math.nan
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    says = ("model.layers.1.mlp.up_proj.weight holds inf or NaN", source)
    refuses(begin, tmp_path, ArtifactError, *says, model=str(source))


@llama_only
def test_a_truncated_file_of_weights(begin, source, tmp_path):
    content = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(content[: len(content) // 2])
    refuses(begin, tmp_path, ArtifactError, "truncated", source, model=str(source))


@llama_only
def test_a_folder_without_a_tokenizer(begin, source, tmp_path):
    for file in source.glob("tokenizer*"):
        file.unlink()
    refuses(begin, tmp_path, FileNotFoundError, "no tokenizer in", source, "tokenizer.json", model=str(source))


@llama_only
def test_a_model_type_that_transformers_lacks(begin, source, tmp_path):
    (source / "config.json").write_text('{"model_type": "mine"}')
    refuses(begin, tmp_path, ConfigError, "model_type 'mine'", "does not implement", model=str(source))


@llama_only
def test_a_model_type_without_a_causal_language_model(begin, source, tmp_path):
    (source / "config.json").write_text('{"model_type": "vit"}')
    says = ("model_type 'vit'", "no causal language model", "octavo.convert takes any model")
    refuses(begin, tmp_path, ConfigError, *says, model=str(source))


@llama_only
def test_missing_weights_are_not_drawn_at_random(begin, source, tmp_path):
    weights = load_file(source / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    del weights[name]
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    refuses(begin, tmp_path, ConfigError, "lacks weights", name, "1 in all", model=str(source))


@llama_only
def test_a_folder_that_needs_its_own_code_is_refused_by_that_reason(begin, source, tmp_path, monkeypatch):
    described = json.loads((source / "config.json").read_text())
    described |= {"model_type": "mine", "auto_map": {"AutoConfig": "code.MyConfig", "AutoModelForCausalLM": "code.My"}}
    (source / "config.json").write_text(json.dumps(described))
    (source / "code.py").write_text("raise SystemExit('this code was run')")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("transformers asks whether to run the code"))
    refuses(begin, tmp_path, ValueError, "auto_map", "runs no code", model=str(source))


@llama_only
def test_the_log_has_no_bars_and_tables_of_transformers(begin, source, capfd):
    transformers.utils.logging.enable_progress_bar()
    begin(model=str(source))
    out, err = capfd.readouterr()
    assert "Loading weights" not in out + err
    assert transformers.utils.logging.is_progress_bar_enabled()


@llama_only
def test_settings_that_are_not_given_fit_the_model(begin, source, tmp_path):
    trainer = begin(model=str(source), context=None, learning_rate=None, min_learning_rate=None, warmup=None)
    config = trainer.config
    assert (config.context, config.learning_rate, config.warmup) == (32, 2e-5, 0)
    written = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (written["context"], written["learning_rate"]) == (32, 2e-5)
    assert written["derived"] == ["decay_steps", "learning_rate", "min_learning_rate", "warmup"]
