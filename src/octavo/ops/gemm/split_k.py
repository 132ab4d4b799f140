"""GEMMs whose K is split into parts (split-K): one launch multiplies the parts, and a second adds the partial sums."""

from torch import Tensor

from octavo.ops.triton_support import cdiv

COMBINE_BLOCK_N = 256  # columns of y of a program of the second launch
COMBINE_STEPS = 12  # the second launch takes as long as so many tiles of a program (bench.gpu.gemm_tune)
MAX_SPLIT_K = 8


def choose_split(tiles: int, steps: int, programs: int) -> int:
    """The number of parts of K for the shortest time.

    Args:
        tiles: of y.
        steps: of the loop over K.
        programs: multiprocessors of the GPU.
    """

    def time(split_k: int) -> int:  # of the programs of one multiprocessor, in steps
        combine = COMBINE_STEPS if split_k > 1 else 0
        return cdiv(tiles * split_k, programs) * cdiv(steps, split_k) + combine

    return min(range(1, MAX_SPLIT_K + 1), key=time)


def cut(k: int, step: int, split_k: int) -> tuple[int, int]:
    """Elements of K in each of at most `split_k` parts, a multiple of `step`, and the number of parts."""
    k_per_split = cdiv(cdiv(k, step), split_k) * step
    return k_per_split, cdiv(k, k_per_split)


def empty_product(y: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """y [M, N] of K = 0, or without elements: the bias, and the residual."""
    y = y.zero_() if bias is None else y.copy_(bias.expand(y.shape))
    return y if residual is None else y + residual
