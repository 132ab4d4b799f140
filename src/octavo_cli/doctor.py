"""octavo doctor: this machine, its problems, and the GEMM that each recipe would run on it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo_cli.display import print_table, progress, say
from octavo_cli.options import AsJson

if TYPE_CHECKING:
    import torch

    from octavo.recipe import Recipe


def doctor_command(
    recipe: Annotated[
        list[str] | None,
        typer.Option(metavar="RECIPE", help="A preset or a .json file; can be repeated. Default: every preset."),
    ] = None,
    as_json: AsJson = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Time the GEMM of each recipe for a few sizes. Takes a minute at most.")
    ] = False,
    measure_layers: Annotated[
        bool,
        typer.Option(
            "--measure-layers",
            help="Time layers in FP8 and BF16 on this GPU, for convert(only_if_faster=True). Takes minutes.",
        ),
    ] = False,
) -> None:
    """Show this machine, its problems and its GEMMs.

    The table has the GEMMs y, dx and dw that each recipe runs.

    "emulated" computes FP8 exactly in float32: right for studying and testing, never faster. "none" cannot run here.

    A problem is shown with its fix. The exit code is 0 also where there are problems.

    Examples:

      octavo doctor

      octavo doctor --measure

      octavo doctor --recipe mine.json
    """
    from dataclasses import asdict

    from octavo.device import choose_device
    from octavo.diagnosis import find_problems, read_versions
    from octavo.recipe import PRESETS, get_recipe

    if recipe and measure_layers:
        raise ValueError("--measure-layers times every preset for one table: leave --recipe out")
    chosen = {found.name: found for found in map(get_recipe, recipe or PRESETS)}
    device = choose_device("auto")
    report: dict[str, Any] = {"machine": read_versions(device), "recipes": backends(chosen, device)}
    report["problems"] = [asdict(problem) for problem in find_problems()]
    if measure:
        report |= measure_gemms(chosen, device)
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
    for recipe, gemms in report["recipes"].items():
        reasons = dict.fromkeys(backend["reason"] for backend in gemms.values())  # each once, in order
        rows.append((recipe, *(backend["name"] for backend in gemms.values()), "; ".join(reasons)))
    print_table(("recipe", "y", "dx", "dw", "why"), rows, prose=["why"])
    for problem in report["problems"]:
        say(f"{problem['name']}: {problem['found']}. Fix: {problem['fix']}", "red")
    if not report["problems"]:
        say("no problem found")
    if "gemms" in report:
        _print_gemms(report)


def _print_gemms(report: dict[str, Any]) -> None:
    numbers = ("ms", "TFLOP/s", "vs BF16")
    rows = [
        (
            " x ".join(map(str, each["shape"])), each["recipe"], each["backend"], f"{each['milliseconds']:.3f}",
            f"{each['tflops']:.4g}", f"{each['speedup']:.2f}x",
        )
        for each in report["gemms"]
    ]  # fmt: skip
    title = "GEMM of y, without quantization: M x K x N"
    print_table(("size", "recipe", "backend", *numbers), rows, right=numbers, title=title)
    if report["not_timed"]:
        say(f"not timed, for lack of time: {', '.join(report['not_timed'])}")


def measure_gemms(recipes: Mapping[str, Recipe], device: torch.device) -> dict[str, Any]:
    """The times of a few GEMMs, and the names of those that the time did not suffice for, as JSON values."""
    from dataclasses import asdict

    from octavo.diagnosis import time_gemms
    from octavo.diagnosis.gemms import CPU_SHAPES, GPU_SHAPES

    shapes = GPU_SHAPES if device.type == "cuda" else CPU_SHAPES
    with progress("timing") as advance:
        found, late = time_gemms(recipes, device, shapes, progress=advance)
    return {"gemms": [asdict(each) | {"tflops": each.tflops} for each in found], "not_timed": late}


def measure_gains(device: torch.device) -> Path:
    """Time the linear layers of the grid for every preset that runs on the GPU `device`; returns the file of the
    times."""
    import torch

    from octavo.nn.backends import gemm_backends
    from octavo.nn.speedup.lookup import cache_path, measure_grid, never_faster, this_machine, write_table
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


def backends(recipes: Mapping[str, Recipe], device: torch.device) -> dict[str, dict[str, dict[str, str]]]:
    """Recipe -> GEMM -> the backend's name and reason."""
    from octavo.nn.backends import gemm_backends

    return {
        name: {gemm: {"name": b.name, "reason": b.reason} for gemm, b in gemm_backends(recipe, device).items()}
        for name, recipe in recipes.items()
    }
