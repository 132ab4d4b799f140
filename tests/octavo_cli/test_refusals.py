"""What a command refuses: another kind of folder, a model that its folder does not hold, options that do nothing."""

import json
import re
import shutil
from collections.abc import Callable

import pytest
import torch
from tiny_models import write_text
from verify_examples import change_json, change_tensors

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
    if (command, wrong) in (("train", "a number for a class"), ("packed", "unknown dtype")):
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


def test_a_damaged_checkpoint_gives_way_to_the_one_before_it(refused, trained, tmp_path):
    copy = shutil.copytree(trained / "bf16", tmp_path / "run")
    (copy / "step-00000004" / "train.json").unlink()
    assert "to resume from the one before it" in refused("train", "--resume", copy, "--steps", "6")


# --- Folders of another kind, and options that do nothing


@pytest.fixture(scope="module")
def places(tmp_path_factory, made, trained):
    """A folder with text.txt, the runs bf16, fp8, again (another seed) and bare (no tokenizer), packed, and llama."""
    root = shutil.copytree(trained, tmp_path_factory.mktemp("places") / "places")
    change_json(shutil.copytree(root / "bf16", root / "again") / "config.json", lambda config: config.update(seed=9))
    shutil.copytree(root / "bf16", root / "bare")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (root / "bare" / "model" / name).unlink()
    shutil.copytree(made("llama"), root / "llama")
    return root


OF_RUN = "is a checkpoint of the run fp8: give fp8, and to choose one --step"


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["train", "--model", "packed", "--data", "text.txt", "--out", "tuned"], "--lora 16.*octavo unpack"),
        (["compare", "fp8", "packed"], "packed is no run: it has no metrics.jsonl.*that octavo train, octavo.watch or"),
        (["verify", "fp8", "--against", "fp8"], "is a run of octavo train, not a packed folder: octavo pack fp8"),
        (["unpack", "fp8", "out"], "a run of octavo train, not a packed folder: octavo pack fp8.*octavo report fp8"),
        (["inspect", "fp8/step-00000004"], "is a checkpoint of the run fp8, not a packed folder: octavo pack fp8"),
        (["generate", "fp8/step-00000004", "--prompt", "a"], OF_RUN),
        (["evaluate", "fp8/step-00000004"], OF_RUN),
        (["pack", "fp8/step-00000004", "out"], OF_RUN),
        (["compare", "bf16", "fp8/step-00000004"], OF_RUN),
        (["report", "fp8/step-00000004"], OF_RUN),
        (["train", "--resume", "fp8/step-00000004"], OF_RUN),
        (["pack", "fp8", "fp8/step-00000004/out"], "would lie in a checkpoint of the run .*fp8, which removes"),
        (
            ["pack", "fp8", "fp8/step-00000004/a.gguf", "--layout", "gguf", "--no-tokenizer"],
            "would lie in a checkpoint of the run .*fp8",
        ),
        (["pack", "bf16", "out", "--rotate", "--seed", "-1"], r"seed must be an integer from 0 to 2\^63 - 1; got -1"),
        (["unpack", "nowhere", "out"], "there is no folder nowhere: give a folder that octavo pack wrote"),
        (["calibrate", ".", "out", "--data", "text.txt"], "holds no config.json: give a run of octavo train, or a"),
        (["train", "--model", "fp8", "--out", "tuned"], "fp8 is a run of octavo train: continue it with --resume"),
        (["train", "--model", ".", "--out", "tuned"], "a local folder with a config.json"),
        (["train", "--resume", "nowhere"], "there is no folder nowhere: give the folder that octavo train wrote"),
        (["plan", "."], "holds no config.json: give a run of octavo train, or a Hugging Face model folder"),
        (["pack", "bf16", "out", "--calibration", "packed"], "is missing: give a folder that octavo calibrate wrote"),
        (["pack", "bf16", "out", "--data", "text.txt"], "--data is for --budget or --freeze.*leave --data out"),
        (["pack", "bf16", "out", "--device", "cuda"], "--device is for --budget or --freeze"),
        (
            ["pack", "bf16", "out", "--freeze", "4", "--data", "text.txt", "--samples", "8"],
            "--samples is for --budget,",
        ),
        (["unpack", "packed", "out", "--context", "64"], "--context is for --freeze"),
        (["evaluate", "bf16", "--context", "32"], "--context is for --data, which is not given: add it, or leave"),
        (["verify", "packed", "--against", "bf16", "--samples", "4"], "--samples is for --data"),
        (["pack", "bf16", "out", "--rotate", "--alpha", "0.3"], "--alpha is for --smooth"),
        (["pack", "bf16", "out", "--smooth", "calibrated", "--seed", "1"], "--seed is for --rotate"),
        (["unpack", "packed", "out", "--data", "text.txt"], "--data is for --freeze"),
        (["pack", "bf16", "static", "--scheme", "static"], "give --calibration, made by octavo calibrate"),
        (["generate", "none", "--prompt", "a"], "give a run of octavo train, a folder of octavo pack"),
        (["generate", "fp8", "--prompt", "a", "--step", "3"], "no checkpoint of step 3: it keeps 2, 4"),
        (["generate", "llama", "--prompt", "a", "--step", "3"], "is a model, not a run of octavo train"),
        (["generate", "bare", "--prompt", "a"], "no tokenizer in"),
        (["generate", "packed", "--prompt", "a", "--device", "cuda:77"], "device cuda:77"),
        (["evaluate", "packed"], "give --data, or --held-out RUN"),
        (["evaluate", "llama", "--held-out", "packed"], "is no run of octavo train"),
        (["evaluate", "llama", "--data", "text.txt", "--context", "999"], "from 1 to the model's"),
        (["evaluate", "llama", "--data", "text.txt", "--batches", "0"], "--batches must be at least 1, got 0"),
        (["compare", "fp8"], "compare takes two or more runs, got 1"),
        (["compare", "bf16", "fp8", "--decide", "0.25"], "--decide takes a percentage"),
        (["compare", "bf16", "again", "--decide", "1%"], "all runs are of bf16"),
        (["report", "none"], "none is no folder: give the folder of a run"),
        (["report", "llama"], "is no run: it has no metrics.jsonl"),
        (["report", "bf16", "--html", "none/page.html"], "--html"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_command_says_what_it_needs(refused, places, monkeypatch, words, advice):
    monkeypatch.chdir(places)
    err = refused(*words)
    assert re.search(advice, err), err
    assert not (places / "tuned").exists()
