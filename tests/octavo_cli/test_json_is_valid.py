"""What --json prints is JSON: no NaN, no Infinity."""

import json

import pytest
from typer.testing import CliRunner

from octavo_cli.app import app


@pytest.mark.parametrize("number", ["448", "inf", "nan", "-1e300"])
def test_formats_of_a_number_at_the_end_of_the_range(number: str) -> None:
    printed = CliRunner().invoke(app, ["formats", "--json", "--", number]).stdout

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    assert len(json.loads(printed, parse_constant=refuse)) == 8
