"""The speed of the forward GEMM of each recipe, beside that of BF16, in a limited time."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from octavo.nn.backends import gemm_backends
from octavo.ops import quantize, scaled_mm
from octavo.progress import Progress, no_progress
from octavo.recipe import Recipe

# [M, K, N] of y[M,N] = x[M,K] @ w[N,K]^T: 8,192 tokens through layers of Llama-3-8B, a square, and a small layer.
GPU_SHAPES = ((8192, 4096, 14336), (8192, 14336, 4096), (4096, 4096, 4096), (8192, 1024, 1024))
CPU_SHAPES = ((512, 512, 512), (256, 1024, 1024))  # FP8 is emulated there
_TURNS = 10
_TURN_SECONDS = 0.02


@dataclass(frozen=True)
class Timing:
    """The time of one GEMM y[M,N] = x[M,K] @ w[N,K]^T on quantized operands.

    Args:
        recipe: whose GEMM of y it is; "bf16" is torch's product of BF16.
        backend: that ran it.
        shape: [M, K, N].
        milliseconds: the median of several turns.
        speedup: how many times faster than BF16 in the same run.
    """

    recipe: str
    backend: str
    shape: tuple[int, int, int]
    milliseconds: float
    speedup: float

    @property
    def tflops(self) -> float:
        """10^12 FLOP/s, where a multiplication and an addition count 2."""
        m, k, n = self.shape
        return 2 * m * k * n / self.milliseconds / 1e9


def time_gemms(
    recipes: Mapping[str, Recipe],
    device: torch.device,
    shapes: Sequence[tuple[int, int, int]],
    *,
    seconds: float = 60.0,
    progress: Progress = no_progress,
) -> tuple[list[Timing], list[str]]:
    """Time the GEMM of y of each recipe that `device` runs, for each shape.

    Quantization is left out: `octavo doctor --measure-layers` times whole layers. Recipes with the same GEMM are timed
    once, under the name of the first.

    Args:
        recipes: by name.
        device: that runs them.
        shapes: [M, K, N].
        seconds: after so much time no other GEMM begins.
        progress: is called before each GEMM.

    Returns:
        The times, and the names of the GEMMs that were left out for lack of time.
    """
    begin, found, late = perf_counter(), [], []
    work = [(name, shape) for shape in shapes for name in ("bf16", *_different(recipes, device))]
    bf16 = 0.0
    for done, (name, shape) in enumerate(work):
        title = f"{name} {' x '.join(map(str, shape))}"
        progress(done, len(work), title)
        if perf_counter() - begin > seconds:
            late.append(title)
            continue
        recipe = None if name == "bf16" else recipes[name]
        ms = _median_milliseconds(_gemm(recipe, shape, device), device)
        bf16 = ms if recipe is None else bf16
        backend = "torch.mm" if recipe is None else gemm_backends(recipe, device)["y"].name
        found.append(Timing(name, backend, shape, ms, bf16 / ms))
    return found, late


def _different(recipes: Mapping[str, Recipe], device: torch.device) -> list[str]:
    """The recipes with a GEMM of y that runs on `device`, each GEMM once; on a GPU none that is emulated."""
    left, first = {"none", "emulated"} if device.type == "cuda" else {"none"}, dict[str, str]()
    for name, recipe in recipes.items():
        if recipe.y is not None and gemm_backends(recipe, device)["y"].name not in left:
            first.setdefault(f"{recipe.y.a.spec} {recipe.y.b.spec}", name)
    return list(first.values())


def _gemm(recipe: Recipe | None, shape: tuple[int, int, int], device: torch.device) -> Callable[[], object]:
    m, k, n = shape
    x, w = (torch.randn(rows, k, device=device, dtype=torch.bfloat16) for rows in (m, n))
    if recipe is None or recipe.y is None:
        return lambda: x @ w.t()  # [M, K] x [K, N]
    x_q, w_q = quantize(x, recipe.y.a), quantize(w, recipe.y.b)
    return lambda: scaled_mm(x_q, w_q)


@torch.no_grad()
def _median_milliseconds(call: Callable[[], object], device: torch.device) -> float:
    """The median over turns of some 20 ms, after a warm-up."""
    for _ in range(2):
        call()
    once = _seconds(call, 1, device)
    count = max(1, round(_TURN_SECONDS / max(once, 1e-7)))
    return 1e3 * statistics.median(_seconds(call, count, device) / count for _ in range(_TURNS))


def _seconds(call: Callable[[], object], count: int, device: torch.device) -> float:
    """The seconds of `count` calls. On a GPU the wait at the end is small beside a turn."""
    _wait(device)
    begin = perf_counter()
    for _ in range(count):
        call()
    _wait(device)
    return perf_counter() - begin


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
