"""The GEMMs that each GPU runs, and the reasons for those that it does not run."""

import json
from importlib.resources import files

import pytest
import torch

from octavo.numerics import ROW, TENSOR, group
from octavo.numerics.qtensor import parse_granularity
from octavo.ops import dispatch as backend
from octavo.ops import find_backend
from octavo.ops.dispatch import LINES, MX, SQUARE, STRIP, Backend, backend_on, gemm_backends, returned_dtype
from octavo.ops.launching import AMD, ARCHITECTURES, NVIDIA, architecture_of, find_architecture
from octavo.recipe import groupwise, mxfp8

E4M3 = ("e4m3", "e4m3")
ADA, HOPPER, BLACKWELL, RTX = (ARCHITECTURES[key] for key in ("ada", "hopper", "blackwell", "rtx_blackwell"))
MI300, MI350, RDNA4 = (ARCHITECTURES[key] for key in ("mi300", "mi350", "rdna4"))
OURS = {"ada": "triton", "hopper": "triton", "blackwell": "triton", "rtx_blackwell": "triton"}
WIDENED = dict.fromkeys(OURS, "dequantized")
LIBRARIES = {
    (TENSOR, TENSOR): {"ada": "cublaslt", "hopper": "cublaslt", "blackwell": "cublaslt", "rtx_blackwell": "cublaslt"},
    (ROW, ROW): {"ada": "cutlass", "hopper": "cublaslt", "blackwell": "cutlass", "rtx_blackwell": "cutlass"},
    (STRIP, SQUARE): OURS | {"hopper": "cublaslt"},
    (SQUARE, STRIP): {"hopper": "cublaslt"},
    (STRIP, STRIP): OURS | {"hopper": "cublaslt"},
    (MX, MX): WIDENED | {"blackwell": "cublaslt", "rtx_blackwell": "cublaslt", "mi350": "hipblaslt"},
    (group(64), group(64)): WIDENED,
    (group(96), group(96)): {},
    (SQUARE, SQUARE): {},
    (ROW, TENSOR): {},
}


@pytest.mark.parametrize("granularities", LIBRARIES, ids=lambda pair: f"{pair[0].name} {pair[1].name}")
def test_e4m3_operands(granularities):
    e8m0 = granularities[0] == MX, granularities[1] == MX
    for key in ("older", "ampere", "ada", "hopper", "blackwell", "rtx_blackwell", "unknown", "mi350"):
        if key == "mi350" and granularities in ((TENSOR, TENSOR), (ROW, ROW)):
            continue
        found = backend_on(ARCHITECTURES[key], *granularities, E4M3, e8m0=e8m0)
        assert found.name == LIBRARIES[granularities].get(key, "none"), key
        if key not in ("older", "ampere"):
            assert f"{granularities[0].name} x {granularities[1].name} scales" in found.reason


@pytest.mark.parametrize("gpu", [ADA, HOPPER, BLACKWELL, RTX], ids=lambda gpu: gpu.key)
def test_e5m2_gradients(gpu):
    for granularity in (TENSOR, ROW):
        assert backend_on(gpu, granularity, granularity, ("e5m2", "e4m3")).name in ("cublaslt", "cutlass")
    both = backend_on(gpu, TENSOR, TENSOR, ("e5m2", "e5m2"))
    assert (both.name, "not e5m2 x e5m2" in both.reason) == ("none", True)
    assert backend_on(gpu, STRIP, SQUARE, ("e5m2", "e4m3")).name == "triton"
    assert backend_on(gpu, MX, MX, ("e5m2", "e4m3"), e8m0=(True, True)).name == "dequantized"


@pytest.mark.parametrize("granularity", [MX, TENSOR, ROW])
@pytest.mark.parametrize("e8m0", [(True, True), (True, False), (False, False)])
def test_mx_is_groups_of_32_with_e8m0_scales_and_nothing_else(granularity, e8m0):
    for gpu in (BLACKWELL, RTX, MI350):
        found = backend_on(gpu, granularity, granularity, E4M3, e8m0=e8m0)
        runs = all(e8m0) if granularity == MX else not any(e8m0)
        assert (found.name not in ("none", "dequantized")) == runs
        if not runs:
            assert "E8M0" in found.reason or "float32" in found.reason


def test_float32_groups_of_32_are_not_sent_to_the_kernel_of_mx(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    cuda = torch.device("cuda")
    assert {b.name for b in gemm_backends(groupwise(size=32), cuda).values()} <= {"none", "dequantized"}
    assert {b.name for b in gemm_backends(mxfp8(), cuda).values()} == {"cublaslt"}


def test_a_reason_has_pytorchs_message_and_the_gpu():
    reason = backend_on(BLACKWELL, SQUARE, STRIP, E4M3).reason
    assert reason.startswith("PyTorch refuses block:128x128 x group:128 scales in float32 on Blackwell (B200): ")
    assert reason.endswith("only supported in CUDA for SM90")


@pytest.mark.parametrize("key", ["older", "ampere", "amd_older", "amd_other"])
def test_a_gpu_without_any_fp8_gemm_has_a_short_reason(key):
    gpu = ARCHITECTURES[key]
    assert backend_on(gpu, ROW, ROW, E4M3) == Backend("none", f"{gpu.name} has no FP8 GEMM")


def test_gpus_that_nothing_was_measured_on_are_marked():
    for key, gpu in ARCHITECTURES.items():
        formats = ("e4m3fnuz", "e4m3fnuz") if key == "mi300" else E4M3
        found = backend_on(gpu, ROW, ROW, formats)
        if found.name != "none":
            assert (f"not measured on {gpu.name}" in found.reason) == (key != "hopper")


@pytest.mark.parametrize(
    ("gpu", "own", "foreign"), [(MI300, "e4m3fnuz", "e4m3"), (MI350, "e4m3", "e4m3fnuz"), (RDNA4, "e4m3", "e4m3fnuz")]
)
def test_amd(gpu, own, foreign):
    for granularity in (TENSOR, ROW):
        assert backend_on(gpu, granularity, granularity, (own, own)).name == "hipblaslt"
        assert backend_on(gpu, granularity, granularity, (own.replace("e4m3", "e5m2"), own)).name == "hipblaslt"
        refused = backend_on(gpu, granularity, granularity, (foreign, foreign))
        assert (refused.name, f"take {own} x {own}" in refused.reason) == ("none", True)
    assert backend_on(gpu, STRIP, STRIP, (own, own)).name == "none"


def test_fnuz_is_amds():
    assert "not e4m3fnuz x e4m3" in backend_on(HOPPER, ROW, ROW, ("e4m3fnuz", "e4m3")).reason


def test_before_cuda_12_9_hopper_has_no_block_scales_and_row_scales_in_cutlass(monkeypatch):
    monkeypatch.setattr(backend, "_CUDA", (12, 8))
    assert backend_on(HOPPER, ROW, ROW, E4M3).name == "cutlass"
    assert backend_on(HOPPER, STRIP, SQUARE, E4M3).name == "triton"
    assert "requires cublasLt >= 12.9" in backend_on(HOPPER, SQUARE, STRIP, E4M3).reason
    assert backend_on(ADA, ROW, ROW, E4M3).name == "cutlass"


def test_y_has_a_dtype_that_the_kernel_writes():
    names = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    for (gpu, scales), line in LINES.items():
        granularity = {"tensor, tensor": TENSOR, "row, row": ROW}.get(scales)
        if granularity is None or line.refusal:
            continue
        for name, dtype in names.items():
            expected = dtype if name in line.out else torch.bfloat16
            assert returned_dtype(line.library, granularity, dtype) == expected, (gpu, scales, name)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_without_a_gpu_it_is_emulated(device):
    found = find_backend(torch.device(device), group(64), group(64), E4M3)
    assert (found.name, device in found.reason) == ("emulated", True)


# ---- The record of PyTorch's dispatch: each line is complete, and names where it comes from


RECORD = json.loads((files("octavo.ops") / "dispatch.json").read_text())
GPUS = ARCHITECTURES.keys() - {"unknown", "amd_newer"} | {"hopper_cuda_12.8"}


def test_each_line_has_a_source():
    for row in RECORD["gemms"]:
        assert row["source"]
        assert set(row["source"].split()) <= RECORD["sources"].keys()
    assert {name for row in RECORD["gemms"] for name in row["source"].split()} == RECORD["sources"].keys()


def test_only_lines_of_hopper_are_measured():
    assert {row["gpus"] for row in RECORD["gemms"] if "measured" in row["source"]} == {"hopper"}


def test_a_line_is_a_gemm_or_a_refusal():
    for row in RECORD["gemms"]:
        rest = row.keys() - {"gpus", "scales", "source"}
        assert rest in ({"refusal"}, {"library", "formats", "out", "fast_accumulation"})


def test_no_line_is_recorded_twice_and_each_gpu_has_all_scales():
    keys = [(gpu, row["scales"]) for row in RECORD["gemms"] for gpu in row["gpus"].split()]
    assert sorted(keys) == sorted(LINES)
    scales = {pair for _, pair in keys}
    assert set(keys) == {(gpu, pair) for gpu in GPUS for pair in scales}
    for pair in scales:
        for each in pair.split(", "):
            parse_granularity(each.removesuffix(" e8m0"))


# ---- The architecture of a GPU by its compute capability


@pytest.mark.parametrize(
    ("capability", "key"),
    [
        ((7, 5), "older"),
        ((8, 0), "ampere"),
        ((8, 6), "ampere"),
        ((8, 7), "ampere"),
        ((8, 9), "ada"),
        ((9, 0), "hopper"),
        ((10, 0), "blackwell"),
        ((10, 3), "blackwell"),
        ((11, 0), "blackwell"),
        ((12, 0), "rtx_blackwell"),
        ((12, 1), "rtx_blackwell"),
        ((13, 0), "unknown"),
    ],
)
def test_nvidia(capability, key):
    assert architecture_of(capability).key == key


@pytest.mark.parametrize(
    ("capability", "key"),
    [
        ((9, 0), "amd_older"),
        ((9, 4), "mi300"),
        ((9, 5), "mi350"),
        ((11, 0), "amd_other"),
        ((12, 0), "rdna4"),
        ((12, 5), "amd_newer"),
    ],
)
def test_architecture_of_an_amd_gpu(capability, key):
    assert architecture_of(capability, amd=True).key == key


def test_the_device_and_the_build_of_pytorch_decide(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 5))
    assert find_architecture(torch.device("cuda")).key == "hopper"
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert find_architecture(torch.device("cuda")).key == "mi350"


def test_tables_are_in_order_and_only_hopper_is_measured():
    for table in (NVIDIA, AMD):
        assert [each.lowest for each in table] == sorted({each.lowest for each in table})
    assert [key for key, each in ARCHITECTURES.items() if each.measured] == ["hopper"]
