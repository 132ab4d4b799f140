"""A Hopper's scaled GEMMs, PyTorch's and ours, against float64 on the same quantized operands, judged on the worst row.

The bound on the error of a row, in the norm of the row:

    u |y| + s |r|        r[m,n]^2 = sum over k of (a[m,k] b[n,k])^2

u is the unit roundoff of the GEMM's result: 2^-8 for BF16, 2^-24 for float32. Adding a bias rounds once more. r is the
size of a sum of independent terms, and s the part of it that the tensor core may lose. Its partial sums keep about 14
bits and are truncated, so that one instruction (32 terms) loses at most 2^-13 of the sum (DeepSeek-V3,
arXiv:2412.19437, section 3.3.2):

    promoted every 128 terms    4 instructions on a sum of size sqrt(128 / K) |r|, and K / 128 of these losses, which
                                add up like sqrt(K / 128): s = 4 * 2^-13, four times that for the products' alignment
    fast                        one accumulator for all K / 32 instructions, its loss always toward zero: 2^-13 each

Our kernels sum a product with M = 1 in float32. Those with scales that vary along K add the product of each group to a
float32 sum: the bounds are those of promoted sums.
"""

import math
from itertools import product as each_with_each

import numpy as np
import pytest
import torch
from gemm_examples import ROUNDOFF, errors_and_bounds, on_gpu, operands, row_norm, wide, wide_in_bf16
from gpus import ONLY_HOPPER, poison, replayed, tiled

from octavo.numerics import QTensor
from octavo.ops import find_backend, scaled_mm
from octavo.ops.dispatch import MAX_M_OF_GROUPS, MAX_SMALL_M
from octavo.ops.launching import Operands

pytestmark = [pytest.mark.gpu, ONLY_HOPPER]

NATIVE = ["tensor", "tensor-e5m2", "row", "row-gradient", "row-e5m2", "strip-square", "strip-strip", "square-strip"]
MISSING = {
    "group96": "PyTorch has no GEMM with group:96 x group:96 scales in float32 on Hopper",
    "mixed": "PyTorch has no GEMM with group:7 x tensor scales in float32 on Hopper",
}
SIZES = [(1, 16, 16), (16, 16, 16), (33, 48, 80), (257, 515, 129), (1024, 4096, 512)]  # m, k, n
# Of our kernels. k, n: no multiples of a tile, a group or a load, not aligned, shorter than a tile; cut along K; of
# Llama-3-8B
OUR_SIZES = [(16, 16), (80, 48), (129, 515), (1031, 77), (4096, 64), (14336, 4096), (4096, 6144)]
PAIRS_OF_GROUPS = ["group32", "group64", "group64-e5m2", "strip-strip", "strip-square", "mx"]


def pytorchs(a, b, bias=None, dtype=torch.bfloat16, fast=False):
    """The operation, where it runs a GEMM of PyTorch."""
    poison()
    return scaled_mm(a, b, bias=bias, out_dtype=dtype, fast_accumulation=fast)


def ours(a: QTensor, b: QTensor, bias=None, dtype=torch.bfloat16, fast=True, tiling=(), residual=None) -> torch.Tensor:
    from octavo.ops.kernels import block_scaled_gemm, gemm  # import Triton, which a CPU build of PyTorch does not have

    poison()
    by_row, operands = a.granularity.outer, Operands.of(a, b)
    with tiled(gemm if by_row else block_scaled_gemm, tiling):
        if by_row:
            return gemm.scaled_mm(operands, bias, dtype, fast, residual)
        return block_scaled_gemm.scaled_mm(operands, bias, dtype, residual)


def check(y: torch.Tensor, a: QTensor, b: QTensor, bias=None, fast=True, widen=wide) -> None:
    error, bound = errors_and_bounds(y, a, b, bias, fast and a.granularity.outer, widen)
    assert (error <= bound).all(), (error / bound).max()


@pytest.mark.parametrize("fast", [False, True], ids=["promoted", "fast"])
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("dtype", ROUNDOFF, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("pair", NATIVE)
def test_worst_row(pair, size, dtype, with_bias, fast):
    m, k, n = size
    a, b = operands(pair, m, k, n)
    bias = torch.randn(n).to(dtype) if with_bias else None
    gpu_a, gpu_b, gpu_bias = on_gpu(a), on_gpu(b), None if bias is None else bias.cuda()
    e8m0 = a.scale.dtype == torch.float8_e8m0fnu, b.scale.dtype == torch.float8_e8m0fnu
    backend = find_backend(gpu_a.data.device, a.granularity, b.granularity, (a.format.name, b.format.name), e8m0=e8m0)
    assert backend.name == "cublaslt"
    y = pytorchs(gpu_a, gpu_b, gpu_bias, dtype, fast)
    assert (y.shape, y.dtype, y.device.type, y.is_contiguous()) == ((m, n), dtype, "cuda", True)
    error, bound = errors_and_bounds(y, a, b, bias, fast)
    worst = int(np.argmax(error / np.maximum(bound, 1e-300)))
    assert (error <= bound).all(), f"row {worst}: {error[worst]:.3g} is more than {bound[worst]:.3g}"
    for _ in range(2):
        assert torch.equal(pytorchs(gpu_a, gpu_b, gpu_bias, dtype, fast), y)


@pytest.mark.parametrize(
    ("pair", "size", "m"),
    [
        *each_with_each(["row", "row-gradient", "row-e5m2", "tensor"], OUR_SIZES, (1, 2, 3, 16, 17, 64)),
        *each_with_each(PAIRS_OF_GROUPS, [(515, 129), (4096, 200), (14336, 200)], (1, 3, 130)),
    ],
    ids=str,
)
def test_worst_row_of_our_kernels(pair, size, m):
    k, n = size
    a, b = operands(pair, m, k, n)
    gpu_a, gpu_b = on_gpu(a), on_gpu(b)
    for fast in (True, False) if a.granularity.outer else (False,):
        y = ours(gpu_a, gpu_b, fast=fast)
        assert (y.shape, y.dtype, y.is_contiguous()) == ((m, n), torch.bfloat16, True)
        check(y, a, b, fast=fast)
        for _ in range(3):
            assert torch.equal(ours(gpu_a, gpu_b, fast=fast), y)


# GEMV, tiles, split-K, a short K, and an empty K
ADDED = [("row", 1, 4096, 515), ("row", 5, 4096, 515), ("row", 1, 14336, 4096), ("row", 16, 80, 48), ("row", 3, 0, 7)]
ADDED_TO_GROUPS = [(pair, m, 1024, 515) for pair in ("group32", "strip-square") for m in (1, 33, 65)]


@pytest.mark.parametrize(
    ("given", "dtype"),
    [*each_with_each(ADDED, (torch.float32, torch.bfloat16)), *((given, torch.float32) for given in ADDED_TO_GROUPS)],
    ids=str,
)
def test_a_bias_is_added_and_a_residual_as_after_it(given, dtype):
    a, b = operands(*given)
    m, n = len(a.data), len(b.data)
    bias, residual = (torch.randn(shape).to(dtype) for shape in ((n,), (m, n)))
    y = ours(on_gpu(a), on_gpu(b), bias.cuda(), dtype)
    check(y, a, b, bias)
    actual = ours(on_gpu(a), on_gpu(b), bias.cuda(), dtype, residual=residual.cuda())
    assert torch.equal(actual, y + residual.cuda())


@pytest.mark.parametrize(
    ("call", "pair", "m", "k"),
    [
        *((pytorchs, pair, 257, 515) for pair in NATIVE),
        *((ours, "row", m, 1031) for m in (1, 2, 16)),
        *((ours, "group64", m, 515) for m in (1, 16, 200)),
    ],
)
def test_each_column_too_and_a_wrong_scale_is_seen(call, pair, m, k):
    """Rows of b differ in size by 2^8, so the norm of a row of y could hide an error in a small column."""
    a, b = operands(pair, m, k, 129)
    fast, factor, least = (a.granularity.outer, 2, 1) if call is ours else (False, 1 + 1 / 16, 4)
    error, bound = errors_and_bounds(call(on_gpu(a), on_gpu(b)).t(), b, a, None, fast)
    assert (error <= bound).all()
    scale = b.scale.clone()
    scale[0] *= factor
    y = call(on_gpu(a), on_gpu(QTensor(b.data, scale, b.format, b.granularity)))
    error, bound = errors_and_bounds(y.t(), b, a, None, fast)
    assert error[0] > least * bound[0]
    assert call is pytorchs or (error[1:] <= bound[1:]).all()


@pytest.mark.parametrize("splits", [1, 2, 3, 5, 8])
def test_every_way_to_cut_a_small_m_up(splits):
    for m, k in ((2, 4096), (16, 1031), (33, 14336)):
        a, b = operands("row", m, k, 515)
        for terms in (64, 256):
            check(ours(on_gpu(a), on_gpu(b), tiling=(64, terms, 3, 4, splits)), a, b)
    a, b = operands("row", 1, 4096, 515)
    for rows, terms in ((4, 512), (8, 1024), (16, 512), (2, 2048)):
        check(ours(on_gpu(a), on_gpu(b), tiling=(rows, terms, splits, 4)), a, b)


@pytest.mark.parametrize("tiling", [(64, 16, 4, 3, 4, 3), (64, 64, 2, 4, 4, 5), (128, 128, 1, 3, 8, 2)], ids=str)
def test_every_way_to_cut_groups_up(tiling):
    a, b = operands("group64", 70, 1040, 300)
    check(ours(on_gpu(a), on_gpu(b), tiling=tiling), a, b)


@pytest.mark.parametrize(
    ("call", "pair", "m", "k", "n"),
    [
        *(
            (pytorchs, pair, *size)
            for pair in ("tensor", "row", "strip-square", "strip-strip")
            for size in ((0, 64, 32), (32, 64, 0), (32, 0, 32))
        ),
        *((ours, "row", *size) for size in ((0, 64, 32), (1, 64, 0), (1, 0, 32), (3, 0, 32))),
        *((ours, "group32", *size) for size in ((0, 64, 32), (1, 64, 0), (3, 0, 32), (200, 0, 32))),
    ],
)
def test_empty_operands(call, pair, m, k, n):
    """Experts often get no tokens. An empty reduction sums to zero."""
    a, b = operands(pair, m, k, n)
    bias = torch.randn(n).bfloat16()
    assert torch.equal(call(on_gpu(a), on_gpu(b)).cpu(), torch.zeros(m, n, dtype=torch.bfloat16))
    if call is ours:
        assert torch.equal(ours(on_gpu(a), on_gpu(b), bias.cuda()).cpu(), bias.expand(m, n))


@pytest.mark.parametrize("size", [(32, 64, 48), (33, 48, 80)], ids=str)
def test_transposed_views_are_taken(size):
    m, k, n = size
    a, b = operands("tensor", m, k, n)
    turned = QTensor(b.data.t().contiguous(), b.scale, b.format, b.granularity)
    poison()
    assert torch.equal(scaled_mm(on_gpu(a), on_gpu(turned).t()), scaled_mm(on_gpu(a), on_gpu(b)))


@pytest.mark.parametrize(
    ("call", "pair", "m"),
    [
        *((pytorchs, pair, 33) for pair in ("tensor", "row", "strip-square", "strip-strip")),
        *((ours, "row", m) for m in (1, 2, MAX_SMALL_M)),
        *each_with_each((ours,), ("group64", "mx"), (1, 3, 130)),
    ],
)
def test_what_is_not_finite_stays_so_and_the_smallest_scale_is_a_number(call, pair, m):
    """255 is NaN in E8M0, and 0 is 2^-127."""
    a, b = operands(pair, m, 515, 80)
    scale = a.scale.float()
    if call is ours and pair != "row":
        scale[0, 0] = 2.0**-127
    scale[-1, -1] = torch.nan
    y = call(on_gpu(QTensor(a.data, scale.to(a.scale.dtype), a.format, a.granularity)), on_gpu(b)).cpu()
    assert y[-1].isnan().all()
    assert y[:-1].isfinite().all() or pair == "tensor"


@pytest.mark.parametrize(
    ("pair", "m", "name"),
    [
        ("row", 1, "triton"), ("row", MAX_SMALL_M, "triton"), ("row", MAX_SMALL_M + 1, "cublaslt"),
        ("group64", MAX_M_OF_GROUPS, "triton"), ("mx", MAX_M_OF_GROUPS, "triton"), ("strip-square", 8, "triton"),
    ],
)  # fmt: skip
def test_the_operation_runs_on_it_and_a_larger_m_by_row_on_cublaslt(pair, m, name):
    a, b = (on_gpu(q) for q in operands(pair, m, 4096, 512))
    e8m0 = (pair == "mx",) * 2
    found = find_backend(a.data.device, a.granularity, b.granularity, ("e4m3", "e4m3"), (m, 512), e8m0=e8m0)
    assert found.name == name
    assert torch.equal(scaled_mm(a, b, fast_accumulation=True), ours(a, b)) == (name == "triton")


@pytest.mark.parametrize("size", [(4096, 512), (515, 129)], ids=str)
@pytest.mark.parametrize("pair", ["group32", "group64", "group64-e5m2", "mx"])
def test_worst_row_of_groups_and_a_large_m(pair, size):
    """A BF16 product of the widened operands, which are rounded to BF16 first."""
    k, n = size
    a, b = operands(pair, MAX_M_OF_GROUPS + 1, k, n)
    gpu_a, gpu_b, bias = on_gpu(a), on_gpu(b), torch.randn(n)
    for dtype in (torch.bfloat16, torch.float32):
        poison()
        check(scaled_mm(gpu_a, gpu_b, out_dtype=dtype), a, b, widen=wide_in_bf16)
        check(scaled_mm(gpu_a, gpu_b, out_dtype=dtype).t(), b, a, widen=wide_in_bf16)
        rounded = bias.to(dtype)
        check(scaled_mm(gpu_a, gpu_b, bias=rounded.cuda(), out_dtype=dtype), a, b, rounded, widen=wide_in_bf16)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize(
    ("pair", "m"),
    [
        *each_with_each(["row"], (1, MAX_SMALL_M)),
        *each_with_each(["group64"], (1, MAX_SMALL_M, MAX_M_OF_GROUPS, MAX_M_OF_GROUPS + 1)),
    ],
)
def test_compiled_it_gives_the_same_bits(pair, m):
    torch.compiler.reset()
    a, b = (on_gpu(q) for q in operands(pair, m, 4096, 512))

    def run(data: torch.Tensor) -> torch.Tensor:
        return scaled_mm(QTensor(data, a.scale, a.format, a.granularity), b, fast_accumulation=True)

    assert torch.equal(torch.compile(run, fullgraph=True)(a.data), run(a.data))


@pytest.mark.parametrize("m", [1, MAX_SMALL_M])
def test_in_a_cuda_graph(m):
    a, b = (on_gpu(q) for q in operands("row", m, 4096, 512))
    expected = scaled_mm(a, b)
    assert torch.equal(replayed(lambda: scaled_mm(a, b)), expected)


# ---- what Hopper has not


@pytest.mark.parametrize("pair", MISSING)
def test_a_missing_gemm_is_named_and_emulated_when_asked_for(pair):
    for size in SIZES[:4]:
        m, k, n = size
        a, b = operands(pair, m, k, n)
        gpu_a, gpu_b, bias = on_gpu(a), on_gpu(b), torch.randn(n)
        with pytest.raises(RuntimeError) as error:
            scaled_mm(gpu_a, gpu_b)
        assert MISSING[pair] in str(error.value)
        assert "emulate=True" in str(error.value)
        poison()
        y = scaled_mm(gpu_a, gpu_b, bias=bias.cuda(), out_dtype=torch.float32, emulate=True)
        expected = scaled_mm(a, b, bias=bias, out_dtype=torch.float32)
        assert (y.device.type, y.dtype, y.is_contiguous()) == ("cuda", torch.float32, True)
        difference = row_norm((y.cpu().double() - expected.double()).numpy())
        # two float32 sums of k terms in different orders; their scales and the bias
        size_of_terms = row_norm(np.sqrt(wide(a) ** 2 @ (wide(b) ** 2).T)) + float(bias.norm())
        assert (difference <= 2.0**-23 * (math.sqrt(k) + 4) * size_of_terms).all()


def test_emulation_is_no_substitute_where_the_gemm_is_there():
    """`emulate` allows emulation. It does not choose it: the reported backend is the one that runs."""
    a, b = (on_gpu(q) for q in operands("row", 33, 4096, 80))
    assert torch.equal(scaled_mm(a, b, emulate=True), scaled_mm(a, b))
