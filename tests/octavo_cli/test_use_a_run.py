"""octavo generate, evaluate and compare: what a run is for, as it is typed."""

import json
import math
import random
import re
import shutil

import pytest
import torch
from calibration_examples import write_model
from torch import nn
from transformers import BertConfig, BertLMHeadModel, BertModel, LlamaForCausalLM

from octavo.artifact.packed.reader import PackedTensors
from octavo.models.tokenizer import ByteTokenizer
from octavo.packing import pack
from octavo.train.config import Config
from octavo.train.log import training_console
from octavo.train.start import start_run

TINY = {
    "layers": 1, "width": 32, "heads": 2, "kv_heads": 1, "mlp_width": 64, "context": 16, "batch": 2, "steps": 4,
    "warmup": 1, "learning_rate": 1e-2, "min_learning_rate": 1e-3, "device": "cpu", "log_every": 1, "evaluate_every": 2,
    "evaluate_batches": 3, "save_every": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with text.txt, the runs bf16 and fp8, and fp8 packed."""
    root = tmp_path_factory.mktemp("made")
    draw = random.Random(0)
    (root / "text.txt").write_text(" ".join(draw.choices(["folio", "quarto", "octavo", "duodecimo"], k=400)))
    torch.manual_seed(0)
    for name, recipe in (("bf16", "bf16"), ("fp8", "delayed")):
        settings = TINY | {"data": (str(root / "text.txt"),), "recipe": recipe, "out": str(root / name)}
        start_run(Config(**settings), training_console()).run()
    pack(root / "fp8", root / "packed")
    return root


def logged(run):
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {r["step"]: r["evaluation_loss"] for r in records if "evaluation_loss" in r}


def evaluated(octavo, *words):
    code, out, err = octavo("evaluate", *words, "--device", "cpu", "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


# --- evaluate


@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_a_run_is_evaluated_as_its_training_did(octavo, made, name):
    losses = logged(made / name)
    for words, step in (((), 4), (("--step", 2), 2)):
        found = evaluated(octavo, made / name, *words)
        assert found["loss"] == losses[step]
        assert found["perplexity"] == pytest.approx(math.exp(losses[step]))
        assert found["tokens"] == 3 * 2 * 16


def test_the_loss_is_printed_with_what_was_read(octavo, made):
    code, out, err = octavo("evaluate", made / "fp8", "--device", "cpu")
    assert (code, err) == (0, "")
    assert "read 1 file" in out
    assert "fp8, step 4, delayed" in out
    assert f"{logged(made / 'fp8')[4]:.4f} nats a token, on 96 tokens" in out


def test_a_packed_model_is_evaluated_on_what_its_run_holds_out(octavo, made):
    loss = evaluated(octavo, made / "packed", "--held-out", made / "fp8")["loss"]
    trained = logged(made / "fp8")[4]
    assert loss != trained
    assert loss == pytest.approx(trained, rel=0.01)


def test_given_text_is_evaluated_as_transformers_does(octavo, tmp_path, llama):
    text = "It was a bright cold day in April, and the clocks were striking.\n" * 4
    (tmp_path / "text.txt").write_text(text)
    found = evaluated(octavo, llama, "--data", tmp_path / "text.txt", "--context", 20, "--batch", 2)
    model = LlamaForCausalLM.from_pretrained(llama, dtype=torch.bfloat16).eval()
    ids = torch.tensor(list(text.encode()))
    rows = (len(ids) - 1) // 20 // 2 * 2
    windows = ids[: rows * 20 + 1].unfold(0, 21, 20)
    with torch.no_grad():
        logits = model(windows[:, :-1]).logits.double()
    want = nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    assert found["tokens"] == rows * 20
    assert found["loss"] == pytest.approx(float(want), rel=1e-3)


# --- generate


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "llama", "llama", max_position_embeddings=64)


def test_text_comes_from_a_run_and_follows_its_seed(octavo, made):
    words = ("generate", made / "fp8", "--prompt", "folio ", "--count", 12, "--device", "cpu", "--seed")
    code, out, err = octavo(*words, 1)
    assert code == 0
    assert err.startswith("12 tokens, ")
    assert out.startswith("folio ")
    assert out == octavo(*words, 1)[1] != octavo(*words, 2)[1]
    earlier = octavo(*words, 1, "--step", 2)[1]
    assert earlier != out


def test_a_hugging_face_folder_goes_on_as_transformers_does(octavo, llama):
    words = ("generate", llama, "--prompt", "It was", "--count", 10, "--temperature", 0, "--device", "cpu")
    code, out, _ = octavo(*words)
    assert code == 0
    model = LlamaForCausalLM.from_pretrained(llama, dtype=torch.bfloat16).eval()
    prompt = torch.tensor([list(b"It was")])
    ids = model.generate(prompt, max_new_tokens=10, do_sample=False, attention_mask=torch.ones_like(prompt))
    text = bytes(ids[0].tolist()).decode(errors="replace")
    assert [c for c in out if c.isprintable() and c != "\ufffd"] == [
        c for c in text if c.isprintable() and c != "\ufffd"
    ]


# --- compare


def test_runs_are_compared_step_by_step(octavo, made):
    code, out, err = octavo("compare", made / "bf16", made / "fp8")
    assert (code, err) == (0, "")
    bf16, fp8 = logged(made / "bf16"), logged(made / "fp8")
    lines = [line.split() for line in out.splitlines()]
    assert lines[1] == ["step", "bf16", "fp8", "gap"]
    for step, line in zip((2, 4), lines[2:4], strict=True):
        gap = fp8[step] / bf16[step] - 1
        assert line == [str(step), f"{bf16[step]:.4f}", f"{fp8[step]:.4f}", f"{gap:+.2%}"]
    assert lines[5] == ["run", "steps", "final", "loss", "gap", "tokens/s", "peak", "memory,", "GB"]
    assert lines[6][:3] == ["bf16", "4", f"{bf16[4]:.4f}"]
    assert float(lines[7][-1]) > 0.1
    assert lines[8:] == [["recipe:", "bf16,", "delayed"]]
    found = json.loads(octavo("compare", made / "bf16", made / "fp8", "--json")[1])
    assert found["different_settings"] == {"recipe": ["bf16", "delayed"]}
    assert found["runs"][1]["gaps"]["4"] == pytest.approx(fp8[4] / bf16[4] - 1)
    assert found["runs"][1]["evaluations"] == {str(step): loss for step, loss in fp8.items()}


def test_settings_that_differ_are_printed_in_few_digits(octavo, made, tmp_path):
    shutil.copytree(made / "fp8", tmp_path / "other")
    config = tmp_path / "other" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"min_learning_rate": 1e-5 / 10}))
    assert octavo("compare", made / "fp8", tmp_path / "other")[1].splitlines()[-1] == "min-learning-rate: 0.001, 1e-06"


def test_runs_without_memory_or_with_other_steps_are_compared_too(octavo, made, tmp_path):
    """An older run has no peak_memory; a run that goes on has fewer steps, and may be writing a line."""
    other = shutil.copytree(made / "fp8", tmp_path / "bf16")
    lines = [json.loads(line) for line in (other / "metrics.jsonl").read_text().splitlines()]
    kept = [{k: v for k, v in line.items() if k != "peak_memory"} for line in lines if line["step"] < 4]
    (other / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept) + '{"step": 4, "evalu')
    code, out, err = octavo("compare", made / "bf16", other, made / "fp8")
    assert (code, err) == (0, "")
    assert str(other) in out  # two folders are called bf16
    row = next(line.split() for line in out.splitlines() if line.split()[:1] == ["4"])
    assert len(row) == 4  # the step, two losses, and one gap


# --- What cannot be


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    """BERT as an encoder, packed too, and as a language model whose attention sees later tokens."""
    root = tmp_path_factory.mktemp("encoders")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = BertConfig(vocab_size=256, max_position_embeddings=64, **sizes)
    for name, model in (("bert", BertModel(config)), ("bertlm", BertLMHeadModel(config))):
        model.save_pretrained(root / name)
        ByteTokenizer().save(root / name)
    pack(root / "bert", root / "packed-bert")
    return root


@pytest.mark.parametrize("name", ["bert", "packed-bert", "bertlm"])
def test_an_encoder_gives_no_next_token(refused, encoders, name):
    err = refused("generate", encoders / name, "--prompt", "hi", "--device", "cpu")
    assert err.startswith(f"error: {encoders / name} holds a Bert")
    assert "which predicts no next token: a causal language model is required" in err


def test_bad_words_are_one_line(refused, made, llama, tmp_path):
    bare = shutil.copytree(made / "bf16", tmp_path / "bare")
    (bare / "model" / "tokenizer.json").unlink()
    (bare / "model" / "tokenizer_config.json").unlink()
    cpu = ("--device", "cpu")
    for words, message in (
        (("generate", tmp_path / "none", "--prompt", "a", *cpu), "give a run of octavo train, a folder of octavo pack"),
        (("generate", made / "fp8", "--prompt", "a", "--step", 3, *cpu), "no checkpoint of step 3: it keeps 2, 4"),
        (("generate", llama, "--prompt", "a", "--step", 3, *cpu), "is a model, not a run of octavo train"),
        (("generate", made / "fp8", "--prompt", "", *cpu), "the prompt must hold at least one token"),
        (("generate", bare, "--prompt", "a", *cpu), "no tokenizer in"),
        (("evaluate", made / "packed", *cpu), "give --data, or --held-out RUN"),
        (("evaluate", llama, "--held-out", made / "packed", *cpu), "is no run of octavo train"),
        (("evaluate", llama, "--data", made / "text.txt", "--context", 65, *cpu), "from 1 to the model's 64"),
        (("evaluate", llama, "--data", made / "text.txt", "--batches", 0), "--batches must be at least 1, got 0"),
        (("compare", made / "fp8"), "compare takes two or more runs, got 1"),
        (("compare", made / "fp8", made / "packed"), "not a run of octavo train"),
    ):
        assert message in refused(*words)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a GPU")
@pytest.mark.parametrize("name", ["fp8", "packed"])
def test_a_gpu_that_is_not_there_is_one_line(refused, made, name):
    err = refused("generate", made / name, "--prompt", "a", "--device", "cuda")
    assert err.startswith("error: device cuda was asked for")


def test_a_packed_folder_may_be_named_by_a_string(made):
    assert PackedTensors(str(made / "packed")).others == PackedTensors(made / "packed").others


def test_a_folder_is_verified_against_the_checkpoint_that_it_was_packed_from(octavo, made, tmp_path):
    """Also where the run went on after packing."""
    pack(made / "fp8", tmp_path / "early", step=2)
    code, out, err = octavo("verify", tmp_path / "early", "--against", made / "fp8")
    assert (code, err) == (0, "")
    assert "the bytes are right" in out


def test_each_layer_of_a_folder_is_found_by_its_name(octavo, made, monkeypatch):
    """In a pipe, where the width of a terminal means nothing."""
    out = octavo("inspect", made / "packed")[1]
    assert [line.split()[0] for line in out.splitlines() if "down_proj" in line] == [
        "model.layers.0.mlp.down_proj.weight"
    ]


# --- the wrong kind of folder


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["train", "--model", "packed", "--data", "text.txt", "--out", "tuned"], "quantized already.*octavo unpack"),
        (["compare", "fp8", "packed"], "is a model folder, not a run.*give the folder that octavo train wrote"),
        (["verify", "fp8", "--against", "fp8"], "is a run of octavo train, not a packed folder: octavo pack fp8"),
        (["unpack", "fp8", "out"], "a run of octavo train, not a packed folder: octavo pack fp8.*octavo report fp8"),
        (["convert-layout", "fp8", "out", "--layout", "fp8"], "a run of octavo train, not a packed folder"),
        (["inspect", "fp8"], "fp8 is a run of octavo train, not a packed folder"),
        (["inspect", "fp8/step-00000004"], "is a checkpoint of the run fp8, not a packed folder: octavo pack fp8"),
        (["unpack", "nowhere", "out"], "there is no folder nowhere: give a folder that octavo pack wrote"),
        (["calibrate", ".", "out", "--data", "text.txt"], "holds no config.json: give a run of octavo train, or a"),
        (["train", "--model", "fp8", "--out", "tuned"], "fp8 is a run of octavo train: continue it with --resume"),
        (["train", "--model", ".", "--out", "tuned"], "a local folder with a config.json"),
        (["train", "--resume", "nowhere"], "there is no folder nowhere: give the folder that octavo train wrote"),
        (["plan", "."], "holds no config.json: give a run of octavo train, or a Hugging Face model folder"),
        (["pack", "bf16", "out", "--calibration", "packed"], "is missing: give a folder that octavo calibrate wrote"),
        (["pack", "bf16", "out", "--data", "text.txt"], "--data is for --budget or --freeze.*leave --data out"),
        (["pack", "bf16", "out", "--device", "cuda"], "--device is for --budget or --freeze"),
        (["pack", "bf16", "out", "--samples", "8"], "--samples is for --budget or --freeze"),
        (
            ["pack", "bf16", "out", "--freeze", "4", "--data", "text.txt", "--samples", "8"],
            "--samples is for --budget,",
        ),
        (["convert-layout", "packed", "out", "--context", "64"], "--context is for --freeze"),
        (["evaluate", "bf16", "--context", "32"], "--context is for --data, which is not given: add it, or leave"),
        (["verify", "packed", "--against", "bf16", "--samples", "4"], "--samples is for --data"),
        (["fold", "bf16", "out", "--rotate", "--alpha", "0.3"], "--alpha is for --smooth"),
        (["fold", "bf16", "out", "--smooth", "calibrated", "--seed", "1"], "--seed is for --rotate"),
        (["convert-layout", "packed", "out", "--data", "text.txt"], "--data is for --freeze"),
        (["pack", "bf16", "static", "--scheme", "static"], "give --calibration, made by octavo calibrate"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_command_names_the_folder_that_it_needs(refused, made, words, advice, monkeypatch):
    monkeypatch.chdir(made)
    err = refused(*words)
    assert re.search(advice, err), err
    assert not (made / "tuned").exists()
