"""Write the pages that tables fill, the plots, README's table and bench/aims.md from bench/results: `make docs`.

It also writes the speeds of packing schemes that `octavo.load` warns by, and those of FP8 attention and the rates of
experts that `octavo plan` reads. `bench.report.filler` says what a template may name.
"""

import json
import operator
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import harmonic_mean
from types import ModuleType
from typing import Any

from bench.gpu import modes
from bench.gpu.modes import speedup
from bench.report import loss, performance, plan, plots, recipes, scaling, training
from bench.report.filler import Result, Row, Rows, fill, fill_row, load, markdown, names_of
from bench.report.performance import EXPERTS, fastest_bf16, front, gains, scheme_speeds

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# The pages, and the module of the functions that their templates call.
PAGES: dict[str, ModuleType] = {
    "performance": performance,
    "accuracy": performance,
    "plan": plan,
    "gpus": recipes,
    "scaling": scaling,
    "loss": loss,
    "pretraining": training,
    "vision": training,
    "attention": performance,
    "recipes": recipes,
}
SIGNS = {"≥": operator.ge, "≤": operator.le, "<": operator.lt}
BOUND = re.compile(r"(≥|≤|<) ([\d.]+)")
NOTE = "`make docs` writes this part from bench/results"  # before a part


def main() -> None:
    results = load()
    for name, table in shipped_tables(results).items():  # before the pages: the plan reads what the package ships
        (ROOT / "src" / "octavo" / name).write_text(table)
    for name in PAGES:
        (ROOT / "docs" / f"{name}.md").write_text(page(name, results))
    (ROOT / "bench" / "aims.md").write_text(aims_page(results))
    plots.draw(results, ROOT / "docs" / "performance")
    performance.write_grids(results, ROOT / "docs" / "performance", plan=plan.whole_runs(results))
    for (name, title), text in parts(results).items():
        path = ROOT / name
        before, begin, rest = path.read_text().partition(f"<!-- {title}: {NOTE} -->")
        _, end, after = rest.partition(f"<!-- end of {title} -->")
        path.write_text(f"{before}{begin}{text}{end}{after}")


def page(name: str, results: dict[str, Result]) -> str:
    rows = markdown(gain.row("") for gain in gains(results)).replace("(performance.md#", "(#")
    decided = fill(template("decided"), names_of(results, loss)).partition("\n")[0]
    return fill(template(name), names_of(results, modes, PAGES[name]) | {"gains": rows, "decided": decided})


def parts(results: dict[str, Result]) -> dict[tuple[str, str], str]:
    """The parts of pages that people write, by the page and the words of the comments around them."""
    picture = "![Speed over compiled BF16](docs/performance/gains.svg)"
    return {
        ("docs/rl.md", "parity"): f"\n{fill(template('parity'), names_of(results, performance))}",
        ("README.md", "loss"): f"\n{fill(template('decided'), names_of(results, loss))}",
        ("README.md", "gains"): f"\n{picture}\n\n{markdown(gain.row() for gain in front(results))}\n",
    }


def aims_page(results: dict[str, Result]) -> str:
    """The speeds and sizes that the project aims at, in which each aim is met or missed."""
    return judged(template("aims"), names_of(results, modes, performance, scaling))


def judged(template: str, names: Mapping[str, Any]) -> str:
    """`template` with its rows, `| claim | sign bound | figure |`, filled and followed by a verdict."""
    lines = []
    for line in template.splitlines():
        if found := BOUND.search(line):
            line, (sign, bound) = fill_row(line, names), found.groups()
            figure = re.search(r"-?[\d.]+", line.split(" | ")[2])
            met = figure and SIGNS[sign](float(figure[0]), float(bound))
            line += f" {'not measured' if met is None else 'met' if met else '**missed**'} |"
        lines.append(line)
    return "\n".join(lines) + "\n"


def template(name: str) -> str:
    return (HERE / f"{name}.template.md").read_text()


# --- The measured speeds that the package ships: of packing schemes, of attention in FP8, and of experts -------


# The schemes of the ways of other results. The first adds tokens to those of gpu_schemes. The second has the kernel of
# INT8 as it is now; its calls of 512 rows wait for the host.
MORE = {"bf16": "bf16", "w8a8": "channel", "weight-only": "weight"}
NEWER, HOST_BOUND = {"bf16": "bf16", "int8": "int8"}, 512
PLANNED = {  # what a plan asks of attention: the pass and the mode that answer it
    "forward": ("forward", "ours"),
    "forward from an FP8 KV cache": ("forward", "ours, FP8 KV cache"),
    "forward and backward": ("both", "ours"),
}
# The ways of accumulating of y, dx and dw of experts.
PASSES = {"bf16": ("y, bf16", "dx, bf16", "dw, bf16"), "rowwise": ("y, fast", "dx, fast", "dw, promoted")}


def shipped_tables(results: dict[str, Result]) -> dict[str, str]:
    """The text of each file, by its path in the package."""
    return {
        "rates/scheme_speeds.json": schemes(results),
        "rates/attention_speeds.json": attention(results["gpu_attention"]),
        "rates/expert_rates.json": expert_rates(results["gpu_moe"]),
        "rates/expert_speeds.json": expert_speeds(results["gpu_packed_experts"]),
    }


def text(result: Result, **values: Any) -> str:
    facts = {name: result["machine"][name] for name in ("gpu", "torch", "measured")}
    return json.dumps({"machine": facts, **values}, indent=2) + "\n"


def schemes(results: dict[str, Result]) -> str:
    """BF16's time over each scheme's, by tokens."""
    newer = [row for row in results["gpu_int8"]["rows"] if row["m"] != HOST_BOUND]
    parts = (
        scheme_speeds(by_scheme(results["gpu_weight_only"]["gemms"], MORE)),
        scheme_speeds(results["gpu_schemes"]["rows"]),
        scheme_speeds(by_scheme(newer, NEWER)),
    )
    speeds: dict[str, dict[str, float]] = {}
    for tokens in sorted({tokens for part in parts for tokens in part}):
        found = {scheme: round(speed, 3) for part in parts for scheme, speed in part.get(tokens, {}).items()}
        speeds[str(tokens)] = dict(sorted(found.items()))
    return text(results["gpu_schemes"], speeds=speeds)


def by_scheme(rows: Iterable[Row], ways: Mapping[str, str]) -> Rows:
    """A row for each scheme, of rows that have the microseconds of several ways."""
    for row in rows:
        for way, scheme in ways.items():
            if way in row["us"]:
                yield {"m": row["m"], "scheme": scheme, "us": row["us"][way]}


def attention(result: Result) -> str:
    """The speed of FP8 over the fastest of BF16, by tokens."""
    speeds = {
        name: {
            str(cell["tokens"]): round(speedup(cell[which], mode, fastest_bf16(cell[which]["ms"])), 3)
            for cell in result["cells"]
        }
        for name, (which, mode) in PLANNED.items()
    }
    return text(result, speeds=speeds)


def expert_rates(result: Result) -> str:
    """FLOP/s of grouped GEMMs over both passes, by the rows of an expert, and the speed of wide experts over BF16."""
    rates: dict[str, dict[str, float]] = {recipe: {} for recipe in PASSES}
    for key in EXPERTS:
        shape, tflops = result[key]["shape"], result[key]["gemm_tflops"]
        rows = shape["tokens"] * shape["top_k"] // shape["experts"]
        for recipe, ways in PASSES.items():
            rates[recipe][str(rows)] = round(1e12 * harmonic_mean([tflops[way] for way in ways]))
    wide = result["mixtral"]["speedup"]
    speeds = {recipe: round(wide[f"ours, {recipe}"], 3) for recipe in ("blockwise", "mxfp8")}
    return text(result, rates=rates, speeds={"rowwise": round(wide["ours"], 3), **speeds})


def expert_speeds(result: Result) -> str:
    """The speed of packed experts over BF16."""
    layers = []
    for layer in result["shapes"].values():
        speeds: dict[str, dict[str, float]] = {}
        for cell in layer["cells"]:
            medians = {way: ms["median"] for way, ms in cell["ms"].items()}
            base = medians.pop("bf16")
            speeds[str(cell["tokens"])] = {way: round(base / median, 3) for way, median in medians.items()}
        shape = {name: layer["shape"][name] for name in ("experts", "width", "mlp_width")}
        layers.append({"shape": shape, "speeds": speeds})
    return text(result, layers=layers)


if __name__ == "__main__":
    main()
