"""The kernels of training, compiled for Ada and RTX Blackwell by ptxas, over wide rows."""

import pytest
import torch
from offline_triton import Compiled, compile_for, on_cpu

from octavo.numerics import ROW, TENSOR, Cast, block, group
from octavo.ops.launching import Cache, Operands

pytest.importorskip("triton")
pytestmark = [pytest.mark.triton, pytest.mark.skipif(torch.version.hip is not None, reason="NVIDIA's compiler")]

M, K = 64, 32768
HALF = torch.bfloat16
CASTS = [
    Cast(),
    Cast("e5m2", scale="pow2"),
    Cast(relative_floor=2**-8),
    Cast(granularity=TENSOR),
    Cast(granularity=group(128)),
    Cast(granularity=block(128, 128)),
    Cast(granularity=group(32), scale="e8m0"),
]


@pytest.fixture(params=[89, 120])
def capability(request) -> int:
    return request.param


def rows(columns: int = K) -> torch.Tensor:
    return on_cpu(M, columns, dtype=HALF)


@pytest.fixture(params=[None, torch.tensor(0)], ids=["nearest", "stochastic"])
def seed(request) -> torch.Tensor | None:
    return request.param


def compile_quantization(capability: int, monkeypatch: pytest.MonkeyPatch) -> Compiled:
    from octavo.ops.kernels import quantization as block_kernel
    from octavo.ops.kernels import quantization as kernel
    from octavo.ops.kernels import quantization as tensor_kernel

    compiled = compile_for(capability, kernel, monkeypatch)
    for module in (block_kernel, tensor_kernel):
        monkeypatch.setattr(module, "launcher", kernel.launcher)
    return compiled


@pytest.mark.parametrize("cast", CASTS, ids=lambda cast: cast.spec)
def test_quantization(cast, seed, capability, monkeypatch):
    from octavo.ops.kernels import quantization as kernel

    compiled = compile_quantization(capability, monkeypatch)
    kernel.quantize(rows(), cast, None, None, seed)
    assert compiled.fit()


def test_quantization_of_a_stored_scale_and_of_transposed_groups(seed, capability, monkeypatch):
    from octavo.ops.kernels import quantization as kernel
    from octavo.ops.kernels import quantization as tensor_kernel

    compiled = compile_quantization(capability, monkeypatch)
    tensor_kernel.quantize_scaled(rows(), torch.ones(1, 1), Cast().fmt, seed)
    kernel.quantize_transposed(rows(), Cast(granularity=group(128)), seed)
    assert compiled.fit()


@pytest.mark.parametrize("center", [False, True], ids=["RMS norm", "layer norm"])
def test_norm(center, capability, monkeypatch):
    from octavo.ops.kernels import norm as kernel

    compiled = compile_for(capability, kernel, monkeypatch)
    x, weight, statistic = rows(8192), torch.ones(8192), torch.ones(M, 1)
    kernel.norm_quantize(x, x, weight, weight if center else None, 1e-5, Cast(), center, True)
    kernel.norm_backward(x, x, weight, statistic, statistic, x, center)
    assert compiled.fit()


@pytest.mark.parametrize("kind", ["swiglu", "geglu", "gelu"])
def test_activation(kind, capability, monkeypatch):
    from octavo.ops.kernels import activation as kernel

    compiled = compile_for(capability, kernel, monkeypatch)
    h, ones = rows(14336), torch.ones(M, 1)
    u = h if kind == "gelu" else rows(2 * 14336)
    kernel.activation_quantize(u, kind, Cast())
    kernel.activation_backward(h, u, kind, Cast(scale="pow2"), torch.ones(14336), ones, Cast(), ones, True, None)
    assert compiled.fit()


def test_transposition_and_requantization(capability, monkeypatch):
    from octavo.ops.kernels import requantization
    from octavo.ops.kernels import transposition as kernel

    compiled = compile_for(capability, kernel, monkeypatch)
    kernel.transpose(on_cpu(M, 4096), torch.zeros(M, dtype=torch.int32), None)
    assert compiled.fit()
    compiled = compile_for(capability, requantization, monkeypatch)
    requantization.requantize_transposed([rows(4096)], torch.ones(M, 1), Cast().fmt, ROW)
    assert compiled.fit()


def test_folded_scales(capability, monkeypatch):
    from octavo.ops.kernels import transposition as kernel

    compiled = compile_for(capability, kernel, monkeypatch)
    for s_w in (None, torch.ones(4096, 1)):
        kernel.fold_scales(torch.ones(M, 1), torch.ones(M, 1), s_w)
    assert compiled.fit()


@pytest.mark.parametrize("columns", [64, 4096, 16384])
def test_rotation(columns, capability, monkeypatch):
    from octavo.ops.kernels import rotation as kernel

    compiled = compile_for(capability, kernel, monkeypatch)
    kernel.rotate(rows(columns))
    kernel.rotate(on_cpu(M, columns, dtype=torch.float32))
    assert compiled.fit()


def test_permutation(capability, monkeypatch):
    from octavo.ops.kernels import permutation as kernel

    compiled = compile_for(capability, kernel, monkeypatch)
    slot = torch.zeros(M, 2, dtype=torch.int32)
    kernel.gather_quantize(rows(4096), Cast(), slot.view(-1), 2, None, None, None)
    kernel.combine(rows(4096), slot, torch.ones(M, 2))
    assert compiled.fit()


# ---- Our kernels with tensor-core products, compiled for GPUs that are not here, fit into their shared memory


SMALL = [89, 120]  # with FP8 on tensor cores
FP8 = [89, 90, 100, 120]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def adds_in_registers(compiled) -> bool:
    """Whether products are added to a sum: Triton may make one product of a sum and a product."""
    return "arith.addf" in compiled.asm["ttgir"]


@pytest.mark.parametrize("capability", SMALL)
@pytest.mark.parametrize(("dim", "rows"), [(128, 1), (256, 32)])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16], ids=str)
def test_attention_over_a_cache(capability, dim, rows, dtype, monkeypatch):
    from octavo.ops import attention_tiles as tiles
    from octavo.ops.kernels import attention as kernel

    compiled = compile_for(capability, kernel, monkeypatch)
    q, keys = on_cpu(1, rows, 1, dim, dtype=torch.bfloat16), on_cpu(1, 1, 4096, dim, dtype=dtype)
    scale = None if dtype == torch.bfloat16 else torch.ones(1)
    kernel.cached_attention(q, Cache(keys, keys, scale, scale, torch.tensor([1])), None, 1.0)
    size = keys.element_size()
    tile = tiles.choose_tile(size, max(rows, 16), dim, compiled.limit)
    assert compiled.shared[0] == tiles.shared_bytes(tile, size, max(rows, 16), dim)
    assert compiled.fit()


@pytest.mark.parametrize("capability", FP8)
@pytest.mark.parametrize("m", [1, 64])
def test_gemm_of_small_m(capability, m, monkeypatch):
    from octavo.ops.kernels import gemm as kernel

    compiled = compile_for(capability, kernel, monkeypatch)
    scales = torch.ones(m, 1), torch.ones(4096, 1)
    kernel.scaled_mm(on_cpu(m, 4096), scales[0], on_cpu(4096, 4096), scales[1], None, torch.bfloat16, False)
    assert compiled.fit()


@pytest.mark.parametrize("capability", FP8)
@pytest.mark.parametrize("m", [16, 64])
def test_promoted_sums_of_small_m_are_added_in_registers(capability, m, monkeypatch):
    from octavo.ops.kernels import gemm as kernel

    compiled = compile_for(capability, kernel, monkeypatch)
    scales = torch.ones(m, 1), torch.ones(4096, 1)
    for fast in (False, True):
        tiling = kernel.Tiling(64, 256, 4, 4)
        kernel.scaled_mm(on_cpu(m, 4096), scales[0], on_cpu(4096, 4096), scales[1], None, torch.bfloat16, fast, tiling)
    assert compiled.fit()
    assert [adds_in_registers(each) for each in compiled] == [True, False]


@pytest.mark.parametrize("capability", SMALL)
@pytest.mark.parametrize("m", [1, 64, 4096])
@pytest.mark.parametrize("size", [32, 64, 128])
def test_gemm_of_groups(capability, m, size, monkeypatch):
    from octavo.ops.kernels import block_scaled_gemm as kernel

    compiled = compile_for(capability, kernel, monkeypatch)
    a, b, scales = on_cpu(m, 4096), on_cpu(4096, 4096), torch.ones(4096, 4096 // size)
    kernel.scaled_mm(Operands(a, b, scales[:m], scales, group(size), group(size)), None, torch.bfloat16)
    assert compiled.fit()


@pytest.mark.parametrize("capability", FP8)
@pytest.mark.parametrize("m", [16, 256, 8192])
@pytest.mark.parametrize("granularities", [(group(128), block(128, 128)), (group(64),) * 2], ids=["block", "group64"])
def test_grouped_gemm(capability, m, granularities, monkeypatch):
    from octavo.ops.kernels import block_scaled_gemm as block_scaled_kernel
    from octavo.ops.kernels import grouped_gemm as kernel

    compile_for(capability, block_scaled_kernel, monkeypatch)  # whose `choose` it calls
    compiled = compile_for(capability, kernel, monkeypatch)
    a, b = on_cpu(m, 4096), on_cpu(8, 512, 4096)
    scales = (torch.ones(g.scale_shape(t.shape)) for g, t in zip(granularities, (a, b), strict=True))
    offsets = torch.zeros(8, dtype=torch.int32)
    kernel.block_scaled_grouped_mm(Operands(a, b, *scales, *granularities), offsets, torch.bfloat16)
    assert compiled.fit()


@pytest.mark.parametrize("capability", FP8)
@pytest.mark.parametrize("fast", [False, True], ids=["promoted", "fast"])
@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E5M2, E4M3)], ids=str)
def test_grouped_gemms_of_row_scales(capability, fast, formats, monkeypatch):
    from octavo.ops.kernels import grouped_gemm as kernel

    compiled = compile_for(capability, kernel, monkeypatch)
    offsets, scale = torch.zeros(8, dtype=torch.int32), torch.ones(8, 512, 1)
    for m in (16, 256, 16384):
        a, b = on_cpu(m, 4096, dtype=formats[0]), on_cpu(8, 512, 4096, dtype=formats[1])
        kernel.grouped_mm(a, torch.ones(m, 1), b, scale, offsets, torch.bfloat16, fast)
    a, b = on_cpu(512, 1024, dtype=formats[0]), on_cpu(2048, 1024, dtype=formats[1])
    for dtype in (torch.bfloat16, torch.float32):
        kernel.grouped_mm_dw(a, scale, b, offsets, dtype, fast)
    assert compiled.fit()
    assert len(compiled) == 5
    assert [adds_in_registers(each) for each in compiled] == [not fast] * 5


@pytest.mark.parametrize("capability", [80, 86, 90, 100, *SMALL])
@pytest.mark.parametrize("m", [1, 64, 128])
@pytest.mark.parametrize("granularity", [ROW, group(128)], ids=lambda g: g.name)
def test_weight_only_gemm(capability, m, granularity, monkeypatch):
    from octavo.ops.kernels import weight_only as kernel

    compiled = compile_for(capability, kernel, monkeypatch)
    x, w = on_cpu(m, 4096, dtype=torch.bfloat16), on_cpu(4096, 4096)
    scale = torch.ones(granularity.scale_shape((4096, 4096)))
    kernel.weight_only_mm(x, w, scale, granularity, None, None, native=capability >= 89)
    assert compiled.fit()


@pytest.mark.parametrize("capability", [80, 90, *SMALL])
@pytest.mark.parametrize("m", [16, 8192])
def test_grouped_weight_only_gemm(capability, m, monkeypatch):
    from octavo.ops.kernels import grouped_gemm as grouped_kernel
    from octavo.ops.kernels import weight_only as kernel

    compile_for(capability, kernel, monkeypatch)  # whose `choose` it calls
    compiled = compile_for(capability, grouped_kernel, monkeypatch)
    x, w, offsets = on_cpu(m, 4096, dtype=torch.bfloat16), on_cpu(8, 512, 4096), torch.zeros(8, dtype=torch.int32)
    grouped_kernel.grouped_weight_only_mm(x, w, torch.ones(8, 512, 1), ROW, offsets, native=capability >= 89)
    assert compiled.fit()
