"""GEMMs that eager code launches at cuBLASLt itself have the bits of `torch._scaled_mm`."""

import pytest
import torch
from gemm_examples import on_gpu, operands
from gpus import ONLY_HOPPER, poison

from octavo.ops import cublaslt
from octavo.ops.launching import Operands
from octavo.ops.library_gemms import scaled_mm_cublaslt

pytestmark = [pytest.mark.gpu, ONLY_HOPPER]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("pair", ["tensor", "tensor-e5m2", "row", "row-gradient", "row-e5m2"])
@pytest.mark.parametrize("size", [(1, 512, 1024), (130, 272, 384), (512, 4096, 512), (64, 16384, 128)], ids=str)
def test_the_bits_are_those_of_torch(monkeypatch, size, pair, fast, with_bias):
    given = Operands.of(*(on_gpu(each) for each in operands(pair, *size)))
    bias = torch.randn(size[2], device="cuda").bfloat16() if with_bias else None
    poison()
    found = [scaled_mm_cublaslt(given, bias, torch.bfloat16, fast) for _ in range(2)]
    assert any(vars(cublaslt._plans).values())
    monkeypatch.setattr(cublaslt, "_libraries", lambda device: None)
    expected = scaled_mm_cublaslt(given, bias, torch.bfloat16, fast)
    for y in found:
        assert torch.equal(y.view(torch.int16), expected.view(torch.int16))
