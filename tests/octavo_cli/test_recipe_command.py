"""octavo recipe, and a recipe in a file from training to packing."""

import json
import random
from dataclasses import replace

import pytest

from octavo.numerics import TENSOR, Cast, History
from octavo.recipe import PRESETS, Gemm, Recipe, delayed, get_recipe
from octavo.train.config import Config, ConfigError

SIZES = "--layers 1 --width 32 --heads 2 --kv-heads 1 --mlp-width 64 --context 16 --batch 2 --warmup 1 --device cpu"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder to stand in, with text.txt and mine.json: delayed scaling with another margin and interval."""
    draw = random.Random(0)
    (tmp_path / "text.txt").write_text(" ".join(draw.choices(["folio", "quarto", "octavo"], k=300)))
    fields = delayed(history=History(8, margin=2.0, interval=2)).to_dict() | {"name": "mine"}
    (tmp_path / "mine.json").write_text(json.dumps(fields))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_printed_for_a_file(octavo, here, name):
    code, out, err = octavo("recipe", name)
    assert (code, err) == (0, "")
    (here / "new.json").write_text(out)
    assert get_recipe("new.json") == replace(PRESETS[name](), name="new")


def test_a_file_is_checked_and_printed_whole(octavo, refused, here):
    code, out, _ = octavo("recipe", "mine.json")
    assert (code, json.loads(out)) == (0, get_recipe("mine.json").to_dict())
    (here / "bad.json").write_text('{"y": {"x": {"granularty": "row"}, "w": {}}}')
    message = "recipe file bad.json: unknown field y.x.granularty (did you mean 'granularity'?)"
    assert message in refused("recipe", "bad.json")


def test_the_table_of_a_toml_file_is_read(octavo, refused, here):
    (here / "own.toml").write_text('steps = 3\n[recipe.y]\nx.granularity = "tensor"\nw.granularity = "tensor"\n')
    code, out, err = octavo("recipe", "own.toml")
    tensor = Cast(granularity=TENSOR)
    assert (code, err, Recipe.from_dict(json.loads(out))) == (0, "", Recipe("own", y=Gemm(tensor, tensor)))
    assert Config(recipe="own.toml").recipe == get_recipe("own.toml")
    for text, essential in (
        ("steps = 3", "in its table [recipe], got none"),
        ('recipe = "rowwise"', "in its table [recipe], got recipe = 'rowwise'"),
        ("[recipe", "recipe file own.toml is not valid TOML"),
    ):
        (here / "own.toml").write_text(text)
        assert essential in refused("recipe", "own.toml")


def test_a_run_keeps_its_recipe_without_the_file(octavo, here):
    sizes = [*SIZES.split(), "--evaluate-batches", "1", "--save-every", "2"]
    code, out, err = octavo(
        "train", "--data", "text.txt", *sizes, "--recipe", "mine.json", "--steps", "2", "--out", "run"
    )
    assert (code, err) == (0, "")
    assert "mine: 7 linear layers converted" in out
    recipe = get_recipe("mine.json")
    (here / "mine.json").unlink()
    assert json.loads((here / "run" / "config.json").read_text())["recipe"] == recipe.to_dict()
    code, out, err = octavo("train", "--resume", "run", "--steps", "4")
    assert (code, err) == (0, "")
    assert "mine: 7 linear layers converted" in out
    code, out, _ = octavo("evaluate", "run", "--json")
    assert code == 0
    code, out, _ = octavo("report", "run", "--json")
    assert '"recipe": "mine"' in out
    code, out, _ = octavo("pack", "run", "packed")  # by the scales of its histories, as delayed
    assert code == 0
    assert "7, static" in out


def test_settings_take_a_file_a_table_and_a_recipe(here):
    recipe = get_recipe("mine.json")
    (here / "file.toml").write_text('recipe = "mine.json"')
    assert Config.load("file.toml").recipe == Config(recipe=recipe).recipe == recipe
    (here / "table.toml").write_text('[recipe.y]\nx.granularity = "tensor"\nw.granularity = "tensor"\n')
    found = Config.load("table.toml")
    assert (found.recipe.name, found.recipe.x, found.recipe.dw) == ("custom", Cast(granularity=TENSOR), None)
    assert Config.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    assert found.change(recipe="bf16").recipe == "bf16"


@pytest.mark.parametrize(
    ("text", "essential"),
    [
        ("recipe = 3", "recipe in bad.toml must be a recipe's name, a .json or .toml file or its fields; got 3 (int)"),
        ('recipe = ["rowwise"]', "got ['rowwise'] (list)"),
        ("[recipe]\nrotat = true", "recipe in bad.toml: unknown field rotat (did you mean 'rotate'?)"),
        ('recipe = "gone.json"', "recipe in bad.toml: recipe file gone.json cannot be read"),
    ],
)
def test_a_setting_that_is_no_recipe_is_refused(here, text, essential):
    (here / "bad.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        Config.load("bad.toml")
    assert essential in str(caught.value)


def test_a_calibration_needs_a_recipe_with_histories(here):
    assert Config(model="models/base", calibration="calibrated", recipe="mine.json").recipe.name == "mine"
    with pytest.raises(ConfigError, match="calibration gives the recipe delayed its first scales"):
        Config(model="models/base", calibration="calibrated", recipe="rowwise")


def test_doctor_and_plan_take_a_file(octavo, refused, here):
    code, out, _ = octavo("doctor", "--json", "--recipe", "mine.json", "--recipe", "rowwise")
    assert (code, list(json.loads(out)["recipes"])) == (0, ["mine", "rowwise"])
    assert "leave --recipe out" in refused("doctor", "--measure-layers", "--recipe", "mine.json")
    code, out, _ = octavo("plan", "llama-3-8b", "--recipe", "mine.json", "--json")
    assert (code, '"recipe": "mine"' in out) == (0, True)
