"""The table of docs/performance.md on packing schemes, and the speeds that `octavo.load` warns by."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bench.report.tables import Result, Row, details, machine, markdown

SHIPPED = Path(__file__).parents[2] / "src" / "octavo" / "runtime" / "scheme_speeds.json"
BASE = "bf16"
# The schemes of the ways of other results. The first adds tokens to those of gpu_schemes. The second has the kernel of
# INT8 as it is now; its calls of 512 rows wait for the host.
MORE = {BASE: BASE, "w8a8": "channel", "weight-only": "weight"}
NEWER, HOST_BOUND = {BASE: BASE, "int8": "int8"}, (512,)


def packing_schemes(results: dict[str, Result]) -> str:
    """The speed of each scheme over BF16, of all layers together, and the time of each layer."""
    result = results.get("gpu_schemes")
    if result is None:
        return "Not measured yet."
    shapes = {(row["layer"], row["n"], row["k"]) for row in result["rows"]}
    parts = [markdown(speed_rows(result))]
    parts += [details(f"{name}: {n:,} x {k:,}", markdown(layer_rows(result, name))) for name, n, k in sorted(shapes)]
    return "\n\n".join([*parts, machine(result)])


def speed_rows(result: Result) -> Iterable[Row]:
    by_tokens = speeds(result)
    for scheme in dict.fromkeys(scheme for found in by_tokens.values() for scheme in found):
        cells = {heading(m): f"{found[scheme]:.2f}x" for m, found in by_tokens.items() if scheme in found}
        yield {"scheme": scheme, **cells}


def layer_rows(result: Result, layer: str) -> Iterable[Row]:
    """The microseconds of one layer by each scheme, and what its GEMM runs on."""
    rows = [row for row in result["rows"] if row["layer"] == layer]
    for scheme in dict.fromkeys(row["scheme"] for row in rows):
        cells = {heading(row["m"]): f"{row['us']:,.1f} us, {row['backend']}" for row in rows if row["scheme"] == scheme}
        worst = min(row.get("worst_db", float("inf")) for row in rows if row["scheme"] == scheme)
        yield {"scheme": scheme, **cells, "worst row": f"{worst:.0f} dB" if worst < float("inf") else "–"}


def heading(tokens: int | str) -> str:
    return f"{int(tokens):,} token{'s' * (int(tokens) != 1)}"


def speeds(result: Result) -> dict[str, dict[str, float]]:
    """BF16's time over the scheme's, of all layers together, by tokens and scheme."""
    times: dict[str, dict[str, float]] = {}
    for row in result["rows"]:
        of_tokens = times.setdefault(str(row["m"]), {})
        of_tokens[row["scheme"]] = of_tokens.get(row["scheme"], 0.0) + row["us"]
    return {
        tokens: {scheme: round(us[BASE] / each, 3) for scheme, each in us.items() if scheme != BASE}
        for tokens, us in times.items()
    }


def shipped(results: dict[str, Result]) -> str:
    """The file that octavo.runtime.scheme_speeds reads."""
    result = results["gpu_schemes"]
    facts: dict[str, Any] = {key: result["machine"][key] for key in ("gpu", "torch", "measured")}
    more = speeds(by_scheme(results.get("gpu_weight_only", {}).get("gemms", []), MORE))
    rows = [row for row in results.get("gpu_int8", {}).get("rows", []) if row["m"] not in HOST_BOUND]
    newer, found = speeds(by_scheme(rows, NEWER)), speeds(result)
    ordered = {
        tokens: dict(sorted((more.get(tokens, {}) | found.get(tokens, {}) | newer.get(tokens, {})).items()))
        for tokens in sorted({*more, *found, *newer}, key=int)
    }
    return json.dumps({"machine": facts, "speeds": ordered}, indent=2) + "\n"


def by_scheme(rows: Iterable[Mapping[str, Any]], ways: Mapping[str, str]) -> Result:
    """A result with a row for each scheme, of rows that have the microseconds of several ways."""
    return {
        "rows": [
            {"m": row["m"], "scheme": scheme, "us": row["us"][way]}
            for row in rows
            for way, scheme in ways.items()
            if way in row["us"]
        ]
    }


def ship(results: dict[str, Result]) -> None:
    """Write the speeds into the package, once they are measured."""
    if "gpu_schemes" in results:
        SHIPPED.write_text(shipped(results))
