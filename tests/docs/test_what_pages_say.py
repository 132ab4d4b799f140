"""What pages say of the library: a section on each rule of warnings, the problems of doctor, the fields of a recipe."""

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import pytest
from code_blocks import ROOT, read_blocks

from octavo.inspection.doctor import Facts, rules_of
from octavo.numerics import Cast, History
from octavo.recipe import Gemm, Recipe
from octavo.watching import rules as losses
from octavo.watching.rules import RULES

SECTIONS = {part.partition("\n")[0]: part for part in (ROOT / "docs" / "warnings.md").read_text().split("\n## ")[1:]}


def test_each_rule_has_a_section() -> None:
    rules = {rule.name for rule in RULES} | {"loss_spike", "loss_stall", "rate_too_high", "rollout_drift"}
    assert {name for name in SECTIONS if re.fullmatch(r"[a-z_]+", name)} == rules
    for name in rules:
        for part in ("Meaning", "How it is computed", "What to do"):
            assert f"**{part}.**" in SECTIONS[name], name


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_limits_are_those_of_the_rules(rule) -> None:
    said = {"dead_scale": ["two samples in a row", "zero, inf or NaN"]}
    for number in said.get(rule.name, [f"{rule.limit:g}"]):
        assert re.search(rf"\b{re.escape(number)}\b", SECTIONS[rule.name])


def test_numbers_of_the_loss_rule() -> None:
    for number in (losses.BEFORE, losses.FEWEST, f"{losses.DEVIATIONS:g}", losses.LEAST):
        assert re.search(rf"\b{re.escape(str(number))}\b", SECTIONS["loss_spike"])
    for number in (losses.STEADY, f"{losses.LONGER:g}"):
        assert re.search(rf"\b{re.escape(str(number))}\b", SECTIONS["loss_stall"])
    assert f"The limit is {losses.RATE:g}." in SECTIONS["rate_too_high"].replace("\n", " ")


def test_every_problem_of_doctor_is_on_the_page() -> None:
    names = {name for _, name, _, _ in rules_of(Facts(environment={}))}
    assert len(names) > 5
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    assert [name for name in names if name not in page] == []


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
