"""octavo doctor and formats: the machine, the GEMMs of each recipe, number formats, and recipes in files."""

import json
import math
import platform
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from codec_oracle import ML_DTYPES

from octavo.nn.only_if_faster import cache_path, read_table
from octavo.numerics import TENSOR, Cast
from octavo.ops import Backend
from octavo.rates.measured import Machine, Measurement, Table
from octavo.recipe import PRESETS, Gemm, Recipe, get_recipe
from octavo.train.config import Config
from octavo.train.settings import load_config
from octavo.version import __version__
from octavo_cli import doctor
from octavo_cli.shared import GPUS, SCHEMES

GEMMS = ("y", "dx", "dw")
QUANTIZED = dict.fromkeys(PRESETS, GEMMS) | {"bf16": (), "rowwise_dw_bf16": ("y", "dx"), "rowwise_forward": ("y",)}


def test_the_machine_its_recipes_and_its_schemes(printed):
    report = json.loads(printed("doctor", "--json"))
    versions = {"octavo": __version__, "torch": torch.__version__, "python": platform.python_version()}
    assert {name: report["machine"][name] for name in versions} == versions
    assert report["machine"]["device"] == ("cuda" if torch.cuda.is_available() else "cpu")
    assert report["recipes"].keys() == PRESETS.keys()
    for name, gemms in report["recipes"].items():
        assert tuple(gemms) == GEMMS
        assert {gemm for gemm, backend in gemms.items() if backend["name"] != "bf16"} == set(QUANTIZED[name])
        assert all(backend["reason"] for backend in gemms.values())
        assert torch.cuda.is_available() or {each["name"] for each in gemms.values()} <= {"emulated", "bf16"}
    assert tuple(report["schemes"]) == SCHEMES
    assert all(scheme["reason"] for scheme in report["schemes"].values())
    assert report["schemes"]["weight"]["name"].startswith("weight-only, ")
    out = printed("doctor")
    assert all(f"{name.replace('_', ' ')}: {value}" in out for name, value in report["machine"].items())
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
    backends = dict.fromkeys(PRESETS, "cublaslt") | {"mxfp8": "none", "bf16": "bf16", "groupwise": "emulated"}
    monkeypatch.setattr("octavo.nn.only_if_faster.this_machine", lambda device: here)
    monkeypatch.setattr(
        "octavo.ops.dispatch.gemm_backends", lambda recipe, _: dict.fromkeys(GEMMS, Backend(backends[recipe.name], ""))
    )
    asked = []

    def measure_grid(recipes, device, progress):
        asked.extend(recipe.name for recipe in recipes)
        progress(1, 1, "timing")
        return measured

    monkeypatch.setattr("octavo.nn.only_if_faster.measure_grid", measure_grid)
    path = doctor.measure_gains(torch.device("cuda", 0))
    assert path == cache_path(here)
    assert read_table(path) == measured
    assert set(asked) == PRESETS.keys() - {"mxfp8", "bf16", "groupwise"}
    monkeypatch.setattr("octavo.nn.only_if_faster.never_faster", lambda *_: "too old")
    with pytest.raises(ValueError, match="Fast GPU 9000 has no FP8 GEMM to time"):
        doctor.measure_gains(torch.device("cuda", 0))


def test_problems_are_shown_with_their_fix(printed, monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    out = printed("doctor")
    assert "environment: TORCHDYNAMO_DISABLE=1: torch.compile does nothing" in out
    assert "Fix: unset it" in out
    assert "environment" in [each["name"] for each in json.loads(printed("doctor", "--json"))["problems"]]


@pytest.mark.parametrize("gpu", GPUS)
def test_a_gpu_that_is_not_here(printed, gpu):
    report = json.loads(printed("doctor", "--gpu", gpu, "--json"))
    assert report["machine"]["measured"] == ("yes" if gpu in ("h100", "h200") else "no")
    assert len(report["recipes"]) == len(PRESETS)
    runs = [name for name, gemms in report["recipes"].items() if "none" not in {g["name"] for g in gemms.values()}]
    assert "emulated" not in {g["name"] for gemms in report["recipes"].values() for g in gemms.values()}
    assert ("rowwise" in runs, "rowwise_fnuz" in runs) == (gpu not in ("a100", "mi300x"), gpu == "mi300x")
    assert set(report["schemes"]) == set(SCHEMES)
    assert "none" not in {scheme["name"] for scheme in report["schemes"].values()}


def test_an_ampere_trains_in_bf16_and_serves_weights_in_eight_bits(printed):
    out = printed("doctor", "--gpu", "a100")
    assert "no FP8 GEMM here: train in BF16" in out
    assert "no problem found" not in out
    report = json.loads(printed("doctor", "--gpu", "a100", "--json"))
    assert report["schemes"].pop("int8")["name"] == "triton"
    assert {scheme["name"] for scheme in report["schemes"].values()} == {"weight-only, triton"}


def test_a_recipe_that_does_not_run_has_a_fix(printed, tmp_path):
    mine = tmp_path / "mine.json"
    mine.write_text(printed("formats", "rowwise"))
    out = printed("doctor", "--gpu", "mi300x", "--recipe", mine)
    assert "mine: no GEMM here. Fix: write the formats e4m3fnuz and e5m2fnuz in the recipe's file" in out
    assert "no FP8 GEMM here" not in out
    mine.write_text(mine.read_text().replace("e4m3", "e4m3fnuz"))
    assert json.loads(printed("doctor", "--gpu", "mi300x", "--recipe", mine, "--json"))["fixes"] == {}
    fixes = json.loads(printed("doctor", "--gpu", "h100", "--recipe", mine, "--json"))["fixes"]
    assert fixes["mine"].startswith("write the formats e4m3 and e5m2 in")
    out = printed("doctor", "--gpu", "mi300x", "--recipe", "blockwise")
    assert "blockwise_fnuz: no GEMM here. Fix: take the recipe rowwise" in out
    assert "no FP8 GEMM here" not in printed("doctor", "--gpu", "h100", "--recipe", "bf16")


# --- formats, against ml_dtypes

TYPES = ML_DTYPES | {"fp32": np.float32}
SIGNED = [name for name in TYPES if name != "e8m0"]
# Ties, subnormals, both zeros, and numbers of each sign.
NUMBERS = [0.1, -0.1, 1.0, 0.0, -0.0, 17.0, 19.0, -1e-5, 2.0**-9, 3 * 2.0**-10, 2.0**-17, -200.0, math.pi, 1e-9]


def looked_at(printed, number, name):
    (row,) = json.loads(printed("formats", "--format", name, "--json", "--", number))
    assert row["format"] == name
    return row


def test_facts_are_those_of_ml_dtypes(printed):
    table = printed("formats")
    rows = json.loads(printed("formats", "--json"))
    shown = [line.split()[0] for line in table.splitlines()[1:] if line.strip()]
    assert [row["format"] for row in rows] == shown == list(TYPES)
    for row in rows:
        finfo = ml_dtypes.finfo(TYPES[row["format"]])
        assert row["bits"] == finfo.bits
        assert row["max"] == float(finfo.max)
        assert row["normal"] == float(finfo.smallest_normal)
        assert row["epsilon"] == float(finfo.eps)
        assert row["layout"] == f"{int(row['format'] != 'e8m0')}-{finfo.nexp}-{finfo.nmant}"
        if row["format"] != "e8m0":
            assert row["subnormal"] == float(finfo.smallest_subnormal)


@pytest.mark.parametrize("name", SIGNED)
def test_a_number_is_stored_as_ml_dtypes_stores_it(printed, name):
    dtype = np.dtype(TYPES[name])
    for number in (number for number in NUMBERS if abs(number) <= ml_dtypes.finfo(dtype).max):
        row = looked_at(printed, number, name)
        stored = np.array(number).astype(dtype)
        code = int(stored.view(f"u{dtype.itemsize}"))
        assert int(row["code"], 16) == int(row["bits"].replace(" ", ""), 2) == code
        assert (row["value"], row["error"]) == (float(stored), abs(float(stored) - number))
        assert row["relative"] == (row["error"] / abs(number) if number else 0)
        for side, direction in (("below", ml_dtypes.finfo(dtype).min), ("above", ml_dtypes.finfo(dtype).max)):
            assert row[side] == float(np.nextafter(stored, direction))


@pytest.mark.parametrize(
    ("number", "name", "expected"),
    [
        (4.0, "e8m0", {"bits": "10000001", "below": 2.0, "value": 4.0, "above": 8.0}),  # 2^(129 - 127)
        (0.1, "e8m0", {"value": 0.125}),
        (0.09, "e8m0", {"value": 0.0625}),
        (0.0, "e8m0", {"value": None, "error": None, "relative": None}),
        (-1000, "e4m3", {"code": "0xfe", "value": -448, "error": 552, "above": -416}),  # beyond the largest
    ],
)
def test_numbers_worked_out_by_hand(printed, number, name, expected):
    assert expected.items() <= looked_at(printed, number, name).items()


def test_a_number_is_shown_in_every_format(printed):
    table = printed("formats", "0.1")
    assert [line.split()[0] for line in table.splitlines()[1:] if line.strip()] == list(TYPES)
    shown = printed("formats", "0.1", "--format", "e4m3")
    for essential in ("e4m3", "0 0011 101", "0x1d", "0.1015625", "0.09375", "0.109375"):
        assert essential in shown
    value, below, above = printed("formats", "0.1", "--format", "fp32").splitlines()[3:6]
    assert [line.split()[1] for line in (below, value, above)] == ["0.099999994", "0.100000001", "0.100000009"]


@pytest.mark.parametrize("number", ["448", "inf", "nan", "-1e300"])
def test_json_has_no_nan_and_no_infinity(printed, number):
    assert len(json.loads(printed("formats", "--json", "--", number), parse_constant=pytest.fail)) == len(TYPES)


# --- recipes in files, from training to packing


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_printed_for_a_file(printed, here, name):
    (here / "new.json").write_text(printed("formats", name))
    assert get_recipe("new.json") == replace(PRESETS[name](), name="new")


def test_a_file_is_checked_and_printed_whole(printed, refused, here):
    assert json.loads(printed("formats", "mine.json")) == get_recipe("mine.json").to_dict()
    (here / "bad.json").write_text('{"y": {"x": {"granularty": "row"}, "w": {}}}')
    message = "recipe file bad.json: unknown field y.x.granularty (did you mean 'granularity'?)"
    assert message in refused("formats", "bad.json")


def test_the_table_of_a_toml_file_is_read(printed, refused, here):
    (here / "own.toml").write_text('steps = 3\n[recipe.y]\nx.granularity = "tensor"\nw.granularity = "tensor"\n')
    tensor = Cast(granularity=TENSOR)
    assert Recipe.from_dict(json.loads(printed("formats", "own.toml"))) == Recipe("own", y=Gemm(tensor, tensor))
    assert Config(recipe="own.toml").recipe == get_recipe("own.toml")
    found = load_config("own.toml")  # as settings
    assert (found.steps, found.recipe.name, found.recipe.x, found.recipe.dw) == (3, "custom", tensor, None)
    assert Config.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    assert found.change(recipe="bf16").recipe == "bf16"
    for text, essential in (
        ("steps = 3", "in its table [recipe], got none"),
        ('recipe = "rowwise"', "in its table [recipe], got recipe = 'rowwise'"),
        ("[recipe", "recipe file own.toml is not valid TOML"),
    ):
        (here / "own.toml").write_text(text)
        assert essential in refused("formats", "own.toml")


def test_a_run_keeps_its_recipe_without_the_file(printed, here):
    out = printed("train", "tiny.toml", "--data=text.txt", "--recipe=mine.json", "--steps=2", "--out=run")
    assert "mine: 7 linear layers converted" in out
    recipe = get_recipe("mine.json")
    (here / "mine.json").unlink()
    assert json.loads((here / "run" / "config.json").read_text())["recipe"] == recipe.to_dict()
    assert "mine: 7 linear layers converted" in printed("train", "--resume", "run", "--steps", "4")
    printed("evaluate", "run", "--json")
    assert '"recipe": "mine"' in printed("report", "run", "--json")
    assert "7, static" in printed("pack", "run", "packed")  # by the scales of its histories, as delayed


def test_settings_take_a_file_and_a_recipe(here):
    recipe = get_recipe("mine.json")
    (here / "file.toml").write_text('recipe = "mine.json"')
    assert load_config("file.toml").recipe == Config(recipe=recipe).recipe == recipe
    assert Config(model="models/base", calibration="calibrated", recipe="mine.json").recipe == recipe  # with histories


def test_doctor_and_plan_take_a_file(printed, here):
    found = json.loads(printed("doctor", "--json", "--recipe", "mine.json", "--recipe", "rowwise"))
    assert list(found["recipes"]) == ["mine", "rowwise"]
    assert '"recipe": "mine"' in printed("plan", "llama-3-8b", "--recipe", "mine.json", "--json")
