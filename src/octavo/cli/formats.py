"""octavo formats: the number formats, and how a number looks in them."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from octavo.numerics.codec import decode, encode
from octavo.numerics.formats import FORMATS, Format, get_format


def formats(
    number: Annotated[float | None, typer.Argument(help="A number to look at; none: the table of formats.")] = None,
    format: Annotated[str | None, typer.Option(help=f"One format only: {', '.join(FORMATS)}.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show the number formats, or the bits, neighbours and error of one number in them.

    Examples:

      octavo formats

      octavo formats 0.1 --format e4m3

      octavo formats -- -1e-5
    """
    chosen = list(FORMATS.values()) if format is None else [get_format(format)]
    rows = [facts(f) if number is None else look(number, f) for f in chosen]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = Table(box=None, pad_edge=False)
    for column in rows[0]:
        table.add_column(column.replace("_", " "), justify="left" if column in ("format", "bits", "specials") else "right")
    for row in rows:
        table.add_row(*(f"{v:.7g}" if isinstance(v, float) else str(v) for v in row.values()))
    Console().print(table)


def facts(f: Format) -> dict[str, Any]:
    """A row of the table of formats."""
    fields = asdict(f)
    specials = {"ieee": "inf, NaN", "fn": "NaN, no inf", "fnuz": "NaN, no inf, no -0", "e8m0": "NaN, no zero, no sign"}
    return {
        "format": f.name,
        "width": f.bits,
        **{name: fields[name] for name in ("exponent_bits", "mantissa_bits", "bias")},
        "max": f.max,
        "smallest_normal": f.smallest_normal,
        "smallest_subnormal": f.smallest_subnormal,
        "epsilon": f.epsilon,
        "specials": specials[f.family],
    }


def look(number: float, f: Format) -> dict[str, Any]:
    """How `number` is stored in `f`: code, bits (sign exponent mantissa), the value, its neighbours, the error."""
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
        "relative_error": error / abs(number) if number else 0.0,
    }


def _bits(code: int, f: Format) -> str:
    text = f"{code:0{f.bits}b}"
    cuts = ([1] if f.signed else [0]) + [f.exponent_bits + int(f.signed)]
    return " ".join(part for part in (text[: cuts[0]], text[cuts[0] : cuts[1]], text[cuts[1] :]) if part)


def _neighbour(code: int, f: Format, direction: int) -> float:
    """The next number above or below in value; NaN where there is none. Codes order magnitudes, the sign turns them."""
    sign_bit = 1 << (f.bits - 1) if f.signed else 0
    negative = bool(code & sign_bit)
    magnitude = code & ~sign_bit if f.signed else code
    position = (-magnitude if negative else magnitude) + direction
    if abs(position) > f.max_code or (not f.signed and position < 0) or code == f.nan_code:
        return float("nan")
    moved = abs(position) | (sign_bit if position < 0 else 0)
    return float(decode(torch.tensor(moved), f))
