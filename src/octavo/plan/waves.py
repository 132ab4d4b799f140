"""How much longer a layer's GEMMs take because their outputs do not fill the GPU.

A kernel divides its output into tiles, and a multiprocessor computes one tile at a time. So the tiles run in waves, and
in the last wave some multiprocessors have nothing to do (NVIDIA, Matrix Multiplication Background User's Guide, "Wave
Quantization"). 200 tiles take as long as 264 on 132 multiprocessors: dw [5120, 1280] of ViT-H's MLP is such an output.

The measured layers of `octavo.plan.rates` have powers of two. Their outputs are 2^n tiles, of which 128 are a wave, or
256 two waves: 97 % of the multiprocessors have work, and that is in their times. Fewer tiles than multiprocessors count
as a full wave: there cuBLASLt divides the sum of each output among several multiprocessors.
"""

from octavo.nn.speedup.table import Shape
from octavo.recipe import Recipe

MULTIPROCESSORS = 132  # of the H100 and of the H200
MEASURED = 128  # of them have work in the measured layers
# Rows and columns of a tile, in the names of cuBLASLt's kernels (bench/results/gpu_stack.json and gpu_vision.json). In
# BF16 it has several, of which the plan takes the one that fills most; with scales by row it has one.
BF16_TILES = ((256, 128), (128, 256), (320, 128), (192, 192))
FP8_TILES = ((128, 128),)


def slowdowns(recipe: Recipe, shape: Shape) -> tuple[float, float, float]:
    """The times of y, dx and dw of a linear layer at (M, K, N), each as a multiple of that in a measured layer."""
    m, k, n = shape
    return (
        1 / _filled(m, n, in_bf16=recipe.y is None),
        1 / _filled(m, k, in_bf16=recipe.dx is None),
        1 / _filled(n, k, in_bf16=recipe.dw is None),
    )


def _filled(rows: int, columns: int, *, in_bf16: bool) -> float:
    """The multiprocessors that have work, as a share of those in a measured layer."""
    return max(_filled_by(rows, columns, *tile) for tile in (BF16_TILES if in_bf16 else FP8_TILES))


def _filled_by(rows: int, columns: int, tile_rows: int, tile_columns: int) -> float:
    count = -(-rows // tile_rows) * -(-columns // tile_columns)
    if count <= MULTIPROCESSORS:
        return 1.0
    waves = -(-count // MULTIPROCESSORS)
    return min(1.0, rows * columns / (tile_rows * tile_columns * MEASURED * waves))
