"""What a person sees first: help, the version, and the answer to a typing mistake, at once and without PyTorch."""

import json
import os
import re
import resource
import subprocess
import sys

import pytest
from environment import with_source

from octavo import __version__
from octavo_cli.choices import SETTINGS
from octavo_cli.other_names import OTHER_NAMES

COMMANDS = (
    "bench", "bisect", "calibrate", "compare", "convert-layout", "doctor", "evaluate", "export-gguf", "fold", "formats",
    "generate", "inspect", "pack", "plan", "recipe", "report", "train", "unpack", "verify",
)  # fmt: skip
CALL = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from octavo_cli import main
for words in json.loads(sys.argv[1]):
    sys.argv = ["octavo", *words]
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    heavy = {"torch", "numpy", "octavo", "safetensors", "transformers"} & sys.modules.keys()
    print(json.dumps([code, out.getvalue(), err.getvalue(), sorted(heavy)]))
"""
ANSWERS = [
    (["--help"], 0, "Usage: octavo"),
    (["-h"], 0, "Usage: octavo"),
    (["help"], 0, "Usage: octavo"),
    (["--version"], 0, f"octavo {__version__}\n"),
    (["train", "-h"], 0, "octavo train --resume runs/first"),
    (["pack", "--help"], 0, "octavo pack runs/first packed/first"),
    (["help", "verify"], 0, "octavo verify packed/qwen --against models/qwen"),
    (["fold", "--help"], 0, "octavo fold models/llama models/llama-rotated --rotate"),
    (["calibrate", "--help"], 0, "octavo calibrate models/llama calibrated/llama --data chats.jsonl"),
    (["pakc"], 2, "No such command 'pakc'. Did you mean 'pack'"),
    (["help", "pakc"], 2, "Did you mean 'pack'"),
    (["verify", "a", "--budget-kl", "0.01"], 2, "A budget is given as --budget kl=0.01."),
    (["pack", "a", "b", "--shceme", "block"], 2, "No such option: --shceme. Did you mean --scheme?"),
    (["pack", "a", "--out", "b"], 2, "OUT is given without an option"),
    (["calibrate", "a", "--output", "b"], 2, "OUT is given without an option"),
    (["convert-layout", "a", "b", "--to", "fp8"], 2, "Did you mean --layout?"),
    (["train", "--recipee", "bf16"], 2, "No such option: --recipee. Did you mean --recipe?"),
    (["train", "tiny.toml", "--learningrate=1"], 2, "Did you mean --learning-rate?"),
    (["train", "--n_layer", "3"], 2, "No such option: --n_layer. Did you mean --layers?"),
    (["train", "-o", "runs"], 2, "No such option: -o. Did you mean --out?"),
    (["inspect"], 2, "Missing argument"),
    (["verify", "-h"], 0, "Usage: octavo verify [OPTIONS] PACKED --against MODEL\n"),
]


def fresh(*commands):
    """Commands in one process of their own: of each the exit code, output, errors, and what is loaded after it."""
    call = [sys.executable, "-c", CALL, json.dumps(commands)]
    done = subprocess.run(call, capture_output=True, text=True, env=with_source(COLUMNS="120"), check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_help_and_typing_mistakes_are_answered_without_pytorch():
    found = fresh(*(words for words, _, _ in ANSWERS))
    for (words, code, answer), (returned, out, err, loaded) in zip(ANSWERS, found, strict=True):
        assert (returned, loaded) == (code, []), words
        assert answer in (err if code else out), words


def test_help_takes_less_than_half_a_second():
    """Of the processor's time, which other processes do not lengthen as much as they do the clock's."""
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        fresh(["--help"])
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 0.5


THEIRS = """
    --lr learning-rate, --max-iters steps, --max_steps steps, --n_head heads, --n_embd width, --block_size context,
    --batch_size batch, --per_device_train_batch_size batch, --gradient_accumulation_steps accumulate,
    --warmup_iters warmup, --weight-dacay weight-decay, --grad_clip clip, --max_grad_norm clip, --output_dir out,
    --model_name_or_path model, --save_steps save-every, --eval_interval evaluate-every, --dtype precision,
    --init_from model, --num_train_epochs steps, --resume_from_checkpoint resume
"""


@pytest.mark.parametrize("pair", [pair.strip() for pair in THEIRS.split(",")])
def test_the_names_of_nanogpt_and_the_trainer_are_known(octavo, pair):
    theirs, ours = pair.split()
    code, out, err = octavo("train", theirs, "3")
    assert (code, out) == (2, "")
    assert f"No such option: {theirs}." in err
    assert f"--{ours}" in err


def test_every_other_name_stands_for_an_option_that_exists(octavo):
    shown = " ".join(octavo("help", name)[1] for name in ("train", "generate", "calibrate", "pack"))
    options = {*re.findall(r"--([a-z0-9-]+)", shown), *SETTINGS}
    assert [ours for ours in OTHER_NAMES.values() if " " not in ours and ours not in options] == []


def test_an_option_of_another_command_is_not_suggested(octavo):
    code, _, err = octavo("inspect", "--lr", "packed")
    assert code == 2
    assert "Did you mean" not in err


def test_help_names_types_by_words(octavo):
    for name in COMMANDS:
        text = octavo("help", name)[1]
        assert not re.search(r"[<{]|\bint\b|\bstr\b|\bbool\b|x>=", text), name
        assert "-h, --help" in text


def test_the_list_of_commands_cuts_no_sentence(octavo):
    text = octavo("--help")[1]
    assert "..." not in text.split("Commands:")[1]
    assert all(f"  {name} " in text for name in COMMANDS)


def test_an_example_stands_on_one_line(octavo, monkeypatch):
    text = octavo("pack", "--help")[1]
    assert "  octavo pack models/qwen packed/qwen --scheme block --layout fp8 --tensor-parallel 1,2,4\n" in text


def test_no_option_is_cut_at_the_end_of_a_line(octavo):
    texts = {name: octavo("help", name)[1] for name in COMMANDS}
    assert [name for name, text in texts.items() if re.search(r"\w-$", text, re.MULTILINE)] == []


def test_ctrl_c_is_not_a_traceback(octavo, monkeypatch):
    def interrupt(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("octavo.numerics.formats.get_format", interrupt)
    assert octavo("formats") == (130, "", "interrupted\n")


def test_ctrl_c_while_the_commands_are_imported_is_not_a_traceback():
    code = """
import builtins, sys
real = builtins.__import__
def interrupted(name, *rest, **more):
    if name == "typer":
        raise KeyboardInterrupt
    return real(name, *rest, **more)
builtins.__import__ = interrupted
from octavo_cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=with_source(), check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


@pytest.mark.slow
@pytest.mark.parametrize("words", ["--help", "formats"])
def test_a_reader_that_goes_away_ends_a_command_quietly(words):
    """The reader is gone before the first byte, as `head` is before the last of a long table."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "octavo_cli", *words.split()]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, env=with_source(), check=False)
    os.close(writing)
    assert done.stderr == ""
    assert done.returncode in (1, 141)


def test_a_warning_is_one_line():
    script = "import warnings, octavo_cli.app as a; a.app = lambda **_: warnings.warn('odd scales'); a.run()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stderr == "warning: odd scales\n"
