"""The INT8 kernels, compiled for GPUs that are not here."""

import pytest
import torch
from offline_triton import compile_for, on_cpu

from octavo.numerics import Cast

pytest.importorskip("triton")
pytestmark = [pytest.mark.triton, pytest.mark.skipif(torch.version.hip is not None, reason="NVIDIA's compiler")]


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 4096, 4096), (64, 4096, 14336), (100, 333, 80), (512, 6150, 4096), (80, 1040, 64)]
)
def test_the_gemm(capability: int, m: int, n: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.ops.kernels import int8_gemm as kernel

    compiled = compile_for(capability, kernel, monkeypatch)
    a, b = on_cpu(m, k, dtype=torch.int8), on_cpu(n, k, dtype=torch.int8)
    bias, residual = on_cpu(n, dtype=torch.bfloat16), on_cpu(m, n, dtype=torch.bfloat16)
    kernel.int8_mm(a, torch.ones(m, 1), b, torch.ones(n, 1), bias, residual, torch.bfloat16)
    assert compiled.fit()


@pytest.mark.parametrize("capability", [80, 90])
def test_the_quantization_of_rows(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.ops.kernels import quantization as kernel

    compiled = compile_for(capability, kernel, monkeypatch)
    kernel.quantize(on_cpu(64, 14336, dtype=torch.bfloat16), Cast("int8"), None, None)
    assert compiled.fit()


@pytest.mark.parametrize("capability", [80, 90])
def test_norms_and_activations(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.ops.kernels import activation, norm

    compiled = compile_for(capability, norm, monkeypatch)
    x, u = on_cpu(64, 4096, dtype=torch.bfloat16), on_cpu(64, 2 * 14336, dtype=torch.bfloat16)
    norm.norm_quantize(x, x, torch.ones(4096), None, 1e-5, Cast("int8"), False, False)
    assert compiled.fit()
    compiled = compile_for(capability, activation, monkeypatch)
    for kind in ("swiglu", "gelu"):
        activation.activation_quantize(u, kind, Cast("int8"))
    assert compiled.fit()
