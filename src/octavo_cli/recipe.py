"""octavo recipe: a recipe as JSON."""

import json
from typing import Annotated

import typer

from octavo_cli.choices import RECIPES


def recipe_command(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help=f"{', '.join(RECIPES)}, or a file to check.")],
) -> None:
    """Print a recipe as JSON, or check a file.

    A recipe has the cast of each operand of the three GEMMs. A preset is the start of a file for --recipe FILE. Of a
    TOML file of settings the table [recipe] is read.

    Examples:

      octavo recipe rowwise > mine.json

      octavo train --recipe mine.json --data book.txt
    """
    from octavo.recipe import PRESETS, get_recipe

    fields = get_recipe(recipe).to_dict()
    if fields["name"] in PRESETS:
        del fields["name"]  # a changed preset needs another name, and takes that of its file
    print(json.dumps(fields, indent=2))
