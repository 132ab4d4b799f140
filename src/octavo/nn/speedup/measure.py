"""Time `octavo.nn.Linear` against `nn.Linear` on a GPU: compiled, in BF16, forward and backward pass.

Both layers are the real ones. Their weight is an argument, so that one compilation with dynamic sizes serves every
size. Each pass is replayed as a CUDA graph, so that only the GPU's work is timed. Launching is left out: a graph or the
rest of a model hides it, and it takes longer with dynamic sizes. The two layers take turns; each turn lies between two
CUDA events, and nothing waits for the GPU before the last turn. The result is the median turn.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from types import FunctionType

import torch
from torch import Tensor, nn
from torch.func import functional_call

from octavo.nn.delayed import update_scales
from octavo.nn.linear import Linear, to_fp8_linear
from octavo.nn.speedup.table import Shape
from octavo.recipe import Recipe

METHOD = (
    "median milliseconds of a forward and backward pass of one linear layer without bias, compiled by torch.compile "
    "and replayed as a CUDA graph, random normal BF16 input, weight and output gradient"
)
WARM_UP = 2  # calls after compilation and before timing
TURNS = 7
TURN_MS = 3.0  # of a turn, so that the events and the switch to the other layer are negligible
COMPILATIONS = 64  # more than needed: the compiler specializes on equal sizes and on sizes of 1


def time_linears(
    recipe: Recipe, shapes: Sequence[Shape], device: torch.device, done: Callable[[], None]
) -> list[tuple[float, float]]:
    """Milliseconds of a forward and backward pass in BF16 and by `recipe`, for each (M, K, N) of `shapes`.

    Torch's random state is restored. `done` is called after each shape.

    Raises:
        RuntimeError: not enough GPU memory for a layer, or the compiler cannot run.
    """
    times = []
    with (
        torch.cuda.device(device),
        torch.random.fork_rng(devices=[device]),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
        torch._dynamo.config.patch(recompile_limit=COMPILATIONS),
    ):
        bf16 = nn.Linear(1, 1, bias=False, device=device)
        fp8 = to_fp8_linear(nn.Linear(1, 1, bias=False, device=device), recipe, "measured")
        forwards = [compiled(bf16), compiled(fp8)]
        for shape in shapes:
            times.append(_time(forwards, fp8, shape, device))
            done()
        torch.cuda.empty_cache()
    return times


def compiled(layer: nn.Linear) -> Callable[[Tensor, Tensor], Tensor]:
    """y[M,N] of x[M,K] and w[N,K] by the forward pass of `layer`, compiled for any sizes."""

    def forward(x: Tensor, w: Tensor) -> Tensor:
        y: Tensor = functional_call(layer, {"weight": w}, (x,))
        return y

    # The compiler stores and counts compilations by code object: with a copy of it, each layer has its own.
    own = FunctionType(forward.__code__.replace(), globals(), closure=forward.__closure__)
    return torch.compile(own, dynamic=True, fullgraph=True)


def _time(
    forwards: Sequence[Callable[[Tensor, Tensor], Tensor]], fp8: Linear, shape: Shape, device: torch.device
) -> tuple[float, float]:
    m, k, n = shape
    normal = partial(torch.randn, device=device, dtype=torch.bfloat16)
    x, w, dy = normal(m, k, requires_grad=True), normal(n, k, requires_grad=True), normal(m, n)
    calls = [partial(_pass, forward, x, w, dy) for forward in forwards]
    for call in calls:
        call()
    update_scales(fp8)  # delayed scaling uses its history from the second step on
    for call in calls:
        for _ in range(WARM_UP):
            call()
    bf16_ms, fp8_ms = interleaved_medians([_recorded(call) for call in calls])
    torch.cuda.empty_cache()  # the memory of the graphs
    return bf16_ms, fp8_ms


def _recorded(call: Callable[[], None]) -> Callable[[], None]:
    """`call` as a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _pass(forward: Callable[[Tensor, Tensor], Tensor], x: Tensor, w: Tensor, dy: Tensor) -> None:
    torch.autograd.grad(forward(x, w), (x, w), dy)


def interleaved_medians(calls: Sequence[Callable[[], None]]) -> list[float]:
    """The median milliseconds of each of `calls`, which take turns on the current stream."""
    repeats = [max(1, round(TURN_MS / _turns([call], [1], 2)[0][-1])) for call in calls]
    return [statistics.median(ms) for ms in _turns(calls, repeats, TURNS)]


def _turns(calls: Sequence[Callable[[], None]], repeats: Sequence[int], turns: int) -> list[list[float]]:
    """For each call, the milliseconds of one of its `repeats` in each turn."""
    marks = [_mark()]
    for _ in range(turns):
        for call, count in zip(calls, repeats, strict=True):
            for _ in range(count):
                call()
            marks.append(_mark())
    torch.cuda.synchronize()
    spans = [before.elapsed_time(after) for before, after in pairwise(marks)]
    return [[ms / count for ms in spans[i :: len(calls)]] for i, count in enumerate(repeats)]


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
