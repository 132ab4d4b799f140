"""What a command refuses: another kind of folder, a model that its folder does not hold, options that do nothing."""

import json
import re
import shlex
import shutil
from collections.abc import Callable

import pytest
import torch
from tiny_models import write_text
from tiny_runs import SMALLEST_TOML
from verify_examples import change_json, change_tensors

from octavo.numerics import FORMATS
from octavo.recipe import PRESETS

COMMANDS = {
    "generate": "generate {model} --prompt a --device cpu",
    "evaluate": "evaluate {model} --data {text} --device cpu",
    "train": "train --model {model} --data {text} --out {out} --device cpu --steps 1 --context 16 --batch 2",
    "calibrate": "calibrate {model} {out} --data {text} --device cpu",
    "time": "generate {model} --time --batch 1 --length 4 --count 2 --rounds 1 --device cpu",
    "rotate": "pack {model} {out} --rotate",
    "gguf": "pack {model} {out} --layout gguf",
    "pack": "pack {model} {out}",
    "freeze": "pack {model} {out} --freeze 1 --data {text}",
}
WEIGHT = "model.layers.1.mlp.down_proj.weight"


def words_of(command, model, text):
    places = {"model": model, "text": text, "out": model.with_name("out")}
    return COMMANDS.get(command, command).format(**places).split()


# The scheme of a folder whose config.json was saved again without its quantization_config; or a change of tensors.
DAMAGES: dict[str, tuple[str | Callable[[dict[str, torch.Tensor]], object], str]] = {
    "e4m3": ("channel", "config.json states no quantization"),
    "int8": ("int8", "config.json states no quantization"),
    "mx": ("mx", "config.json states no quantization"),
    "scales alone": (
        lambda t: t.update({f"{WEIGHT}_scale": torch.ones(128, 1)}),
        f"{WEIGHT}_scale is the scale of a packed weight",
    ),
    "int32": (lambda t: t.update({WEIGHT: t[WEIGHT].int()}), f"{WEIGHT} is torch.int32"),
    "e5m2": (lambda t: t.update({WEIGHT: t[WEIGHT].to(torch.float8_e5m2)}), f"{WEIGHT} is torch.float8_e5m2"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("command", COMMANDS)
def test_codes_are_not_read_as_weights(refused, made, tmp_path, command, damage):
    what, message = DAMAGES[damage]
    if isinstance(what, str):
        model = shutil.copytree(made("llama", scheme=what), tmp_path / "model")
        shutil.copyfile(made("llama") / "config.json", model / "config.json")
    else:
        model = shutil.copytree(made("llama"), tmp_path / "model")
        change_tensors(model, what)
    assert message in refused(*words_of(command, model, write_text(tmp_path / "text.txt")))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "text.txt"]


def test_a_tensor_of_an_older_file_is_not_trained(refused, made, tmp_path):
    """transformers, which opens the model, takes the tensor from the last file that holds it."""
    model = shutil.copytree(made("llama"), tmp_path / "model")
    names: list[str] = []
    change_tensors(model, names.extend)
    shutil.copyfile(model / "model.safetensors", model / "b.safetensors")
    (model / "model.safetensors").rename(model / "a.safetensors")
    places = dict.fromkeys(names, "a.safetensors") | {WEIGHT: "b.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    err = refused(*words_of("train", model, write_text(tmp_path / "text.txt")))
    assert "which its index takes from another file" in err


# --- config.json and the tokenizer

WRONG: dict[str, dict[str, object]] = {
    "a string for a size": {"hidden_size": "64"},
    "a negative size": {"hidden_size": -64},
    "no vocabulary": {"vocab_size": None},
    "no heads": {"num_attention_heads": 0},
    "unknown positions": {"rope_scaling": {"type": "nope", "rope_type": "nope", "factor": 2.0}},
    "unknown activation": {"hidden_act": "x"},
    "unknown dtype": {"dtype": "float1"},
    "a number for a class": {"architectures": [128]},
    "another class": {"architectures": ["MistralForCausalLM"]},
    "a number for a packing": {"quantization_config": 5},
}
LOADED = (*(name for name in COMMANDS if name not in ("rotate", "gguf", "freeze")), "packed")


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("command", LOADED)
def test_a_config_of_wrong_values_is_named(refused, made, tmp_path, command, wrong):
    scheme = {"scheme": "channel"} if command == "packed" else {}
    model = shutil.copytree(made("llama", **scheme), tmp_path / "model")
    change_json(model / "config.json", lambda config: config.update(WRONG[wrong]))
    words = words_of("generate" if command == "packed" else command, model, write_text(tmp_path / "text.txt"))
    if (command == "train" and wrong.endswith("class")) or (command, wrong) == ("packed", "unknown dtype"):
        pytest.skip("the entry is not read")
    assert str(model) in refused(*words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"vocab": {"a": None}}, "tokenizer.json is not a tokenizer that can be opened"),
        ({"merges": [["no", "pe"]]}, "tokenizer.json is not a tokenizer that can be opened"),
        ("[]", "tokenizer.json must hold a JSON object, got list"),
        ("{}", "tokenizer.json is not a tokenizer that can be opened"),
        ({"vocab": {"a": 256, "b": 1}}, "has 256 rows, but its tokenizer makes token 256"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "evaluate"])
def test_a_tokenizer_that_does_not_open_or_fit(refused, made, tmp_path, command, damage, message):
    """Of the bytes as a BPE with other entries, or with another text."""
    model = shutil.copytree(made("llama"), tmp_path / "model")
    path = model / "tokenizer.json"
    found = json.loads(path.read_text())
    path.write_text(damage if isinstance(damage, str) else json.dumps(found | {"model": found["model"] | damage}))
    (tmp_path / "text.txt").write_text("ab" * 200)
    assert message in refused(*words_of(command, model, tmp_path / "text.txt"))


# --- Runs

DAMAGED_RUNS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "inf": (lambda t: t[WEIGHT.replace("1", "0")].fill_(torch.inf), "down_proj.weight holds inf or NaN: the "),
    "int32": (
        lambda t: t.update({name: w.int() for name, w in t.items()}),
        "weight must be torch.float32, the file has torch.int32",
    ),
}


@pytest.mark.parametrize("damage", DAMAGED_RUNS)
@pytest.mark.parametrize("command", ["generate", "evaluate", "train --resume {model} --steps 6", "pack"])
def test_a_damaged_checkpoint_is_refused(octavo, trained, tmp_path, command, damage):
    copy = shutil.copytree(trained / "bf16", tmp_path / "run")
    change, message = DAMAGED_RUNS[damage]
    change_tensors(copy / "step-00000004", change)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    code, _, found = octavo(*words_of(command, copy, trained / "text.txt"))
    assert (code, found.count("\n"), found[:7]) == (1, 1, "error: ")
    assert message in found.replace("torch.bfloat16", "torch.float32")  # pack reads the model in BF16
    assert "last good" not in found
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


# --- Folders of another kind, values that cannot be, and options that do nothing


@pytest.fixture(scope="module")
def places(tmp_path_factory, made, trained):
    """A folder with text.txt, the runs bf16, fp8, again (another seed), bare (no tokenizer) and cut (a lost file),
    packed, and llama."""
    root = shutil.copytree(trained, tmp_path_factory.mktemp("places") / "places")
    change_json(shutil.copytree(root / "bf16", root / "again") / "config.json", lambda config: config.update(seed=9))
    shutil.copytree(root / "bf16", root / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    (shutil.copytree(root / "bf16", root / "cut") / "step-00000004/train.json").unlink()
    shutil.copytree(made("llama"), root / "llama")
    for name, text in FILES.items():
        (root / name).write_text(text)
    return root


FILES = {
    "tiny.toml": SMALLEST_TOML,
    "bad.toml": "step = 3",
    "lora.toml": 'model = "./llama"\nlora = 8',
    "empty.txt": "# nothing\n",
    "short.txt": "short",
    "bad.jsonl": '{"text": "fine"}\nnot json\n',
    "surrogates.jsonl": '{"prompt": "a"}\n{"prompt": "b\\ud800"}\n',  # JSON can write surrogates, which are no text
}
OF_RUN = "is a checkpoint of the run fp8: give fp8. A checkpoint is chosen by --step NUMBER, and in octavo train by"
TRAIN, VERIFY = "train tiny.toml --data text.txt --out run", "verify packed --against fp8 --data text.txt"
REFUSED = {
    "train --model packed --data text.txt --out tuned": "--lora 16.*octavo unpack",
    "train --resume fp8/step-00000004": OF_RUN,
    "train --model fp8 --out tuned": "fp8 is a run of octavo train: continue it with --resume",
    "train --model . --out tuned": "a local folder with a config.json",
    "train --resume cut --steps 6": "to resume from the one before it",
    "train --resume nowhere": "there is no folder nowhere: give the folder that octavo train wrote",
    f"{TRAIN} --recipe fp8": f"'fp8'.*{', '.join(PRESETS)}",
    f"{TRAIN} --skip nothing.*": r"nothing\.\*.*matches no linear layer",
    "train tiny.toml --data nowhere.txt --out run": r"nowhere\.txt.*no such file",
    "train tiny.toml --data short.txt --out run": "17 tokens",
    "train bad.toml --data text.txt --out run": r"'step' in .*bad\.toml; did you mean 'steps'",
    f"{TRAIN} --lr 3": "'lr' in the command line; did you mean 'learning_rate'",
    "train empty.txt --data text.txt": "empty.txt must hold settings, got none: leave it out for the defaults",
    "train --resume bf16 tiny.toml": "a resumed run has its settings: .* leave tiny.toml out",
    "train --resume bf16 --or-resume": "--resume continues the run of a folder, --or-resume that in --out: leave one",
    "bisect --seeds 2": "give its settings as CONFIG, --from a run, or settings of octavo train",
    "compare fp8 packed": "packed is no run: it has no metrics.jsonl.*that octavo train, octavo.watch or",
    "compare bf16 fp8/step-00000004": OF_RUN,
    "compare fp8": "compare takes two or more runs, got 1",
    "compare bf16 fp8 --decide 0.25": "--decide takes a percentage",
    "compare bf16 again --decide 1%": "all runs are of bf16",
    "report none": "none is no folder: give the folder of a run",
    "calibrate . out --data text.txt": "holds no config.json: give a run of octavo train, or a",
    "calibrate llama out --data bad.jsonl": "bad.jsonl, line 2 is not valid JSON",
    "pack fp8/step-00000004 out": OF_RUN,
    "pack fp8 fp8/step-00000004/out": "would lie in a checkpoint of the run .*fp8, which removes",
    "pack fp8 fp8/step-00000004/a.gguf --layout gguf --no-tokenizer": "would lie in a checkpoint of the run .*fp8",
    "pack bf16 out --rotate --seed -1": r"seed must be an integer from 0 to 2\^63 - 1; got -1",
    "pack bf16 out --calibration text.txt": "is for --scheme static or --kv-cache, which is not given",
    "pack bf16 out --kv-cache fp8 --calibration packed": "is missing: give a folder that octavo calibrate wrote",
    "pack bf16 out --data text.txt": "--data is for --budget or --freeze.*leave --data out",
    "pack bf16 out --freeze 4 --data text.txt --samples 8": "--samples is for --budget,",
    "pack bf16 out --smooth calibrated --seed 1": "--seed is for --rotate",
    "pack bf16 static --scheme static": "give --calibration, made by octavo calibrate",
    "pack llama out --layer *=channel --layer *=tensor": r"--layer must give each pattern one scheme, got '\*' more",
    "pack llama out --layer channel": r"--layer takes GLOB=SCHEME, such as '\*.down_proj=channel', got 'channel'",
    "pack llama out --freeze 1 --data text.txt --calibration text.txt": "both give the scales of inputs: leave one out",
    "pack llama out --rule mse": "the rule mse chooses scales from a calibration, and none is given: give --calibr",
    "pack llama out --rule max --calibration text.txt": "unknown rule 'max' for a scale: choose one of amax,",
    "pack llama out --budget much": "a budget reads kl=0.01",
    "pack llama out --budget kl=1": "give --data",
    "pack llama out --budget kl=0": "the budget kl must be nats a token above 0",
    "pack llama out --budget kl=1e-9 --data text.txt --samples 2 --context 16": "leaves nothing to pack",
    "pack llama out --rotate --scheme channel": "--scheme must be one of bf16, fp32, got 'channel'",
    "pack llama out --layout gguf --pow2": "--pow2 does nothing with --layout gguf: leave one of them out",
    "pack llama out --no-tokenizer": "--no-tokenizer is for --layout gguf, which is not given: add it",
    "pack llama out.gguf": "would be a folder: add --layout gguf for a file",
    "unpack packed out.gguf": "would be a folder: give OUT, and octavo pack OUT .*out.gguf --layout gguf makes",
    "unpack fp8 out": "a run of octavo train, not a packed folder: octavo pack fp8.*octavo report fp8",
    "unpack nowhere out": "there is no folder nowhere: give a folder that octavo pack wrote",
    "unpack packed out --freeze 1 --scheme block": "which only the scheme static has; got --scheme block",
    "verify fp8 --against fp8": "is a run of octavo train, not a packed folder: octavo pack fp8",
    f"{VERIFY} --budget ppl=half": "the budget ppl must be a percentage above 0% and up to 100%, such as 0.5%, or a",
    f"{VERIFY} --json none/r.json": "r.json cannot be written: No such file or directory. Nothing was",
    f"{VERIFY} --json r --html ./r": "--json and --html must be two files",
    f"{VERIFY} --json packed/octavo.json": "octavo.json exists, and is not a report that Octavo wrote: give another",
    f"{VERIFY} --samples 0": "samples, context and batch must be at least 1",
    "verify packed --against none --data text.txt": "give a run of octavo train, or a Hugging Face model",
    "verify packed --against packed": "is quantized already: give the model in BF16 that it was made from",
    "inspect fp8/step-00000004": "is a checkpoint of the run fp8, not a packed folder: octavo pack fp8",
    "inspect llama-9b --dtypes": "the presets are",
    "inspect packed --module *": "--module is for --dtypes, which is not given: add it",
    "inspect small.toml": "small.toml is no packed folder; to trace the dtypes of a model, add --dtypes",
    "inspect llama-1b --dtypes --context 0": "context must be",
    "evaluate packed": "give --data, or --held-out RUN",
    "evaluate llama --data text.txt --held-out bf16": "--data and --held-out both name the text: give one of them",
    "evaluate llama --data text.txt --context 999": "from 1 to the model's",
    "evaluate llama --data text.txt --batches 0": "--batches must be at least 1, got 0",
    "generate fp8/step-00000004 --prompt a": OF_RUN,
    "generate none": "give a run of octavo train, a folder of octavo pack",
    "generate fp8 --prompt a --step 3": "no checkpoint of step 3: it keeps 2, 4",
    "generate llama --prompt a --step 3": "is a model, not a run of octavo train",
    "generate bare --prompt a": "no tokenizer in",
    "generate packed --prompt a --device cuda:77": "device cuda:77",
    "generate none --prompt a --top-p 0": "top_p must be above 0 and at most 1, got 0.0",
    "generate none --prompt a --count 0": "count must be at least 1, got 0",
    "generate none --prompt a --batch 0": "batch must be at least 1, got 0",
    "generate none --prompt a --kv-cache fp4": "--kv-cache must be one of auto, bf16, fp8, int8, got 'fp4'",
    "generate llama --prompt a --file prompts.txt": "--prompt and --file both give prompts",
    "generate none --prompt a --batch 1,2": "--batch takes one number without --time",
    f"generate llama --prompt {'x' * 65}": "the prompt has 65 tokens, and the model sees 64: shorten it",
    "generate llama --prompt a --prompt ''": "prompt 2 of 2 must hold at least one token, got an empty one",
    "generate llama --file surrogates.jsonl": r"a prompt must be text in UTF-8, got 'b\\ud800': convert it first",
    "generate llama --file none": "--file none cannot be read: No such file or directory",
    "generate llama --chat --prompt a": "--chat needs a tokenizer with a chat template, and that in",
    "generate llama --device cpu --time --length 60 --count 8": "are 68 tokens, and the model of",
    "generate llama --device cpu --time --batch 1,x": "--batch takes numbers, such as 1,2,4, got '1,x'",
    "generate llama --device cpu --time --rounds 0": "rounds must be at least 1, got 0",
    "generate llama --device cpu --time --prompt a": "--prompt is for text, and --time writes none",
    "formats --format fp8": f"'fp8'.*{', '.join(FORMATS)}",
    "formats e4m3": "e4m3 is a format: give --format e4m3",
    "formats rowwise --format e4m3": "leave one of them out",
    "doctor --measure-layers --recipe rowwise": "leave --recipe out",
    "plan .": "holds no config.json: give a run of octavo train, or a Hugging Face model folder",
    "plan --batch 4 gpt2": "MODEL comes before the settings and names a model.*; got '--batch'",
    "plan gpt-5": "MODEL must be a preset",
    "plan gpt2 --csv text.txt": "--csv text.txt exists, and is not a table that Octavo wrote: give another name",
    "plan gpt2 --tokens many": "--tokens must be a number such as 300B",
    "plan gpt2 --days 14": "--days is the time for --tokens: add it",
    "plan gpt2 --days 0 --tokens 1B": "--days must be above 0; got 0",
    "plan gpt2 --days 1 --tokens 1B --gpus 8": "searches GPUs and recipes: leave out --gpus",
    "plan gpt2 --days 1 --tokens 1B --parallel.dp-shard 3": "must multiply to the number of processes, 24576",
    "plan gpt2 --tokens 1B --price -1": "--price must be 0 or more; got -1",
    "plan gpt2 --price 2": "--price gives the cost of --tokens: add it, such as --tokens 1T",
    "plan gpt2 --serve --tokens 1B": "--tokens belongs to training: leave out --serve",
    "plan gpt2 --kv-cache fp8": "--kv-cache belongs to serving: add --serve",
    "plan gpt2 --serve --compare kv-cache=bf16,int4": "--kv-cache must be one of bf16, fp8; got 'int4'",
    "plan gpt2 --serve --scheme int4": "--scheme must be one of bf16, channel",
    "plan gpt2 --gpu h300": "--gpu must be one of .* got 'h300' .did you mean 'h",
    "plan gpt2 --gpus 1000000000": "--gpus must be from 1 to 1,000,000, .* got 1,000,000,000",
    "plan llama-3.1-8b --gpus 3 --parallel.tp 3": "tp must divide .*; got 3: it can be 1, 2, 4, 8",
    "plan llama-3.1-8b --gpus 3 --parallel.tp 2": "must multiply to the number of processes, 3",
    "plan gpt2 --gpus 2 --batch 3": "must be a multiple of the 2 that .* have 3: give --batch 4",
    "plan gpt2 --gpus 2 --optimizer.masters host": "needs one process; got 2: give --gpus 1",
    "plan gpt2 --context 4096": "must be at most the 1024 tokens of gpt2; got 4096",
    "plan gpt2 --gpu a100": "A100 80GB SXM has no FP8 GEMMs, .* give --recipe bf16",
    "plan lora.toml": "can be planned, not that of adapters: leave out lora 8",
    "plan gpt2 --compare batch=1 --compare batch=2": "--compare batch stands twice",
    "plan gpt2 --layers 2": "gpt2 has sizes of its own: leave out --layers",
    "plan dit-xl-2 --context 100": "--context of the image model dit-xl-2 is 256; got 100",
    "plan gpt2 --gpus 16 --network 0": "--network must be above 0",
    "plan llama-1b --tokenizer hf:some/tokenizer": "how many tokens the tokenizer hf:",
    "plan lama-3-8b": "got 'lama-3-8b': the nearest presets are llama-3-8b",
    "plan mixture": 'give a .toml file with model = "mixture".*all presets: .*llama-1b',
    "plan gpt2 --compare =bf16": "--compare",
    "plan gpt2 --compare gpus=many": "--compare",
    "plan vit-h-14 --serve": "vit-h-14 has no vocabulary",
    "plan llama-3.1-8b --serve --gpus 3": "--gpus must divide the 32 heads",
    "plan llama-3.1-8b --serve --gpus 0": "--gpus must divide the 32 heads of llama-3.1-8b; got 0",
    "plan llama-3-8b --serve --context 9000": "must be at most the 8192 tokens",
    "plan deepseek-v3 --serve --gpus 8 --scheme block": "cannot pack: .*no multiple of 128 x 128",
    "plan llama-3.1-8b --serve --scheme int8 --gpu mi300x": "no kernel for the scheme int8",
    "plan mixtral-8x7b --serve --scheme int8": "can be packed in FP8, not int8",
    "plan ''": "MODEL comes before the settings and names a model, such as llama-3-8b; got ''",
    "plan 7B --compare gpus=1,2": "--compare needs a model: a number of parameters has one table",
    "plan 0B": "a number of parameters or tokens must be at least 1; got 0B",
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_command_says_what_it_needs_and_changes_nothing(refused, places, monkeypatch, words):
    monkeypatch.chdir(places)
    before = {path: path.stat().st_mtime_ns for path in places.rglob("*")}
    err = refused(*shlex.split(words))
    assert re.search(REFUSED[words], err), err
    assert {path: path.stat().st_mtime_ns for path in places.rglob("*")} == before
