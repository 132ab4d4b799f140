"""The files of bench/results. Each begins with the machine, the versions and the commit."""

import json
from pathlib import Path
from typing import Any

from octavo.speed import facts
from octavo.util import installed

__all__ = ["RESULTS", "facts", "installed", "rows_before", "write"]

RESULTS = Path(__file__).parent / "results"


def rows_before(name: str, key: str) -> list[dict[str, Any]]:
    """The rows below `key` in results/NAME.json, each with the machine that measured it; none without the file."""
    path = RESULTS / f"{name}.json"
    found = json.loads(path.read_text()) if path.exists() else {key: []}
    return [{"machine": found["machine"], **row} for row in found[key]]


def write(name: str, result: dict[str, Any]) -> Path:
    """Write `result` to results/NAME.json, with the facts of this machine unless it has a "machine" of its own."""
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": facts(), **result}, indent=2) + "\n")
    return path
