"""octavo doctor: this machine, its problems, and the GEMM that each recipe would run on it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo_cli.choices import GPUS, RECIPES
from octavo_cli.display import print_table, progress, say
from octavo_cli.options import AsJson, option

if TYPE_CHECKING:
    import torch

    from octavo.ops.gpu_architecture import GpuArchitecture, Place
    from octavo.recipe import Recipe


def doctor_command(
    recipe: Annotated[
        list[str] | None,
        option("RECIPE", "A preset, or a .json or .toml file. Repeatable. Default: every preset."),
    ] = None,
    gpu: Annotated[str, option("NAME", f"Of a GPU that is not here: {', '.join(GPUS)}. Default: this machine.")] = "",
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

    The first table has the GEMMs y, dx and dw that each recipe runs, the second the GEMM of each packing scheme.

    "emulated" computes FP8 exactly in float32: right for studying and testing, never faster. "none" cannot run here.
    "weight-only" computes in BF16 with weights in FP8.

    A problem is shown with its fix. The exit code is 0 also where there are problems.

    Examples:

      octavo doctor

      octavo doctor --measure

      octavo doctor --recipe mine.json

      octavo doctor --gpu rtx4090
    """
    from octavo.device import choose_device
    from octavo.nn.backends import choose_recipe, find_fix

    if recipe and measure_layers:
        raise ValueError("--measure-layers times every preset for one table: leave --recipe out")
    if gpu and (measure or measure_layers):
        raise ValueError("--measure and --measure-layers time the GPU of this machine: leave --gpu out")
    device = choose_device("auto")
    place, report = (device, this_machine(device)) if not gpu else other_machine(gpu)
    chosen = {found.name: found for each in recipe or RECIPES for found in [choose_recipe(each, place)]}
    report |= {"recipes": backends(chosen, place), "schemes": scheme_backends(place)}
    report["fixes"] = {name: fix for name, each in chosen.items() if (fix := find_fix(each, place))}
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
    packed = [(scheme, gemm["name"], gemm["reason"]) for scheme, gemm in report["schemes"].items()]
    print_table(("scheme", "GEMM", "why"), packed, prose=["why"])
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


def this_machine(device: torch.device) -> dict[str, Any]:
    """The versions, the device and the problems of this machine, as JSON values."""
    from dataclasses import asdict

    from octavo.diagnosis import find_problems, read_versions

    return {"machine": read_versions(device), "problems": [asdict(problem) for problem in find_problems()]}


def other_machine(name: str) -> tuple[GpuArchitecture, dict[str, Any]]:
    """The architecture of the GPU of this name, and a report about it."""
    from octavo.ops.gpu_architecture import ARCHITECTURES
    from octavo.plan.hardware import find_gpu

    found = find_gpu(name)
    architecture = ARCHITECTURES[found.architecture]
    measured = "yes" if architecture.measured else "no"
    return architecture, {"machine": {"gpu": found.name, "architecture": architecture.name, "measured": measured}}


def scheme_backends(place: Place) -> dict[str, dict[str, str]]:
    """Packing scheme -> the name and the reason of its GEMM."""
    from octavo.artifact.packed.scheme import SCHEMES
    from octavo.runtime.fnuz import scheme_on
    from octavo.runtime.gemm_path import find_gemm

    found = {}
    for name, scheme in SCHEMES.items():
        cast, backend = find_gemm(scheme_on(scheme, place), place)
        found[name] = {"name": backend.name if cast else f"weight-only, {backend.name}", "reason": backend.reason}
    return found


def backends(recipes: Mapping[str, Recipe], device: Place) -> dict[str, dict[str, dict[str, str]]]:
    """Recipe -> GEMM -> the backend's name and reason."""
    from octavo.nn.backends import gemm_backends

    return {
        name: {gemm: {"name": b.name, "reason": b.reason} for gemm, b in gemm_backends(recipe, device).items()}
        for name, recipe in recipes.items()
    }
