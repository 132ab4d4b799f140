"""Our kernels with tensor-core products, compiled for GPUs that are not here, fit into their shared memory.

The other kernels reduce rows and transpose tiles, with 16 KiB at most.
"""

import pytest
import torch
from offline_triton import compile_for, on_cpu

from octavo.numerics import ROW, block, group

pytest.importorskip("triton")
pytestmark = [pytest.mark.triton, pytest.mark.skipif(torch.version.hip is not None, reason="NVIDIA's compiler")]

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
    from octavo.ops.attention import kernel, tiles

    compiled = compile_for(capability, kernel, monkeypatch)
    q, keys = on_cpu(1, rows, 1, dim, dtype=torch.bfloat16), on_cpu(1, 1, 4096, dim, dtype=dtype)
    scale = None if dtype == torch.bfloat16 else torch.ones(1)
    kernel.cached_attention(q, keys, keys, scale, scale, torch.tensor([1]), None, 1.0)
    size = keys.element_size()
    tile = tiles.choose_tile(size, max(rows, 16), dim, compiled.limit)
    assert compiled.shared[0] == tiles.shared_bytes(tile, size, max(rows, 16), dim)
    assert compiled.fit()


@pytest.mark.parametrize("capability", FP8)
@pytest.mark.parametrize("m", [1, 64])
def test_gemm_of_small_m(capability, m, monkeypatch):
    from octavo.ops.gemm import kernel

    compiled = compile_for(capability, kernel, monkeypatch)
    scales = torch.ones(m, 1), torch.ones(4096, 1)
    kernel.scaled_mm(on_cpu(m, 4096), scales[0], on_cpu(4096, 4096), scales[1], None, torch.bfloat16, False)
    assert compiled.fit()


@pytest.mark.parametrize("capability", FP8)
@pytest.mark.parametrize("m", [16, 64])
def test_promoted_sums_of_small_m_are_added_in_registers(capability, m, monkeypatch):
    from octavo.ops.gemm import kernel

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
    from octavo.ops.gemm import block_scaled_kernel as kernel

    compiled = compile_for(capability, kernel, monkeypatch)
    a, b, scales = on_cpu(m, 4096), on_cpu(4096, 4096), torch.ones(4096, 4096 // size)
    kernel.scaled_mm(a, scales[:m], group(size), b, scales, group(size), None, torch.bfloat16)
    assert compiled.fit()


@pytest.mark.parametrize("capability", FP8)
@pytest.mark.parametrize("m", [16, 256, 8192])
@pytest.mark.parametrize("granularities", [(group(128), block(128, 128)), (group(64),) * 2], ids=["block", "group64"])
def test_grouped_gemm(capability, m, granularities, monkeypatch):
    from octavo.ops.gemm import block_scaled_kernel
    from octavo.ops.grouped_gemm import block_scaled_kernel as kernel

    compile_for(capability, block_scaled_kernel, monkeypatch)  # whose `choose` it calls
    compiled = compile_for(capability, kernel, monkeypatch)
    a, b = on_cpu(m, 4096), on_cpu(8, 512, 4096)
    scale_a, scale_b = (torch.ones(g.scale_shape(t.shape)) for g, t in zip(granularities, (a, b), strict=True))
    offsets = torch.zeros(8, dtype=torch.int32)
    kernel.grouped_mm(a, scale_a, b, scale_b, granularities[1], offsets, torch.bfloat16)
    assert compiled.fit()


@pytest.mark.parametrize("capability", FP8)
@pytest.mark.parametrize("fast", [False, True], ids=["promoted", "fast"])
@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E5M2, E4M3)], ids=str)
def test_grouped_gemms_of_row_scales(capability, fast, formats, monkeypatch):
    from octavo.ops.grouped_gemm import row_scaled_kernel as kernel

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
    from octavo.ops.weight_only import kernel

    compiled = compile_for(capability, kernel, monkeypatch)
    x, w = on_cpu(m, 4096, dtype=torch.bfloat16), on_cpu(4096, 4096)
    scale = torch.ones(granularity.scale_shape((4096, 4096)))
    kernel.weight_only_mm(x, w, scale, granularity, None, None, native=capability >= 89)
    assert compiled.fit()


@pytest.mark.parametrize("capability", [80, 90, *SMALL])
@pytest.mark.parametrize("m", [16, 8192])
def test_grouped_weight_only_gemm(capability, m, monkeypatch):
    from octavo.ops.weight_only import grouped_kernel, kernel

    compile_for(capability, kernel, monkeypatch)  # whose `choose` it calls
    compiled = compile_for(capability, grouped_kernel, monkeypatch)
    x, w, offsets = on_cpu(m, 4096, dtype=torch.bfloat16), on_cpu(8, 512, 4096), torch.zeros(8, dtype=torch.int32)
    grouped_kernel.grouped_weight_only_mm(x, w, torch.ones(8, 512, 1), ROW, offsets, native=capability >= 89)
    assert compiled.fit()
