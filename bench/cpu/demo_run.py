"""Training runs for the CPU benchmarks, and their models as Hugging Face folders."""

import json
import shutil
from pathlib import Path

from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from examples import demo
from octavo.checkpoint.files import read_json
from octavo.checkpoint.run import RunFolder
from octavo.evaluation.metrics import Outputs
from octavo.train.config import Config
from octavo.train.settings import load_config
from octavo.train.trainer import start_run


def train(out: Path, *overrides: str) -> Config:
    """Train the demo in the folder `out`, with other settings as `--key value`."""
    config = load_config(None, [*demo.SETTINGS, "--out", str(out), "--device", "cpu", *overrides])
    if signal := start_run(config, Console(quiet=True)).run().interrupted:
        raise SystemExit(f"{signal}: no result is written")
    return config


def write_model(run: Path, out: Path) -> Path:
    """Write the newest checkpoint of a run as a Hugging Face folder in BF16."""
    folder = RunFolder(run)
    shutil.copytree(folder.model, out)
    config = read_json(out / "config.json") | {"dtype": "bfloat16"}
    (out / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder.newest() / "model.safetensors")
    save_file({name: t.bfloat16() for name, t in tensors.items()}, out / "model.safetensors", {"format": "pt"})
    return out


def outputs(model: nn.Module) -> Outputs:
    """A function from ids [B, T] to the logits [B, T, V] of whole prompts."""

    def run(ids: Tensor) -> Tensor:
        logits: Tensor = model(ids, use_cache=False).logits
        return logits

    return run
