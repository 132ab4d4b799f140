"""octavo doctor: what this machine is, and which GEMM each recipe would run on it."""

from __future__ import annotations

import json
import os
import platform
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from octavo.nn.backends import gemm_backends
from octavo.recipe import PRESETS
from octavo.version import __version__


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False) -> None:
    """Show the device, and for each recipe which GEMM would run here, and why.

    "emulated" computes FP8 exactly in float32: right for studying and testing, never faster. "none" cannot run here.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report = {"machine": machine(device), "recipes": recipes(device)}
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


def recipes(device: torch.device) -> dict[str, dict[str, dict[str, str]]]:
    """Recipe -> GEMM -> the backend's name and reason."""
    return {
        name: {gemm: {"name": b.name, "reason": b.reason} for gemm, b in gemm_backends(preset(), device).items()}
        for name, preset in PRESETS.items()
    }
