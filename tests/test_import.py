"""`import octavo` is cheap and changes nothing."""

import json
import subprocess
import sys

import octavo

LOOK = """
import json, os, random, signal, sys, warnings
import torch
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
import octavo
changed = [name for name, value in state().items() if value != before[name]]
loaded = sorted(sys.modules.keys() - modules)
print(json.dumps({"changed": changed, "cuda": torch.cuda.is_initialized(), "modules": loaded}))
"""
TIME = """
import time
begin = time.process_time()  # of the processor: other programs may take turns with this one
import torch
middle = time.process_time()
import octavo
print(middle - begin, time.process_time() - middle)
"""
# What only the command line, Hugging Face's formats, plots and FP8 competitors need.
LEFT_ALONE = (
    "transformers", "tokenizers", "datasets", "compressed_tensors", "gguf", "rich", "typer", "tensorboard",
    "matplotlib", "torch._inductor", "torch.utils.tensorboard", "octavo_cli", "octavo.train", "octavo.evaluation",
    "octavo.hf", "octavo.calibration", "octavo.packing",
)  # fmt: skip


def python(code):
    """Run `code` in a fresh interpreter; its output."""
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_nothing_is_changed_and_nothing_optional_is_loaded():
    found = json.loads(python(LOOK))
    assert found["changed"] == []
    assert found["cuda"] is False
    assert [name for name in LEFT_ALONE if name in found["modules"]] == []
    assert "octavo.nn.linear" in found["modules"]


def test_public_names_are_those_listed():
    """And the submodules, which Python adds."""
    submodules = {name.split(".")[1] for name in sys.modules if name.startswith("octavo.")}
    public = {name for name in vars(octavo) if not name.startswith("_")}
    assert public - submodules <= set(octavo.__all__)
    assert set(octavo.__all__) <= vars(octavo).keys()
    assert len(octavo.__all__) == len(set(octavo.__all__))
    assert all(getattr(octavo, name) is not None for name in octavo.__all__)


def test_costs_little_more_than_torch():
    runs = [map(float, python(TIME).split()) for _ in range(3)]
    torch_alone, octavo_beside_it = (min(seconds) for seconds in zip(*runs, strict=True))
    assert octavo_beside_it < 0.3 * torch_alone
