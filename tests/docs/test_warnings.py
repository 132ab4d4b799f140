"""The page on warnings has a section on each rule, with its limits."""

import re

import pytest
from code_blocks import ROOT

from octavo.watching import rules as losses
from octavo.watching.rules import RULES

SECTIONS = {part.partition("\n")[0]: part for part in (ROOT / "docs" / "warnings.md").read_text().split("\n## ")[1:]}


def test_each_rule_has_a_section() -> None:
    rules = {rule.name for rule in RULES} | {"loss_spike", "loss_stall", "rate_too_high"}
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
