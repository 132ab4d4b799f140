"""Times the grouped GEMM of block scales with many tilings, by experts and tokens, beside BF16's grouped GEMM.

It prints the tiling that `octavo.ops.gemm.block_scaled_kernel.choose` takes and the best four in microseconds and
TFLOP/s. Change `choose` by it. The routing is drawn at random. It writes no result.

    python -m bench.gpu.grouped_gemm_tune [--tokens 16,8192]
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu.gemms import fastest
from bench.gpu.moe import SHAPES, Shape
from bench.gpu.timing import replayed
from bench.options import option
from octavo.numerics import Cast
from octavo.ops import quantize, sort_by_expert
from octavo.ops.compiling import compile_only
from octavo.ops.gemm.backend import SQUARE, STRIP
from octavo.ops.gemm.block_scaled_kernel import Tiling, choose
from octavo.ops.grouped_gemm import block_scaled_kernel as kernel

# BLOCK_N, BLOCK_M, groups of a step, stages and warps that are worth a try, up to so many likely rows of a group
TILINGS = {
    16: [(64, 16, 2, 3, 4), (64, 16, 1, 6, 4), (128, 16, 2, 3, 4), (128, 16, 1, 4, 4)],
    64: [(64, 64, 1, 5, 4), (128, 64, 1, 4, 8), (128, 64, 1, 4, 4), (64, 32, 2, 4, 4)],
    1 << 20: [(128, 128, 1, 5, 8), (128, 128, 1, 3, 8), (64, 128, 1, 3, 4), (128, 64, 1, 4, 8)],
}


def main() -> None:
    given = option("--tokens", "16,512,8192")
    for name, shape in SHAPES.items():
        for n, k in ((2 * shape.mlp_width, shape.width), (shape.width, shape.mlp_width)):
            w = torch.randn(shape.experts, n, k, device="cuda", dtype=torch.bfloat16)
            data, scale = packed(w)
            for tokens in map(int, given.split(",")):
                measure(f"{name}, {tokens} tokens, {n} x {k}", shape, tokens, w, data, scale)


def packed(w: Tensor) -> tuple[Tensor, Tensor]:
    """The matrices [E, N, K] in blocks."""
    data = torch.empty_like(w, dtype=torch.float8_e4m3fn)
    scales = []
    for e, matrix in enumerate(w):
        q = quantize(matrix, Cast(granularity=SQUARE))
        data[e] = q.data
        scales.append(q.scale)
    return data, torch.stack(scales)


def measure(name: str, shape: Shape, tokens: int, w: Tensor, data: Tensor, scale: Tensor) -> None:
    (e, n, k), m = w.shape, tokens * shape.top_k
    index = torch.rand(tokens, e, device="cuda").topk(shape.top_k).indices
    offsets = sort_by_expert(index, e).offsets
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    a = quantize(x, Cast(granularity=STRIP))
    bf16 = 1e3 * replayed(lambda: F.grouped_mm(x, w.transpose(1, 2), offs=offsets), rounds=4)
    rows = kernel.likely_rows(m, e)
    chosen = choose(rows, n, k, 128, x.device)
    print(f"{name}: BF16 {bf16:.1f} us", flush=True)
    product = partial(kernel.grouped_mm, a.data, a.scale, data, scale, SQUARE, offsets, torch.bfloat16)
    others = [Tiling(*each) for each in next(tilings for most, tilings in TILINGS.items() if rows <= most)]
    with compile_only():  # in several threads
        for tiling in (chosen, *others):
            product(tiling)
    for tiling, us in fastest(chosen, others, lambda each: 1e3 * replayed(partial(product, each), rounds=4), best=4):
        print(f"    {tuple(tiling)[:5]} {us:8.1f} us  {2 * m * n * k / us / 1e6:5.0f} TFLOP/s", flush=True)


if __name__ == "__main__":
    main()
