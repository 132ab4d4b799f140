"""octavo doctor and formats: this machine, the number formats, and the recipes."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from octavo.util import choose_device, finite
from octavo_cli.display import print_rows, progress, say
from octavo_cli.shared import FORMATS, GPUS, RECIPES, AsJson, argument, option

if TYPE_CHECKING:
    import torch

    from octavo.numerics.formats import Format
    from octavo.ops.launching import Place


def doctor_command(
    recipe: Annotated[list[str] | None, option("RECIPE", "A preset or a file, repeatable. Default: presets.")] = None,
    gpu: Annotated[str, option("NAME", f"Of a GPU that is not here: {', '.join(GPUS)}. Default: this machine.")] = "",
    as_json: AsJson = False,
    measure_layers: Annotated[bool, option("--measure-layers", "Time layers for convert(only_if_faster=True)")] = False,
) -> None:
    """Show this machine, its problems and its GEMMs.

    The first table has the GEMMs y, dx and dw that each recipe runs, the second the GEMM of each packing scheme.

    "emulated" computes FP8 exactly in float32: right for studying and testing, never faster. "none" cannot run here.
    "weight-only" computes in BF16 with weights in FP8.

    A problem is shown with its fix. The exit code is 0 also where there are problems. --measure-layers takes minutes.

    Examples:

      octavo doctor
      octavo doctor --recipe mine.json
      octavo doctor --gpu rtx4090
    """
    from octavo.ops.dispatch import choose_recipe, find_fix, gemm_backends

    if recipe and measure_layers:
        raise ValueError("--measure-layers times every preset for one table: leave --recipe out")
    if gpu and measure_layers:
        raise ValueError("--measure-layers times the GPU of this machine: leave --gpu out")
    device = choose_device("auto")
    place, report = find_machine(gpu, device)
    chosen = {found.name: found for each in recipe or RECIPES for found in [choose_recipe(each, place)]}
    gemms = {name: gemm_backends(each, place) for name, each in chosen.items()}
    report["recipes"] = {name: {gemm: vars(b) for gemm, b in each.items()} for name, each in gemms.items()}
    report["schemes"] = scheme_backends(place)
    report["fixes"] = {name: fix for name, each in chosen.items() if (fix := find_fix(each, place))}
    if measure_layers:
        report["machine"]["table_of_gains"] = str(measure_gains(device))
    if as_json:
        print(json.dumps(report, indent=2))
        return
    _print(report)


def _print(report: dict[str, Any]) -> None:
    for name, value in report["machine"].items():
        say(f"{name.replace('_', ' ')}: {value}")
    rows = []
    for name, gemms in report["recipes"].items():
        reasons = dict.fromkeys(backend["reason"] for backend in gemms.values())  # each once, in order
        backends = {gemm: backend["name"] for gemm, backend in gemms.items()}
        rows.append({"recipe": name, **backends, "why": "; ".join(reasons)})
    print_rows(rows, prose=("why",))
    packed = [{"scheme": name, "GEMM": each["name"], "why": each["reason"]} for name, each in report["schemes"].items()]
    print_rows(packed, prose=("why",))
    for fix in dict.fromkeys(report["fixes"].values()):
        names = ", ".join(name for name, each in report["fixes"].items() if each == fix)
        say(f"{names}: no GEMM here. Fix: {fix}")
    none = {name for name, gemms in report["recipes"].items() if "none" in {gemm["name"] for gemm in gemms.values()}}
    if none - report["fixes"].keys():
        say(
            "no FP8 GEMM here: train in BF16, or study FP8 with emulate=True, which computes in float32. Packed "
            "folders run weight-only: weights in FP8, products in BF16"
        )
    for problem in report.get("problems", ()):
        say(f"{problem['name']}: {problem['found']}. Fix: {problem['fix']}", "red")
    if not report.get("problems", True):
        say("no problem found")


def measure_gains(device: torch.device) -> Path:
    """Time the linear layers of the grid for every preset that runs on the GPU; returns the file of the times."""
    import torch

    from octavo.nn.only_if_faster import cache_path, measure_grid, never_faster, this_machine, write_table
    from octavo.ops.dispatch import gemm_backends
    from octavo.recipe import PRESETS

    if device.type != "cuda":
        raise ValueError(
            f"--measure-layers times FP8 against BF16 on a CUDA GPU, and this torch ({torch.__version__}) sees none: "
            "run it on the machine that trains (on a CPU, FP8 is emulated and never faster)"
        )
    presets = [preset() for preset in PRESETS.values()]
    able = [recipe for recipe in presets if not never_faster(recipe, gemm_backends(recipe, device), device)]
    here = this_machine(device)
    if not able:
        raise ValueError(f"{here.gpu} has no FP8 GEMM to time against BF16: `octavo doctor` says why, by recipe")
    path = cache_path(here)
    doing = f"timing {', '.join(recipe.name for recipe in able)}"
    with progress(doing) as advance:
        table = measure_grid(able, device, lambda done, total, _: advance(done, total, doing))
    write_table(path, table)
    return path


def find_machine(name: str, device: torch.device) -> tuple[Place, dict[str, Any]]:
    """The architecture of the GPU of this name, or without one the device, and a report about it, as JSON values."""
    from octavo.inspection.doctor import find_problems, read_versions
    from octavo.ops.launching import ARCHITECTURES
    from octavo.rates.measured import find_gpu

    if not name:
        return device, {"machine": read_versions(device), "problems": [asdict(found) for found in find_problems()]}
    found = find_gpu(name)
    architecture = ARCHITECTURES[found.architecture]
    measured = "yes" if architecture.measured else "no"
    return architecture, {"machine": {"gpu": found.name, "architecture": architecture.name, "measured": measured}}


def scheme_backends(place: Place) -> dict[str, dict[str, str]]:
    """Packing scheme -> the name and the reason of its GEMM."""
    from octavo.checkpoint.scheme import SCHEMES, find_gemm, scheme_on

    found = {}
    for name, scheme in SCHEMES.items():
        cast, backend = find_gemm(scheme_on(scheme, place), place)
        found[name] = {"name": backend.name if cast else f"weight-only, {backend.name}", "reason": backend.reason}
    return found


SPECIALS = {"ieee": "inf, NaN", "fn": "NaN", "fnuz": "NaN, no -0", "e8m0": "NaN, no 0", "finite": "none"}


def formats_command(
    what: Annotated[
        str | None,
        argument(
            "WHAT",
            f"A number to look at, or a recipe to print as JSON: {', '.join(RECIPES)}, or a file to check. "
            "Default: all formats.",
        ),
    ] = None,
    format: Annotated[str | None, option("NAME", f"One format only: {', '.join(FORMATS)}.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the number formats, a number in each of them, or a recipe.

    A number is shown with the bits that store it, the value that they mean, its neighbours and its error.

    A recipe has the cast of each operand of the three GEMMs. A preset is the start of a file for --recipe FILE. In a
    TOML file of settings the recipe is the table "recipe".

    Examples:

      octavo formats
      octavo formats 0.1 --format e4m3
      octavo formats -1e-5
      octavo formats rowwise > mine.json
    """
    from octavo.numerics.formats import get_format

    number: float | None = None
    with suppress(ValueError):
        number = None if what is None else float(what)
    if what is not None and number is None:
        if format is not None:
            raise ValueError(f"--format shows a number in that format, got the recipe {what!r}: leave one of them out")
        _print_recipe(what)
        return
    chosen = [get_format(name) for name in (FORMATS if format is None else [format])]
    rows = [facts(f) if number is None else look(number, f) for f in chosen]
    if as_json:
        print(json.dumps(finite(rows), indent=2))
    elif number is not None and format is not None:
        for name, value in rows[0].items():
            say(f"{name:<9} {_text(value)}")
    else:
        left_out = ("bits",) if number is None else ("below", "above", "error")
        print_rows([{name: _text(row[name]) for name in row if name not in left_out} for row in rows])


def _print_recipe(recipe: str) -> None:
    from octavo.recipe import PRESETS, get_recipe

    if recipe in FORMATS and recipe not in RECIPES:
        raise ValueError(f"{recipe} is a format: give --format {recipe} (the recipes are {', '.join(RECIPES)})")
    fields = get_recipe(recipe).to_dict()
    if fields["name"] in PRESETS:
        del fields["name"]  # a changed preset needs another name, and takes that of its file
    print(json.dumps(fields, indent=2))


def _text(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)  # so many digits tell all float32 numbers apart


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

    from octavo.numerics.formats import decode, encode

    sign_bit = 1 << (f.bits - 1) if f.signed else 0

    def neighbour(direction: int) -> float:
        """The next number above or below; NaN where there is none. Codes order magnitudes, the sign turns them."""
        magnitude = code & ~sign_bit
        position = (-magnitude if code & sign_bit else magnitude) + direction
        if abs(position) > f.max_code or (not f.signed and position < 0) or math.isnan(value):
            return math.nan
        return float(decode(torch.tensor(abs(position) | (sign_bit if position < 0 else 0)), f))

    code = int(encode(torch.tensor(number, dtype=torch.float64), f))
    value = float(decode(torch.tensor(code), f))
    error = abs(value - number)
    bits, ends = f"{code:0{f.bits}b}", (int(f.signed), f.exponent_bits + int(f.signed))
    return {
        "format": f.name,
        "bits": " ".join(filter(None, (bits[: ends[0]], bits[ends[0] : ends[1]], bits[ends[1] :]))),
        "code": f"0x{code:0{f.bits // 4}x}",
        "value": value,
        "below": neighbour(-1),
        "above": neighbour(+1),
        "error": error,
        "relative": error / abs(number) if number else error,
    }
