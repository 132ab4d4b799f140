"""The settings in which runs differ, where their recipes are names or fields."""

from dataclasses import replace

from octavo.numerics import History
from octavo.recipe import delayed
from octavo.train.config import Config
from octavo.train.records import different_settings

MINE = replace(delayed(), name="mine")
OTHER = replace(delayed(history=History(margin=3.0)), name="mine", rotate=("y",))


def differences(*configs: Config) -> dict[str, list[object]]:
    return different_settings([config.to_dict() for config in configs])


def test_recipes_differ_in_their_fields():
    found = differences(Config(recipe=MINE, steps=5), Config(recipe=OTHER, steps=5))
    margins = {f"recipe.{gemm}.{operand}.history.margin" for gemm, operand in (("y", "x"), ("dx", "w"), ("dw", "dy"))}
    assert margins <= found.keys()
    assert found["recipe.y.x.history.margin"] == [1.0, 3.0]
    assert found["recipe.rotate"] == [[], ["y"]]
    assert len(found) == 7


def test_a_recipe_differs_from_a_preset_by_its_name():
    assert differences(Config(recipe=MINE), Config(recipe="rowwise")) == {"recipe": ["mine", "rowwise"]}
    assert differences(Config(recipe=MINE), Config(recipe=MINE)) == {}
