"""Our kernels with tensor-core products, compiled for GPUs that are not here, fit into their shared memory.

The other kernels reduce rows and transpose tiles, with 16 KiB at most.
"""

import pytest
import torch
from offline_triton import SHARED_MEMORY, compile_for, on_cpu

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.version.hip is not None, reason="NVIDIA's compiler")

TWO = [89, 120]


@pytest.mark.parametrize("capability", TWO)
@pytest.mark.parametrize(("dim", "rows"), [(128, 1), (256, 32)])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16], ids=str)
def test_attention_over_a_cache(capability, dim, rows, dtype, monkeypatch):
    from octavo.ops.attention import kernel, tiles

    compiled = compile_for(capability, [kernel], monkeypatch)
    q, keys = on_cpu(1, rows, 1, dim, dtype=torch.bfloat16), on_cpu(1, 1, 4096, dim, dtype=dtype)
    scale = None if dtype == torch.bfloat16 else torch.ones(1)
    kernel.cached_attention(q, keys, keys, scale, scale, torch.tensor([1]), None, 1.0)
    size = keys.element_size()
    tile = tiles.choose_tile(size, max(rows, 16), dim, SHARED_MEMORY[capability])
    assert compiled[0].metadata.shared == tiles.shared_bytes(tile, size, max(rows, 16), dim)
    assert all(each.metadata.shared <= SHARED_MEMORY[capability] for each in compiled)


@pytest.mark.parametrize("capability", SHARED_MEMORY)
@pytest.mark.parametrize("m", [1, 64])
def test_gemm_of_small_m(capability, m, monkeypatch):
    from octavo.ops.gemm import kernel

    kernel.choose.cache_clear()
    compiled = compile_for(capability, [kernel], monkeypatch)
    scales = torch.ones(m, 1), torch.ones(4096, 1)
    kernel.scaled_mm(on_cpu(m, 4096), scales[0], on_cpu(4096, 4096), scales[1], None, torch.bfloat16, False)
    kernel.choose.cache_clear()
    assert compiled
    assert all(each.metadata.shared <= SHARED_MEMORY[capability] for each in compiled)
