import dataclasses
import json

import pytest

from octavo.train.config import Config, ConfigError, describe
from octavo.train.declaration import settings_of
from octavo.train.tables import ActivationCheckpointing, Parallel


def write(folder, text):
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def fails(*essentials, overrides=(), path=None):
    with pytest.raises(ConfigError) as caught:
        Config.load(path, overrides)
    for essential in essentials:
        assert essential in str(caught.value)


def test_file_overrides_defaults_and_command_line_overrides_file(tmp_path):
    path = write(tmp_path, 'layers = 6\nkv_heads = 1\nlearning_rate = 1\nskip = ["lm_head"]\ncompile = true\n')
    config = Config.load(path, ["--kv-heads", "4", "--clip=0", "--compile", "false"])
    assert (config.layers, config.kv_heads, config.compile.blocks, config.skip) == (6, 4, False, ("lm_head",))
    assert (config.width, config.data) == (256, ("stdlib",))
    assert type(config.learning_rate) is float
    assert config.learning_rate == 1.0
    assert type(config.clip) is float


def test_lists_take_values_to_the_next_key():
    config = Config.load(None, ["--data", "a.txt", "b/*.py", "--steps", "50", "--skip=lm_head", "mlp.*"])
    assert (config.data, config.steps, config.skip) == (("a.txt", "b/*.py"), 50, ("lm_head", "mlp.*"))
    assert config.replace(["--skip="]).skip == ()


def test_equals_sign_may_occur_in_a_value():
    assert Config.load(None, ["--data=hf:x?column=code"]).data == ("hf:x?column=code",)


def test_numbers_of_the_command_line():
    config = Config.load(None, ["--learning_rate", "3e-4", "--min-learning-rate", ".0001", "--weight-decay", "0"])
    assert (config.learning_rate, config.min_learning_rate, config.weight_decay) == (3e-4, 1e-4, 0.0)


def test_json_round_trip():
    config = Config(data=("a", "b"), skip=("x",), steps=77, learning_rate=0.1, model="gpt2")
    written = json.dumps(config.to_dict())
    assert Config.from_dict(json.loads(written)) == config
    assert json.loads(written)["data"] == ["a", "b"]


def test_replace_keeps_the_rest_and_is_checked():
    config = Config(steps=77)
    assert config.replace(["--layers", "9"]) == dataclasses.replace(config, layers=9)
    with pytest.raises(ConfigError, match="layers"):
        config.replace(["--layers", "0"])


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().steps = 3


def test_describe_covers_every_setting_with_help():
    rows = describe()
    assert [row[0] for row in rows] == list(settings_of(Config))
    assert all(row[3] for row in rows)
    assert next(row[:3] for row in rows if row[0] == "heads") == ("heads", "an integer", 4)


@pytest.mark.parametrize(
    ("overrides", "essentials"),
    [
        (["--stpes", "5"], ["stpes", "'steps'", "command line"]),
        (["--zzzzzz", "5"], ["zzzzzz", "octavo train --settings lists all"]),
        (["5"], ["--key value", "'5'"]),
        (["--steps"], ["--steps", "an integer"]),
        (["--steps", "5", "6"], ["--steps", "one value", "5 6"]),
        (["--steps", "5.0"], ["steps", "an integer", "'5.0'"]),
        (["--steps", "1_000"], ["steps", "an integer", "'1_000'"]),
        (["--steps", "true"], ["steps", "an integer", "'true'"]),
        (["--clip", "much"], ["clip", "number", "'much'"]),
        (["--clip", "nan"], ["clip", "number", "'nan'"]),
        (["--clip", "1e999"], ["clip", "finite", "inf"]),
        (["--compile", "0"], ["compile", "true or false", "'0'"]),
        (["--compile", "yes"], ["compile", "true or false", "'yes'"]),
        (["--steps", "0"], ["steps", "at least 1", "0"]),
        (["--heads", "-4"], ["heads", "at least 1", "-4"]),
        (["--schedule", "linear"], ["schedule", "cosine, wsd", "'linear'"]),
        (["--precision", "fp8"], ["precision", "bf16, fp32, fp16", "'fp8'"]),
        (["--tokenizer", "words"], ["tokenizer", "bytes, characters, bpe"]),
        (["--sampling", "shuffle"], ["sampling", "epochs, random"]),
        (["--device", "gpu"], ["device", "cuda:N", "'gpu'"]),
        (["--model", "lama"], ["model", "llama, gpt2", "folder", "'lama'"]),
        (["--model", "llama-3-8b"], ["'llama-3-8b', a preset: give it as in octavo train llama-3-8b"]),
        (["--vocabulary", "255"], ["vocabulary", "256", "255"]),
        (["--validation-fraction", "1"], ["validation_fraction", "between 0 and 1", "1.0"]),
        (["--decay", "1.5"], ["decay", "between 0 and 1", "1.5"]),
        (["--beta2", "1"], ["beta2", "below 1"]),
        (["--learning-rate", "0"], ["learning_rate", "above 0"]),
        (["--min-learning-rate", "0.1"], ["min_learning_rate", "0.1", "0.001"]),
        (["--warmup", "500"], ["warmup", "below steps", "500"]),
        (["--schedule", "wsd", "--warmup", "450"], ["warmup 450", "decay 0.2", "500 steps", "(100)"]),
        (["--width", "100000000001"], ["heads 4", "width 100000000001"]),
        (["--heads", "5"], ["heads 5", "width 256", "2, 4, 8"]),
        (["--kv-heads", "3"], ["kv_heads 3", "heads 4", "1, 2, 4"]),
        (["--width", "6", "--heads", "2"], ["6 / 2 = 3", "even", "RoPE", "1, 3"]),
        (["--width", "7", "--heads", "7"], ["7 / 7 = 1", "make the width even"]),
        (["--data="], ["data", "at least one"]),
    ],
)
def test_bad_command_line(overrides, essentials):
    fails(*essentials, overrides=overrides)


@pytest.mark.parametrize(
    "overrides",
    [["--data", "a", "b", "--data", "c"], ["--data=a", "--layers", "3", "--data", "b", "c"], ["--data", "a", "b", "c"]],
)
def test_a_list_given_again_takes_the_values_of_both(overrides):
    assert Config.load(None, overrides).data == ("a", "b", "c")


@pytest.mark.parametrize("again", [["--steps", "30"], ["--steps=40"]])
def test_a_setting_that_is_no_list_is_given_once(again):
    fails("--steps must be given once", overrides=["--steps", "30", "--layers", "2", *again])


@pytest.mark.parametrize(
    ("text", "essentials"),
    [
        ('attention = "fp8"', ["is a table", "'attention.precision'"]),
        ("layer = 3", ["'layer'", "'layers'", "run.toml"]),
        ('layers = "3"', ["layers", "run.toml", "an integer", "'3'"]),
        ("layers = true", ["layers", "an integer", "True"]),
        ("clip = true", ["clip", "number", "True"]),
        ("compile = 1", ["compile", "true or false", "1"]),
        ("clip = inf", ["clip", "finite", "inf"]),
        ('data = "stdlib"', ["data", "a list of strings", "'stdlib'"]),
        ("data = [1]", ["data", "a list of strings", "[1]"]),
        ('model = ["llama"]', ["model", "a string", "llama"]),
        ("[model]\nlayers = 3", ["model", "a string", "table"]),
        ("[parallel]\ndp_shards = 2", ["'parallel.dp_shards'", "'parallel.dp_shard'"]),
        ("[paralel]\ntp = 2", ["'paralel.tp'", "'parallel.tp'"]),
        ("[parallel]\ntp = 0", ["parallel.tp must be at least 1, or -1", "got 0"]),
        ('[parallel]\ntp = "2"', ["parallel.tp", "run.toml", "an integer"]),
        ("parallel = 2", ["'parallel' in", "is a table, not a setting", "'parallel.tp'"]),
        ('[activation_checkpointing]\nmode = "some"', ["none, full, selective", "'some'"]),
        ("layers = 3\nwidth = = 4", ["run.toml", "TOML", "line 2"]),
    ],
)
def test_bad_file(tmp_path, text, essentials):
    fails(*essentials, path=write(tmp_path, text))


def test_missing_and_binary_file(tmp_path):
    fails("absent.toml", "No such file", path=tmp_path / "absent.toml")
    fails("directory", path=tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"ab\xff")
    fails("binary.toml", "UTF-8", "byte 2", path=tmp_path / "binary.toml")


def test_a_table_reads_the_same_from_a_file_the_command_line_and_json(tmp_path):
    path = write(tmp_path, '[parallel]\ntp = 2\ndp_shard = 4\n\n[activation_checkpointing]\nmode = "selective"\n')
    config = Config.load(path, ["--parallel.dp-shard", "2", "--parallel.dp_replicate=-1", "--compile.blocks"])
    assert config.parallel == Parallel(dp_shard=2, dp_replicate=-1, tp=2)
    assert (config.activation_checkpointing.mode, config.compile.blocks) == ("selective", True)
    assert json.loads(json.dumps(config.to_dict()))["parallel"]["tp"] == 2
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.replace(["--parallel.tp", "1", "--no-compile.blocks"]).change(steps=7) == Config(
        steps=7,
        parallel=Parallel(dp_shard=2, dp_replicate=-1),
        activation_checkpointing=ActivationCheckpointing("selective"),
    )


def test_former_settings_are_read_as_the_tables_that_replace_them(tmp_path):
    path = write(tmp_path, "compile = true\ncheckpoint_activations = true\n")
    config = Config.load(path)
    assert (config.compile.blocks, config.activation_checkpointing.mode) == (True, "full")
    config = Config.load(path, ["--no-compile", "--checkpoint-activations", "false"])
    assert (config.compile.blocks, config.activation_checkpointing.mode) == (False, "none")
    assert Config.from_dict({"compile": True, "checkpoint_activations": False}).compile.blocks
    fails("compile", "former name of compile.blocks", overrides=["--compile", "--compile.blocks"])


def test_from_dict_names_the_unknown_key():
    with pytest.raises(ConfigError, match=r"'batches'.*'batch'"):
        Config.from_dict({"batches": 3})


def test_shapes_are_those_of_the_model():
    gpt2 = Config(model="gpt2", width=9, heads=3, kv_heads=2)  # no RoPE, no kv_heads: an odd head dimension is fine
    assert gpt2.width // gpt2.heads == 3
    fails("heads 4", "width 9", "1, 3, 9", overrides=["--model", "gpt2", "--width", "9"])


def test_a_model_folder_brings_its_own_shapes(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    assert Config(model="mine", heads=5).heads == 5
    assert Config(model="elsewhere/mine", heads=5).model == "elsewhere/mine"


@pytest.mark.parametrize("option", ["--experts.count", "--experts.top-k", "--experts.shared-width"])
def test_experts_are_settings_of_a_mixture_alone(option):
    assert Config.load(None, ["--model", "mixture", option, "3"]).experts != Config().experts
    for model in ("llama", "gpt2"):
        name = option[2:].replace("-", "_")
        with pytest.raises(
            ConfigError, match=f"{name} is a setting of the model mixture, and the model {model} has no"
        ):
            Config.load(None, ["--model", model, option, "3"])
