"""The implementations that each GPU runs GEMMs on, and the reasons for those that it does not run."""

import json
from importlib.resources import files
from itertools import product

import numpy as np
import pytest
import torch
from gemm_examples import on_gpu, wide
from gpus import poison

from octavo.numerics import ROW, TENSOR, Cast, group
from octavo.numerics.qtensor import parse_granularity
from octavo.ops import dispatch as backend
from octavo.ops import find_backend, find_grouped_backend, find_weight_only_backend, quantize
from octavo.ops.dispatch import LINES, MAX_M, MAX_SMALL_M, MX, SQUARE, STRIP, Backend, architecture_key
from octavo.ops.launching import AMD, ARCHITECTURES, NVIDIA, Operands, architecture_of, find_architecture
from octavo.ops.library_gemms import scaled_mm_cublaslt
from octavo.recipe import PRESETS

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
E4M3, GRADIENT = ("e4m3", "e4m3"), ("e5m2", "e4m3")
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


@pytest.fixture
def on(monkeypatch):
    """Takes the compute capability of the GPU that is here, and whether Triton is."""

    def set_capability(capability: tuple[int, int], *, triton: bool = True) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(backend, "HAS_TRITON", triton)

    return set_capability


@pytest.mark.parametrize("granularities", LIBRARIES, ids=lambda pair: f"{pair[0].name} {pair[1].name}")
def test_e4m3_operands(granularities):
    e8m0 = granularities[0] == MX, granularities[1] == MX
    for key in ("older", "ampere", "ada", "hopper", "blackwell", "rtx_blackwell", "unknown", "mi350"):
        if key == "mi350" and granularities in ((TENSOR, TENSOR), (ROW, ROW)):
            continue
        found = find_backend(ARCHITECTURES[key], *granularities, E4M3, e8m0=e8m0)
        assert found.name == LIBRARIES[granularities].get(key, "none"), key
        if key not in ("older", "ampere"):
            assert f"{granularities[0].name} x {granularities[1].name} scales" in found.reason


@pytest.mark.parametrize("granularity", [MX, TENSOR, ROW])
@pytest.mark.parametrize("e8m0", [(True, True), (True, False), (False, False)])
def test_mx_is_groups_of_32_with_e8m0_scales_and_nothing_else(granularity, e8m0):
    for gpu in (BLACKWELL, RTX, MI350):
        found = find_backend(gpu, granularity, granularity, E4M3, e8m0=e8m0)
        runs = all(e8m0) if granularity == MX else not any(e8m0)
        assert (found.name not in ("none", "dequantized")) == runs
        if not runs:
            assert "E8M0" in found.reason or "float32" in found.reason


@pytest.mark.parametrize("key", ["older", "ampere", "amd_older", "amd_other"])
def test_a_gpu_without_any_fp8_gemm_has_a_short_reason(key):
    gpu = ARCHITECTURES[key]
    assert find_backend(gpu, ROW, ROW, E4M3) == Backend("none", f"{gpu.name} has no FP8 GEMM")


def test_gpus_that_nothing_was_measured_on_are_marked():
    for key, gpu in ARCHITECTURES.items():
        found = find_backend(gpu, ROW, ROW, FNUZ if key == "mi300" else E4M3)
        if found.name != "none":
            assert (f"not measured on {gpu.name}" in found.reason) == (key != "hopper")


@pytest.mark.parametrize(
    ("gpu", "own", "foreign"), [(MI300, "e4m3fnuz", "e4m3"), (MI350, "e4m3", "e4m3fnuz"), (RDNA4, "e4m3", "e4m3fnuz")]
)
def test_amd(gpu, own, foreign):
    for granularity in (TENSOR, ROW):
        assert find_backend(gpu, granularity, granularity, (own, own)).name == "hipblaslt"
        assert find_backend(gpu, granularity, granularity, (own.replace("e4m3", "e5m2"), own)).name == "hipblaslt"
        refused = find_backend(gpu, granularity, granularity, (foreign, foreign))
        assert (refused.name, f"take {own} x {own}" in refused.reason) == ("none", True)
    assert find_backend(gpu, STRIP, STRIP, (own, own)).name == "none"


def test_before_cuda_12_9_hopper_has_no_block_scales_and_row_scales_in_cutlass(monkeypatch):
    monkeypatch.setattr(backend, "_CUDA", (12, 8))
    assert find_backend(HOPPER, ROW, ROW, E4M3).name == "cutlass"
    assert find_backend(HOPPER, STRIP, SQUARE, E4M3).name == "triton"
    assert "requires cublasLt >= 12.9" in find_backend(HOPPER, SQUARE, STRIP, E4M3).reason
    assert find_backend(ADA, ROW, ROW, E4M3).name == "cutlass"


def test_y_has_a_dtype_that_the_kernel_writes():
    for (gpu, scales), line in LINES.items():
        granularity = {"tensor, tensor": TENSOR, "row, row": ROW}.get(scales)
        if granularity is None or line.refusal:
            continue
        for name, dtype in DTYPES.items():
            expected = dtype if name in line.out else torch.bfloat16
            assert backend.returned_dtype(line.library, granularity, dtype) == expected, (gpu, scales, name)


# ---- Our kernels: of a small M, of scales along K, of groups of rows, and of weights alone


NARROW, G64 = ("e5m2", "e5m2"), (group(64), group(64))
FNUZ = ("e4m3fnuz", "e4m3fnuz")
WIDTHS = (1, 8192, 128_256)  # N, on which the largest small M does not depend
CHOICES = [  # a GPU, granularities, formats and [M, N]; the implementation, and a part of the reason
    *((gpu, (by, by), GRADIENT, None, LIBRARIES[by, by][gpu], "") for gpu in OURS for by in (TENSOR, ROW)),
    *((gpu, (STRIP, SQUARE), GRADIENT, None, "triton", "") for gpu in OURS),
    *((gpu, (TENSOR, TENSOR), NARROW, None, "none", "not e5m2 x e5m2") for gpu in OURS),
    ("hopper", (ROW, ROW), ("e4m3fnuz", "e4m3"), None, "none", "not e4m3fnuz x e4m3"),
    *(("hopper", (by, by), E4M3, (m, n), "triton", "small M")
      for by in (ROW, TENSOR) for n in WIDTHS for m in (0, 1, MAX_SMALL_M)),
    *(("hopper", (by, by), E4M3, (MAX_SMALL_M + 1, n), "cublaslt", "") for by in (ROW, TENSOR) for n in WIDTHS),
    ("hopper", (SQUARE, STRIP), E4M3, (1, 64), "cublaslt", ""), ("hopper", (ROW, TENSOR), E4M3, (1, 64), "none", ""),
    ("hopper", (ROW, ROW), NARROW, (1, 64), "none", ""), ("hopper", (ROW, ROW), FNUZ, (1, 64), "none", ""),
    ("hopper", (STRIP, SQUARE), E4M3, (17, 28672), "cublaslt", ""),
    ("hopper", (STRIP, SQUARE), E4M3, (16, 28672), "triton", ", small M"),
    *((gpu, (group(size),) * 2, E4M3, (256, 8192), "triton", f"group:{size} x group:{size} scales in float32")
      for gpu in ("ada", "hopper", "blackwell") for size in (32, 64, 128) if (gpu, size) != ("hopper", 128)),
    *((gpu, (group(size),) * 2, E4M3, m_n, "dequantized", "")
      for gpu in ("ada", "hopper", "blackwell") for size in (32, 64) for m_n in ((257, 8192), None)),
    ("hopper", (STRIP, STRIP), E4M3, (257, 8192), "cublaslt", ""), ("ada", (STRIP, STRIP), E4M3, None, "triton", ""),
    ("ada", (group(64), SQUARE), E4M3, None, "none", ""), ("ada", (group(64), group(32)), E4M3, None, "none", ""),
    ("hopper", G64, NARROW, None, "none", ""), ("hopper", G64, FNUZ, None, "none", ""),
]  # fmt: skip


@pytest.mark.parametrize(("key", "pair", "formats", "size", "name", "reason"), CHOICES, ids=str)
def test_the_choice_of_an_implementation(key, pair, formats, size, name, reason, on):
    on(ARCHITECTURES[key].lowest)
    found = find_backend(CUDA, *pair, formats, size)
    assert (found.name, reason in found.reason) == (name, True)
    assert found.name == "none" or ("not measured" in found.reason) == (key != "hopper")
    assert size or found == find_backend(ARCHITECTURES[key], *pair, formats)


def test_without_triton(on):
    on((9, 0), triton=False)
    assert find_backend(CUDA, ROW, ROW, E4M3, (1, 64)).name == "cublaslt"
    reason = "group:64 x group:64 scales in float32 need Triton, which is not installed"
    assert find_backend(CUDA, *G64, E4M3) == Backend("none", reason)
    for device in ("cpu", "meta"):
        found = find_backend(torch.device(device), ROW, ROW, E4M3, (1, 64))
        assert (found.name, device in found.reason) == ("emulated", True)


def test_the_choice_is_traced_without_a_break(on):
    def names(x):
        return x + (1 if find_backend(CUDA, ROW, ROW, E4M3, (x.shape[0], 64)).name == "triton" else 2)

    on((9, 0))
    compiled = torch.compile(names, fullgraph=True, backend="eager", dynamic=False)
    assert [compiled(torch.zeros(m)).mean().item() for m in (1, MAX_SMALL_M, MAX_SMALL_M + 1)] == [1, 1, 2]


@pytest.mark.parametrize(
    ("capability", "formats", "name"),
    [
        *(((9, 0), formats, "triton") for formats in (E4M3, GRADIENT, ("e4m3", "e5m2"))),
        *(((9, 0), formats, "none") for formats in (NARROW, FNUZ)),
        ((8, 9), E4M3, "triton"), ((10, 0), GRADIENT, "triton"), ((12, 0), E4M3, "triton"),
        ((8, 0), E4M3, "none"), ((13, 0), E4M3, "none"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("pair", [(ROW, ROW), (STRIP, STRIP), (STRIP, SQUARE)], ids=lambda pair: pair[1].name)
def test_groups_of_rows_have_a_kernel_from_ada_on(on, pair, capability, formats, name):
    on(capability)
    found = find_grouped_backend(CUDA, formats, *pair)
    assert found == find_grouped_backend(architecture_of(capability), formats, *pair)
    assert found.name == name
    assert ("not measured" in found.reason) == (name == "triton" and capability != (9, 0))
    assert find_grouped_backend(CPU, formats, *pair).name == "emulated"
    assert find_grouped_backend(CUDA, formats, STRIP, group(64)).name == "none"
    on(capability, triton=False)
    without = find_grouped_backend(CUDA, formats, *pair)
    assert without.name == ("none" if name == "triton" else name)
    assert ("need Triton" in without.reason) == (name == "triton")
    assert find_grouped_backend(architecture_of(capability), formats, *pair).name == name


@pytest.mark.parametrize(
    ("capability", "e8m0", "formats", "name"),
    [
        ((9, 0), True, E4M3, "dequantized"), ((10, 0), True, E4M3, "cutlass"), ((12, 0), True, E4M3, "dequantized"),
        ((10, 0), False, E4M3, "dequantized"), ((10, 0), True, GRADIENT, "dequantized"), ((8, 0), True, E4M3, "none"),
    ],
)  # fmt: skip
def test_groups_of_rows_in_mx_run_on_blackwells_tensor_cores(on, monkeypatch, capability, e8m0, formats, name):
    on(capability)
    assert find_grouped_backend(architecture_of(capability), formats, MX, MX, e8m0=e8m0).name == name
    for built, expected in ((True, name), (False, "dequantized" if name == "cutlass" else name)):
        monkeypatch.setattr(backend, "HAS_MSLK", built)
        assert find_grouped_backend(CUDA, formats, MX, MX, e8m0=e8m0).name == expected


@pytest.mark.parametrize(
    ("shape_a", "shape_b", "fast", "expected"),
    [
        ((8192, 4096), (2, 14336, 4096), False, True), ((512, 4096), (2, 4096, 4096), False, True),
        ((256, 4096), (2, 4096, 4096), False, False), ((2048, 2048), (2, 1536, 2048), False, False),
        ((4096, 2048), (2, 1536, 2048), False, True), ((8192, 4096), (2, 14336, 4096), True, False),
        ((4096, 2048), (4096, 2048), False, False), ((4096, 4096), (4096, 4096), False, True),  # of a gradient
    ],
    ids=str,
)  # fmt: skip
def test_promoted_sums_of_large_groups_run_on_cutlass_on_a_hopper(on, shape_a, shape_b, fast, expected):
    a, b = (torch.empty(shape, dtype=torch.float8_e4m3fn, device="meta") for shape in (shape_a, shape_b))
    on((9, 0))
    assert backend.takes_cutlass(a, b, 2, fast) is expected
    assert not backend.takes_cutlass(a, b.view(torch.float8_e5m2), 2, fast)
    on((8, 9))
    assert not backend.takes_cutlass(a, b, 2, fast)


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (12, 0)])
def test_every_gpu_has_a_path_for_weights_alone_and_a_small_m_the_kernel(capability, monkeypatch):
    def name(dtype=torch.bfloat16, granularity=ROW, m=1) -> str:
        return find_weight_only_backend(CUDA, dtype, granularity, m).name

    monkeypatch.setattr(backend, "has_kernels", lambda device, lowest: capability >= lowest)
    ours = "triton" if capability >= (8, 0) else "dequantized"
    assert [name(m=m) for m in (1, MAX_M, MAX_M + 1)] == [ours, ours, "dequantized"]
    assert [name(torch.float16), name(torch.float32)] == [ours, "dequantized"]
    assert [name(granularity=by) for by in (group(32), group(128), group(48))] == [ours, ours, "dequantized"]
    assert find_weight_only_backend(CPU, torch.bfloat16, ROW, 1).name == "emulated"


# ---- The record of PyTorch's dispatch: each line is complete, and names where it comes from


RECORD = json.loads((files("octavo.ops") / "dispatch.json").read_text())
GPUS = ARCHITECTURES.keys() - {"unknown", "amd_newer"} | {"hopper_cuda_12.8"}


def test_each_line_is_a_gemm_or_a_refusal_and_has_a_source():
    for row in RECORD["gemms"]:
        rest = row.keys() - {"gpus", "scales", "source"}
        assert rest in ({"refusal"}, {"library", "formats", "out", "fast_accumulation"})
        assert row["source"]
    assert {name for row in RECORD["gemms"] for name in row["source"].split()} == RECORD["sources"].keys()
    assert {row["gpus"] for row in RECORD["gemms"] if "measured" in row["source"]} == {"hopper"}


def test_no_line_is_recorded_twice_and_each_gpu_has_all_scales():
    keys = [(gpu, row["scales"]) for row in RECORD["gemms"] for gpu in row["gpus"].split()]
    assert sorted(keys) == sorted(LINES)
    scales = {pair for _, pair in keys}
    assert set(keys) == {(gpu, pair) for gpu in GPUS for pair in scales}
    for pair in scales:
        for each in pair.split(", "):
            parse_granularity(each.removesuffix(" e8m0"))


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [False, True], ids=["promoted", "fast"])
@pytest.mark.parametrize("scales", sorted({scales for _, scales in LINES}))
def test_pytorch_on_this_gpu_does_what_a_line_says(scales, fast):
    """It computes with a library, and refuses all else."""
    line = LINES[architecture_key(find_architecture(CUDA)), scales]
    granularities = [parse_granularity(each.removesuffix(" e8m0")) for each in scales.split(", ")]
    kinds = ["e8m0" if each.endswith("e8m0") else "fp32" for each in scales.split(", ")]
    suffix = "fnuz" if any("fnuz" in formats for formats in line.formats) else ""
    for formats in product(("e4m3", "e5m2"), repeat=2):
        torch.manual_seed(0)
        casts = [Cast(f + suffix, g, kind) for f, g, kind in zip(formats, granularities, kinds, strict=True)]
        a, b = (quantize(torch.randn(rows, 512), cast) for rows, cast in zip((256, 384), casts, strict=True))
        for name, dtype in DTYPES.items():
            arguments = Operands.of(on_gpu(a), on_gpu(b)), None, dtype, fast
            poison()
            own = name in line.out or not a.granularity.outer  # block-scaled GEMMs return BF16, which is then cast
            if f"{a.format.name} x {b.format.name}" not in line.formats or not own:
                with pytest.raises((RuntimeError, ValueError, NotImplementedError)) as error:
                    scaled_mm_cublaslt(*arguments)
                if formats == ("e4m3", "e4m3"):
                    assert line.refusal in str(error.value)
                continue
            y, exact = scaled_mm_cublaslt(*arguments), wide(a) @ wide(b).T
            assert y.dtype == dtype
            assert np.linalg.norm(y.cpu().double().numpy() - exact) < 0.01 * np.linalg.norm(exact)


# ---- The architecture of a GPU by its compute capability


CAPABILITIES = {
    "older": [(7, 5)], "ampere": [(8, 0), (8, 6), (8, 7)], "ada": [(8, 9)], "hopper": [(9, 0)],
    "blackwell": [(10, 0), (10, 3), (11, 0)], "rtx_blackwell": [(12, 0), (12, 1)], "unknown": [(13, 0)],
    "amd_older": [(9, 0)], "mi300": [(9, 4)], "mi350": [(9, 5)], "amd_other": [(11, 0)], "rdna4": [(12, 0)],
    "amd_newer": [(12, 5)],
}  # fmt: skip


@pytest.mark.parametrize("key", ARCHITECTURES)
def test_the_architecture_of_a_compute_capability(key):
    amd = ARCHITECTURES[key] in AMD
    assert {architecture_of(capability, amd=amd).key for capability in CAPABILITIES[key]} == {key}


def test_the_device_and_the_build_of_pytorch_decide(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 5))
    assert find_architecture(CUDA).key == "hopper"
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert find_architecture(CUDA).key == "mi350"


@pytest.mark.parametrize("name", PRESETS)
def test_experts_have_a_grouped_gemm_where_linear_layers_have_one(name):
    recipe = PRESETS[name]()
    for gpu in NVIDIA if backend.runs_experts(recipe) else ():
        found = backend.gemm_backends(recipe, gpu), backend.gemm_backends(recipe, gpu, grouped=True)
        linear, grouped = ({gemm for gemm in each if each[gemm].name == "none"} for each in found)
        assert linear == grouped
