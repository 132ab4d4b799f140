"""Times the kernel of the weight-only GEMM with many tilings, by rows and shape. It writes no result.

It prints the tiling that `octavo.ops.weight_only.kernel.choose` takes and the best three, in microseconds.

    python -m bench.gpu.weight_only_tune [--rows 1,16,64] [--bytes]      --bytes: E4M3 widened as on older GPUs
"""

import sys
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

from torch import Tensor

from bench.gpu.llama import GEMMS
from bench.gpu.serve import in_turn
from bench.gpu.weight_only import operands
from octavo.numerics import ROW, QTensor
from octavo.ops.gemm.kernel import Tiling
from octavo.ops.weight_only import kernel


def main() -> None:
    rows = sys.argv[sys.argv.index("--rows") + 1] if "--rows" in sys.argv else "1,16,64"
    native = "--bytes" not in sys.argv
    for m, (n, k) in product(map(int, rows.split(",")), GEMMS.values()):
        x, _, packed = operands(m, n, k)
        chosen, found = kernel.choose(m, n, k, 0, x.device), {}
        for tiling in (chosen, *(Tiling(*how) for how in tilings(m))):
            try:
                found[tiling] = in_turn(partial(call, x, tiling, native), packed)
            except Exception as error:  # the tiling needs more shared memory than there is
                print(f"  {tuple(tiling)}: {type(error).__name__}", flush=True)
        best = sorted(found, key=lambda each: found[each])[:3]
        print(m, n, k, [(tuple(tiling), round(found[tiling], 1)) for tiling in (chosen, *best)], flush=True)


def call(x: Tensor, tiling: Tiling, native: bool, w: QTensor) -> Tensor:
    return kernel.weight_only_mm(x, w.data, w.scale, ROW, None, None, tiling, native)


def tilings(m: int) -> Iterator[tuple[Any, ...]]:
    """BLOCK_N, BLOCK_K, stages, warps and splits that are worth a try."""
    if m == 1:
        return product((4, 8, 16), (512, 1024), (3, 4), (4,), (1,))
    return product((64, 128), (128, 256) if m <= 32 else (64, 128), (3, 4), (4, 8), (1, 2))


if __name__ == "__main__":
    main()
