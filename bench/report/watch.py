"""The table of docs/performance.md on the cost of `octavo.watch`."""

from bench.report.tables import Result, machine, markdown

STEPS = {
    "watched, not sampled": "without a sample",
    "brief sample": "with a brief sample",
    "full sample": "with a full sample",
    "at the default interval": "at the default interval",
}


def watch_cost(results: dict[str, Result]) -> str:
    """Milliseconds of a step with and without a watch, by the sample that the step takes."""
    result = results.get("gpu_watch")
    if result is None:
        return "Not measured yet: `python -m bench.gpu.watch` measures it on one GPU."
    rows = []
    for name, title in STEPS.items():
        plain, watched = (result["ms"][name][which]["median"] for which in ("not watched", name))
        more = watched / plain - 1
        rows.append({"step": title, "not watched, ms": f"{plain:.2f}", "ms": f"{watched:.2f}", "more": f"{more:+.2%}"})
    facts = [
        f"A full sample comes every {result['interval']} steps, and the last row is the mean of so many steps.",
        f"The peak memory grows by {result['memory']:.2%}.",
    ]
    return f"{markdown(rows)}\n\n{' '.join(facts)} {machine(result)}"
