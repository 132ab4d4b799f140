"""octavo doctor: this machine, and the GEMM that each recipe would run on it."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo_cli.display import print_table, progress, say
from octavo_cli.options import AsJson

if TYPE_CHECKING:
    import torch


def doctor_command(
    as_json: AsJson = False,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Time FP8 against BF16 on this GPU, for convert(only_if_faster=True). Takes minutes."
        ),
    ] = False,
) -> None:
    """Show this machine and the GEMM that each recipe runs.

    "emulated" computes FP8 exactly in float32: right for studying and testing, never faster. "none" cannot run here.
    """
    from octavo.device import choose_device

    device = choose_device("auto")
    report = {"machine": machine(device), "recipes": recipes(device)}
    if measure:
        report["machine"]["table_of_gains"] = str(measure_gains(device))
    if as_json:
        print(json.dumps(report, indent=2))
        return
    for name, value in report["machine"].items():
        say(f"{name.replace('_', ' ')}: {value}")
    rows = []
    for recipe, gemms in report["recipes"].items():
        reasons = dict.fromkeys(backend["reason"] for backend in gemms.values())  # each once, in order
        rows.append((recipe, *(backend["name"] for backend in gemms.values()), "; ".join(reasons)))
    print_table(("recipe", "y", "dx", "dw", "why"), rows, prose=["why"])


def machine(device: torch.device) -> dict[str, Any]:
    """Versions, and the device that would be used."""
    import torch

    from octavo.version import __version__

    found: dict[str, Any] = {
        "octavo": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": device.type,
    }
    if device.type == "cpu":
        return found | {"processor": platform.machine(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(device)
    return found | {
        "gpu": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "memory_gb": round(properties.total_memory / 1e9, 1),
        "cuda": torch.version.cuda or torch.version.hip,
    }


def measure_gains(device: torch.device) -> Path:
    """Time the linear layers of the grid for every recipe that runs on the GPU `device`; returns the file of the
    times."""
    import torch

    from octavo.nn.backends import gemm_backends
    from octavo.nn.speedup.lookup import cache_path, measure_grid, never_faster, this_machine, write_table
    from octavo.recipe import PRESETS

    if device.type != "cuda":
        raise ValueError(
            f"--measure times FP8 against BF16 on a CUDA GPU, and this torch ({torch.__version__}) sees none: run it "
            "on the machine that trains (on a CPU, FP8 is emulated and never faster)"
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


def recipes(device: torch.device) -> dict[str, dict[str, dict[str, str]]]:
    """Recipe -> GEMM -> the backend's name and reason."""
    from octavo.nn.backends import gemm_backends
    from octavo.recipe import PRESETS

    return {
        name: {gemm: {"name": b.name, "reason": b.reason} for gemm, b in gemm_backends(preset(), device).items()}
        for name, preset in PRESETS.items()
    }
