"""The cost of `octavo.watch` at the layer stack of bench.gpu.stack: one process, one GPU, the fused rowwise stack.

Two models with the same weights, one of them watched, take turns: a step that is not sampled, one with a brief sample,
one with a full sample, and as many steps in a row as the default interval has. The limits are 2 % of a step at the
default interval, and 1 % of the peak memory. Outputs must be equal bit for bit. So must the gradients of a small stack
with deterministic algorithms: otherwise the backward pass of flash attention differs from call to call.

    python -m bench.gpu.watch         2 minutes: most of it compiles
"""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from bench.gpu.harness import Options, Results, allocated, benchmark, interleaved, peak_of, sized, summary
from bench.gpu.modes import FUSED
from bench.gpu.stack import CONFIG, MODES, Runner
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


def measure() -> dict[str, Any]:
    """Times, memory and equality of the stack with and without a watch."""
    before = allocated()
    plain = Runner(MODES[FUSED])
    least, before = peak_of(plain.step, before), allocated()
    watched = WatchedRunner(MODES[FUSED])
    single = {UNSAMPLED: watched.every(NEVER, NEVER), BRIEF: watched.every(NEVER, 1), FULL: watched.every(1, NEVER)}
    peaks = [peak_of(step, before) for step in single.values()]
    assert torch.equal(plain.step()[0], watched.step()[0])
    rows = [(name, step, 12, 4) for name, step in single.items()]
    rows.append((DEFAULT, watched.every(INTERVAL, CHECK_INTERVAL), 4, INTERVAL))
    times = {
        name: interleaved({PLAIN: plain.step, name: step}, rounds=rounds, repeat=repeat, warmup=2)
        for name, step, rounds, repeat in rows
    }
    watched.watch.close()
    ms = {name: {which: summary(t) for which, t in found.items()} for name, found in times.items()}
    memory = max(least, *peaks) / least - 1 if least else None
    return {"interval": INTERVAL, "ms": ms, "memory": memory}


def small_equality(**options: Any) -> dict[str, bool]:
    """Whether outputs and gradients of a small stack are equal: twice without a watch, and without and with one."""
    torch.use_deterministic_algorithms(True)
    try:
        plain, watched = Runner(MODES[FUSED], **options), WatchedRunner(MODES[FUSED], **options)
        watched.every(1, 1)()  # the next step is sampled
        first, second, third = (everything(runner) for runner in (plain, plain, watched))
        watched.watch.close()
    finally:
        torch.use_deterministic_algorithms(False)
    pairs = {"repeated": zip(first, second, strict=True), "watched": zip(first, third, strict=True)}
    return {name: all(torch.equal(a, b) for a, b in each) for name, each in pairs.items()}


def everything(runner: Runner) -> list[torch.Tensor]:
    """The output, the gradient of the input, and those of the weights."""
    found = [*runner.run(), *(p.grad for p in runner.model.parameters() if p.grad is not None)]
    runner.drop()
    return found


@benchmark()
def main(_: Options) -> Results:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic GEMMs need it
    # The large stack must not be compiled for any number of tokens.
    torch._dynamo.config.automatic_dynamic_shapes = False
    equal = small_equality(config=replace(CONFIG, layers=1), tokens=sized(1024, 32))
    assert all(equal.values()), equal
    yield "gpu_watch", {"layers": CONFIG.layers, "equal": equal, **measure()}
