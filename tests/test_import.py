"""`import octavo` is cheap and changes nothing."""

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import octavo

LOOK = """
import json, os, random, signal, sys, warnings
calls = [0]
def count(*_):
    calls[-1] += 1
sys.setprofile(count)
import torch
sys.setprofile(None)
SET = ["TORCHINDUCTOR_STATIC_LAUNCH_USER_DEFINED_TRITON_KERNELS"]  # docs/decisions.md says why the operations set it
def state():
    return {
        "environment": {key: value for key, value in os.environ.items() if key not in SET},
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
calls.append(0)
sys.setprofile(count)
import octavo
presets = len(octavo.recipe.PRESETS)  # a package is an attribute without an import of its own
octavo.convert, octavo.quantize, octavo.watch, octavo.load
sys.setprofile(None)
changed = [name for name, value in state().items() if value != before[name]]
loaded = sorted(sys.modules.keys() - modules)
found = {"changed": changed, "cuda": torch.cuda.is_initialized(), "modules": loaded, "presets": presets}
print(json.dumps(found | {"calls": calls}))
"""
# What only the command line, Hugging Face's formats, plots and FP8 competitors need.
LEFT_ALONE = (
    "transformers", "tokenizers", "datasets", "compressed_tensors", "gguf", "rich", "typer", "tensorboard",
    "matplotlib", "torch._inductor", "torch.utils.tensorboard", "octavo_cli", "octavo.train", "octavo.evaluation",
    "octavo.hf", "octavo.calibration", "octavo.packing",
)  # fmt: skip


@pytest.fixture(scope="module")
def looked() -> dict[str, Any]:
    """An import of octavo in a fresh interpreter: the changes, the modules, and Python's calls and returns."""
    printed = subprocess.run([sys.executable, "-c", LOOK], check=True, capture_output=True, text=True).stdout
    return json.loads(printed)


def test_nothing_is_changed_and_nothing_optional_is_loaded(looked):
    assert looked["changed"] == []
    assert looked["cuda"] is False
    assert [name for name in LEFT_ALONE if name in looked["modules"]] == []
    assert "octavo.nn.linear" in looked["modules"]


def test_public_names_are_there_once():
    assert len(octavo.__all__) == len(set(octavo.__all__)) <= 14
    assert all(getattr(octavo, name) is not None for name in octavo.__all__)


def test_only_public_names_are_offered():
    assert dir(octavo) == sorted(octavo.__all__)


def test_costs_little_more_than_torch(looked):
    torch_alone, octavo_beside_it = looked["calls"]
    assert octavo_beside_it < 0.2 * torch_alone


def test_each_public_name_is_imported_from_the_module_that_type_checkers_see():
    tree = ast.parse(Path(octavo.__file__).read_text())
    for_types = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [n for n in for_types.body if isinstance(n, ast.ImportFrom) and str(n.module).startswith("octavo")]
    seen = {alias.name: node.module for node in imports for alias in node.names}
    assert seen == octavo._MODULE_OF
    assert {*seen, "load", "__version__"} == set(octavo.__all__)


def test_a_package_is_an_attribute_without_an_import_of_its_own(looked):
    assert looked["presets"] == len(octavo.recipe.PRESETS)
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        octavo.quantise  # noqa: B018
