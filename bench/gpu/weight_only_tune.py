"""Times the kernel of the weight-only GEMM with many tilings, by rows and shape. It writes no result.

It prints the tiling that `octavo.ops.weight_only.kernel.choose` takes and the best three, in microseconds.

    python -m bench.gpu.weight_only_tune [--rows 1,16,64] [--bytes]      --bytes: E4M3 widened as on older GPUs
"""

import sys
from collections.abc import Iterator
from functools import partial
from itertools import product, starmap
from typing import Any

from torch import Tensor

from bench.gpu.gemms import SHAPES, fastest, in_turn
from bench.gpu.weight_only import operands
from bench.options import option
from octavo.numerics import ROW, QTensor
from octavo.ops.gemm.kernel import Tiling
from octavo.ops.weight_only import kernel


def main() -> None:
    rows = option("--rows", "1,16,64")
    native = "--bytes" not in sys.argv
    for m, (n, k) in product(map(int, rows.split(",")), SHAPES):
        x, _, packed = operands(m, n, k)
        chosen = kernel.choose(m, n, k, 0, x.device)
        found = fastest(chosen, starmap(Tiling, tilings(m)), partial(microseconds, x, packed, native))
        print(m, n, k, [(tuple(tiling), round(us, 1)) for tiling, us in found], flush=True)


def microseconds(x: Tensor, packed: list[QTensor], native: bool, tiling: Tiling) -> float:
    return in_turn(lambda w: kernel.weight_only_mm(x, w.data, w.scale, ROW, None, None, tiling, native), packed)


def tilings(m: int) -> Iterator[tuple[Any, ...]]:
    """BLOCK_N, BLOCK_K, stages, warps and splits that are worth a try."""
    if m == 1:
        return product((4, 8, 16), (512, 1024), (3, 4), (4,), (1,))
    return product((64, 128), (128, 256) if m <= 32 else (64, 128), (3, 4), (4, 8), (1, 2))


if __name__ == "__main__":
    main()
