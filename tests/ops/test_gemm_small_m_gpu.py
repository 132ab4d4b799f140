"""The GEMM of small M on CUDA against float64 on the same quantized operands, for every path of its kernels.

M = 1 is summed in float32. A larger M runs on the tensor core, whose partial sums keep about 14 bits: the bounds are
those of test_gemm_gpu.
"""

import pytest
import torch
from gemm_examples import check_columns, errors_and_bounds, on_gpu, operands
from gpu_memory import poison
from hopper import ONLY_HOPPER

from octavo.numerics import QTensor
from octavo.ops import find_backend, scaled_mm
from octavo.ops.dispatch import MAX_SMALL_M

pytestmark = [pytest.mark.gpu, ONLY_HOPPER]

# k, n: no multiples of a tile, not aligned, shorter than one; long enough to be cut; of Llama-3-8B
SIZES = [(16, 16), (80, 48), (129, 515), (1031, 77), (4096, 64), (14336, 4096), (4096, 6144)]
PAIRS = ["row", "row-gradient", "row-e5m2", "tensor"]


def product(
    a: QTensor, b: QTensor, bias=None, dtype=torch.bfloat16, fast=True, tiling=(), residual=None
) -> torch.Tensor:
    from octavo.ops.kernels import gemm as kernel  # imports Triton, which a CPU build of PyTorch does not have

    poison()
    how = kernel.Tiling(*tiling) if tiling else None
    return kernel.scaled_mm(a.data, a.scale, b.data, b.scale, bias, dtype, fast, how, residual)


def check(y: torch.Tensor, a: QTensor, b: QTensor, bias=None, fast=True) -> None:
    error, bound = errors_and_bounds(y, a, b, bias, fast)
    assert (error <= bound).all(), (error / bound).max()


@pytest.mark.parametrize("m", [1, 2, 3, 16, 17, 64])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("pair", PAIRS)
def test_worst_row(pair, size, m):
    k, n = size
    a, b = operands(pair, m, k, n)
    gpu_a, gpu_b = on_gpu(a), on_gpu(b)
    for fast in (True, False):
        y = product(gpu_a, gpu_b, fast=fast)
        assert (y.shape, y.dtype, y.is_contiguous()) == ((m, n), torch.bfloat16, True)
        check(y, a, b, fast=fast)
        for _ in range(3):
            assert torch.equal(product(gpu_a, gpu_b, fast=fast), y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("m", "k", "n"), [(1, 4096, 515), (5, 4096, 515), (1, 14336, 4096), (16, 80, 48), (3, 0, 7)])
def test_a_residual_is_added_as_after_it(m, k, n, dtype):
    """GEMV, tiles, split-K, a short K, and an empty K."""
    a, b = (on_gpu(t) for t in operands("row", m, k, n))
    bias, residual = (torch.randn(shape, device="cuda").to(dtype) for shape in ((n,), (m, n)))
    actual = product(a, b, bias, dtype, residual=residual)
    assert torch.equal(actual, product(a, b, bias, dtype) + residual)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("m", [1, 5])
def test_bias_and_dtypes(m, dtype):
    a, b = operands("row", m, 4096, 515)
    bias = torch.randn(515).to(dtype)
    check(product(on_gpu(a), on_gpu(b), bias.cuda(), dtype), a, b, bias)


@pytest.mark.parametrize("m", [1, 2, 16])
def test_each_column_too_and_a_wrong_scale_is_seen(m):
    a, b = operands("row", m, 1031, 129)
    check_columns(product, a, b, fast=True)


@pytest.mark.parametrize("splits", [1, 2, 3, 5, 8])
def test_every_way_to_cut_it_up(splits):
    for m, k in ((2, 4096), (16, 1031), (33, 14336)):
        a, b = operands("row", m, k, 515)
        for terms in (64, 256):
            check(product(on_gpu(a), on_gpu(b), tiling=(64, terms, 3, 4, splits)), a, b)
    a, b = operands("row", 1, 4096, 515)
    for rows, terms in ((4, 512), (8, 1024), (16, 512), (2, 2048)):
        check(product(on_gpu(a), on_gpu(b), tiling=(rows, terms, splits, 4)), a, b)


@pytest.mark.parametrize(("m", "k", "n"), [(0, 64, 32), (1, 64, 0), (1, 0, 32), (3, 0, 32)])
def test_empty_operands(m, k, n):
    a, b = operands("row", m, k, n)
    bias = torch.randn(n).bfloat16()
    assert torch.equal(product(on_gpu(a), on_gpu(b)).cpu(), torch.zeros(m, n, dtype=torch.bfloat16))
    assert torch.equal(product(on_gpu(a), on_gpu(b), bias.cuda()).cpu(), bias.expand(m, n))


@pytest.mark.parametrize("m", [1, 2, MAX_SMALL_M])
def test_what_is_not_finite_stays_so(m):
    a, b = operands("row", m, 515, 80)
    scale = a.scale.clone()
    scale[-1] = torch.nan
    y = product(on_gpu(QTensor(a.data, scale, a.format, a.granularity)), on_gpu(b)).cpu()
    assert y[-1].isnan().all()
    assert y[:-1].isfinite().all()


def test_a_small_m_runs_here_and_a_larger_one_on_cublaslt():
    for m in (1, MAX_SMALL_M, MAX_SMALL_M + 1):
        a, b = (on_gpu(q) for q in operands("row", m, 4096, 512))
        name = find_backend(a.data.device, a.granularity, b.granularity, ("e4m3", "e4m3"), (m, 512)).name
        assert name == ("triton" if m <= MAX_SMALL_M else "cublaslt")
        y = scaled_mm(a, b, fast_accumulation=True)
        assert torch.equal(y, product(a, b)) == (name == "triton")


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("m", [1, MAX_SMALL_M])
def test_compiled_it_gives_the_same_bits(m):
    torch.compiler.reset()
    a, b = (on_gpu(q) for q in operands("row", m, 4096, 512))

    def run(data: torch.Tensor) -> torch.Tensor:
        return scaled_mm(QTensor(data, a.scale, a.format, a.granularity), b, fast_accumulation=True)

    assert torch.equal(torch.compile(run, fullgraph=True)(a.data), run(a.data))


@pytest.mark.parametrize("m", [1, MAX_SMALL_M])
def test_in_a_cuda_graph(m):
    a, b = (on_gpu(q) for q in operands("row", m, 4096, 512))
    expected = scaled_mm(a, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = scaled_mm(a, b)
    y.fill_(torch.nan)
    graph.replay()
    assert torch.equal(y, expected)
