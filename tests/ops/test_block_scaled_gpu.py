"""Our GEMM of scales that vary along K, on CUDA, against float64 on the same quantized operands.

A group's product is summed by the tensor core, whose partial sums keep about 14 bits, and the groups in float32: the
bounds are those of promoted sums in test_gemm_gpu.
"""

import pytest
import torch
from gemm_examples import check_columns, errors_and_bounds, on_gpu, operands, wide, wide_in_bf16
from gpu_memory import poison
from hopper import ONLY_HOPPER

from octavo.numerics import QTensor
from octavo.ops import find_backend, scaled_mm
from octavo.ops.dispatch import MAX_M_OF_GROUPS, MAX_SMALL_M
from octavo.ops.launching import Operands

pytestmark = [pytest.mark.gpu, ONLY_HOPPER]

PAIRS = ["group32", "group64", "group64-e5m2", "strip-strip", "strip-square", "mx"]
SIZES = [(515, 129), (4096, 200), (14336, 200)]  # k, n: no multiples of a tile, a group or a load; cut along K


def product(a: QTensor, b: QTensor, bias=None, dtype=torch.bfloat16, residual=None, tiling=()) -> torch.Tensor:
    from octavo.ops.kernels import block_scaled_gemm as kernel  # imports Triton, which a CPU build does not have

    poison()
    how = kernel.Tiling(*tiling) if tiling else None
    return kernel.scaled_mm(Operands.of(a, b), bias, dtype, residual, how)


def check(y: torch.Tensor, a: QTensor, b: QTensor, bias=None, widen=wide) -> None:
    error, bound = errors_and_bounds(y, a, b, bias, False, widen)
    assert (error <= bound).all(), (error / bound).max()


@pytest.mark.parametrize("m", [1, 3, 130])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("pair", PAIRS)
def test_worst_row(pair, size, m):
    k, n = size
    a, b = operands(pair, m, k, n)
    gpu_a, gpu_b = on_gpu(a), on_gpu(b)
    y = product(gpu_a, gpu_b)
    assert (y.shape, y.dtype, y.is_contiguous()) == ((m, n), torch.bfloat16, True)
    check(y, a, b)
    for _ in range(2):
        assert torch.equal(product(gpu_a, gpu_b), y)


@pytest.mark.parametrize("pair", ["group32", "strip-square"])
@pytest.mark.parametrize("m", [1, 33, 65])
def test_bias_and_residual_in_float32(pair, m):
    a, b = operands(pair, m, 1024, 515)
    bias, residual = torch.randn(515), torch.randn(m, 515).cuda()
    y = product(on_gpu(a), on_gpu(b), bias.cuda(), torch.float32)
    check(y, a, b, bias)
    assert torch.equal(product(on_gpu(a), on_gpu(b), bias.cuda(), torch.float32, residual), y + residual)


@pytest.mark.parametrize("tiling", [(64, 16, 4, 3, 4, 3), (64, 64, 2, 4, 4, 5), (128, 128, 1, 3, 8, 2)], ids=str)
def test_every_way_to_cut_it_up(tiling):
    a, b = operands("group64", 70, 1040, 300)
    check(product(on_gpu(a), on_gpu(b), tiling=tiling), a, b)


@pytest.mark.parametrize("m", [1, 16, 200])
def test_each_column_too_and_a_wrong_scale_is_seen(m):
    a, b = operands("group64", m, 515, 129)
    check_columns(product, a, b, fast=False)


@pytest.mark.parametrize(("m", "k", "n"), [(0, 64, 32), (1, 64, 0), (3, 0, 32), (200, 0, 32)])
def test_empty_operands(m, k, n):
    a, b = operands("group32", m, k, n)
    bias = torch.randn(n).bfloat16()
    assert torch.equal(product(on_gpu(a), on_gpu(b), bias.cuda()).cpu(), bias.expand(m, n))


@pytest.mark.parametrize("pair", ["group64", "mx"])
@pytest.mark.parametrize("m", [1, 3, 130])
def test_what_is_not_finite_stays_so_and_the_smallest_scale_is_a_number(pair, m):
    """255 is NaN in E8M0, and 0 is 2^-127."""
    a, b = operands(pair, m, 515, 80)
    scale = a.scale.float()
    scale[-1, -1] = torch.nan
    scale[0, 0] = 2.0**-127
    if m == 1:
        scale[0, -1] = torch.nan
    broken = QTensor(a.data, scale.to(a.scale.dtype), a.format, a.granularity)
    y = product(on_gpu(broken), on_gpu(b)).cpu()
    assert y[-1].isnan().all()
    assert y[:-1].isfinite().all()


@pytest.mark.parametrize(("pair", "m"), [("group64", MAX_M_OF_GROUPS), ("mx", MAX_M_OF_GROUPS), ("strip-square", 8)])
def test_the_operation_runs_on_it(pair, m):
    a, b = (on_gpu(q) for q in operands(pair, m, 512, 256))
    e8m0 = pair == "mx"
    found = find_backend(a.data.device, a.granularity, b.granularity, ("e4m3", "e4m3"), (m, 256), e8m0=(e8m0, e8m0))
    assert found.name == "triton"
    assert torch.equal(scaled_mm(a, b), product(a, b))


@pytest.mark.parametrize("size", [(4096, 512), (515, 129)], ids=str)
@pytest.mark.parametrize("pair", ["group32", "group64", "group64-e5m2", "mx"])
def test_worst_row_of_a_large_m(pair, size):
    """A BF16 product of the widened operands, which are rounded to BF16 first."""
    k, n = size
    a, b = operands(pair, MAX_M_OF_GROUPS + 1, k, n)
    gpu_a, gpu_b, bias = on_gpu(a), on_gpu(b), torch.randn(n)
    for dtype in (torch.bfloat16, torch.float32):
        poison()
        check(scaled_mm(gpu_a, gpu_b, out_dtype=dtype), a, b, widen=wide_in_bf16)
        check(scaled_mm(gpu_a, gpu_b, out_dtype=dtype).t(), b, a, widen=wide_in_bf16)
        rounded = bias.to(dtype)
        check(scaled_mm(gpu_a, gpu_b, bias=rounded.cuda(), out_dtype=dtype), a, b, rounded, wide_in_bf16)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("m", [1, MAX_SMALL_M, MAX_M_OF_GROUPS, MAX_M_OF_GROUPS + 1])
def test_compiled_it_gives_the_same_bits(m):
    torch.compiler.reset()
    a, b = (on_gpu(q) for q in operands("group64", m, 4096, 512))

    def run(data: torch.Tensor) -> torch.Tensor:
        return scaled_mm(QTensor(data, a.scale, a.format, a.granularity), b)

    assert torch.equal(torch.compile(run, fullgraph=True)(a.data), run(a.data))
