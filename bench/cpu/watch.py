"""The cost of `octavo.watch` in the demo on a CPU: training steps of two runs, one of them watched, in turn.

Times are those that the processor worked for this process, its threads together, so that other programs disturb them
little. The steps alternate one by one, and each figure is a median of differences between neighbours. The limit is 5 %
of a step at the default interval.

    python -m bench.cpu.watch [--steps 150]
"""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import record
from bench.gpu.harness import parser_of, show, sized
from examples import demo
from octavo.train.settings import load_config
from octavo.train.trainer import Trainer, start_run
from octavo.watching import watch
from octavo.watching.collection import CHECK_INTERVAL

INTERVAL = 100
BRIEF_ALONE = INTERVAL // CHECK_INTERVAL - 1  # steps with a brief sample; one more has both


def begin(out: Path, *overrides: str) -> Trainer:
    words = [*demo.SETTINGS, "--recipe", "rowwise", "--device", "cpu", "--out", str(out), *overrides]
    return start_run(load_config(None, words), Console(quiet=True))


def milliseconds(trainer: Trainer) -> float:
    began = time.process_time()
    trainer.step()
    return (time.process_time() - began) * 1e3


def measure(steps: int, *overrides: str) -> dict[str, Any]:
    """Median processor time of steps, and the share of a step that the watch costs at the default interval.

    Args:
        steps: of each run: half of them without a sample, a quarter with a brief one, and a quarter with both.
        overrides: settings of the demo as `--key value`.
    """
    with tempfile.TemporaryDirectory() as folder:
        plain, watched = (begin(Path(folder) / name, *overrides) for name in ("plain", "watched"))
        for trainer in (plain, watched):
            trainer.step()
        differences: dict[str, list[float]] = {"both": [], "brief": [], "not sampled": []}
        base = []
        with watch(watched.model, folder=Path(folder), interval=4, resumed_at=watched.state.step) as found:
            watched.watch, found.check_interval = found, 2
            for number in range(found.done + 1, found.done + steps + 1):
                before = milliseconds(plain)
                kind = "not sampled" if not found.sampled else "brief" if number % 4 else "both"
                middle, after = milliseconds(watched), milliseconds(plain)
                base += [before, after]
                differences[kind].append(middle - (before + after) / 2)
        for trainer in (plain, watched):
            trainer.lock.__exit__(None, None, None)
    step = statistics.median(base)
    extra = {kind: statistics.median(found) for kind, found in differences.items()}
    unsampled = extra["not sampled"] * (INTERVAL - BRIEF_ALONE - 1)
    overhead = (unsampled + extra["brief"] * BRIEF_ALONE + extra["both"]) / INTERVAL / step
    return {"step_ms": step, "extra_ms": extra, "interval": INTERVAL, "overhead": overhead, "steps": steps}


def main() -> None:
    result = measure(parser_of(__doc__, steps=sized(150, 8)).parse_args().steps)
    show(result)
    print(record.write("cpu_watch", result))


if __name__ == "__main__":
    main()
