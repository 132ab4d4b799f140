"""Times the GEMM of small M with many tilings, by shape and rows.

It prints the tiling that `octavo.ops.gemm.kernel.choose` takes and the best three, beside cuBLASLt, in microseconds and
as a share of a copy of the same bytes. Change `choose` and `max_small_m` by it. It writes no result.

    python -m bench.gpu.gemm_tune [--rows 1,16,64]
"""

from collections.abc import Iterator
from itertools import product, starmap

import torch

from bench.gpu.gemms import SHAPES, beyond_cache, fastest, in_turn
from bench.gpu.kernels import copy_ms
from bench.options import option
from octavo.numerics import ROW, Cast, QTensor
from octavo.ops import quantize
from octavo.ops.gemm import kernel
from octavo.ops.gemm.cublaslt import scaled_mm_cublaslt


def main() -> None:
    rows = option("--rows", "1,16,64")
    for m in map(int, rows.split(",")):
        for n, k in SHAPES:
            shape(m, n, k)
            torch.cuda.empty_cache()


def shape(m: int, n: int, k: int) -> None:
    """Time one shape."""
    a = quantize(torch.randn(m, k, device="cuda"), Cast())
    count = beyond_cache(n, k)
    bs = [quantize(torch.randn(n, k, device="cuda"), Cast()) for _ in range(count)]

    def ours(tiling: kernel.Tiling) -> float:
        return in_turn(
            lambda b: kernel.scaled_mm(a.data, a.scale, b.data, b.scale, None, torch.bfloat16, True, tiling), bs
        )

    def native(b: QTensor) -> None:
        scaled_mm_cublaslt(a.data, a.scale, ROW, b.data, b.scale, ROW, None, torch.bfloat16, True)

    found = fastest(kernel.choose(m, n, k, a.data.device), starmap(kernel.Tiling, tilings(m)), ours)
    copy = 1e3 * copy_ms(count * (n * k + 4 * n + m * (k + 4 + 2 * n))) / count
    print(f"{m} x {n} x {k}: a copy {copy:.1f} us, cuBLASLt {in_turn(native, bs):.1f} us", flush=True)
    for tiling, us in found:
        print(f"  {tuple(tiling)} {us:8.1f} us  {copy / us:.2f} of a copy", flush=True)


def tilings(m: int) -> Iterator[tuple[int, ...]]:
    """BLOCK_N, BLOCK_K, stages, warps and splits that are worth a try."""
    if m == 1:
        yield from product((2, 4, 8, 16), (512, 1024, 2048), (1, 3, 4), (4,))
    else:
        yield from product((64, 128), (128, 256), (3, 4, 6), (4,), (1, 2, 4, 8))


if __name__ == "__main__":
    main()
