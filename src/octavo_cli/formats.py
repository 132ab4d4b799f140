"""octavo formats: the number formats, and a number stored in each of them."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo_cli.choices import FORMATS
from octavo_cli.display import print_table, say
from octavo_cli.options import AsJson, option

if TYPE_CHECKING:
    from octavo.numerics.formats import Format

FACTS = ("format", "layout", "bias", "max", "normal", "subnormal", "epsilon", "specials")
SPECIALS = {"ieee": "inf, NaN", "fn": "NaN", "fnuz": "NaN, no -0", "e8m0": "NaN, no 0"}


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no number. A format is given as --format NAME.") from None


def formats_command(
    number: Annotated[
        float | None,
        typer.Argument(
            metavar="NUMBER", parser=_number, help="A number to look at; without it, all formats are listed."
        ),
    ] = None,
    format: Annotated[str | None, option("NAME", f"One format only: {', '.join(FORMATS)}.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the number formats, or one number in each of them.

    A number is shown with the bits that store it, the value that they mean, its neighbours and its error.

    Examples:

      octavo formats

      octavo formats 0.1 --format e4m3

      octavo formats -1e-5
    """
    from octavo.numerics.formats import get_format

    chosen = [get_format(name) for name in (FORMATS if format is None else [format])]
    rows = [facts(f) if number is None else look(number, f) for f in chosen]
    if as_json:
        print(json.dumps([{name: _json(value) for name, value in row.items()} for row in rows], indent=2))
        return
    if number is not None and format is not None:
        for name, value in rows[0].items():
            say(f"{name:<9} {_text(value)}")
        return
    columns = FACTS if number is None else ("format", "bits", "code", "value", "relative")
    print_table(columns, [[_text(row[column]) for column in columns] for row in rows])


def _json(value: Any) -> Any:
    """`value`, or None for inf and NaN, which JSON lacks."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def facts(f: Format) -> dict[str, Any]:
    """A row of the table of formats: sign-exponent-mantissa bits, and the extreme numbers."""
    return {
        "format": f.name,
        "bits": f.bits,
        "layout": f"{int(f.signed)}-{f.exponent_bits}-{f.mantissa_bits}",
        "bias": f.bias,
        "max": f.max,
        "normal": f.smallest_normal,
        "subnormal": f.smallest_subnormal,
        "epsilon": f.epsilon,
        "specials": SPECIALS[f.family],
    }


def look(number: float, f: Format) -> dict[str, Any]:
    """`number` as `f` stores it: code, bits (sign exponent mantissa), value, neighbours and error."""
    import torch

    from octavo.numerics.codec import decode, encode

    code = int(encode(torch.tensor(number, dtype=torch.float64), f))
    value = float(decode(torch.tensor(code), f))
    error = abs(value - number)
    return {
        "format": f.name,
        "bits": _bits(code, f),
        "code": f"0x{code:0{f.bits // 4}x}",
        "value": value,
        "below": _neighbour(code, f, -1),
        "above": _neighbour(code, f, +1),
        "error": error,
        "relative": error / abs(number) if number else 0.0,
    }


def _bits(code: int, f: Format) -> str:
    text = f"{code:0{f.bits}b}"
    cuts = ([1] if f.signed else [0]) + [f.exponent_bits + int(f.signed)]
    return " ".join(part for part in (text[: cuts[0]], text[cuts[0] : cuts[1]], text[cuts[1] :]) if part)


def _neighbour(code: int, f: Format, direction: int) -> float:
    """The next number above or below in value; NaN where there is none. Codes order magnitudes, the sign turns them."""
    import torch

    from octavo.numerics.codec import decode

    sign_bit = 1 << (f.bits - 1) if f.signed else 0
    negative = bool(code & sign_bit)
    magnitude = code & ~sign_bit if f.signed else code
    position = (-magnitude if negative else magnitude) + direction
    if abs(position) > f.max_code or (not f.signed and position < 0) or code == f.nan_code:
        return float("nan")
    moved = abs(position) | (sign_bit if position < 0 else 0)
    return float(decode(torch.tensor(moved), f))
