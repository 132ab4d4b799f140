"""The table of docs/performance.md on the time that compilation takes."""

from bench.report.tables import MISSING, Result, earlier, machine, markdown

SCOPES = {"whole": "`torch.compile(model)`", "block": "`block.compile()` for each block"}


def compile_time(results: dict[str, Result]) -> str:
    """Seconds to compile in BF16 and in ours, and their ratio."""
    result = results.get("gpu_compile_time")
    if result is None:
        return "Not measured yet: `python -m bench.gpu.compile_time` measures it on one GPU."
    rows = []
    for scope, name in SCOPES.items():
        found = {cell["mode"]: cell for cell in result["cells"] if cell["scope"] == scope}
        bf16, ours = found["bf16"], found["ours"]
        later = f"{bf16['later_ms']:.0f} and {ours['later_ms']:.0f}" if ours["later_ms"] else MISSING
        rows.append(
            {
                f"{result['depth']} blocks": name,
                "BF16, s": f"{bf16['seconds']:.1f}",
                "`rowwise`, s": f"{ours['seconds']:.1f}",
                "vs BF16": f"{ours['seconds'] / bf16['seconds']:.2f}x",
                "a later step, ms": later,
                **earlier(ours),
            }
        )
    return f"{markdown(rows)}\n\n{machine(result)}"
