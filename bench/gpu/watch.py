"""The cost of `octavo.watch` at the layer stack of bench.gpu.stack: one process, one GPU, the fused rowwise stack.

Two models with the same weights, one of them watched, take turns: a step that is not sampled, one with a brief sample,
one with a full sample, and as many steps in a row as the default interval has. The limits are 2 % of a step at the
default interval, and 1 % of the peak memory. Outputs must be equal bit for bit.

    python -m bench.gpu.watch         2 minutes: most of it compiles
"""

from collections.abc import Callable
from typing import Any

import torch

from bench.gpu.harness import Options, Results, allocated, benchmark, interleaved, peak_of, show, summary
from bench.gpu.modes import FUSED
from bench.gpu.stack import CONFIG, Runner
from octavo.watching.collection import CHECK_INTERVAL, Watch, watch

INTERVAL = 100
NEVER = 1 << 30
PLAIN, UNSAMPLED, BRIEF, FULL = "not watched", "watched, not sampled", "brief sample", "full sample"
DEFAULT = "at the default interval"


class WatchedRunner(Runner):
    """A mode of the stack whose model is watched."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.watch: Watch = watch(self.model, interval=INTERVAL)

    def step(self) -> list[torch.Tensor]:
        """As `Runner.step`; the watch reads the gradients before they are dropped."""
        found = self.run()
        self.watch.read_gradients()
        self.drop()
        self.watch.step()
        return found

    def every(self, full: int, brief: int) -> Callable[[], None]:
        """The step of a watch with samples at these intervals. The watch changes its intervals where it has others."""

        def step() -> None:
            if (self.watch.interval, self.watch.check_interval) != (full, brief):
                self.watch.interval, self.watch.check_interval = full, brief
                self.watch.go_back(0)
            self.step()

        return step


def measure(mode: str = FUSED, *, many: int = INTERVAL, **options: Any) -> dict[str, Any]:
    """Times, memory and equality of the stack with and without a watch; `many` steps at the default interval."""
    before = allocated()
    plain = Runner(mode, **options)
    least, before = peak_of(plain.step, before), allocated()
    watched = WatchedRunner(mode, **options)
    single = {
        UNSAMPLED: watched.every(NEVER, NEVER),
        BRIEF: watched.every(NEVER, 1),
        FULL: watched.every(1, NEVER),
    }
    peaks = [peak_of(step, before) for step in single.values()]
    assert torch.equal(plain.step()[0], watched.step()[0])
    rows = [(name, step, 12, 4) for name, step in single.items()]
    rows.append((DEFAULT, watched.every(INTERVAL, CHECK_INTERVAL), 4, many))
    times = {
        name: interleaved({PLAIN: plain.step, name: step}, rounds=rounds, repeat=repeat, warmup=2)
        for name, step, rounds, repeat in rows
    }
    watched.watch.close()
    ms = {name: {which: summary(t) for which, t in found.items()} for name, found in times.items()}
    memory = max(least, *peaks) / least - 1 if least else None
    return {"interval": INTERVAL, "ms": ms, "memory": memory}


@benchmark()
def main(_: Options) -> Results:
    dynamo: Any = torch._dynamo.config
    dynamo.automatic_dynamic_shapes = False  # the large stack must not be compiled for any number of tokens
    result = measure()
    show(result)
    yield "gpu_watch", {"layers": CONFIG.layers, **result}
