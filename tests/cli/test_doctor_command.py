"""octavo doctor: the machine, and what each GEMM of each recipe runs on."""

import json
import platform

import pytest
import torch

import octavo as package

GEMMS = ("y", "dx", "dw")
QUANTIZED = dict.fromkeys(package.PRESETS, GEMMS) | {"bf16": (), "rowwise_dw_bf16": ("y", "dx")}


def test_machine_is_this_one(octavo):
    code, out, err = octavo("doctor", "--json")
    assert (code, err) == (0, "")
    machine = json.loads(out)["machine"]
    versions = {"octavo": package.__version__, "torch": torch.__version__, "python": platform.python_version()}
    assert {name: machine[name] for name in versions} == versions
    assert machine["device"] == ("cuda" if torch.cuda.is_available() else "cpu")


def test_every_recipe_has_its_three_gemms(octavo):
    recipes = json.loads(octavo("doctor", "--json")[1])["recipes"]
    assert recipes.keys() == package.PRESETS.keys()
    for name, gemms in recipes.items():
        assert tuple(gemms) == GEMMS
        assert {gemm for gemm, backend in gemms.items() if backend["name"] != "bf16"} == set(QUANTIZED[name])
        assert all(backend["reason"] for backend in gemms.values())


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a GPU")
def test_without_a_gpu_everything_is_emulated(octavo):
    recipes = json.loads(octavo("doctor", "--json")[1])["recipes"]
    found = {backend["name"] for gemms in recipes.values() for backend in gemms.values()}
    assert found == {"emulated", "bf16"}


def test_tables_say_the_same(octavo):
    code, out, err = octavo("doctor")
    assert (code, err) == (0, "")
    report = json.loads(octavo("doctor", "--json")[1])
    for name, value in report["machine"].items():
        assert f"{name.replace('_', ' ')}: {value}" in out
    rows = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    for recipe, gemms in report["recipes"].items():
        assert all(backend["name"] in rows[recipe] for backend in gemms.values())
