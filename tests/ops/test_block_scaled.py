"""The choice of our kernel for GEMMs whose scales vary along K, without a GPU, and its tilings."""

import pytest
import torch

from octavo.numerics import ROW, TENSOR, group
from octavo.ops import dispatch as backend
from octavo.ops import find_backend
from octavo.ops.dispatch import MX, SQUARE, STRIP

CUDA = torch.device("cuda")
E4M3 = ("e4m3", "e4m3")
AMPERE, ADA, HOPPER, BLACKWELL = (8, 0), (8, 9), (9, 0), (10, 0)


def chosen(monkeypatch, capability, a, b, formats=E4M3, size=None, e8m0=False):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(backend, "HAS_TRITON", True)
    return find_backend(CUDA, a, b, formats, size, e8m0=(e8m0, e8m0))


@pytest.mark.parametrize("capability", [ADA, HOPPER, BLACKWELL])
@pytest.mark.parametrize("size", [32, 64, 128])
def test_groups_in_float32_run_on_it_from_ada_on(monkeypatch, capability, size):
    found = chosen(monkeypatch, capability, group(size), group(size), size=(256, 8192))
    cublaslt = capability == HOPPER and size == 128
    assert found.name == ("cublaslt" if cublaslt else "triton")
    large = chosen(monkeypatch, capability, group(size), group(size), size=(257, 8192))
    assert large == chosen(monkeypatch, capability, group(size), group(size))
    assert large.name == ("dequantized" if size < 128 else found.name)
    assert found.reason.startswith(f"group:{size} x group:{size} scales in float32")
    assert ("not measured" in found.reason) == (capability != HOPPER)


def test_mx_runs_on_it_where_cublaslt_has_no_kernel(monkeypatch):
    names = [chosen(monkeypatch, gpu, MX, MX, e8m0=True).name for gpu in (AMPERE, ADA, HOPPER, BLACKWELL)]
    assert names == ["none", "dequantized", "dequantized", "cublaslt"]


def test_blocks_run_on_it_on_ada_and_for_a_small_m(monkeypatch):
    assert chosen(monkeypatch, ADA, STRIP, SQUARE).name == "triton"
    assert chosen(monkeypatch, HOPPER, STRIP, SQUARE).name == "cublaslt"
    assert chosen(monkeypatch, HOPPER, STRIP, SQUARE, size=(17, 28672)).name == "cublaslt"
    small = chosen(monkeypatch, HOPPER, STRIP, SQUARE, size=(16, 28672))
    assert (small.name, small.reason.endswith(", small M")) == ("triton", True)


@pytest.mark.parametrize(
    ("a", "b"), [(SQUARE, STRIP), (group(64), SQUARE), (group(64), group(32)), (group(96), group(96)), (ROW, TENSOR)]
)
def test_what_it_does_not_take_stays_refused(monkeypatch, a, b):
    assert chosen(monkeypatch, ADA, a, b).name == "none"


def test_two_e5m2_operands_and_fnuz_formats_stay_refused(monkeypatch):
    for formats in (("e5m2", "e5m2"), ("e4m3fnuz", "e4m3fnuz")):
        assert chosen(monkeypatch, HOPPER, group(64), group(64), formats).name == "none"


def test_without_triton_there_is_no_kernel(monkeypatch):
    chosen(monkeypatch, HOPPER, group(64), group(64))
    monkeypatch.setattr(backend, "HAS_TRITON", False)
    found = find_backend(CUDA, group(64), group(64), E4M3)
    assert (found.name, found.reason) == (
        "none", "group:64 x group:64 scales in float32 need Triton, which is not installed"
    )  # fmt: skip
