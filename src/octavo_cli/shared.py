"""The options and arguments that several commands share, and the names that help texts list."""

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.data import ReadReport
from octavo_cli.display import say

# ---- The names that help texts list. They are repeated here because the library that defines them imports PyTorch.
#
# `tests/octavo_cli/test_command_line.py` compares them with the library's.


FORMATS = ("e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz", "e2m1", "e8m0", "bf16", "fp16", "fp32")
ATTENTIONS = CACHES = ("bf16", "fp8")  # caches of octavo plan
GGUF_WEIGHTS = ("q8_0", "f16")
GPUS = ("a100", "h100", "h200", "b200", "rtx4090", "rtx4070", "l40s", "rtx5090", "mi300x", "mi355x")
KV_CACHES = ("auto", "bf16", "fp8", "int8")
LAYOUTS = ("compressed-tensors", "fp8", "modelopt")
MODEL_PRESETS = ("llama-1b", "llama-3-70b", "llama-3-8b")
RECIPES = (
    "bf16", "tensorwise", "tensorwise_rotated", "rowwise", "rowwise_dw_bf16", "rowwise_forward", "delayed",
    "blockwise", "mxfp8", "groupwise", "mxfp4", "nvfp4",
)  # fmt: skip
SCHEMES = ("channel", "tensor", "static", "block", "mx", "group32", "group64", "group128", "weight", "int8")


# ---- Arguments and options that several commands share.


DATA = "--data"
BUDGET_HELP = "kl=0.01 (nats a token), ppl=0.5%, or of an encoder cosine=0.999; --budget can be repeated"
RUN_OPTIONS = (DATA, "--samples", "--context", "--device")  # how pack and unpack run a model on text
DATA_HELP = "Text: stdlib, files, folders, globs, .jsonl (text, prompt or messages), hf:DATASET; --data can be repeated"
FOR_VLLM = f"{LAYOUTS[2]} is for vLLM: transformers computes nonsense from it, or fails."


def changed(context: typer.Context) -> list[str]:
    """The options of the command line, such as --data, whose values are not the defaults."""
    return [
        param.opts[0]
        for param in context.command.params
        if param.param_type_name == "option"
        and (source := context.get_parameter_source(str(param.name))) is not None
        and source.name == "COMMANDLINE"
        and context.params[str(param.name)] != param.default
    ]


def refuse_unused(context: typer.Context, unused: Collection[str], needed: str) -> None:
    """Raise a ValueError if the command line has an option of `unused`, which do nothing without `needed`."""
    for name in changed(context):
        if name in unused:
            raise ValueError(f"{name} is for {needed}, which is not given: add it, or leave {name} out")


def numbers(option: str, given: str) -> list[int]:
    """The numbers of a list such as 1,2,4, the value of an option."""
    if not all(part.strip().isdecimal() for part in given.split(",")):
        raise ValueError(f"{option} takes numbers, such as 1,2,4, got {given!r}")
    return [int(part) for part in given.split(",")]


def settings_after(config: Path | None, context: typer.Context) -> tuple[Path | None, list[str]]:
    """The argument CONFIG and the settings of the command line: click takes the first unknown option for CONFIG."""
    if config is not None and str(config).startswith("--"):
        return None, [str(config), *context.args]
    return config, list(context.args)


def option(form: str, help: str) -> Any:
    """An option as the help shows it: "NAME", a value; "--time", a flag; "--json FILE", with a name of its own."""
    names = [word for word in form.split() if word.startswith("--")]
    values = [word for word in form.split() if word not in names]
    return typer.Option(*names, metavar=values[0] if values else None, help=help)


def argument(metavar: str, help: str) -> Any:
    return typer.Argument(metavar=metavar, help=help)


AsJson = Annotated[bool, option("--json", "Print JSON instead of tables.")]
Device = Annotated[str, option("NAME", "auto, cpu, cuda or cuda:N.")]
Freeze = Annotated[
    int | None,
    option("NUMBER", "Run the model on this many prompts of --data, and store the scales of its inputs: static."),
]
Out = Annotated[Path, argument("OUT", "The folder to make; it must not exist.")]
Packed = Annotated[Path, argument("PACKED", "A packed folder.")]
PromptBatch = Annotated[int, option("NUMBER", "Prompts that run at once.")]
PromptSeed = Annotated[int, option("NUMBER", "Seed of the choice of prompts.")]
PromptTokens = Annotated[int, option("NUMBER", "Most tokens of a prompt.")]
Step = Annotated[int | None, option("NUMBER", "Take the checkpoint of this step; without it, the newest.")]


def print_reading(report: ReadReport) -> None:
    """Print the report of the text that was read."""
    for line in report.lines():
        say(line)


def required_data(data: list[str] | None) -> list[str]:
    """The words of --data, which --freeze needs."""
    if not data:
        raise ValueError("--freeze runs the model on text: give --data, text files, folders, .jsonl or hf:DATASET")
    return data
