"""Times GEMMs over weights that take turns, which together are too large for the L2 cache, as in a model."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from bench.gpu.llama import GEMMS
from bench.gpu.timing import replayed

SHAPES = tuple(GEMMS.values())  # (n, k)
BEYOND_CACHE = 1 << 28  # bytes that the L2 cache cannot keep from call to call
Weight = TypeVar("Weight")
Tiling = TypeVar("Tiling", bound=tuple[int, ...])


def beyond_cache(n: int, k: int) -> int:
    """How many weights [N, K] of one byte an element take turns."""
    return max(2, BEYOND_CACHE // (n * k))


def in_turn(call: Callable[[Weight], Any], weights: Sequence[Weight]) -> float:
    """Microseconds of a call, over all weights in turn."""

    def step() -> None:
        for weight in weights:
            call(weight)

    return 1e3 * replayed(step, calls=2) / len(weights)


def fastest(
    chosen: Tiling, others: Iterable[Tiling], us: Callable[[Tiling], float], best: int = 3
) -> list[tuple[Tiling, float]]:
    """The microseconds of the chosen tiling, then those of the `best` of all. Prints those that do not run."""
    found: dict[Tiling, float] = {}
    for tiling in dict.fromkeys((chosen, *others)):
        try:
            found[tiling] = us(tiling)
        except Exception as error:  # the tiling needs more shared memory than there is
            print(f"  {tuple(tiling)}: {type(error).__name__} {str(error)[:60]}", flush=True)
    return [(tiling, found[tiling]) for tiling in (chosen, *sorted(found, key=lambda each: found[each])[:best])]
