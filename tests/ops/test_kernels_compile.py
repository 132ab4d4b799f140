"""The kernels of training, compiled for Ada and RTX Blackwell by ptxas, over wide rows."""

import pytest
import torch
from offline_triton import Compiled, compile_for, on_cpu

from octavo.numerics import ROW, TENSOR, Cast, block, group

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
    from octavo.ops.quantization import block_kernel, kernel, tensor_kernel

    compiled = compile_for(capability, kernel, monkeypatch)
    for module in (block_kernel, tensor_kernel):
        monkeypatch.setattr(module, "launcher", kernel.launcher)
    return compiled


@pytest.mark.parametrize("cast", CASTS, ids=lambda cast: cast.spec)
def test_quantization(cast, seed, capability, monkeypatch):
    from octavo.ops.quantization import kernel

    compiled = compile_quantization(capability, monkeypatch)
    kernel.quantize(rows(), cast, None, None, seed)
    assert compiled.fit()


def test_quantization_of_a_stored_scale_and_of_transposed_groups(seed, capability, monkeypatch):
    from octavo.ops.quantization import kernel, tensor_kernel

    compiled = compile_quantization(capability, monkeypatch)
    tensor_kernel.quantize_scaled(rows(), torch.ones(1, 1), Cast().fmt, seed)
    kernel.quantize_transposed(rows(), Cast(granularity=group(128)), seed)
    assert compiled.fit()


@pytest.mark.parametrize("center", [False, True], ids=["RMS norm", "layer norm"])
def test_norm(center, capability, monkeypatch):
    from octavo.ops.norm import kernel

    compiled = compile_for(capability, kernel, monkeypatch)
    x, weight, statistic = rows(8192), torch.ones(8192), torch.ones(M, 1)
    kernel.norm_quantize(x, x, weight, weight if center else None, 1e-5, Cast(), center, True)
    kernel.norm_backward(x, x, weight, statistic, statistic, x, center)
    assert compiled.fit()


@pytest.mark.parametrize("kind", ["swiglu", "geglu", "gelu"])
def test_activation(kind, capability, monkeypatch):
    from octavo.ops.activation import kernel

    compiled = compile_for(capability, kernel, monkeypatch)
    h, ones = rows(14336), torch.ones(M, 1)
    u = h if kind == "gelu" else rows(2 * 14336)
    kernel.activation_quantize(u, kind, Cast())
    kernel.activation_backward(h, u, kind, Cast(scale="pow2"), torch.ones(14336), ones, Cast(), ones, True, None)
    assert compiled.fit()


def test_transposition_and_requantization(capability, monkeypatch):
    from octavo.ops.requantization import kernel as requantization
    from octavo.ops.transposition import kernel

    compiled = compile_for(capability, kernel, monkeypatch)
    kernel.transpose(on_cpu(M, 4096), torch.zeros(M, dtype=torch.int32), None)
    assert compiled.fit()
    compiled = compile_for(capability, requantization, monkeypatch)
    requantization.requantize_transposed([rows(4096)], torch.ones(M, 1), Cast().fmt, ROW)
    assert compiled.fit()


def test_folded_scales(capability, monkeypatch):
    from octavo.ops.folded_scales import kernel

    compiled = compile_for(capability, kernel, monkeypatch)
    for s_w in (None, torch.ones(4096, 1)):
        kernel.fold_scales(torch.ones(M, 1), torch.ones(M, 1), s_w)
    assert compiled.fit()


@pytest.mark.parametrize("columns", [64, 4096, 16384])
def test_rotation(columns, capability, monkeypatch):
    from octavo.ops.rotation import kernel

    compiled = compile_for(capability, kernel, monkeypatch)
    kernel.rotate(rows(columns))
    kernel.rotate(on_cpu(M, columns, dtype=torch.float32))
    assert compiled.fit()


def test_permutation(capability, monkeypatch):
    from octavo.ops.permutation import kernel

    compiled = compile_for(capability, kernel, monkeypatch)
    slot = torch.zeros(M, 2, dtype=torch.int32)
    kernel.gather_quantize(rows(4096), Cast(), slot.view(-1), 2, None, None, None)
    kernel.combine(rows(4096), slot, torch.ones(M, 2))
    assert compiled.fit()
