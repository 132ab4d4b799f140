"""The files of bench/results. Each begins with the machine, the versions and the commit."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from octavo import speed
from octavo.util import installed

__all__ = ["QUICK", "RESULTS", "before", "facts", "installed", "rows_before", "write"]

RESULTS = Path(__file__).parent / "results"
QUICK = "--quick" in sys.argv  # a benchmark at its smallest size, which writes nothing


def facts() -> dict[str, Any]:
    """Of `octavo.speed`. OCTAVO_COMMIT names the commit where the sources are a copy."""
    found = speed.facts()
    return found | {"commit": os.environ.get("OCTAVO_COMMIT") or found["commit"]}


def before(name: str) -> dict[str, Any]:
    """results/NAME.json; {} without the file, and with `--quick`."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() and not QUICK else {}


def rows_before(name: str, key: str) -> list[dict[str, Any]]:
    """The rows below `key` in results/NAME.json, each with the machine that measured it; none without the file."""
    found = before(name)
    return [{"machine": found["machine"], **row} for row in found.get(key, [])]


def write(name: str, result: dict[str, Any], folder: Path | None = None) -> Path:
    """Write `result` to NAME.json, of results by default, with the facts of this machine unless it has a "machine" of
    its own."""
    path = (folder or RESULTS) / f"{name}.json"
    text = json.dumps({"machine": facts(), **result}, indent=2) + "\n"
    if folder or not QUICK:
        path.write_text(text)
    return path
