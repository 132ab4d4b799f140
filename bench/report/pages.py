"""Write the pages that tables fill, the plots, README's table and bench/aims.md from bench/results: `make docs`.

It also writes the speeds of packing schemes that `octavo.load` warns by, and those of FP8 attention and the rates of
experts that `octavo plan` reads. `bench.report.filler` says what a template may name.
"""

import operator
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from bench.gpu import modes
from bench.report import loss, performance, plan, plots, recipes, scaling, shipped, training
from bench.report.filler import Result, fill, fill_row, load, markdown, names_of
from bench.report.performance import front, gains

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
NOTE = "`make docs` writes this part from bench/results"  # in README, before a part


def main() -> None:
    results = load()
    shipped.write(results)  # before the pages: the plan reads what the package ships
    for name in PAGES:
        (ROOT / "docs" / f"{name}.md").write_text(page(name, results))
    (ROOT / "bench" / "aims.md").write_text(aims_page(results))
    plots.draw(results, ROOT / "docs" / "performance")
    performance.write_grids(results, ROOT / "docs" / "performance", plan=plan.whole_runs(results))
    rl = ROOT / "docs" / "rl.md"
    parity = fill(performance.PARITY, names_of(results, performance))
    rl.write_text(with_part(rl.read_text(), "parity", parity.strip()))
    readme = ROOT / "README.md"
    decided = f"{loss.decided(results)}\n\n{loss.peers(results)}"
    readme.write_text(with_part(with_gains(readme.read_text(), results), "loss", decided))


def page(name: str, results: dict[str, Result]) -> str:
    rows = markdown(gain.row("") for gain in gains(results)).replace("(performance.md#", "(#")
    return fill(template(name), names_of(results, modes, PAGES[name]) | {"gains": rows})


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


def with_gains(readme: str, results: dict[str, Result]) -> str:
    """`readme` with the picture and the table of gains."""
    picture = "![Speed over compiled BF16](docs/performance/gains.svg)"
    return with_part(readme, "gains", f"{picture}\n\n{markdown(gain.row() for gain in front(results))}")


def with_part(readme: str, name: str, part: str) -> str:
    """`readme` with `part` between the two comments of that name."""
    before, begin, rest = readme.partition(f"<!-- {name}: {NOTE} -->")
    _, end, after = rest.partition(f"<!-- end of {name} -->")
    return f"{before}{begin}\n{part}\n{end}{after}"


if __name__ == "__main__":
    main()
