"""Layer norm -> linear -> sigmoid, forward and backward, over tokens M, inputs K, outputs N: the sizes where FP8 pays.

Compiling the modes of a cell takes longer than measuring them, so several processes compile the cells of a batch, one
each, and then measure them, one at a time on each GPU. One process at a time on a GPU times the candidates of a Triton
kernel that Inductor generated, since the fastest candidate is what will be measured.

The cells come in an order that covers the range first. The result is written after each batch, so a run may be ended
at any time: cells that bench/results has already, of this machine and commit, are not measured again. The result holds
every round, since modes are compared round by round: the host takes most of the time of a short step, and its speed
varies by more than the modes differ.

"ours, only if faster" either converts the layer or leaves it as it is. So it has the rounds of "ours" or of "bf16".

    python -m bench.gpu.layer [--processes 12]          an hour
"""

import functools
import multiprocessing
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import octavo
from bench import record
from bench.gpu.harness import DEVICE, interleaved, own_code, parser_of, show, sized
from bench.gpu.modes import speedup
from bench.gpu.peers import use_torchao
from octavo.nn import NormLinear

Cell = tuple[int, int, int]
Rounds = dict[str, list[float]]

SIZES = sized((1024, 2048, 4096, 8192, 16384, 32768), (64,))
TIMEOUT = 3600  # seconds that a batch may take to compile, and a cell to be measured
CONTEXT = 1 << 30  # bytes of a GPU that a process takes before it allocates
PER_ELEMENT = 16  # bytes for each element of x, w and y while a cell is compiled: more than any mode takes


class Layer(nn.Module):
    def __init__(self, k: int, n: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(k), nn.Linear(k, n, bias=False)
        self.fused = NormLinear(self, "norm", "linear")

    def forward(self, x: Tensor) -> Tensor:
        (y,), _ = self.fused(x)
        return torch.sigmoid(y)


def main() -> None:
    processes = parser_of(__doc__, processes=12).parse_args().processes  # that compile at the same time
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # of each process
    rows = measured_before()
    left = [cell for cell in order() if cell not in {(row["m"], row["k"], row["n"]) for row in rows}]
    memory = 0.9 * torch.cuda.mem_get_info()[1] if DEVICE == "cuda" else float("inf")
    gpus = max(1, torch.cuda.device_count())
    for batch in batches(left, processes, memory, gpus):
        for (m, k, n), rounds in measure(batch, gpus):
            if isinstance(rounds, str):
                print(m, k, n, rounds, flush=True)
                continue
            rows.append({"m": m, "k": k, "n": n, "rounds": rounds})
            show(m, k, n, {mode: speedup(rows[-1], mode, "bf16") for mode in rounds})
        print(record.write("gpu_layer", {"cells": rows, "of": len(SIZES) ** 3}), len(rows), flush=True)


def measured_before() -> list[dict[str, Any]]:
    """The cells of bench/results, if they are of this machine, these versions and this commit."""
    found = record.before("gpu_layer") or {"machine": {}, "cells": []}
    same = {**found["machine"], "measured": ""} == {**record.facts(), "measured": ""}
    return list(found["cells"]) if same else []


def order() -> list[Cell]:
    """All cells: the corners and the middle first, then the others in an order that is random but fixed."""
    cells = [(m, k, n) for m in SIZES for k in SIZES for n in SIZES]
    random.Random(0).shuffle(cells)
    ends = {1024, 8192, 32768}
    return sorted(cells, key=lambda cell: not set(cell) <= ends)


def batches(cells: Iterable[Cell], count: int, memory: float, gpus: int) -> Iterator[list[Cell]]:
    """The cells in their order, in batches of `count`, or of fewer whose compilation needs `memory` bytes of a GPU.

    Cell i of a batch is compiled and measured on GPU i modulo `gpus`.
    """
    batch: list[Cell] = []
    for cell in cells:
        beside = batch[len(batch) % gpus :: gpus]
        if batch and (len(batch) == count or sum(map(bytes_of, [*beside, cell])) > memory):
            yield batch
            batch = []
        batch.append(cell)
    if batch:
        yield batch


def bytes_of(cell: Cell) -> int:
    """Bytes of the GPU that compiling a cell takes."""
    m, k, n = cell
    return CONTEXT + PER_ELEMENT * (m * k + k * n + m * n)


# --- The processes of a batch ----------------------------------------------------------------------------------


def measure(batch: Sequence[Cell], gpus: int) -> Iterator[tuple[Cell, Rounds | str]]:
    """Each cell with its rounds, or with the exception that it raised, as text."""
    context = multiprocessing.get_context("spawn")
    locks, compiled = [context.RLock() for _ in range(gpus)], context.Barrier(len(batch))
    results: Any = context.Queue()
    for i, cell in enumerate(batch):
        arguments = cell, i % gpus, locks[i % gpus], compiled, results
        context.Process(target=work, args=arguments, daemon=True).start()
    for _ in batch:
        yield results.get(timeout=TIMEOUT)


def work(cell: Cell, gpu: int, lock: Any, compiled: Any, results: Any) -> None:
    """Compile a cell, wait until all cells of the batch are compiled, and measure it alone on its GPU."""
    if torch.cuda.is_available():
        torch.cuda.set_device(gpu)
    time_candidates_alone(lock)
    found: Rounds | str = ""
    try:
        run = prepare(cell)
        torch.cuda.empty_cache()  # the others need the memory that compiling took
    except Exception as error:  # the other cells are measured all the same
        found, run = f"{type(error).__name__}: {error}", dict
    compiled.wait(TIMEOUT)
    with lock:
        found = found or run()
    results.put((cell, found))


def time_candidates_alone(lock: Any) -> None:
    """Let Inductor time the candidates of a kernel only while it has `lock`."""
    from torch._inductor.runtime.benchmarking import benchmarker

    found = benchmarker.benchmark_gpu

    @functools.wraps(found)
    def alone(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return found(*args, **kwargs)

    benchmarker.benchmark_gpu = alone


# --- A cell ----------------------------------------------------------------------------------------------------


def prepare(cell: Cell) -> Callable[[], Rounds]:
    """Compile the modes of a cell; returns the function that measures milliseconds of each mode, one a round."""
    m, k, n = cell
    x = torch.randn(m, k, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(m, n, device=DEVICE, dtype=torch.bfloat16)
    steps = {name: step(convert, x, dy) for name, convert in MODES.items() if name != "torchao" or HAS_TORCHAO}
    for run in steps.values():
        run()
    guarded = "ours" if converts(m, k, n) else "bf16"

    def measure() -> Rounds:
        share = (1 << 41) // (m * k * n)  # cells with little work get more repetitions
        times = interleaved(steps, rounds=max(5, min(20, share)), repeat=max(2, min(10, share)))
        times["ours, only if faster"] = times[guarded]
        return {name: [round(ms, 4) for ms in found] for name, found in times.items()}

    return measure


def converts(m: int, k: int, n: int) -> bool:
    """Whether `only_if_faster` converts the layer for `m` tokens."""
    with torch.device(DEVICE):
        layer = Layer(k, n).to(torch.bfloat16)
    octavo.convert(layer, "rowwise", only_if_faster=True, tokens=m)
    return isinstance(layer.linear, octavo.nn.Linear)


def step(convert: Callable[[nn.Module], Any], x: Tensor, dy: Tensor) -> Callable[[], None]:
    """Forward and backward of a compiled layer."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        layer: nn.Module = Layer(x.shape[1], dy.shape[1]).to(torch.bfloat16)
    convert(layer)
    layer.__class__ = own_code(Layer)
    compiled = torch.compile(layer)

    def run() -> None:
        compiled(x).backward(dy)
        layer.zero_grad()
        x.grad = None

    return run


HAS_TORCHAO = bool(record.installed("torchao"))
MODES: dict[str, Callable[[nn.Module], Any]] = {
    "bf16": lambda layer: None,
    "ours": lambda layer: octavo.convert(layer, "rowwise"),
    "torchao": lambda layer: use_torchao(layer, "rowwise"),
}


if __name__ == "__main__":
    main()
