"""Write the pages of docs that tables fill, the plots and README's table from bench/results: `make docs`.

It also writes the speeds of packing schemes that `octavo.load` warns by, and those of FP8 attention and the rates of
experts that `octavo plan` reads.

The words of a page are in its template beside this file. A template may name

    {stack_modes}                               the table that this function of the page's modules makes
    {gpu_stack[floors][cast][total]:.2f}        a number of bench/results/gpu_stack.json
    {machine[gpu_stack]}                        the machine, the versions and the date of that file
"""

import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from bench.report import (
    accuracy,
    attention,
    compile_time,
    experts,
    generation,
    gpus,
    int8,
    parity,
    performance,
    plan,
    plots,
    pretraining,
    recipes,
    scaling,
    schemes,
    vision,
    watch,
    weight_only,
)
from bench.report.aims import aims
from bench.report.front_page import gains
from bench.report.tables import Result, load, machine, markdown

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGES = {
    "performance": (generation, performance, parity, experts, weight_only, int8, compile_time, schemes, watch),
    "accuracy": (accuracy, parity),
    "plan": (plan,),
    "gpus": (gpus,),
}  # the modules of their tables
# Pages that exist once a benchmark has run: the beginning of its results' names, and the modules of the tables.
LATER = {
    "scaling": ("gpu_fsdp_", (scaling,)),
    "pretraining": ("pretrain_", (pretraining,)),
    "vision": ("vision", (vision,)),
    "attention": ("gpu_attention", (attention,)),
    "recipes": ("recipes", (recipes,)),
}
MARKERS = "<!-- gains: `make docs` writes this part from bench/results -->", "<!-- end of gains -->"  # in README


def main() -> None:
    results = load()
    schemes.ship(results)  # before the pages: the plan reads what the package ships
    attention.ship(results)
    experts.ship(results)
    for name in pages(results):
        (ROOT / "docs" / f"{name}.md").write_text(page(name, results))
    plots.draw(results, ROOT / "docs" / "performance")
    readme = ROOT / "README.md"
    readme.write_text(with_gains(readme.read_text(), results))


def pages(results: dict[str, Result]) -> dict[str, tuple[ModuleType, ...]]:
    """The pages that the results give, and the modules of their tables."""
    there = {
        name: modules
        for name, (prefix, modules) in LATER.items()
        if any(result.startswith(prefix) for result in results)
    }
    return PAGES | there


def page(name: str, results: dict[str, Result]) -> str:
    template = (HERE / f"{name}.template.md").read_text()
    text = template.format_map(Values(pages(results)[name], results))
    return re.sub(r"\n{3,}", "\n\n", text)  # a warning that has nothing to say leaves an empty paragraph


def with_gains(readme: str, results: dict[str, Result]) -> str:
    """`readme` with the picture and the table of gains between its markers."""
    before, begin, rest = readme.partition(MARKERS[0])
    _, end, after = rest.partition(MARKERS[1])
    picture = "![Speed over compiled BF16](docs/performance/gains.svg)"
    table = markdown(gain.row() for gain in gains(results))
    return f"{before}{begin}\n{picture}\n\n{table}\n{end}{after}"


class Values(dict[str, Any]):
    """The values that a template may name."""

    def __init__(self, modules: Sequence[ModuleType], results: dict[str, Result]) -> None:
        super().__init__(results)
        self["machine"] = {name: machine(result) for name, result in results.items()}
        self["aims"] = markdown(aim.row() for aim in aims(results))
        here = "performance.md#"
        rows = ({**gain.row(), "measured": f"[how]({gain.link.replace(here, '#')})"} for gain in gains(results))
        self["gains"] = markdown(rows)
        self._modules, self._results = modules, results

    def __missing__(self, name: str) -> str:
        function = next(getattr(module, name) for module in self._modules if hasattr(module, name))
        found = function(self._results)
        return found if isinstance(found, str) else markdown(found)


if __name__ == "__main__":
    main()
