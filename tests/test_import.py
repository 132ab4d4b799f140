"""`import octavo` is cheap and changes nothing."""

import json
import subprocess
import sys
from typing import Any

import pytest

import octavo

LOOK = """
import json, os, random, signal, sys, time, warnings
times = [time.process_time()]  # of the processor: other programs may take turns with this one
import torch
times.append(time.process_time())
def state():
    return {
        "environment": dict(os.environ),
        "warnings": [str(each) for each in warnings.filters],
        "hooks": [str(each) for each in (sys.excepthook, sys.displayhook, signal.getsignal(signal.SIGINT))],
        "torch": [
            torch.get_num_threads(), str(torch.get_default_dtype()), torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(),
            torch.backends.cuda.matmul.allow_tf32, torch.random.get_rng_state().sum().item(),
        ],
        "random": str(random.getstate()),
    }
before, modules = state(), set(sys.modules)
times.append(time.process_time())
import octavo
times.append(time.process_time())
changed = [name for name, value in state().items() if value != before[name]]
loaded = sorted(sys.modules.keys() - modules)
found = {"changed": changed, "cuda": torch.cuda.is_initialized(), "modules": loaded}
print(json.dumps(found | {"torch": times[1] - times[0], "octavo": times[3] - times[2]}))
"""
# What only the command line, Hugging Face's formats, plots and FP8 competitors need.
LEFT_ALONE = (
    "transformers", "tokenizers", "datasets", "compressed_tensors", "gguf", "rich", "typer", "tensorboard",
    "matplotlib", "torch._inductor", "torch.utils.tensorboard", "octavo_cli", "octavo.train", "octavo.evaluation",
    "octavo.hf", "octavo.calibration", "octavo.packing",
)  # fmt: skip


def look() -> dict[str, Any]:
    """Import octavo in a fresh interpreter: the changes, the modules, and the seconds."""
    printed = subprocess.run([sys.executable, "-c", LOOK], check=True, capture_output=True, text=True).stdout
    return json.loads(printed)


@pytest.fixture(scope="module")
def looked() -> dict[str, Any]:
    return look()


def test_nothing_is_changed_and_nothing_optional_is_loaded(looked):
    assert looked["changed"] == []
    assert looked["cuda"] is False
    assert [name for name in LEFT_ALONE if name in looked["modules"]] == []
    assert "octavo.nn.linear" in looked["modules"]


def test_public_names_are_those_listed():
    """And the submodules, which Python adds."""
    submodules = {name.split(".")[1] for name in sys.modules if name.startswith("octavo.")}
    public = {name for name in vars(octavo) if not name.startswith("_")}
    assert public - submodules <= set(octavo.__all__)
    assert set(octavo.__all__) <= vars(octavo).keys()
    assert len(octavo.__all__) == len(set(octavo.__all__))
    assert all(getattr(octavo, name) is not None for name in octavo.__all__)


def costs_little(runs):
    torch_alone, octavo_beside_it = (min(run[name] for run in runs) for name in ("torch", "octavo"))
    return octavo_beside_it < 0.3 * torch_alone


def test_costs_little_more_than_torch(looked):
    """In the shortest of three runs. One is enough if it is that short."""
    runs = [looked]
    while not costs_little(runs) and len(runs) < 3:
        runs.append(look())
    assert costs_little(runs)
