"""octavo doctor: the machine, and what each GEMM of each recipe runs on."""

import json
import platform

import pytest
import torch

import octavo as package
from octavo.nn.speedup.lookup import cache_path, read_table
from octavo.nn.speedup.table import Machine, Measurement, Table
from octavo.ops import Backend
from octavo_cli import doctor
from octavo_cli.choices import GPUS, SCHEMES

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


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a GPU")
def test_measuring_needs_a_gpu(refused, monkeypatch, tmp_path):
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    err = refused("doctor", "--measure-layers")
    assert "--measure-layers times FP8 against BF16 on a CUDA GPU" in err
    assert "run it on the machine that trains" in err
    assert not list(tmp_path.iterdir())


def test_what_was_measured_is_written_where_convert_looks(monkeypatch, tmp_path):
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    here = Machine("Fast GPU 9000", "9.9", "13.0", "2.11.0", "0.1.0")
    measured = Table(here, "made up", grid=(Measurement("rowwise", 2, 3, 4, 1.5, 1.0),))
    backends = dict.fromkeys(package.PRESETS, "cublaslt") | {"mxfp8": "none", "bf16": "bf16", "groupwise": "emulated"}
    monkeypatch.setattr("octavo.nn.speedup.lookup.this_machine", lambda device: here)
    monkeypatch.setattr(
        "octavo.nn.backends.gemm_backends", lambda recipe, _: dict.fromkeys(GEMMS, Backend(backends[recipe.name], ""))
    )
    asked = []

    def measure_grid(recipes, device, progress):
        asked.extend(recipe.name for recipe in recipes)
        progress(1, 1, "timing")
        return measured

    monkeypatch.setattr("octavo.nn.speedup.lookup.measure_grid", measure_grid)
    path = doctor.measure_gains(torch.device("cuda", 0))
    assert path == cache_path(here)
    assert read_table(path) == measured
    assert set(asked) == package.PRESETS.keys() - {"mxfp8", "bf16", "groupwise"}
    monkeypatch.setattr("octavo.nn.speedup.lookup.never_faster", lambda *_: "too old")
    with pytest.raises(ValueError, match="Fast GPU 9000 has no FP8 GEMM to time"):
        doctor.measure_gains(torch.device("cuda", 0))


def test_problems_are_shown_with_their_fix(octavo, monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    code, out, _ = octavo("doctor")
    assert code == 0
    assert "environment: TORCHDYNAMO_DISABLE=1: torch.compile does nothing" in out
    assert "Fix: unset it" in out
    assert "environment" in [each["name"] for each in json.loads(octavo("doctor", "--json")[1])["problems"]]


def test_gemms_are_timed(octavo, monkeypatch):
    monkeypatch.setattr("octavo.diagnosis.gemms.CPU_SHAPES", ((32, 128, 128),))
    monkeypatch.setattr("octavo.diagnosis.gemms.GPU_SHAPES", ((32, 128, 128),))
    monkeypatch.setattr("octavo.diagnosis.gemms._TURN_SECONDS", 1e-4)
    code, out, err = octavo("doctor", "--measure")
    assert (code, err) == (0, "")
    assert "32 x 128 x 128" in out
    assert "1.00x" in out
    found = json.loads(octavo("doctor", "--measure", "--json")[1])
    assert found["not_timed"] == []
    assert {"bf16", "rowwise"} <= {each["recipe"] for each in found["gemms"]}


def test_every_packing_scheme_has_its_gemm(octavo):
    schemes = json.loads(octavo("doctor", "--json")[1])["schemes"]
    assert tuple(schemes) == SCHEMES
    assert all(scheme["reason"] for scheme in schemes.values())
    assert schemes["weight"]["name"].startswith("weight-only, ")


@pytest.mark.parametrize("gpu", GPUS)
def test_a_gpu_that_is_not_here(octavo, gpu):
    code, out, err = octavo("doctor", "--gpu", gpu, "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert report["machine"]["measured"] == ("yes" if gpu in ("h100", "h200") else "no")
    assert len(report["recipes"]) == len(package.PRESETS)
    runs = [name for name, gemms in report["recipes"].items() if "none" not in {g["name"] for g in gemms.values()}]
    assert "emulated" not in {g["name"] for gemms in report["recipes"].values() for g in gemms.values()}
    assert ("rowwise" in runs, "rowwise_fnuz" in runs) == (gpu not in ("a100", "mi300x"), gpu == "mi300x")
    assert set(report["schemes"]) == set(SCHEMES)
    assert "none" not in {scheme["name"] for scheme in report["schemes"].values()}


def test_an_ampere_trains_in_bf16_and_serves_weights_in_eight_bits(octavo):
    code, out, _ = octavo("doctor", "--gpu", "a100")
    assert code == 0
    assert "no FP8 GEMM here: train in BF16" in out
    assert "no problem found" not in out
    report = json.loads(octavo("doctor", "--gpu", "a100", "--json")[1])
    assert report["schemes"].pop("int8")["name"] == "triton"
    assert {scheme["name"] for scheme in report["schemes"].values()} == {"weight-only, triton"}


def test_a_recipe_that_does_not_run_has_a_fix(octavo, tmp_path):
    mine = tmp_path / "mine.json"
    mine.write_text(octavo("recipe", "rowwise")[1])
    code, out, _ = octavo("doctor", "--gpu", "mi300x", "--recipe", mine)
    assert code == 0
    assert "mine: no GEMM here. Fix: write the formats e4m3fnuz and e5m2fnuz in the recipe's file" in out
    assert "no FP8 GEMM here" not in out
    mine.write_text(mine.read_text().replace("e4m3", "e4m3fnuz"))
    assert json.loads(octavo("doctor", "--gpu", "mi300x", "--recipe", mine, "--json")[1])["fixes"] == {}
    fixes = json.loads(octavo("doctor", "--gpu", "h100", "--recipe", mine, "--json")[1])["fixes"]
    assert fixes["mine"].startswith("write the formats e4m3 and e5m2 in")
    out = octavo("doctor", "--gpu", "mi300x", "--recipe", "blockwise")[1]
    assert "blockwise_fnuz: no GEMM here. Fix: take the recipe rowwise" in out
    assert "no FP8 GEMM here" not in octavo("doctor", "--gpu", "h100", "--recipe", "bf16")[1]


def test_only_the_gpu_of_this_machine_is_timed(refused):
    assert "leave --gpu out" in refused("doctor", "--gpu", "rtx4090", "--measure")
    assert "the nearest is rtx4090" in refused("doctor", "--gpu", "rtx409")
