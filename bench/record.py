"""The files of bench/results. Each begins with the machine, the versions and the commit."""

import json
from pathlib import Path
from typing import Any

from octavo.extras import installed
from octavo.speed.machine import facts

__all__ = ["RESULTS", "facts", "installed", "write"]

RESULTS = Path(__file__).parent / "results"


def write(name: str, result: dict[str, Any]) -> Path:
    """Write `result` to results/NAME.json, with the facts of this machine unless it has a "machine" of its own."""
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": facts(), **result}, indent=2) + "\n")
    return path
