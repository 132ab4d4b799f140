import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from octavo.models.tokenizer import ByteTokenizer
from octavo.numerics import History
from octavo.recipe import delayed
from octavo.train.config import PRESETS, RULES, Config, ConfigError, Parallel, check_effects, settings_of
from octavo.train.model import check_memory, make_model
from octavo.train.processes import check_parallel, find_degrees, total_memory
from octavo.train.run_records import different_settings
from octavo.train.settings import load_config, parse
from octavo.train.trainer import start_run

HOST = "--optimizer.masters=host"


def write(folder, text):
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def fails(*essentials, overrides=(), path=None):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    for essential in essentials:
        assert essential in str(caught.value)


def test_file_overrides_defaults_and_command_line_overrides_file(tmp_path):
    text = 'layers = 6\nkv_heads = 1\nlearning_rate = 1\nskip = ["lm_head"]\n[compile]\nblocks = true\n'
    config = load_config(write(tmp_path, text), ["--kv-heads", "4", "--clip=0", "--compile.blocks", "false"])
    assert (config.layers, config.kv_heads, config.compile.blocks, config.skip) == (6, 4, False, ("lm_head",))
    assert (config.width, config.data) == (256, ("stdlib",))
    assert type(config.learning_rate) is float
    assert config.learning_rate == 1.0
    assert type(config.clip) is float


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--data a.txt b/*.py --steps 50", {"data": ("a.txt", "b/*.py"), "steps": 50}),
        ("--skip=lm_head mlp.*", {"skip": ("lm_head", "mlp.*")}),
        ("--skip lm_head --skip=", {"skip": ("lm_head",)}),
        ("--skip=", {"skip": ()}),
        ("--data=hf:x?column=code", {"data": ("hf:x?column=code",)}),
        ("--data a b --data c", {"data": ("a", "b", "c")}),
        ("--data=a --layers 3 --data b c", {"data": ("a", "b", "c")}),
        ("--learning_rate 3e-4 --min-learning-rate .0001", {"learning_rate": 3e-4, "min_learning_rate": 1e-4}),
        ("--weight-decay 0", {"weight_decay": 0.0}),
        ("--model gpt2 --width 9 --heads 3", {"width": 9, "heads": 3}),  # no RoPE: an odd head dimension is fine
        ("--tensorboard --no-tied --deterministic=false", {"tensorboard": True, "tied": False, "deterministic": False}),
    ],
)
def test_words_of_the_command_line(words, expected):
    config = load_config(None, words.split(" "))
    assert {name: getattr(config, name) for name in expected} == expected


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
        (["--clip", "1e999"], ["clip", "finite", "inf"]),
        (["--compile.blocks", "yes"], ["compile.blocks", "true or false", "'yes'"]),
        (["--steps", "0"], ["steps", "at least 1", "0"]),
        (["--schedule", "linear"], ["schedule", "cosine, wsd", "'linear'"]),
        (["--tokenizer", "words"], ["tokenizer", "bytes, characters, bpe"]),
        (["--device", "gpu"], ["device", "cuda:N", "'gpu'"]),
        (["--model", "lama"], ["model", "llama, gpt2", "folder", "'lama'"]),
        (["--model", "llama-3-8b"], ["'llama-3-8b', a preset: give it as in octavo train llama-3-8b"]),
        (["--vocabulary", "255"], ["vocabulary", "256", "255"]),
        (["--validation-fraction", "1"], ["validation_fraction", "between 0 and 1", "1.0"]),
        (["--min-learning-rate", "0.1"], ["min_learning_rate", "0.1", "0.001"]),
        (["--warmup", "500"], ["warmup 500 requires more steps; got steps 500"]),
        (["--schedule", "wsd", "--warmup", "450"], ["warmup 450", "decay 0.2", "500 steps", "(100)"]),
        (["--width", "100000000001"], ["heads 4", "width 100000000001"]),
        (["--model", "gpt2", "--width", "9"], ["heads 4", "width 9", "1, 3, 9"]),
        (["--heads", "5"], ["heads 5", "width 256", "2, 4, 8"]),
        (["--kv-heads", "3"], ["kv_heads 3", "heads 4", "1, 2, 4"]),
        (["--width", "6", "--heads", "2"], ["6 / 2 = 3", "even", "RoPE", "1, 3"]),
        (["--width", "7", "--heads", "7"], ["7 / 7 = 1", "make the width even"]),
        (["--data="], ["data", "at least one"]),
        (["--steps", "9" * 26], ["steps must be below 2^63; got " + "9" * 26]),
        (["--skip", ""], ["--skip has an empty value", "--skip= for an empty list"]),
        (["--data", ""], ["--data has an empty value: give at least one entry"]),
        (["--steps", "30", "--layers", "2", "--steps=40"], ["--steps must be given once"]),
        (["--no-steps"], ["no_steps"]),
        (["--model=mixture", "--experts.top-k=9"], ["experts.top_k 9 requires as many experts; got experts.count 8"]),
        ([HOST, "--precision=fp16"], ["masters host requires precision bf16; got fp16: leave"]),
        ([HOST, "--optimizer.weights=bf16"], ["masters host requires optimizer.weights fp32; got bf16: leave"]),
        ([HOST, "--optimizer.state=8bit"], ["masters host requires optimizer.state fp32; got 8bit: leave"]),
        ([HOST, "--optimizer.offload"], ["masters host requires optimizer.offload False; got True: leave"]),
        (["--precision", "fp16", "--optimizer.offload"], ["optimizer.offload True requires precision bf16"]),
        *((["--seed", seed], [f"0 to 2^63 - 1; got {seed}"]) for seed in ("9" * 20, "-1", str(1 << 63))),
    ],
)
def test_bad_command_line(overrides, essentials):
    fails(*essentials, overrides=overrides)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model gpt2 --kv-heads 1", "kv_heads 1 requires the model llama or mixture; got model gpt2: give"),
        ("--recipe bf16 --bf16-gemms dw", r"bf16_gemms \('dw',\) requires .* FP8; got recipe bf16: give --recipe"),
        ("--decay 0.1", "decay 0.1 requires schedule wsd; got schedule cosine: give .* wsd, or leave decay out"),
        ("--loss.chunk 8192", "loss.chunk 8192 requires 8192 tokens .*; got 2048: give at most 2048"),
        ("--loss.logits whole --loss.chunk 512", "loss.chunk 512 requires logits in chunks; got loss.logits whole"),
        ("--compile.backend eager", "compile.backend eager requires compile.blocks; got false: give --compile.blocks"),
        ("--parallel.gather-dtype bf16", "gather_dtype bf16 requires several processes; got 1: .* torchrun"),
        ("--vocabulary 5000", "vocabulary 5000 requires tokenizer bpe; got tokenizer bytes: give --tokenizer bpe"),
        ("--no-bias", "bias False requires the model gpt2; got model llama: give --model gpt2"),
        ("--disturb 0.1", r"disturb 0.1 requires a branch; got none: give --branch RUN/step-N"),
        ("--watch.interval 0 --watch.rows 3", "rows 3 requires watch.interval above 0; got 0: give --watch.interval"),
        ("--watch.rollbacks 5", "rollbacks 5 requires watch.on_spike rollback; got log: give --watch.on-spike"),
        ("--attention.shortest 9", "shortest 9 requires attention.precision fp8; got bf16: give --attention.precision"),
        ("--parallel.async-tp", "async_tp True requires parallel.tp above 1; got 1: give --parallel.tp 2"),
    ],
)
def test_a_setting_without_an_effect_is_refused_before_a_run(words, message, tmp_path):
    config = load_config(None, [*words.split(" "), f"--out={tmp_path / 'run'}"])
    with pytest.raises(ConfigError, match=message):
        start_run(config, Console(quiet=True))
    assert not (tmp_path / "run").exists()


def test_settings_with_an_effect_and_those_at_their_default_are_not_refused():
    words = ["--schedule=wsd", "--decay=0.1", "--compile.blocks", "--compile.backend=eager", "--loss.chunk=512"]
    one = load_config(None, [*words, "--bf16-gemms=dw", "--rope-theta=5e5", "--recipe=auto"])
    names = settings_of(Config)
    check_effects(one, 1, 1, 1, names)
    check_effects(Config(model="gpt2", batch=1, recipe="bf16"), 1, 1, 1, names)
    several = load_config(None, ["--parallel.gather-dtype=bf16", "--parallel.async-tp", "--parallel.tp=2"])
    check_effects(several, 4, 2, 2, names)
    with pytest.raises(ConfigError, match="got 512: give at most 512"):
        check_effects(Config(batch=2).change(**{"loss.chunk": 600}), 2, 1, 2, names)


@pytest.mark.parametrize(
    ("text", "essentials"),
    [
        ("layer = 3", ["'layer'", "'layers'", "run.toml"]),
        ('layers = "3"', ["layers", "run.toml", "an integer", "'3'"]),
        ("clip = true", ["clip", "number", "True"]),
        ("[compile]\nblocks = 1", ["compile.blocks", "true or false", "1"]),
        (f"clip = {10**400}", ["clip", "a finite number", "(int)"]),
        ('data = "stdlib"', ["data", "a list of strings", "'stdlib'"]),
        ("[model]\nlayers = 3", ["model", "a string", "table"]),
        ("[parallel]\ndp_shards = 2", ["'parallel.dp_shards'", "'parallel.dp_shard'"]),
        ("[parallel]\ntp = 0", ["parallel.tp must be at least 1, or -1", "got 0"]),
        ("parallel = 2", ["'parallel' in", "is a table, not a setting", "'parallel.tp'"]),
        ('[activation_checkpointing]\nmode = "some"', ["none, full, selective", "'some'"]),
        ("layers = 3\nwidth = = 4", ["run.toml", "TOML", "line 2"]),
        ("recipe = 3", ["run.toml must be a recipe's name, a .json or .toml file or its fields; got 3 (int)"]),
        ('recipe = ["rowwise"]', ["got ['rowwise'] (list)"]),
        ("[recipe]\nrotat = true", ["run.toml: unknown field rotat (did you mean 'rotate'?)"]),
        ('recipe = "gone.json"', ["run.toml: recipe file", "gone.json cannot be read"]),
    ],
)
def test_bad_file(tmp_path, text, essentials):
    fails(*essentials, path=write(tmp_path, text))


def test_missing_and_binary_file(tmp_path):
    fails("absent.toml", "No such file", path=tmp_path / "absent.toml")
    (tmp_path / "binary.toml").write_bytes(b"ab\xff")
    fails("binary.toml is not valid TOML", "utf-8", "position 2", path=tmp_path / "binary.toml")


def test_a_table_reads_the_same_from_a_file_the_command_line_and_json(tmp_path):
    path = write(tmp_path, '[parallel]\ntp = 2\ndp_shard = 4\n\n[activation_checkpointing]\nmode = "selective"\n')
    config = load_config(path, ["--parallel.dp-shard", "2", "--parallel.dp_replicate=-1", "--compile.blocks"])
    assert config.parallel == Parallel(dp_shard=2, dp_replicate=-1, tp=2)
    assert (config.activation_checkpointing.mode, config.compile.blocks) == ("selective", True)
    assert json.loads(json.dumps(config.to_dict()))["parallel"]["tp"] == 2
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    changed = config.change(**parse(["--parallel.tp", "1", "--no-compile.blocks"])).change(steps=7)
    selective = replace(Config().activation_checkpointing, mode="selective")
    expected = Config(steps=7, parallel=Parallel(dp_shard=2, dp_replicate=-1), activation_checkpointing=selective)
    assert changed == expected


def test_a_model_folder_brings_its_own_shapes(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    assert Config(model="mine", heads=5).heads == 5
    assert Config(model="elsewhere/mine", heads=5).model == "elsewhere/mine"


@pytest.mark.parametrize("option", ["--experts.count", "--experts.top-k", "--experts.shared-width"])
def test_experts_are_settings_of_a_mixture_alone(option):
    assert load_config(None, ["--model", "mixture", option, "3"]).experts != Config().experts
    for model in ("llama", "gpt2"):
        message = f"{option[2:].replace('-', '_')} 3 requires the model mixture; got model {model}: give --model"
        fails(message, overrides=["--model", model, option, "3"])


# --- What was not given follows from what was, and a resumed run keeps what it had


def load(*words):
    return load_config(None, words)


def test_the_defaults_do_not_contradict_each_other_and_are_what_they_were():
    assert (load("--steps", "10").warmup, load("--steps", "1").warmup) == (1, 0)
    assert load("--learning-rate", "1e-5").min_learning_rate == pytest.approx(1e-6)
    assert load("--heads", "1").kv_heads == load("--heads", "1").heads
    assert load("--heads", "16", "--schedule", "wsd", "--decay", "1").warmup == 0
    config = Config()
    found = [config.learning_rate, config.min_learning_rate, config.warmup, config.context, config.kv_heads]
    assert found == [1e-3, 1e-4, 20, 512, 2]
    assert (load("--steps", "200").warmup, config.decay_steps) == (20, 500)  # the demo's


def test_a_change_derives_what_follows_from_it_and_nothing_else():
    recorded = Config.from_dict(json.loads(json.dumps(load("--steps", "100", "--learning-rate", "1e-2").to_dict())))
    assert recorded.derived == RULES.keys() - {"learning_rate"}
    longer = recorded.change(**parse(["--steps", "400"]))
    assert (longer.decay_steps, longer.warmup, longer.min_learning_rate) == (400, 20, 1e-3)
    assert longer == load("--steps", "400", "--learning-rate", "1e-2")
    slower = recorded.change(**parse(["--learning-rate", "1e-5"]))
    assert (slower.min_learning_rate, slower.warmup) == (pytest.approx(1e-6), recorded.warmup)
    given = recorded.change(**parse(["--warmup", "9"])).change(**parse(["--steps", "50"]))
    assert (given.warmup, given.decay_steps) == (9, 50)


def test_recorded_values_hold_although_the_rules_may_change():
    """Another version of octavo may derive another warmup: a run that goes on keeps its own."""
    recorded = Config().to_dict() | {"warmup": 3}
    assert Config.from_dict(recorded).warmup == 3
    assert Config.from_dict(recorded).change(**parse(["--batch", "8"])).warmup == 3
    assert Config.from_dict(recorded).change(**parse(["--steps", "80"])).warmup == 8


def test_the_settings_of_a_run_are_a_configuration_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(load("--steps", "40", "--data", "a", "b").to_dict()))
    assert load_config(path) == load("--steps", "40", "--data", "a", "b")
    assert load_config(path, ["--steps", "4"]) == load("--steps", "4", "--data", "a", "b")
    derived = "config.json must be a list of some of learning_rate, "
    faults = {'{"derived": ["steps"]}': derived, "{": "is not valid JSON", "[]": "must hold a JSON object"}
    for text, reason in faults.items():
        path.write_text(text)
        fails(reason, path=path)


# --- The settings in which runs differ, where their recipes are names or fields


MINE = replace(delayed(), name="mine")
OTHER = replace(delayed(history=History(margin=3.0)), name="mine", emulate=True)


def differences(*configs: Config) -> dict[str, list[object]]:
    return different_settings([config.to_dict() for config in configs])


def test_recipes_differ_in_their_fields_and_from_a_preset_by_their_name():
    found = differences(Config(recipe=MINE, steps=5), Config(recipe=OTHER, steps=5))
    margins = {f"recipe.{gemm}.{operand}.history.margin" for gemm, operand in (("y", "x"), ("dx", "w"), ("dw", "dy"))}
    assert margins <= found.keys()
    assert found["recipe.y.x.history.margin"] == [1.0, 3.0]
    assert found["recipe.emulate"] == [False, True]
    assert len(found) == 7
    assert differences(Config(recipe=MINE), Config(recipe="rowwise")) == {"recipe": ["mine", "rowwise"]}
    assert differences(Config(recipe=MINE), Config(recipe=MINE)) == {}


# --- The presets: whole models by name, of the sizes that their names say


LLAMA_VOCABULARY = 128_256


@pytest.mark.parametrize(
    ("name", "billions", "processes"),
    [("llama-1b", 1.2358, 1), ("llama-3-8b", 8.0303, 8), ("llama-3-70b", 70.5537, 64)],
)
def test_a_preset_has_the_parameters_and_the_processes_of_its_model(name, billions, processes):
    config = load_config(name)
    with torch.device("meta"):
        model = make_model(config, LLAMA_VOCABULARY, Path("none"))
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=1e-4)
    check_parallel(config, find_degrees(config.parallel, processes), torch.device("cpu"))
    assert (config.batch * config.accumulate * config.context) & 0x7FFFF == 0  # a multiple of 524,288 tokens a step
    assert config.tokenizer.startswith("hf:meta-llama/")
    assert config.compile.blocks


def test_every_file_is_a_preset_that_an_error_names(tmp_path, monkeypatch):
    assert PRESETS.keys() == {"llama-1b", "llama-3-8b", "llama-3-70b"}
    fails("llama-7b cannot be read", "presets are llama-1b, llama-3-70b, llama-3-8b", path="llama-7b")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama-1b").write_text("layers = 3")
    assert load_config("llama-1b").layers == 3
    fails("give a TOML file of settings, or the config.json of a run", path=tmp_path)
    assert load_config("llama-3-8b", ["--layers", "2", "--parallel.tp", "2"]).layers == 2


def test_memory_counts_the_parts_of_each_process(monkeypatch):
    monkeypatch.setattr("octavo.train.model.total_memory", lambda device: 80e9)
    config, gpu = load_config("llama-3-70b"), torch.device("cuda")
    with pytest.raises(ConfigError, match=r"divided among 8 processes, 141 GB .* 80 GB.*torchrun"):
        check_memory(config, LLAMA_VOCABULARY, gpu, parts=8)
    check_memory(config, LLAMA_VOCABULARY, gpu, parts=64)
    monkeypatch.undo()
    whole = total_memory(torch.device("cpu"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")  # the processes share the memory of their machine
    assert total_memory(torch.device("cpu")) == whole // 4


def test_memory_counts_the_weights_of_a_folder(begin, made, monkeypatch):
    llama = made("llama")
    monkeypatch.setattr("octavo.train.model.total_memory", lambda device: 1e6)
    said = "too many parameters .* 28 bytes for each .*a copy for checkpoints.*cpu has 0 GB. Choose a smaller"
    with pytest.raises(ConfigError, match=said):
        begin(model=str(llama), optimizer={"masters": "host"})


def test_a_tokenizer_by_its_name(begin, go_on, tmp_path):
    ByteTokenizer().save(tmp_path / "tokenizer")
    trainer = begin(tokenizer=f"hf:{tmp_path / 'tokenizer'}", steps=4)
    assert trainer.data.tokenizer.encode("ab") == [97, 98]
    trainer.run()
    (tmp_path / "tokenizer").rename(tmp_path / "gone")
    assert go_on(tmp_path / "run", "--steps", "5").run().step == 5
    with pytest.raises(ValueError, match=r"hf:no/such/name cannot be opened .* or a local folder"):
        begin(tokenizer="hf:no/such/name", out=str(tmp_path / "other"))
