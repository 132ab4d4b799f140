"""The example of a recipe in docs/training.md has every field that a recipe has, and is accepted."""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from code_blocks import read_blocks

from octavo.numerics import Cast, History
from octavo.recipe import Gemm, Recipe


def names(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        yield from value
        for entry in value.values():
            yield from names(entry)


def test_the_example_has_every_field_of_a_recipe() -> None:
    (text,) = (b.text for b in read_blocks("docs/training.md") if b.text.startswith("# own.toml"))
    example = tomllib.loads(text)["recipe"]
    required = {field.name for kind in (Recipe, Gemm, Cast, History) for field in fields(kind) if field.init}
    assert set(names(example)) == required - {"a", "b"} | {"x", "w", "dy"}
    recipe = Recipe.from_dict(example)
    assert recipe.rotate == ("dw",)
    assert recipe.quantizes_w_once
