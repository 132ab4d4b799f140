"""Packed folders in vLLM itself, where it is installed: `make test-vllm`. It makes of a folder what the bytes say.

Every case is a process: `octavo verify`, which compares vLLM's log-probabilities with those of the folder's bytes.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import Folders, make_model

from octavo.packing import pack

pytest.importorskip("vllm")


def vllm_says(folder: Path, model: Path, found: Path) -> dict:
    """What verify has of vLLM: the fields of a `ReaderResult`."""
    command = ["verify", str(folder), "--against", str(model), "--json", str(found)]
    helper = Path(__file__).parent.parent / "support" / "verify_with_vllm.py"
    ran = subprocess.run([sys.executable, str(helper), *command], capture_output=True, text=True, check=False)
    assert found.exists(), ran.stdout + ran.stderr
    (said,) = [reader for reader in json.loads(found.read_text())["readers"] if reader["name"] == "vllm"]
    return dict(said)


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("llama", {"scheme": "channel"}),
        ("mistral", {"scheme": "channel"}),
        ("qwen2", {"scheme": "channel"}),
        ("qwen3", {"scheme": "static"}),
        ("opt", {"scheme": "channel"}),
        ("gpt2", {"scheme": "channel"}),
        ("llama", {"scheme": "tensor"}),
        ("llama", {"scheme": "static"}),
        ("llama", {"scheme": "block"}),
        ("llama", {"scheme": "mx"}),
        ("llama", {"scheme": "int8"}),
        ("llama", {"scheme": "channel", "layers": {"*.mlp.*": "block"}}),
        ("llama", {"scheme": "channel", "skip": ["*.down_proj", "*.o_proj"]}),
        ("llama", {"scheme": "channel", "kv_cache": "fp8"}),
        ("llama", {"scheme": "block", "layout": "fp8"}),
        ("llama", {"scheme": "static", "layout": "modelopt"}),
        ("llama", {"scheme": "channel", "layout": "modelopt"}),
        ("llama", {"scheme": "static", "layout": "modelopt", "kv_cache": "fp8"}),
        ("mixtral", {"scheme": "channel"}),
        ("qwen3moe", {"scheme": "channel", "experts": True}),
        ("mixtral", {"scheme": "channel", "experts": True}),
        ("mixtral of 128", {"scheme": "block", "experts": True}),
        ("qwen3moe", {"scheme": "static", "experts": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_it_agrees_with_the_bytes(made: Folders, tmp_path: Path, kind: str, how: dict) -> None:
    said = vllm_says(made(kind, **how), made(kind), tmp_path / "found.json")
    assert said["outcome"] == "agrees", said
    assert said["distance"] > 0  # it rounds in BF16, the reference does not


@pytest.mark.parametrize(
    ("kind", "how", "note"),
    [
        ("mixtral", {"scheme": "tensor", "experts": True}, "AssertionError"),  # one scale a matrix, dynamic inputs
        ("llama", {"scheme": "group32"}, "No compressed-tensors compatible scheme was found"),
        ("llama", {"scheme": "group128"}, "No compressed-tensors compatible scheme was found"),
        ("llama", {"scheme": "weight"}, "ScaledMM linear layer"),  # its CPU build has no kernel for weights alone
    ],
)
def test_what_it_refuses(made: Folders, tmp_path: Path, kind: str, how: dict, note: str) -> None:
    said = vllm_says(made(kind, **how), made(kind), tmp_path / "found.json")
    assert said["outcome"] == "failed"
    assert note in said["note"]


def in_vllm(*words: object):
    """What a function of tests/support/live_vllm.py finds."""
    helper = Path(__file__).parent.parent / "support" / "live_vllm.py"
    ran = subprocess.run([sys.executable, helper, *map(str, words)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize("scheme", [None, "channel", "tensor", "static", "block"])
def test_check_compares_its_layers_and_finds_a_dropped_scale(made: Folders, scheme: str | None) -> None:
    folder = made("llama") if scheme is None else made("llama", scheme=scheme)
    key = "model.layers.1.mlp.down_proj"
    sound, broken = in_vllm("check", folder, *([] if scheme is None else [key]))
    assert sound["faults"] == []
    assert "y of 8 linear layers" in sound["verdict"]  # q, k and v are one, and so are gate and up
    assert (["scale", f"{key}.weight"] in broken["faults"]) == (scheme is not None)


def test_check_says_where_it_packs_weights_away(made: Folders) -> None:
    found, _ = in_vllm("check", made("llama", scheme="int8"))
    assert found["faults"] == []
    assert "qkv_proj (8 such) holds no weight to read" in found["remarks"][0]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])  # the head of qwen2 is tied
def test_it_takes_the_weights_of_a_model_in_training(made: Folders, tmp_path: Path, kind: str) -> None:
    """As the folder that they would be packed to. (vLLM's reload leaves a tied head as it was, of a folder too.)"""
    model = make_model(tmp_path / "model", kind, seed=1)
    pack(model, tmp_path / "packed")
    given = made(kind, scheme="channel"), model, tmp_path / "packed"
    before, pushed, reloaded = in_vllm("reload", *given)
    assert pushed == reloaded != before
