"""The files of bench/results. Each begins with the machine, the versions and the commit."""

import json
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from octavo.version import __version__

RESULTS = Path(__file__).parent / "results"


def facts() -> dict[str, Any]:
    """The date, the commit, and the versions and processors of this machine."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "measured": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip(),
        "octavo": __version__,
        "torch": torch.__version__,
        **{name: installed(name) for name in ("triton", "torchao", "transformer-engine") if gpu and installed(name)},
        "python": platform.python_version(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
    }


def write(name: str, result: dict[str, Any]) -> Path:
    """Write `result` to results/NAME.json, with the facts of this machine unless it has a "machine" of its own."""
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": facts(), **result}, indent=2) + "\n")
    return path


def installed(package: str) -> str:
    """The version of a package; empty where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _processor() -> str:
    """The processor's name and the vector units that decide how fast BF16 is on it."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    name = next((line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line), "unknown")
    units = [unit for unit in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if unit in text]
    return f"{name} ({', '.join(units)})"
