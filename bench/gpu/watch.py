"""The cost of `octavo.watch` at the layer stack of bench.gpu.stack: one process, one GPU, the fused rowwise stack.

Two models with the same weights, one of them watched, take turns: a step that is not sampled, a sampled one, and as
many steps in a row as the default interval has. Outputs and gradients must be equal bit for bit. The limits are 2 % of
a step at the default interval, and 1 % of the peak memory.

    python -m bench.gpu.watch [--quick]         2 minutes, or 1.5: most of it compiles
"""

import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch

from bench import record
from bench.gpu.modes import FUSED
from bench.gpu.stack import CONFIG, Runner
from bench.gpu.timing import interleaved, summary
from octavo.telemetry import Watch, watch

INTERVAL = 50
NEVER = 1 << 30
PLAIN, UNSAMPLED, SAMPLED, DEFAULT = "not watched", "watched, not sampled", "sampled", "at the default interval"


class WatchedRunner(Runner):
    """A mode of the stack whose model is watched."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.watch: Watch = watch(self.model, interval=INTERVAL)

    def step(self) -> None:
        """As `Runner.step`; the watch reads the gradients before they are dropped."""
        self.call(self.x, *self.tables).backward(self.dy)
        self.watch.read_gradients()
        self.model.zero_grad()
        self.x.grad = None
        self.watch.step()

    def every(self, interval: int) -> Callable[[], None]:
        """The step of a watch of this interval. The watch changes its interval where it has another one."""

        def step() -> None:
            if self.watch.interval != interval:
                self.watch.interval = interval
                self.watch.go_back(0)
            self.step()

        return step


def peak(step: Callable[[], None], before: int) -> int:
    """The most bytes that tensors take during a step, without the `before` of other tensors; 0 without a GPU."""
    step()
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure(mode: str = FUSED, *, rounds: int, repeat: int = 4, many: int = INTERVAL, **options: Any) -> dict[str, Any]:
    """Times, memory and equality of the stack with and without a watch.

    Args:
        many: the steps in a row at the default interval.
        options: those of `Runner`.
    """
    allocated = torch.cuda.memory_allocated
    before = allocated()
    plain = Runner(mode, **options)
    peaks = {PLAIN: peak(plain.step, before)}
    before = allocated()
    watched = WatchedRunner(mode, **options)
    sampled, unsampled, usual = watched.every(1), watched.every(NEVER), watched.every(INTERVAL)
    peaks |= {SAMPLED: peak(sampled, before), UNSAMPLED: peak(unsampled, before)}
    equal = all(torch.equal(a, b) for a, b in zip(plain.gradients(), watched.gradients(), strict=True))
    long = max(rounds // 3, 2)
    turns = ((UNSAMPLED, unsampled, rounds, repeat), (SAMPLED, sampled, rounds, repeat), (DEFAULT, usual, long, many))
    times = {
        name: interleaved({PLAIN: plain.step, name: step}, rounds=count, repeat=each, warmup=2)
        for name, step, count, each in turns
    }
    watched.watch.close()
    extra = {name: _median(found[name]) - _median(found[PLAIN]) for name, found in times.items()}
    base = _median(times[UNSAMPLED][PLAIN])
    return {
        "equal": equal,
        "interval": INTERVAL,
        "ms": {name: {which: summary(t) for which, t in found.items()} for name, found in times.items()},
        "sample_ms": extra[SAMPLED],
        "overhead": extra[DEFAULT] / _median(times[DEFAULT][PLAIN]),
        "overhead_of_parts": (extra[UNSAMPLED] + extra[SAMPLED] / INTERVAL) / base,
        "peak_bytes": peaks,
        "memory": max(peaks[SAMPLED], peaks[UNSAMPLED]) / peaks[PLAIN] - 1 if peaks[PLAIN] else None,
    }


def _median(times: list[float]) -> float:
    return statistics.median(times)


def main() -> None:
    result = measure(rounds=5 if "--quick" in sys.argv else 12)
    for name, found in result["ms"].items():
        print(
            f"{name:24} {found[name]['median']:8.2f} ms; not watched, in turn with it, {found[PLAIN]['median']:.2f} ms"
        )
    print(f"a sample costs {result['sample_ms']:.2f} ms")
    print(f"at interval {INTERVAL}: {result['overhead']:.2%} of a step; by parts {result['overhead_of_parts']:.2%}")
    print(f"peak memory {result['memory'] or 0:+.2%}; equal outputs and gradients: {result['equal']}")
    print(record.write("gpu_watch", {"layers": CONFIG.layers, **result}))


if __name__ == "__main__":
    main()
