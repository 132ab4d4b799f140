"""octavo doctor: what this machine is, and which GEMM each recipe would run on it."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

if TYPE_CHECKING:
    import torch


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Minutes: time FP8 against BF16 on this GPU, for convert(only_if_faster=True)."),
    ] = False,
) -> None:
    """Show the device, and for each recipe which GEMM would run here, and why.

    "emulated" computes FP8 exactly in float32: right for studying and testing, never faster. "none" cannot run here.
    """
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report = {"machine": machine(device), "recipes": recipes(device)}
    if measure:
        report["machine"]["table_of_gains"] = str(measure_gains(device))
    if as_json:
        print(json.dumps(report, indent=2))
        return
    console = Console()
    for name, value in report["machine"].items():
        console.print(f"{name.replace('_', ' ')}: {value}", highlight=False)
    table = Table(box=None, pad_edge=False)
    for column in ("recipe", "y", "dx", "dw", "why"):
        table.add_column(column, no_wrap=column != "why")
    for recipe, gemms in report["recipes"].items():
        reasons = dict.fromkeys(backend["reason"] for backend in gemms.values())  # each once, in order
        table.add_row(recipe, *(backend["name"] for backend in gemms.values()), "; ".join(reasons))
    console.print(table)


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
    """Time the linear layers of the grid for every recipe that runs on the GPU `device`; the file that holds them."""
    import torch

    from octavo.nn.backends import gemm_backends
    from octavo.nn.gains import cache_path, measure_grid, never_faster, this_machine, write_table
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
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"timing {', '.join(recipe.name for recipe in able)}")
        table = measure_grid(able, device, lambda done, of: bar.update(task, completed=done, total=of))
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
