"""What the benchmarks share: words, results in files, modes that take turns, checks before them, passes, peaks.

Variants take turns in one process, several steps at a time; a figure is the median of the rounds. Steps follow each
other without a synchronization, as in training, so that host code that runs ahead of the device costs nothing. The
order is drawn anew each round, because the work before, and the power that it drew, sets the clock.

Every benchmark takes `--quick`: it runs at its smallest size, also without a GPU where its kernels allow that, and
writes nothing (`bench.smoke` runs all of them so).
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.utils._pytree import tree_map

from octavo import speed
from octavo.evaluation.metrics import energies, sqnr
from octavo.models.llama import LlamaConfig, rope_tables
from octavo.train.processes import collect_between_steps
from octavo.util import installed as installed

Step = Callable[[], Any]
Options = argparse.Namespace
Result = dict[str, Any]  # what a file of bench/results has
Row = dict[str, Any]  # of a table in it
Results = Iterator[tuple[str, Result]]  # with the names of the files
Main = Callable[[Options], Results | None]
Made = TypeVar("Made")
Weight = TypeVar("Weight")

RESULTS = Path(__file__).parents[1] / "results"
QUICK = "--quick" in sys.argv  # a benchmark at its smallest size, which writes nothing
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROOM = 80 * 10**9  # bytes that a step may take, where its largest batch is looked for
BEYOND_CACHE = 1 << (20 if QUICK else 28)  # bytes that the L2 cache cannot keep from call to call

# --- Words -----------------------------------------------------------------------------------------------------


def sized(full: Made, quick: Made) -> Made:
    """A size of the measurement, or of a run with `--quick`."""
    return quick if QUICK else full


def parser_of(what: str | None, **options: Any) -> argparse.ArgumentParser:
    """A parser of `--name value` for each default, of its type; `what` describes it.

    False is a flag, and a type the option without a default. A tuple lists the values of an option, and a dictionary
    those of an argument without a name.
    """
    parser = argparse.ArgumentParser(description=what, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {**options, "quick": False}.items():
        match default:
            case dict():
                parser.add_argument(name, choices=default)
            case tuple():
                parser.add_argument(f"--{name}", choices=default)
            case type():
                parser.add_argument(f"--{name}", type=default)
            case False:
                parser.add_argument(f"--{name}", action="store_true")
            case _:
                parser.add_argument(f"--{name}", type=type(default), default=default)
    return parser


def benchmark(**options: Any) -> Callable[[Main], Callable[..., None]]:
    """Makes a command with these options (`parser_of`) of a function, and writes each result that the function gives.

    It is the last function of a file: the command runs where its file is the program. A long benchmark gives a result
    again when it has more, so it may be ended at any time.
    """

    def command(main: Main) -> Callable[..., None]:
        def run(words: Sequence[str] | None = None) -> None:
            given = parser_of(sys.modules[main.__module__].__doc__, **options).parse_args(words)
            torch._dynamo.config.recompile_limit = 64  # modes share the code of layers, each with a cache of its own
            write(main(given) or iter(()))

        if main.__module__ == "__main__":
            run()
        return run

    return command


def write(results: Results) -> None:
    """Write each result, and print the entries and the rows that are new in it; of several ranks the first one does."""
    printed = set[str]()
    for name, result in results:
        if distributed.is_initialized() and distributed.get_rank() > 0:
            continue
        for key, value in result.items():
            for row in value if isinstance(value, list) else [value]:
                if (line := f"{key}: {rounded(row)}") not in printed:
                    print(line, flush=True)
                    printed.add(line)
        print(write_result(name, result), flush=True)


def show(*words: Any) -> None:
    """Print words, and results with four digits of their numbers."""
    print(*map(rounded, words), flush=True)


def rounded(value: Any) -> Any:
    """`value` with four digits of every float in it."""
    return tree_map(lambda each: float(f"{each:.4g}") if isinstance(each, float) else each, value)


def in_new_process(call: Callable[[], Made], **environment: str) -> Made:
    """What `call` gives in a process of its own, with more environment variables, which this process keeps too."""
    os.environ |= environment
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(call).result()


def in_processes(count: int, calls: Iterable[Callable[[], Any]]) -> int:
    """Make the calls, `count` at a time, each in a process of its own. Prints the errors, and returns their number."""
    failed = 0
    with ProcessPoolExecutor(count, get_context("spawn"), max_tasks_per_child=1) as pool:
        for done in as_completed([pool.submit(_alone, call) for call in calls]):
            if error := done.exception():
                failed += 1
                print(*traceback.format_exception(error), sep="", flush=True)
    return failed


def _alone(call: Callable[[], Any]) -> None:
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64
    call()


# --- The files of bench/results, which begin with the machine, the versions and the commit ------------------------


def facts() -> dict[str, Any]:
    """Of `octavo.speed`. OCTAVO_COMMIT names the commit where the sources are a copy."""
    found = speed.facts()
    return found | {"commit": os.environ.get("OCTAVO_COMMIT") or found["commit"]}


def result_before(name: str) -> dict[str, Any]:
    """results/NAME.json; {} without the file, and with `--quick`."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() and not QUICK else {}


def rows_before(name: str, key: str) -> list[dict[str, Any]]:
    """The rows below `key` in results/NAME.json, each with the machine that measured it; none without the file."""
    found = result_before(name)
    return [{"machine": found["machine"], **row} for row in found.get(key, [])]


def write_result(name: str, result: dict[str, Any], folder: Path | None = None) -> Path:
    """Write `result` to NAME.json, of results by default, with the facts of this machine unless it has a "machine" of
    its own."""
    path = (folder or RESULTS) / f"{name}.json"
    text = json.dumps({"machine": facts(), **result}, indent=2) + "\n"
    if folder or not QUICK:
        path.write_text(text)
    return path


# --- Time ------------------------------------------------------------------------------------------------------


def interleaved(steps: Mapping[str, Step], *, rounds: int, repeat: int, warmup: int = 3) -> dict[str, list[float]]:
    """Milliseconds a step of each variant, one entry a round. With `--quick` two rounds of one step."""
    for step in steps.values():
        for _ in range(sized(warmup, 1)):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    order, drawn = list(steps), random.Random(0)
    for _ in range(sized(rounds, 2)):
        drawn.shuffle(order)
        for name in order:
            times[name].append(once(steps[name], sized(repeat, 1)))
    return times


def own_code(cls: type[nn.Module]) -> type[nn.Module]:
    """A subclass with a copy of the code of `forward`. torch.compile counts and caches compilations by code object."""
    forward = cls.forward
    copy = FunctionType(forward.__code__.replace(), forward.__globals__, forward.__name__)
    return type(cls.__name__, (cls,), {"forward": copy})


@collect_between_steps()
def once(step: Step, repeat: int) -> float:
    """Milliseconds a step, of `repeat` in a row, without Python's garbage collection; by the clock without a GPU."""
    if not torch.cuda.is_available():
        began = time.perf_counter()
        for _ in range(repeat):
            step()
        return (time.perf_counter() - began) * 1e3 / repeat
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    begin.record()
    for _ in range(repeat):
        step()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / repeat


def host_once(step: Step) -> float:
    """Milliseconds that the host takes for a step, which begins with an idle GPU and is not waited for.

    The queue of a stream has some 1,000 places. Where a step launches more, and the GPU is slower than the host, this
    is longer than the host needs.
    """
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    step()
    return (time.perf_counter() - began) * 1e3


def captured(step: Step) -> Step:
    """A step as one CUDA graph, after a few ordinary calls; without a GPU the step itself.

    Each call overwrites the result of the one before.
    """
    if DEVICE == "cpu":
        return step
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()

    def replay(held: Step = step) -> Any:  # the graph does not hold the memory that the step reads and writes
        graph.replay()
        return result

    return replay


def replayed(step: Step, *, calls: int = 6, rounds: int = 8) -> float:
    """Median milliseconds of a small piece of device work without its launch: a CUDA graph of a few calls.

    Reads may hit the L2 cache from call to call. Compare with work that moves as many bytes, timed alike.
    """

    def repeat() -> None:
        for _ in range(sized(calls, 1)):
            step()  # its result is dropped, so that each call writes to the same memory

    graph = captured(repeat)
    graph()
    return statistics.median(once(graph, sized(4, 1)) for _ in range(sized(rounds, 1))) / sized(calls, 1)


def summary(times: list[float]) -> dict[str, float]:
    """Median and quartiles in milliseconds."""
    low, middle, high = statistics.quantiles(times, n=4) if len(times) > 1 else (times[0],) * 3
    return {"median": middle, "low": low, "high": high}


def rows_of(times: Mapping[str, list[float]], base: str, key: str = "ratio") -> dict[str, dict[str, Any]]:
    """Of each mode the median and quartiles in milliseconds, and as `key` the speed as a multiple of that of `base`."""
    found = {name: summary(each) for name, each in times.items()}
    return {name: row | {key: found[base]["median"] / row["median"]} for name, row in found.items()}


def medians(times: Mapping[str, list[float]]) -> dict[str, float]:
    """The median of each variant."""
    return {name: statistics.median(found) for name, found in times.items()}


# --- Checks ----------------------------------------------------------------------------------------------------


def decibels(exact: torch.Tensor, actual: torch.Tensor) -> float:
    """The SQNR of `actual`."""
    return sqnr(*energies(exact, actual))


def each_decibels(exact: Iterable[Tensor], actual: Iterable[Tensor], least: float = 6) -> list[float]:
    """The SQNR of each tensor of `actual`; an AssertionError unless all exceed `least`: less is a wrong kernel."""
    found = [decibels(e, a) for e, a in zip(exact, actual, strict=True)]
    assert all(db > least for db in found), found  # NaN is not
    return found


def turns(
    base: str, steps: Mapping[str, Step], *, rounds: int, repeat: int, warmup: int = 3, least: float = 10
) -> dict[str, Any]:
    """The SQNR of each mode's result against that of `base`, which must exceed `least` decibels, its milliseconds by
    round, and their medians."""
    exact = steps[base]().clone()  # a graph overwrites its result
    found = {name: each_decibels([exact], [step()], least)[0] for name, step in steps.items() if name != base}
    times = interleaved(steps, rounds=rounds, repeat=repeat, warmup=warmup)
    return {"sqnr": found, "rounds": times, "ms": {name: summary(each) for name, each in times.items()}}


# --- What runs, memory and kernels -----------------------------------------------------------------------------


def made(name: str, make: Callable[[], Made]) -> Made | None:
    """What `make` gives; None, with a line about it, if it raises: a mode that does not run must not end the others.

    With `--quick` it ends them, since that is what a quick run is for.
    """
    try:
        return make()
    except Exception as error:
        if QUICK:
            raise
        print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        return None


def allocated() -> int:
    """Bytes of tensors on the GPU, without those that nothing refers to; 0 without a GPU."""
    speed.release(torch.device(DEVICE))
    return torch.cuda.memory_allocated() if DEVICE == "cuda" else 0


def peak_of(step: Step, before: int, warmup: int = 1) -> int:
    """The most bytes that tensors take during a step, without the `before` of other tensors; 0 without a GPU."""
    for _ in range(warmup):
        step()
    if not torch.cuda.is_available():
        step()
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def largest_batch(
    step: Callable[[int], Any], batches: tuple[int, int], before: int, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """The peak bytes of a training step with each of two batches, without the `before` bytes of other tensors, and the
    largest batch that runs in ROOM bytes, for which the peaks say where to look; None without a GPU."""
    peaks = [peak_of(partial(step, batch), before) for batch in batches]
    found: dict[str, Any] = {"peak_bytes": dict(zip(batches, peaks, strict=True)), "largest_batch": None}
    if DEVICE == "cpu":
        return found
    largest = int(batches[0] + (ROOM - peaks[0]) * (batches[1] - batches[0]) / (peaks[1] - peaks[0]))
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min((ROOM + before) / torch.cuda.mem_get_info()[1], 1.0))
    while largest and made(f"{largest} at once", partial(once, partial(step, largest), 1)) is None:  # in pieces
        optimizer.zero_grad()
        allocated()
        largest -= max(largest // 50, 1)
    torch.cuda.set_per_process_memory_fraction(1.0)
    return found | {"largest_batch": largest}


def built(makes: Mapping[str, Callable[[], Any]]) -> tuple[dict[str, Any], dict[str, int]]:
    """What each call makes, and the peak bytes of its `step`, weights included; without those that raise."""

    def with_peak(make: Callable[[], Any]) -> tuple[Any, int]:
        before = allocated()
        runner = make()
        return runner, peak_of(runner.step, before, warmup=3)  # delayed scaling compiles twice

    found = {name: made(name, partial(with_peak, make)) for name, make in makes.items()}
    there = {name: each for name, each in found.items() if each is not None}
    return {name: runner for name, (runner, _) in there.items()}, {name: peak for name, (_, peak) in there.items()}


def checked(base: str, runners: Mapping[str, Any]) -> dict[str, list[float]]:
    """The SQNR of each tensor that the step of each other runner returns, against those of `base`."""
    exact = runners[base].step()
    return {name: each_decibels(exact, runner.step()) for name, runner in runners.items() if name != base}


# --- GEMMs over weights that take turns ------------------------------------------------------------------------
# Together they are too large for the L2 cache, as in a model.


def beyond_cache(n: int, k: int) -> int:
    """How many weights [N, K] of one byte an element take turns."""
    return max(2, BEYOND_CACHE // (n * k))


def in_turn(call: Callable[[Weight], Any], weights: Sequence[Weight]) -> float:
    """Microseconds of a call, over all weights in turn."""

    def step() -> None:
        for weight in weights:
            call(weight)

    return 1e3 * replayed(step, calls=2) / len(weights)


# --- Passes forward and backward, on random inputs -------------------------------------------------------------


def draw_matrices(model: nn.Module) -> None:
    """Random numbers for all matrices: the same for models whose matrices come in the same order."""
    torch.manual_seed(0)
    for p in model.parameters():
        if p.ndim > 1:
            nn.init.normal_(p, std=0.02)


def llama_inputs(config: LlamaConfig, tokens: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """x [1, T, width] with the tables of `rope_tables`, and dy, in BF16."""
    generator = torch.Generator(DEVICE).manual_seed(1)
    x, dy = (torch.randn(1, tokens, config.width, device=DEVICE, generator=generator).bfloat16() for _ in range(2))
    return (x, *rope_tables(config, torch.arange(tokens, device=DEVICE))), dy


class Passes:
    """The passes of `model`. The first of the inputs has a gradient. Another `call` may compute the model."""

    def __init__(
        self, model: nn.Module, inputs: Sequence[Tensor], dy: Tensor, weights: Sequence[nn.Parameter] = ()
    ) -> None:
        self.model, self.dy, self.weights = model, dy, weights
        self.call: Callable[..., Tensor] = model
        self.x, *self.others = inputs
        self.x.requires_grad_()
        self.after: Callable[[nn.Module], Any] = lambda model: None  # called with the model after each step

    def compile(self) -> None:
        """Compile the model as a whole, by code of its own."""
        self.model.__class__ = own_code(type(self.model))
        self.call = torch.compile(self.model)

    def run(self) -> list[Tensor]:
        """The output, and the gradients of the first input and of `weights`."""
        y = self.call(self.x, *self.others)
        y.backward(self.dy)  # type: ignore[no-untyped-call]
        return [y.detach(), *(t.grad for t in (self.x, *self.weights) if t.grad is not None)]

    def drop(self) -> None:
        """Drop all gradients, as `zero_grad` drops them."""
        self.model.zero_grad()
        self.x.grad = None

    def step(self) -> list[Tensor]:
        """`run`, then `drop`."""
        found = self.run()
        self.drop()
        self.after(self.model)
        return found
