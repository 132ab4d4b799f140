"""The choice of the implementation that a GEMM, or attention in FP8, runs on.

One function decides for each kind of operand, and reports call it too. dispatch.json records the GEMMs that PyTorch's
`scaled_mm` runs on each GPU.
"""

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from octavo.numerics.qtensor import ROW, Cast, Granularity, block, group
from octavo.ops.launching import (
    FORMATS,
    HAS_TRITON,
    HEAD_DIM,
    NVIDIA,
    GpuArchitecture,
    Place,
    find_architecture,
    has_kernels,
)
from octavo.recipe import PRESETS, Recipe, fnuz, get_recipe, rowwise, tensorwise

# ---- The GEMMs of PyTorch's `scaled_mm` on each GPU, recorded in dispatch.json.
#
# Octavo's tests run on Hopper GPUs. For the other architectures the lines come from PyTorch's sources and binaries,
# which each line names, and nothing is measured. A line is either a GEMM or a refusal:
#
#     gpus                 keys of `octavo.ops.launching`; hopper_cuda_12.8: PyTorch is built for CUDA < 12.9
#     scales               of a and b: granularity, and "e8m0" for scales that are not float32
#     library              that has the kernel
#     formats              of a and b
#     out                  dtypes of y that the kernel writes
#     fast_accumulation    whether the option has an effect; every GEMM accepts it
#     refusal              PyTorch's own message


@dataclass(frozen=True)
class Line:
    """One line of dispatch.json for one architecture; `library` is "" for a refusal."""

    library: str = ""
    formats: tuple[str, ...] = ()
    out: tuple[str, ...] = ()
    fast_accumulation: bool = False
    refusal: str = ""


def _read_lines() -> dict[tuple[str, str], Line]:
    found: dict[tuple[str, str], Line] = {}
    for row in json.loads((files("octavo.ops") / "dispatch.json").read_text())["gemms"]:
        gpus, scales, _ = row.pop("gpus").split(), row.pop("scales"), row.pop("source")
        line = Line(formats=tuple(row.pop("formats", ())), out=tuple(row.pop("out", "").split()), **row)
        found |= {(gpu, scales): line for gpu in gpus}
    return found


# (architecture, scales of a and b) -> the line. A plain dictionary: torch.compile traces the look-up.
LINES = _read_lines()


# ---- The choice of the implementation that a scaled GEMM runs on.
#
# PyTorch's `scaled_mm` has these kernels:
#
#     scales                     GPU
#     tensor                     cuBLASLt from Ada (8.9), hipBLASLt from MI300
#     row                        cuBLASLt on Hopper; CUTLASS on Ada and Blackwell; hipBLASLt from MI300
#     1x128, 128x128 blocks      cuBLASLt on Hopper (9.x) only
#     MX: groups of 32, E8M0     cuBLASLt from Blackwell (10.0), hipBLASLt on MI350
#
# A Triton kernel of ours computes what PyTorch lacks on NVIDIA GPUs from Ada on: scales in groups of 32, 64 or 128, and
# 1x128 with 128x128 blocks, float32 or E8M0. With groups of 32 and 64 and a large M, scaling the partial sums takes so
# long that a BF16 GEMM of the widened operands is faster. A GEMM of small M takes as long as reading b, and runs on
# kernels of ours.
#
# Octavo is measured on Hopper only. If a GPU has no kernel for a GEMM, it raises an error unless the caller asks for
# emulation.


# The largest M for which our kernels are faster than cuBLASLt, on an H200. With scales by row they take 0.47 to 0.98 of
# its time for N 4,096 to 128,256, and with blocks, M 16 and N 28,672 33 us instead of 40 to 45.
MAX_SMALL_M = 64
_MAX_SMALL_M_OF_BLOCKS = 16
SQUARE = block(128, 128)
STRIP = group(128)
MX = group(32)

# Of our kernel for scales along K. A tensor-core instruction multiplies 32 elements of K.
_GROUP_SIZES = (32, 64, 128)
MAX_M_OF_GROUPS = 256  # above it, widening operands in groups of 32 or 64 costs less than scaling their partial sums
_GPUS_OF_OUR_KERNELS = ("ada", "hopper", "blackwell", "rtx_blackwell")

# The architectures that PyTorch refuses every FP8 GEMM.
_WITHOUT_FP8 = {gpu for gpu, _ in LINES} - {gpu for (gpu, _), line in LINES.items() if line.library}

# The version of CUDA that PyTorch was built with. From 12.9 on, cuBLASLt has row and block scales for Hopper.
_CUDA = tuple(int(part) for part in (torch.version.cuda or "99.0").split(".")[:2])
# The dtypes that row-scaled kernels write; cuBLASLt's write any.
_ROW_SCALED_DTYPES = {"cutlass": (torch.bfloat16, torch.float16), "hipblaslt": (torch.bfloat16,)}


@dataclass(frozen=True)
class Backend:
    """The implementation of a scaled GEMM, and the reason for it, for people.

    The names are cublaslt, cutlass, hipblaslt, triton, dequantized (a BF16 GEMM of the widened operands), emulated and
    none.
    """

    name: str
    reason: str


def find_backend(
    place: Place,
    granularity_a: Granularity,
    granularity_b: Granularity,
    formats: tuple[str, str],
    size: tuple[int, int] | None = None,
    *,
    e8m0: tuple[bool, bool] = (False, False),
) -> Backend:
    """The implementation that a device or a GPU has for operands of these granularities and formats (by their names).

    `size` is [M, N] of y, None for a large M. `e8m0` tells whether the scales of a and b are E8M0 instead of float32.
    """
    if isinstance(place, torch.device) and place.type != "cuda":
        return Backend("emulated", f"{place.type} has no FP8 GEMM: exact in float32, slower than BF16")
    backend = _backend_of_large_m(find_architecture(place), granularity_a, granularity_b, formats, e8m0)
    if isinstance(place, torch.device) and backend.name in ("triton", "dequantized") and not HAS_TRITON:
        return Backend("none", f"{backend.reason} need Triton, which is not installed")
    if backend.name == "dequantized" and size is not None and size[0] <= MAX_M_OF_GROUPS:
        return Backend("triton", backend.reason)
    small = size is not None and size[0] <= (MAX_SMALL_M if granularity_a.outer else _MAX_SMALL_M_OF_BLOCKS)
    nvidia = backend.name in ("cublaslt", "cutlass")
    ours = granularity_a.outer or takes_blocks(granularity_a, granularity_b)
    if small and nvidia and ours and set(formats) <= set(FORMATS) and HAS_TRITON:
        return Backend("triton", f"{backend.reason}, small M")
    return backend


def takes_blocks(granularity_a: Granularity, granularity_b: Granularity) -> bool:
    """True if our kernel for scales along K takes these: equal groups in a and b, or 1x128 and 128x128 blocks."""
    in_groups = granularity_a.rows == 1 and granularity_a.cols in _GROUP_SIZES
    return in_groups and (granularity_b == granularity_a or (granularity_a, granularity_b) == (STRIP, SQUARE))


def runs_our_kernels(gpu: GpuArchitecture, formats: tuple[str, str]) -> bool:
    """True if our kernels for many rows run on a GPU of this architecture, for operands of these formats."""
    return gpu.key in _GPUS_OF_OUR_KERNELS and set(formats) <= set(FORMATS) and formats != ("e5m2", "e5m2")


def _backend_of_large_m(
    gpu: GpuArchitecture, by_a: Granularity, by_b: Granularity, formats: tuple[str, str], e8m0: tuple[bool, bool]
) -> Backend:
    if gpu.key in _WITHOUT_FP8:
        return Backend("none", f"{gpu.name} has no FP8 GEMM")
    a, b = by_a.name, by_b.name
    kinds = ["E8M0" if is_e8m0 else "float32" for is_e8m0 in e8m0]
    names = f"{a} x {b} scales in {' and '.join(dict.fromkeys(kinds))}"
    note = "" if gpu.measured else f", not measured on {gpu.name}"
    line = LINES.get((architecture_key(gpu), f"{a}{' e8m0' * e8m0[0]}, {b}{' e8m0' * e8m0[1]}"))
    runs = line is not None and " x ".join(formats) in line.formats
    if not runs and runs_our_kernels(gpu, formats) and takes_blocks(by_a, by_b):
        return Backend("triton" if by_a == STRIP else "dequantized", f"{names}{note}")
    if line is None:
        return Backend("none", f"PyTorch has no GEMM with {names} on {gpu.name}")
    if line.refusal:
        return Backend("none", f"PyTorch refuses {names} on {gpu.name}: {line.refusal}")
    if " x ".join(formats) not in line.formats:
        return Backend("none", f"{names} on {gpu.name} take {' or '.join(line.formats)}, not {' x '.join(formats)}")
    return Backend(line.library, f"{names}{note}")


def architecture_key(gpu: GpuArchitecture) -> str:
    """The key of `gpu` in dispatch.json, with the PyTorch that is installed."""
    return "hopper_cuda_12.8" if gpu.key == "hopper" and _CUDA < (12, 9) else gpu.key


def returned_dtype(library: str, granularity: Granularity, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a GEMM of `library` returns y: `dtype`, or BF16 where it cannot write `dtype`."""
    able = _ROW_SCALED_DTYPES.get(library) if granularity == ROW else None
    return torch.bfloat16 if able and dtype not in able else dtype


# ---- The choice of the implementation that a grouped GEMM runs on.
#
#     triton        our kernels, on NVIDIA GPUs from Ada (8.9), for row scales and for scales that vary along K
#                   on Hopper, promoted sums of large groups of two E4M3 operands: PyTorch's `scaled_grouped_mm`
#     dequantized   groups smaller than 128, with many rows: PyTorch's BF16 product of the widened operands; with few
#                   rows our kernels
#     cutlass       two E4M3 operands in groups of 32 with E8M0 scales, on Blackwell: PyTorch's `scaled_grouped_mm`
#     emulated      the reference, in float32: a CPU
#
# ScaledGroupMM.cu in torch 2.11 and 2.13 has f8f8bf16_grouped_gemm_impl_sm90 alone, a CUTLASS kernel whose result is
# BF16. On GPUs without a kernel a call raises an error, or computes in float32 if the caller allows emulation.


HAS_MSLK = "USE_MSLK" in torch.__config__.show()  # the library of grouped MX GEMMs that PyTorch may be built with

COLUMNS = 128  # a group has a positive multiple of these in `grouped_mm_dw`: a step of the kernel, which needs no mask
# Above so many rows of a group, on average, PyTorch's BF16 product of widened operands is faster than our kernels for
# groups of 32 or 64 and for weights alone, by the rates of these in linear layers.
MAX_MEAN_ROWS = 1024
# On Hopper, above so many rows of a group, on average, CUTLASS's kernel promotes sums faster than ours does: 1,007
# against 905 TFLOP/s with 4,096 rows, 322 against 785 with 1,024. Where both sides of a matrix are wide, y and dx are
# faster from fewer rows on: 982 against 822 with 256 (bench/log.md).
CUTLASS_ROWS, CUTLASS_ROWS_OF_WIDE, WIDE = 1024, 128, 4096


def find_grouped_backend(
    place: Place,
    formats: tuple[str, str],
    granularity_a: Granularity = ROW,
    granularity_b: Granularity = ROW,
    *,
    e8m0: bool = False,
) -> Backend:
    """The implementation that a device or a GPU has for operands of these formats and granularities, with scales in
    E8M0 or float32."""
    if isinstance(place, torch.device) and place.type != "cuda":
        return Backend("emulated", f"{place.type} has no FP8 GEMM: exact in float32, slower than BF16")
    gpu = find_architecture(place)
    names = f"{granularity_a.name} x {granularity_b.name} scales"
    by_row = (granularity_a, granularity_b) == (ROW, ROW)
    if not runs_our_kernels(gpu, formats) or not (by_row or takes_blocks(granularity_a, granularity_b)):
        return Backend("none", f"no grouped GEMM takes {' x '.join(formats)} with {names} on {gpu.name}")
    note = f"{names}, in groups{'' if gpu.measured else f', not measured on {gpu.name}'}"
    is_mx = e8m0 and granularity_a == granularity_b == MX and formats == ("e4m3", "e4m3")
    if is_mx and gpu.key == "blackwell" and (isinstance(place, GpuArchitecture) or HAS_MSLK):
        return Backend("cutlass", note)
    if isinstance(place, torch.device) and not HAS_TRITON:
        return Backend("none", f"grouped GEMMs with {names} need Triton, which is not installed")
    return Backend("triton" if by_row or granularity_a == STRIP else "dequantized", note)


def takes_cutlass(a: Tensor, b: Tensor, groups: int, fast: bool) -> bool:
    """True if PyTorch's kernel is faster than ours for operands with row scales.

    a and b are [M, K] and [E, N, K], or [N, M] and [K, M] with groups of columns.
    """
    if b.ndim == 3:
        rows, least = a.shape[0], CUTLASS_ROWS_OF_WIDE if min(b.shape[1:]) >= WIDE else CUTLASS_ROWS
    else:
        rows, least = a.shape[1], CUTLASS_ROWS
    large = not fast and rows > least * groups
    return large and a.dtype == b.dtype == torch.float8_e4m3fn and find_architecture(a.device).key == "hopper"


# ---- The choice of the implementation that a weight-only GEMM runs on.
#
#     triton        the weight is widened inside our kernel, which reads one byte an element: a small M, from Ampere on
#     dequantized   the weight is widened to a tensor of x's dtype, and PyTorch's product runs: a large M, every GPU
#     emulated      the reference, in float32: a CPU
#
# Every GPU has a path, because none of them computes with eight-bit operands.


MAX_FASTER_M = 16  # up to it, each GEMM of Llama-3-8B was faster than BF16's on an H200 (docs/performance.md)
MAX_M = 256  # above it, widening the weight once costs less than the tensor cores lose in our kernel
LOWEST_WEIGHT_ONLY = (8, 0)  # Ampere: the first with BF16 on tensor cores, and the first that Triton supports
_GROUPS = (None, 32, 64, 128)  # elements along K that share a scale; None for all


def find_weight_only_backend(device: Place, dtype: torch.dtype, granularity: Granularity, m: int) -> Backend:
    """The implementation that `device` has for an input [m, K] of `dtype` and a weight of this granularity."""
    if isinstance(device, torch.device) and device.type != "cuda":
        return Backend("emulated", f"{device.type}: exact in float32, slower than BF16")
    if not has_kernels(device, LOWEST_WEIGHT_ONLY):
        return Backend("dequantized", "Triton kernels need an NVIDIA GPU from Ampere (8.0)")
    if dtype not in (torch.bfloat16, torch.float16):
        return Backend("dequantized", f"the kernel takes bfloat16 and float16, the input is {dtype}")
    if granularity.cols not in _GROUPS:
        return Backend("dequantized", f"the kernel takes no {granularity.name} scales")
    if m > MAX_M:
        return Backend("dequantized", f"more than {MAX_M} rows of x")
    return Backend("triton", "E4M3 weight, widened in the kernel")


# ---- The choice of the implementation that an INT8 GEMM runs on.
#
#     triton        our kernels, on the INT8 tensor cores of NVIDIA GPUs from Ampere (8.0) on; from 65 rows on
#                   cuBLASLt makes the sums, and our kernel scales them
#     emulated      the reference, in float64: a CPU, and a GPU for which there is no kernel here


LOWEST_INT8 = (8, 0)
_GPUS_INT8 = tuple(gpu.key for gpu in NVIDIA if gpu.lowest >= LOWEST_INT8)


def find_int8_backend(device: Place) -> Backend:
    """The implementation that `device` has for operands in int8. torch.compile traces this."""
    if isinstance(device, torch.device) and device.type != "cuda":
        return Backend("emulated", f"{device.type}: exact, in float64")
    if find_architecture(device).key in _GPUS_INT8 and (HAS_TRITON or isinstance(device, GpuArchitecture)):
        return Backend("triton", "INT8 tensor cores")
    return Backend("emulated", "no kernel for this GPU: exact, in float64, and slow")


# ---- Where attention runs in FP8: the GPUs, head sizes and libraries.


GRADIENT_TILE = 128  # tokens: of 200, which it does not divide, cuDNN 9.19 gave dq with 17 dB on an H200, not 21
HEAD_DIMS = (64, HEAD_DIM)  # in training: the gradient of 64 is computed as one of 128
SHORTEST_PROMPT = 4096  # tokens: with fewer, its attention is faster in BF16 than in FP8 with its casts
HAS_CUDNN = find_spec("cudnn") is not None  # nvidia-cudnn-frontend; found at import, as Triton is


@cache
def fp8_attention_limit(device: Place, head_dim: int, *, training: bool = False) -> str:
    """Why attention with heads of `head_dim` elements does not run in FP8 on `device`; "" if it does.

    cuDNN has FP8 attention for Hopper and Blackwell. Only Hopper has been measured. For the architecture of a GPU that
    is not here, the libraries of this machine do not matter.
    """
    if isinstance(device, GpuArchitecture):
        if device.key not in ("hopper", "blackwell"):
            return f"cuDNN has FP8 attention for Hopper and Blackwell, and this GPU is {device.name}"
    elif device.type != "cuda" or torch.version.hip is not None:
        return f"FP8 attention needs an NVIDIA GPU, and the device is {device}"
    else:
        major, minor = torch.cuda.get_device_capability(device)
        if major < 9 or major > 10:
            return f"cuDNN has FP8 attention for compute capability 9.0 and 10.0, and this GPU has {major}.{minor}"
    kind, dims = ("", HEAD_DIMS) if training else (" of prompts", (HEAD_DIM,))
    if head_dim not in dims:
        return f"FP8 attention{kind} takes heads of {' and '.join(map(str, dims))} elements, and these have {head_dim}"
    if isinstance(device, torch.device) and not HAS_CUDNN:
        return 'FP8 attention needs nvidia-cudnn-frontend: run pip install ".[cudnn]" in the source folder of Octavo'
    return ""


# ---- The backends of the three GEMMs of a recipe, and the recipe of a setting: the same decision that a scaled GEMM
# makes when it is called, on a device or on the architecture of a GPU that need not be here.


_IN_BF16 = Backend("bf16", "the recipe casts nothing here: the GEMM runs in the autocast dtype")


def gemm_backends(recipe: Recipe, place: Place, *, grouped: bool = False) -> dict[str, Backend]:
    """The backends of y, dx and dw; "bf16" for a GEMM without casts, which runs in the autocast dtype. Of the `grouped`
    GEMMs of experts none for a recipe that they cannot run."""
    if grouped and not runs_experts(recipe):
        return {}
    return {
        name: _IN_BF16 if gemm is None else product_backend(gemm.a, gemm.b, place, grouped=grouped)
        for name, gemm in (("y", recipe.y), ("dx", recipe.dx), ("dw", recipe.dw))
    }


def runs_experts(recipe: Recipe) -> bool:
    """True if experts can run the recipe: a fusable one, or one with scales along the reduction in its FP8 GEMMs.

    Such a recipe quantizes the matrices for y and for dx, so it must round them to nearest.
    """
    if recipe.fusable is not None:
        return True
    gemms = [gemm for gemm in (recipe.y, recipe.dx, recipe.dw) if gemm is not None]
    matrices = [gemm.b for gemm in (recipe.y, recipe.dx) if gemm is not None]
    in_groups = all(takes_blocks(gemm.a.granularity, gemm.b.granularity) for gemm in gemms)
    return len(gemms) > 0 and in_groups and all(cast.rounding == "nearest" for cast in matrices)


def product_backend(a: Cast, b: Cast, place: Place, *, grouped: bool = False) -> Backend:
    """The backend of a product of operands that are cast by `a` and `b`."""
    left, right = ("e4m3" if cast.format == "e2m1" else cast.format for cast in (a, b))  # E4M3 holds all of E2M1
    e8m0 = a.scale.startswith("e8m0"), b.scale.startswith("e8m0")
    if grouped:
        return find_grouped_backend(place, (left, right), a.granularity, b.granularity, e8m0=all(e8m0))
    return find_backend(place, a.granularity, b.granularity, (left, right), e8m0=e8m0)


def takes_fnuz(place: Place) -> bool:
    """True if the GEMMs of a device, or of a GPU that need not be here, take the FNUZ formats: those of an MI300."""
    return (isinstance(place, GpuArchitecture) or place.type == "cuda") and find_architecture(place).key == "mi300"


def in_formats_of(place: Place, recipe: Recipe) -> Recipe:
    """A preset in the eight-bit formats of a GPU: FNUZ on an MI300."""
    return fnuz(recipe) if recipe.quantized and takes_fnuz(place) else recipe


def choose_recipe(recipe: str | Path | Recipe, place: Place) -> Recipe:
    """The recipe of `get_recipe`, or `pick_recipe` for "auto". A preset on an MI300 gets that GPU's formats."""
    if recipe == "auto":
        return pick_recipe(place)
    found = get_recipe(recipe)
    return in_formats_of(place, found) if isinstance(recipe, str) and recipe in PRESETS else found


def find_fix(recipe: Recipe, place: Place) -> str:
    """The change after which a recipe runs in FP8 at `place`; "" if it runs, or if no recipe does."""
    if _runs(recipe, place):
        return ""
    try:
        best = pick_recipe(place)
    except ValueError:
        return ""
    if takes_fnuz(place) and not _has_fnuz(recipe) and _runs(fnuz(recipe), place):
        return "write the formats e4m3fnuz and e5m2fnuz in the recipe's file, in place of e4m3 and e5m2"
    if _has_fnuz(recipe) and not takes_fnuz(place):
        return "write the formats e4m3 and e5m2 in the recipe's file, in place of e4m3fnuz and e5m2fnuz"
    return f"take the recipe {best.name.removesuffix('_fnuz')}"


def pick_recipe(place: Place) -> Recipe:
    """`rowwise` if the GPU has its GEMMs, else `tensorwise`, on an MI300 in FNUZ formats; a ValueError without both."""
    for recipe in (in_formats_of(place, rowwise()), in_formats_of(place, tensorwise())):
        if _runs(recipe, place):
            return recipe
    raise ValueError(
        f"{find_architecture(place).name} has no FP8 GEMM: FP8 needs an Ada, Hopper or Blackwell GPU of NVIDIA, or an "
        "MI300 or MI350 of AMD; train in BF16 here"
    )


def _runs(recipe: Recipe, place: Place) -> bool:
    return all(backend.name != "none" for backend in gemm_backends(recipe, place).values())


def _has_fnuz(recipe: Recipe) -> bool:
    casts = [cast for gemm in (recipe.y, recipe.dx, recipe.dw) if gemm is not None for cast in (gemm.a, gemm.b)]
    return any(cast.format.endswith("fnuz") for cast in casts)
