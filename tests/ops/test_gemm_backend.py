"""The GEMMs that each GPU runs, and the reasons for those that it does not run."""

import pytest
import torch

from octavo.nn.backends import gemm_backends
from octavo.numerics import ROW, TENSOR, group
from octavo.ops import find_backend
from octavo.ops.gemm.backend import MX, SQUARE, STRIP, Backend, _cuda_backend
from octavo.recipe import groupwise, mxfp8

FLOAT32 = (False, False)
ADA, HOPPER, BLACKWELL = (8, 9), (9, 0), (10, 0)


@pytest.mark.parametrize(
    ("granularities", "runs_on"),
    [
        ((TENSOR, TENSOR), {ADA, HOPPER, BLACKWELL}),
        ((ROW, ROW), {ADA, HOPPER, BLACKWELL}),
        ((STRIP, SQUARE), {HOPPER}),
        ((SQUARE, STRIP), {HOPPER}),
        ((STRIP, STRIP), {HOPPER}),
        ((MX, MX), {BLACKWELL}),
        ((group(64), group(64)), set()),
        ((SQUARE, SQUARE), set()),
        ((ROW, TENSOR), set()),
    ],
)
def test_nvidia(granularities, runs_on):
    for capability in ((8, 0), ADA, HOPPER, BLACKWELL):
        for formats in (("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2")):
            e8m0 = granularities[0] == MX, granularities[1] == MX
            backend = _cuda_backend(capability, *granularities, formats, False, e8m0)
            assert backend.name == ("cublaslt" if capability in runs_on else "none")
            if capability not in runs_on:
                assert f"{granularities[0].name} x {granularities[1].name} scales" in backend.reason


@pytest.mark.parametrize("granularity", [MX, TENSOR, ROW])
@pytest.mark.parametrize("e8m0", [(True, True), (True, False), FLOAT32])
def test_mx_is_groups_of_32_with_e8m0_scales_and_nothing_else(granularity, e8m0):
    backend = _cuda_backend(BLACKWELL, granularity, granularity, ("e4m3", "e4m3"), False, e8m0)
    runs = all(e8m0) if granularity == MX else not any(e8m0)
    assert backend.name == ("cublaslt" if runs else "none")
    if not runs:
        assert "E8M0" in backend.reason or "float32" in backend.reason


def test_float32_groups_of_32_are_not_sent_to_the_kernel_of_mx(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: BLACKWELL)
    cuda = torch.device("cuda")
    assert {b.name for b in gemm_backends(groupwise(size=32), cuda).values()} == {"none"}
    assert {b.name for b in gemm_backends(mxfp8(), cuda).values()} == {"cublaslt"}


def test_nvidia_reasons_name_what_is_needed_and_what_is_there():
    assert _cuda_backend((8, 0), TENSOR, TENSOR, ("e4m3", "e4m3"), False, FLOAT32).reason.endswith(
        "need compute capability 8.9 or newer, this GPU has 8.0"
    )
    assert _cuda_backend((10, 0), STRIP, STRIP, ("e4m3", "e4m3"), False, FLOAT32).reason.endswith(
        "need compute capability 9.0 to 9.x, this GPU has 10.0"
    )


@pytest.mark.parametrize(("capability", "fnuz"), [((9, 4), True), ((9, 5), False)])
def test_amd(capability, fnuz):
    own, foreign = ("e4m3fnuz", "e4m3") if fnuz else ("e4m3", "e4m3fnuz")
    for granularity in (TENSOR, ROW):
        assert _cuda_backend(capability, granularity, granularity, (own, own), True, FLOAT32).name == "hipblaslt"
        refused = _cuda_backend(capability, granularity, granularity, (foreign, foreign), True, FLOAT32)
        assert (refused.name, "FNUZ" if fnuz else "OCP") == ("none", refused.reason.split("takes ")[1].split(" ")[0])
    assert _cuda_backend(capability, STRIP, STRIP, (own, own), True, FLOAT32).name == "none"


@pytest.mark.parametrize("hip", [False, True])
def test_no_gpu_takes_two_e5m2_operands(hip):
    backend = _cuda_backend(HOPPER, TENSOR, TENSOR, ("e5m2", "e5m2"), hip, FLOAT32)
    assert (backend.name, "two E5M2 operands" in backend.reason) == ("none", True)


def test_fnuz_is_amds():
    assert _cuda_backend(HOPPER, ROW, ROW, ("e4m3fnuz", "e4m3"), False, FLOAT32) == Backend(
        "none", "FNUZ formats run on AMD MI300 only"
    )


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_without_a_gpu_it_is_emulated(device):
    backend = find_backend(torch.device(device), group(64), group(64), ("e4m3", "e4m3"))
    assert (backend.name, device in backend.reason) == ("emulated", True)
