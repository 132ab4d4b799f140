"""Every code block of README, CONTRIBUTING and docs runs, and prints what the page shows; and what pages say is so."""

import argparse
import contextlib
import inspect
import io
import json
import re
import shutil
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from code_blocks import PAGES, ROOT, Block, different_lines, missing_lines, read_blocks
from tiny_models import SIZES
from transformers import Qwen3Config, Qwen3ForCausalLM

from octavo.inspection.doctor import Facts, rules_of
from octavo.models.tokenizer import ByteTokenizer
from octavo.numerics import Cast, History
from octavo.recipe import Gemm, Recipe
from octavo.train.config import Config
from octavo.watching import rules as losses
from octavo.watching.rules import RULES
from octavo_cli.app import app

# The blocks marked `no-test`, by their page and first word, and why they cannot run here. Commands are still parsed.
UNTESTED = {
    "needs the network": {"README.md git", "docs/quickstart.md hf"},
    "takes minutes or hours": {
        "README.md make", "CONTRIBUTING.md make", "docs/serving.md compiled",
        "docs/troubleshooting.md TORCH_LOGS=recompiles",
    },
    "needs many GPUs, or their run": {
        "docs/distributed.md from", "docs/distributed.md import", "docs/distributed.md torchrun",
    },
    "needs a Hopper": {"docs/serving.md model"},
    "vLLM has an environment of its own: make test-vllm": {
        "docs/learn/6_serving.md vllm", "docs/quickstart.md vllm", "docs/rl.md llm", "docs/serving.md vllm",
    },
    "torchtitan, Lightning and TRL have an environment of their own: make test-integrations": {
        "docs/integrations.md from", "docs/integrations.md import", "docs/rl.md from",
    },
    "reads the calibration of a whole model": {"docs/training_loop.md from"},
}  # fmt: skip

# The pages of the learning path go on with each other's names and files. Every other page runs by itself.
LESSONS = tuple(page for page in PAGES if page.startswith("docs/learn/"))
GROUPS = [pages for pages in (LESSONS, *((page,) for page in PAGES if page not in LESSONS)) if pages]
PAGES_OF_SECONDS = "bisect inspect integrations learn/1_gpt packing quickstart report rl runs serving troubleshooting"
SLOW = {f"docs/{name}.md": pytest.mark.slow for name in PAGES_OF_SECONDS.split()}

Octavo = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def brought(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the pages ask their reader to bring: `book.txt`, `texts/`, and the folder of a tiny model, `models/qwen`."""
    folder = tmp_path_factory.mktemp("brought")
    text = inspect.getsource(argparse)
    (folder / "book.txt").write_text(text)
    (folder / "texts").mkdir()
    (folder / "texts" / "first.txt").write_text(text[:20_000])
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES | {"max_position_embeddings": 256}))
    model.save_pretrained(folder / "models" / "qwen")
    ByteTokenizer().save(folder / "models" / "qwen")
    return folder


@pytest.fixture
def workspace(brought: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(brought, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)


def test_a_line_that_is_not_printed_in_its_order_is_found() -> None:
    printed = "step 10  loss 2.81\ndone: 10 steps in /somewhere/run\n"
    assert missing_lines(["step 20 loss 1.5", "...", "done: 20 steps in ...run"], printed) == []
    assert missing_lines(["done: 10 steps in /else"], printed) == ["done: 10 steps in /else"]
    assert missing_lines(["done: 10 steps in ...", "step 10  loss 2.81"], printed) == ["step 10  loss 2.81"]


def test_the_blocks_that_do_not_run_are_listed() -> None:
    blocks = (block for page in PAGES for block in read_blocks(page) if not block.tested)
    assert {f"{block.page} {block.text.split()[0]}" for block in blocks} == set().union(*UNTESTED.values())


def test_an_output_that_is_not_shown_is_found() -> None:
    assert different_lines("28.5 dB\n", "28.6 dB\n") == []
    assert different_lines("28.5 dB\n", "28.7 dB\n") == ["28.5 dB | 28.7 dB"]
    assert different_lines("128 ones\n", "129 ones\n") == ["128 ones | 129 ones"]
    assert different_lines("a\n", "a\nb\n") == [" | b"]


@pytest.mark.parametrize("pages", [pytest.param(each, id=each[0], marks=SLOW.get(each[0], ())) for each in GROUPS])
@pytest.mark.usefixtures("workspace")
def test_the_blocks_of_a_page_run(pages: tuple[str, ...], octavo: Octavo) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    blocks = [block for page in pages for block in read_blocks(page)]
    for block, after in zip_longest(blocks, blocks[1:]):
        match block.language:
            case "python":
                printed = run_python(block, names)
                if after is not None and after.shows_output_of(block):
                    assert different_lines(after.text, printed) == [], block
            case "bash" | "console":
                run_commands(block, octavo)
            case "toml":
                write_settings(block)
            case "json":
                json.loads(block.text)
            case "text":
                pass
            case other:
                pytest.fail(f"{block}: a block is python, bash, console, toml, json or text; got {other}")


def run_python(block: Block, names: dict[str, Any]) -> str:
    code = compile("\n" * block.line + block.text, block.page, "exec")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        if block.tested:
            exec(code, names)
    return printed.getvalue()


def run_commands(block: Block, octavo: Octavo) -> None:
    for words, shown in block.commands():
        if not block.tested:
            parse(words)
            continue
        assert words[0] == "octavo", f"{block}: {words[0]} does not run here; mark the block no-test, and list it"
        words, target = (words[:-2], words[-1]) if words[-2] == ">" else (words, None)
        code, printed, errors = octavo(*words[1:])
        assert code == 0, f"{block}: {' '.join(words)}\n{printed}\n{errors}"
        assert missing_lines(shown, printed) == [], f"{block}: {' '.join(words)} printed\n{printed}"
        if target is not None:
            Path(target).write_text(printed)


def parse(words: list[str]) -> None:
    """Read a command without running it: octavo's by its command line; the target of make must exist."""
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words
    if words[0] == "octavo":
        typer.main.get_command(app).commands[words[1]].make_context(words[1], words[2:])


def write_settings(block: Block) -> None:
    """Check a file of settings, and write it under the name in its first line, `# small.toml`, with small batches."""
    Config.from_dict(tomllib.loads(block.text))
    batch = "" if "batch = " in block.text else "batch = 1\n"
    Path(block.text.splitlines()[0].removeprefix("# ")).write_text(batch + block.text)


# ---- What pages say of the library: a section on each rule of warnings, the problems of doctor, the fields of a recipe


SECTIONS = {part.partition("\n")[0]: part for part in (ROOT / "docs" / "warnings.md").read_text().split("\n## ")[1:]}


def test_each_rule_has_a_section() -> None:
    rules = {rule.name for rule in RULES} | {"loss_spike", "loss_stall", "rate_too_high", "rollout_drift"}
    assert {name for name in SECTIONS if re.fullmatch(r"[a-z_]+", name)} == rules
    for name in rules:
        for part in ("Meaning", "How it is computed", "What to do"):
            assert f"**{part}.**" in SECTIONS[name], name


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_limits_are_those_of_the_rules(rule) -> None:
    said = {"dead_scale": ["two samples in a row", "zero, inf or NaN"]}
    for number in said.get(rule.name, [f"{rule.limit:g}"]):
        assert re.search(rf"\b{re.escape(number)}\b", SECTIONS[rule.name])


def test_numbers_of_the_loss_rule() -> None:
    for number in (losses.BEFORE, losses.FEWEST, f"{losses.DEVIATIONS:g}", losses.LEAST):
        assert re.search(rf"\b{re.escape(str(number))}\b", SECTIONS["loss_spike"])
    for number in (losses.STEADY, f"{losses.LONGER:g}"):
        assert re.search(rf"\b{re.escape(str(number))}\b", SECTIONS["loss_stall"])
    assert f"The limit is {losses.RATE:g}." in SECTIONS["rate_too_high"].replace("\n", " ")


def test_every_problem_of_doctor_is_on_the_page() -> None:
    names = {name for _, name, _, _ in rules_of(Facts(environment={}))}
    assert len(names) > 5
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    assert [name for name in names if name not in page] == []


def names(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        yield from value
        for entry in value.values():
            yield from names(entry)


def test_the_example_has_every_field_of_a_recipe() -> None:
    (text,) = (b.text for b in read_blocks("docs/training.md") if b.text.startswith("# own.toml"))
    example = tomllib.loads(text)["recipe"]
    required = {field.name for kind in (Recipe, Gemm, Cast, History) for field in fields(kind) if field.init}
    assert set(names(example)) == required - {"a", "b"} | {"x", "w", "dy"}
    recipe = Recipe.from_dict(example)
    assert recipe.rotate == ("dw",)
    assert recipe.quantizes_w_once
