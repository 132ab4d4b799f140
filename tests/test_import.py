"""`import octavo` is cheap and changes nothing."""

import json
import subprocess
import sys
import time

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
            torch.backends.cuda.matmul.allow_tf32, torch.cuda.is_initialized(), torch.random.get_rng_state().sum().item(),
        ],
        "random": str(random.getstate()),
    }
before = state()
import octavo
after = state()
changed = [name for name in before if before[name] != after[name]]
print(json.dumps({"changed": changed, "cuda": torch.cuda.is_initialized(), "modules": list(sys.modules)}))
"""
# What only the command line, Hugging Face's formats, plots and FP8 competitors need.
LEFT_ALONE = (
    "transformers",
    "tokenizers",
    "datasets",
    "compressed_tensors",
    "rich",
    "typer",
    "tensorboard",
    "matplotlib",
)
LEFT_ALONE += ("torch._inductor", "torch.utils.tensorboard", "octavo.cli", "octavo.train", "octavo.serve")


def python(code):
    """Run `code` in a fresh interpreter; its output."""
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_nothing_is_changed_and_nothing_optional_is_loaded():
    found = json.loads(python(LOOK))
    assert found["changed"] == []
    assert found["cuda"] is False
    plain = set(json.loads(python("import json, sys, torch; print(json.dumps(list(sys.modules)))")))
    assert [name for name in LEFT_ALONE if name in found["modules"] and name not in plain] == []


def test_public_names_are_those_listed():
    """And the submodules, which Python adds."""
    submodules = {name.split(".")[1] for name in sys.modules if name.startswith("octavo.")}
    public = {name for name in vars(octavo) if not name.startswith("_")}
    assert public - submodules <= set(octavo.__all__)
    assert set(octavo.__all__) <= vars(octavo).keys()
    assert len(octavo.__all__) == len(set(octavo.__all__))
    assert all(getattr(octavo, name) is not None for name in octavo.__all__)


def seconds(code):
    begin = time.perf_counter()
    python(code)
    return time.perf_counter() - begin


def test_costs_little_more_than_torch():
    pairs = [(seconds("import torch"), seconds("import octavo")) for _ in range(5)]
    torch_alone, with_octavo = (min(times) for times in zip(*pairs, strict=True))
    assert with_octavo < 1.3 * torch_alone
