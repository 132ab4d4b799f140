"""`examples/grpo.py` on a CPU: what its three arms reach, each over three seeds, and how far their samplers are off.

python -m bench.cpu.grpo
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, median
from typing import Any

from bench.gpu.harness import Options, Results, benchmark, sized

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo.py"
SEEDS, STEPS, LAST = sized(3, 1), sized(300, 2), 20
FIGURES = ("reward", "right", "kl")


def summary(found: dict[str, list[dict[str, list[float]]]]) -> list[dict[str, Any]]:
    """A row for each arm: the means of the last steps of each seed, and the medians of the speeds of all steps."""
    rows = []
    for arm, runs in found.items():
        ends = {name: [mean(run[name][-LAST:]) for run in runs] for name in FIGURES}
        pushes = [seconds for run in runs for seconds in run["push_seconds"]]
        speeds = {
            "tokens_per_second": median(speed for run in runs for speed in run["tokens_per_second"]),
            "push_ms": 1e3 * median(pushes) if pushes else None,  # where the sampler is the model that learns
        }
        rows.append({"arm": arm, "seeds": len(runs), "steps": len(runs[0]["reward"]), **ends, **speeds})
    return rows


@benchmark()
def main(_: Options) -> Results:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "arms.json"
        sizes = ["--seeds", str(SEEDS), "--steps", str(STEPS), "--out", str(out)]
        subprocess.run([sys.executable, str(EXAMPLE), *sizes], check=True)
        yield "cpu_grpo", {"last": LAST, "arms": summary(json.loads(out.read_text()))}
