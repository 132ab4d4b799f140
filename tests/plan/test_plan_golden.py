"""The figures and the printed text of plans against those of figures.json: of all models, GPUs, recipes and settings.

The other files say what is right, by measurements and counts; this one says that nothing else moved. A change of the
planner, of a measured rate or of a list of names moves figures on purpose. Then `python tests/plan/test_plan_golden.py`
writes the file again, and its difference shows them.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import typer
from click.testing import CliRunner

from octavo.checkpoint.scheme import SCHEMES
from octavo.plan.cases import model_presets
from octavo.rates.measured import known_gpus
from octavo.recipe import PRESETS
from octavo_cli.app import app

COMMANDS = typer.main.get_command(app)  # once: reading the options of all commands takes longer than a plan
FILE = Path(__file__).with_name("figures.json")
FULL = "--activation-checkpointing.mode full"
LLAMA, SMALL = "llama-3.1-8b", "llama-3.2-1b --gpus 2 --context 2048"
FP8 = f"{LLAMA} --attention.precision fp8"
EXPERTS = "mixtral-8x7b --batch"
CASES = [
    "7B",
    "llama-3-8b --tokens 1T --days 14 --price 3",
    "llama-3-70b --gpus 64 --compare recipe=bf16,rowwise --compare gpu=h100,h200",
    "llama-3-405b --gpu rtx4090 --recipe bf16",
    *(f"{model} --gpu b200 --gpus 64 --optimizer.state 8bit" for model in model_presets()),
    f"{LLAMA} --compare gpu={','.join(known_gpus())} --recipe bf16",
    f"{LLAMA} --compare recipe={','.join(name for name in PRESETS if name != 'nvfp4')}",
    f"{EXPERTS} 4 --gpus 4 --compare recipe=bf16,tensorwise,rowwise --compare gpu=h200,b200",
    f"{LLAMA} --gpus 8 --compare activation-checkpointing.mode=none,selective,full --compare recipe=bf16,rowwise",
    f"{LLAMA} --no-compile.blocks --compare activation-checkpointing.mode=none,selective,full",
    f"{LLAMA} --gpus 8 --batch 64 --compare parallel.tp=1,8 --compare accumulate=1,4",
    f"{LLAMA} --gpus 8 --compare parallel.gather-dtype=fp32,bf16 --compare optimizer.weights=fp32,bf16",
    f"{LLAMA} --gpus 8 --no-parallel.fp8-all-gather {FULL}",
    f"{LLAMA} --gpus 8 --parallel.dp-replicate 8 --parallel.dp-shard 1",
    f"{LLAMA} --gpus 64 --compare network=25,3200",
    f"{LLAMA} --optimizer.offload --compare loss.logits=whole,chunked",
    f"{LLAMA} --optimizer.masters host --compare clip=0,1 --compare recipe=bf16,rowwise",
    f"{FP8} {FULL} --compare context=4096,8192 --batch 1",
    f"{FP8} --context 8100 --attention.shortest 8000",
    f"{FP8} --gpu l40s",
    *(f"{model} --attention.precision fp8 --attention.shortest 128" for model in ("gpt2", "dit-xl-2", "deepseek-v3")),
    "gpt2 --batch 8 --recipe tensorwise --compare gpus=1,2 --compare model=gpt2,gpt2-xl --compare recipe=bf16,rowwise",
    *(f"{SMALL} {FULL} --compare batch=2,64 --recipe {name}" for name in ("bf16", "rowwise", "delayed", "blockwise")),
    *(f"{LLAMA} --serve --context 8192 --gpu {gpu}" for gpu in known_gpus()),
    f"{LLAMA} --serve --context 1024 --batch 64 --gpus 4 --compare scheme=bf16,{','.join(SCHEMES)}",
    f"{LLAMA} --serve --context 8192 --compare kv-cache=bf16,fp8 --compare attention=bf16,fp8",
    f"{EXPERTS} 64 --serve --gpus 2 --context 4096 --kv-cache fp8 --compare scheme=bf16,channel,tensor,mx",
    "llama-3-8b --serve --attention fp8 --gpu l40s --context 2048 --compare scheme=bf16,weight",
    "deepseek-v3 --serve --gpus 8 --batch 1",
    "gpt2 --serve",
]  # fmt: skip


def plan(words: str) -> dict[str, Any]:
    """The figures of a plan, which --json prints, and the lines of text, of one call."""
    figures: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("octavo_cli.plan._save", lambda csv, as_json, found: figures.append(json.dumps(found)))
        result = CliRunner(env={"COLUMNS": "1000"}).invoke(COMMANDS, ["plan", *words.split()])
    assert result.exit_code == 0, result.exception
    return {"figures": json.loads(figures[0]), "printed": result.stdout.splitlines()}


def same(found: Any, required: Any) -> bool:
    """Equal, but numbers may differ in their last digits."""
    if isinstance(required, dict):
        return found.keys() == required.keys() and all(same(found[key], value) for key, value in required.items())
    if isinstance(required, list):
        return len(found) == len(required) and all(map(same, found, required))
    return math.isclose(found, required, rel_tol=1e-9) if isinstance(required, float) else bool(found == required)


@pytest.mark.parametrize("words", CASES)
def test_figures_and_text_are_those_of_the_file(words: str) -> None:
    found, required = plan(words), json.loads(FILE.read_text())[words]
    assert found["printed"] == required["printed"]
    assert same(found["figures"], required["figures"])


if __name__ == "__main__":
    plans = [f"{json.dumps(words)}: {json.dumps(plan(words))}" for words in CASES]
    FILE.write_text("{\n" + ",\n".join(plans) + "\n}\n")
