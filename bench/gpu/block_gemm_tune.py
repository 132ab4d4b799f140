"""Times the GEMM of scales along K with many tilings, by shape, tokens and scales.

It prints the tiling that `octavo.ops.gemm.block_scaled_kernel.choose` takes and the best four in microseconds and
TFLOP/s, beside BF16 and, where it has the GEMM, cuBLASLt. Change `choose` by it. It writes no result.

    python -m bench.gpu.block_gemm_tune [--rows 16,8192] [--shapes 2]
"""

import time
from collections.abc import Iterator
from functools import partial
from itertools import product, starmap

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu.gemms import SHAPES, beyond_cache, fastest, in_turn
from bench.options import option
from octavo.numerics import Cast, Granularity, QTensor, group
from octavo.ops import quantize
from octavo.ops.gemm import block_scaled_kernel as kernel
from octavo.ops.gemm.backend import SQUARE, STRIP
from octavo.ops.gemm.cublaslt import scaled_mm_cublaslt

PAIRS = {"group32": (group(32),) * 2, "group64": (group(64),) * 2, "group128": (STRIP, STRIP), "block": (STRIP, SQUARE)}


def main() -> None:
    rows = option("--rows", "16,8192")
    shapes = SHAPES[-int(option("--shapes", str(len(SHAPES)))) :]
    for m in map(int, rows.split(",")):
        for n, k in shapes:
            x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            count = beyond_cache(n, k) if m < 1024 else 2
            wide = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
            print(f"{m} x {n} x {k}: BF16 {in_turn(partial(F.linear, x), wide):.1f} us", flush=True)
            for name, granularities in PAIRS.items():
                began = time.perf_counter()
                scales(name, granularities, x, wide)
                print(f"    {time.perf_counter() - began:.1f} s", flush=True)
            torch.cuda.empty_cache()


def scales(name: str, granularities: tuple[Granularity, Granularity], x: Tensor, wide: list[Tensor]) -> None:
    """Time one kind of scales."""
    (m, k), n, group_size = x.shape, len(wide[0]), granularities[0].cols or 1
    a, bs = (
        quantize(x, Cast(granularity=granularities[0])),
        [quantize(w, Cast(granularity=granularities[1])) for w in wide],
    )

    def ours(tiling: kernel.Tiling) -> float:
        return in_turn(
            lambda b: kernel.scaled_mm(
                a.data, a.scale, a.granularity, b.data, b.scale, b.granularity, None, torch.bfloat16, None, tiling
            ),
            bs,
        )

    def native(b: QTensor) -> None:
        scaled_mm_cublaslt(a.data, a.scale, a.granularity, b.data, b.scale, b.granularity, None, torch.bfloat16, False)

    def wide_product(b: QTensor) -> None:
        kernel.dequantized_mm(a.data, a.scale, a.granularity, b.data, b.scale, b.granularity, None, torch.bfloat16)

    cast = Cast(granularity=granularities[0])
    print(f"  {name}: quantize {in_turn(lambda _: quantize(x, cast), wide):.1f} us", end="")
    print(f", cuBLASLt {in_turn(native, bs):.1f} us" if group_size == 128 else "", flush=True)
    print(f"    widened to BF16 {in_turn(wide_product, bs):8.1f} us")
    chosen = kernel.choose(m, n, k, group_size, x.device)
    for tiling, us in fastest(chosen, starmap(kernel.Tiling, tilings(m, group_size)), ours, best=4):
        print(f"    {tuple(tiling)} {us:8.1f} us  {2 * m * n * k / us / 1e6:5.0f} TFLOP/s", flush=True)


def tilings(m: int, group_size: int) -> Iterator[tuple[int, ...]]:
    """BLOCK_N, BLOCK_M, groups of a step, stages, warps and splits that are worth a try."""
    groups = {32: (4, 2), 64: (2, 4), 128: (2, 1)}[group_size]
    if m <= 64:
        block_m = max(16, 1 << (m - 1).bit_length())
        yield from product((64,), (block_m,), groups, (3, 5), (4,), (1, 2, 4, 8))
        return
    stages = {32: (3, 4, 5), 64: (2, 3, 4), 128: (2, 3)}[group_size]
    yield from product((128,), (128,), (groups[0],), stages, (8,), (1,))
    yield from product((128,), (128,), (groups[1],), (2, 3), (8,), (1,))
    yield from product((64,), (128,), (groups[0],), (2, 3), (4,), (1,))
    yield from product((128,), (64,), (groups[0],), (2, 3), (4,), (1,))


if __name__ == "__main__":
    main()
