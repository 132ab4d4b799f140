"""The kernels, compiled by ptxas for GPUs that are not here, fit into their shared memory."""

from collections.abc import Iterator
from importlib import import_module
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, ones
from torch._higher_order_ops import triton_kernel_wrap

from octavo.numerics import ROW, TENSOR, Cast, block, group
from octavo.ops.launching import Around, Cache, Factors, Operands, Turn

pytest.importorskip("triton")
pytestmark = [pytest.mark.triton, pytest.mark.skipif(torch.version.hip is not None, reason="NVIDIA's compiler")]

M, K = 64, 32768
HALF, E4M3, E5M2, INT8 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
SMALL = [89, 120]  # with FP8 on tensor cores
FP8 = [89, 90, 100, 120]
CASTS = [
    Cast(),
    Cast("e5m2", scale="pow2"),
    Cast(relative_floor=2**-8),
    Cast(granularity=TENSOR),
    Cast(granularity=group(128)),
    Cast(granularity=block(128, 128)),
    Cast(granularity=group(32), scale="e8m0"),
]
Call = tuple[str, str, tuple]  # a file of kernels, a function of it, and its arguments


# The largest shared memory of a program, in bytes: CUDA C++ Programming Guide, "Compute Capabilities".
SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}


class Compiled(list):
    """The kernels that were compiled for a GPU of this capability."""

    def __init__(self, capability: int) -> None:
        self.limit = SHARED_MEMORY[capability]

    @property
    def shared(self) -> list[int]:
        """Bytes of shared memory of a program of each kernel."""
        return [kernel.metadata.shared for kernel in self]

    def fit(self) -> bool:
        return bool(self) and max(self.shared) <= self.limit


def compile_for(capability: int, module, monkeypatch: pytest.MonkeyPatch) -> Compiled:
    """From here on the launches of a module of kernels compile for a GPU of this capability, with ptxas. The kernels
    are added to the list that this returns."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    compiled, target = Compiled(capability), GPUTarget("cuda", capability, 32)
    needed = {
        "get_current_target": lambda: target,
        "get_current_device": lambda: 0,
        "get_current_stream": lambda device: 0,
    }
    monkeypatch.setattr(driver, "_active", SimpleNamespace(**needed))

    def launcher(kernel, grid):
        kernel.device_caches.clear()
        return lambda *args, **constants: compiled.append(kernel.warmup(*args, grid=grid, **constants))

    for each in ("norm", "gemm", module.__name__.rpartition(".")[2]):  # others launch kernels of the first two
        monkeypatch.setattr(import_module(f"octavo.ops.kernels.{each}"), "launcher", launcher)
    monkeypatch.setattr(module, "multiprocessors", lambda device: 128, raising=False)
    monkeypatch.setattr(module, "shared_memory", lambda device: compiled.limit, raising=False)
    return compiled


def on_cpu(*shape: int, dtype: torch.dtype = E4M3) -> Tensor:
    """Zeros for the arguments of a kernel that is compiled and not launched."""
    return torch.zeros(shape, dtype=dtype)


def rows(columns: int = K) -> Tensor:
    return on_cpu(M, columns, dtype=HALF)


def calls_of_training() -> Iterator[Call]:
    """Over wide rows."""
    place = torch.zeros(2 * M, dtype=torch.int32)
    yield "quantization", "quantize_transposed", (rows(), Cast(granularity=group(128)), None, place)
    for long_place in (None, torch.zeros(1024, dtype=torch.int32)):
        yield "quantization", "quantize_transposed", (on_cpu(1024, 256, dtype=HALF), Cast(), None, long_place)
    for seed in (None, torch.tensor(0)):
        for cast in CASTS:
            yield "quantization", "quantize", (rows(), cast, None, None, seed, 1)
        yield "quantization", "quantize_scaled", (rows(), ones(1, 1), Cast().fmt, seed)
        yield "quantization", "quantize_transposed", (rows(), Cast(granularity=group(128)), seed, None)
    x, weight, row = rows(8192), ones(8192), ones(M, 1)
    for center in (False, True):
        yield "norm", "norm_quantize", (x, x, weight, weight if center else None, 1e-5, Cast(), center, True)
        yield "norm", "norm_backward", (x, x, weight, row, row, x, center)
    h, wide, slot = rows(14336), rows(2 * 14336), torch.zeros(M, 2, dtype=torch.int32)
    for kind, u in (("swiglu", wide), ("geglu", wide), ("gelu", h)):
        yield "activation", "activation_quantize", (u, kind, None, True, Cast())
        for number, where, weight in ((None,) * 3, (slot.view(-1), slot, ones(M, 2))):
            factors = Factors(ones(14336), number, row, weight, number, where)
            given = h, u, kind, Cast(scale="pow2"), factors, Cast(), row, True
            yield "activation", "activation_backward", given
    shift = torch.zeros(M, dtype=torch.int32)
    yield "transposition", "transpose", (on_cpu(M, 4096), shift, None)
    for s_w in (None, ones(4096, 1)):
        yield "transposition", "fold_scales", (row, row, s_w, None)
    yield "transposition", "fold_scales", (row, row, ones(8, 4096, 1), torch.zeros(8, dtype=torch.int32))
    for count in (1, 2, 3):
        stack = [rows(4096)] * count
        yield "quantization", "quantize_stack", (stack, Cast(relative_floor=2**-8), True)
        yield "quantization", "requantize", (stack, ones(count * M, 1), Cast().fmt, ROW, True)
    yield "largest", "index_of_largest", (on_cpu(M, 128256, dtype=HALF),)
    for columns, dtype in product((64, 4096, 16384), (HALF, torch.float32)):
        yield "rotation", "rotate", (on_cpu(M, columns, dtype=dtype),)
    factors = Factors(ones(8, 4096), slot.view(-1), row, ones(M, 2), slot.view(-1))
    for given in (Factors(slot=slot.view(-1)), factors):
        yield "permutation", "gather_quantize", (rows(4096), Cast(), 2, given)
    yield "permutation", "combine", (rows(4096), slot, ones(M, 2))
    yield "permutation", "index_slots", (shift, shift.long(), 8)
    for given in (None, shift):
        yield "permutation", "index_groups", (torch.zeros(8, dtype=torch.int32), M, 8 * 128 + M, given, 2)
    for mean in (True, False):
        yield "rows", "add_rows", (rows(2048), torch.zeros(2048), mean)
    yield "rows", "word_sums", ([rows(2048), ones(5)],)
    labels, one = torch.zeros(M, dtype=torch.int64), torch.tensor(1.0)
    for cap in (0.0, 30.0):
        yield "softmax_loss", "cross_entropy", (rows(128_256), labels, one, None, 1.0, cap)
        gradient = rows(128_256), labels, one, ones(M), ones(M), 1.0, cap, True, True
        yield "softmax_loss", "cross_entropy_gradient", gradient
    yield "softmax_loss", "multiply", (rows(2048), one)


def calls_of_caches(capability: int) -> Iterator[Call]:
    """What writes keys and values: those before Ada store no E4M3."""
    clipped, angles = torch.zeros(2, dtype=torch.int64), on_cpu(1, 5, 128, dtype=HALF)
    k, turn = on_cpu(2, 2, 5, 128, dtype=HALF), Turn(angles, angles, ones(128), None, 1e-6)
    for dtype in (HALF, INT8, E4M3)[: 3 if capability >= 89 else 2]:
        stored, scale = on_cpu(2, 2, 64, 128, dtype=dtype), None if dtype == HALF else ones(2)
        cache = Cache(stored, stored, scale, scale, torch.tensor(5))
        yield "attention", "append_kv", (k, k, cache, clipped)
        qkv = (on_cpu(2, 5, heads * 128, dtype=HALF) for heads in (4, 2, 2))
        yield "rotary", "rotate_append", (*qkv, turn, cache, clipped, True)
    yield "rotary", "turn_heads", (*(on_cpu(2, heads, 5, 128, dtype=HALF) for heads in (4, 2)), angles, angles, True)


def calls_in_int8() -> Iterator[Call]:
    cast, x = Cast("int8"), rows(4096)
    yield "quantization", "quantize", (rows(14336), cast, None, None, None, 1)
    yield "norm", "norm_quantize", (x, x, ones(4096), None, 1e-5, cast, False, False)
    for kind in ("swiglu", "gelu"):
        yield "activation", "activation_quantize", (rows(2 * 14336), kind, None, True, cast)


def calls_of_products(capability: int) -> Iterator[Call]:
    """Those whose tiles are chosen by the shared memory."""
    native = capability >= 89
    offsets, packed, stack = torch.zeros(8, dtype=torch.int32), on_cpu(4096, 4096), on_cpu(8, 512, 4096)
    for m, by in product((1, 64, 128), (ROW, group(128))):
        given = on_cpu(m, 4096, dtype=HALF), packed, ones(by.scale_shape((4096, 4096))), by, None, None
        yield "weight_only", "weight_only_mm", (*given, Around(), native)
        if m == 1 and by == ROW:
            yield "weight_only", "weight_only_mm", (*given, Around(ones(4096), 1e-5, True), native)
    for m in (16, 8192):
        given = on_cpu(m, 4096, dtype=HALF), stack, ones(8, 512, 1), ROW, offsets
        yield "grouped_gemm", "grouped_weight_only_mm", (*given, native)
    for m, n, k in ((1, 4096, 4096), (64, 4096, 14336), (100, 333, 80), (512, 6150, 4096), (80, 1040, 64)):
        operands = Operands(on_cpu(m, k, dtype=INT8), on_cpu(n, k, dtype=INT8), ones(m, 1), ones(n, 1), ROW, ROW)
        yield "int8_gemm", "int8_mm", (operands, on_cpu(n, dtype=HALF), on_cpu(m, n, dtype=HALF), HALF)
    for heads, new, dim in ((16, 1, 128), (16, 300, 128), (2, 64, 256)):
        q, keys = on_cpu(2, heads, new, dim, dtype=HALF), on_cpu(2, 2, 600, dim, dtype=HALF)
        cache = Cache(keys, keys, None, None, torch.tensor(300))
        yield "attention", "ordered_attention", (q, cache, torch.zeros(2, dtype=torch.int32), 0.1)
    if not native:
        return
    for m, dtype in product((1, 64, 65), (E4M3, HALF)):
        a, b = on_cpu(m, 4096, dtype=dtype), on_cpu(1000, 4096, dtype=dtype)
        scales = (ones(m, 1), ones(1000, 1)) if dtype == E4M3 else (None, None)
        yield "gemm", "ordered_mm", (a, b, *scales, on_cpu(1000, dtype=HALF), on_cpu(m, 1000, dtype=HALF))
    for m in (1, 64):
        operands = Operands(on_cpu(m, 4096), packed, ones(m, 1), ones(4096, 1), ROW, ROW)
        yield "gemm", "scaled_mm", (operands, None, HALF, False)
    for m, size in product((1, 64, 4096), (32, 64, 128)):
        scales, by = ones(4096, 4096 // size), group(size)
        operands = Operands(on_cpu(m, 4096), packed, scales[:m], scales, by, by)
        yield "block_scaled_gemm", "scaled_mm", (operands, None, HALF)
    for m, pair in product((16, 256, 8192), ((group(128), block(128, 128)), (group(64),) * 2)):
        a, b = on_cpu(m, 4096), stack
        scales = (ones(by.scale_shape(t.shape)) for by, t in zip(pair, (a, b), strict=True))
        yield "grouped_gemm", "grouped_mm", (Operands(a, b, *scales, *pair), offsets, HALF, False)
    for size, m in product((32, 64, 128), (16, 4096)):
        a, b = on_cpu(m, 2048), packed[:, :2048]
        operands = Operands(a, b, ones(m, 2048 // size), ones(4096, 2048 // size), group(size), group(size))
        yield "grouped_gemm", "grouped_mm_dw", (operands, offsets, HALF, False)


def compiled_for(capability: int, file: str, monkeypatch: pytest.MonkeyPatch):
    """The kernels of a file, whose launches compile for a GPU of this capability."""
    kernel = import_module(f"octavo.ops.kernels.{file}")
    if file == "grouped_gemm":  # its tiles are chosen by others
        for other in ("block_scaled_gemm", "weight_only"):
            compile_for(capability, import_module(f"octavo.ops.kernels.{other}"), monkeypatch)
    return kernel, compile_for(capability, kernel, monkeypatch)


CALLS = [
    *((capability, *call) for capability in SMALL for call in calls_of_training()),
    *((capability, *call) for capability in (80, 86, *SMALL) for call in calls_of_caches(capability)),
    *((capability, *call) for capability in (80, 90) for call in calls_in_int8()),
    *((capability, *call) for capability in (80, 86, *FP8) for call in calls_of_products(capability)),
]


@pytest.mark.parametrize(
    ("capability", "file", "function", "args"), CALLS, ids=lambda v: "" if isinstance(v, tuple) else v
)
def test_they_fit(capability, file, function, args, monkeypatch):
    kernel, compiled = compiled_for(capability, file, monkeypatch)
    getattr(kernel, function)(*args)
    assert compiled.fit()


@pytest.mark.parametrize("capability", [80, 86, *SMALL])
@pytest.mark.parametrize(("dim", "queries"), [(128, 1), (256, 32)])
@pytest.mark.parametrize("dtype", [E4M3, INT8, HALF], ids=str)
def test_attention_over_a_cache_takes_what_its_tile_says(capability, dim, queries, dtype, monkeypatch):
    from octavo.ops import attention_tiles as tiles

    kernel, compiled = compiled_for(capability, "attention", monkeypatch)
    q, keys = on_cpu(1, queries, 1, dim, dtype=HALF), on_cpu(1, 1, 4096, dim, dtype=dtype)
    scale = None if dtype == HALF else ones(1)
    cache = Cache(keys, keys, scale, scale, torch.tensor([1]))
    kernel.cached_attention(q, cache, None, 1.0, native=capability >= 89)
    size, padded = keys.element_size(), max(queries, 16)
    tile = tiles.choose_tile(size, padded, dim, compiled.limit)
    assert compiled.shared[0] == tiles.shared_bytes(tile, size, padded, dim)
    assert compiled.fit()


def adds_in_registers(compiled) -> bool:
    """True if products are added to a sum: Triton may make one product of a sum and a product."""
    return "arith.addf" in compiled.asm["ttgir"]


@pytest.mark.parametrize("capability", FP8)
@pytest.mark.parametrize("m", [16, 64])
def test_promoted_sums_of_small_m_are_added_in_registers(capability, m, monkeypatch):
    kernel, compiled = compiled_for(capability, "gemm", monkeypatch)
    operands = Operands(on_cpu(m, 4096), on_cpu(4096, 4096), ones(m, 1), ones(4096, 1), ROW, ROW)
    monkeypatch.setattr(kernel, "choose", lambda *_: kernel.Tiling(64, 256, 4, 4))
    for fast in (False, True):
        kernel.scaled_mm(operands, None, HALF, fast)
    assert compiled.fit()
    assert [adds_in_registers(each) for each in compiled] == [True, False]


@pytest.mark.parametrize("capability", FP8)
@pytest.mark.parametrize("fast", [False, True], ids=["promoted", "fast"])
@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E5M2, E4M3)], ids=str)
def test_grouped_gemms_of_row_scales(capability, fast, formats, monkeypatch):
    kernel, compiled = compiled_for(capability, "grouped_gemm", monkeypatch)
    offsets, scale = torch.zeros(8, dtype=torch.int32), ones(8, 512, 1)
    for m in (16, 256, 16384):
        a, b = on_cpu(m, 4096, dtype=formats[0]), on_cpu(8, 512, 4096, dtype=formats[1])
        kernel.grouped_mm(Operands(a, b, ones(m, 1), scale, ROW, ROW), offsets, HALF, fast)
    a, b = on_cpu(512, 1024, dtype=formats[0]), on_cpu(2048, 1024, dtype=formats[1])
    for dtype in (HALF, torch.float32):
        kernel.grouped_mm_dw(Operands(a, b, scale, scale, ROW, ROW), offsets, dtype, fast)
    assert compiled.fit()
    assert [adds_in_registers(each) for each in compiled] == [not fast] * 5


def test_the_copy_engine_loads_the_tiles_of_short_groups(monkeypatch):
    kernel, compiled = compiled_for(90, "grouped_gemm", monkeypatch)
    monkeypatch.setattr(kernel, "take_descriptors", lambda a, b: True)
    for b in (on_cpu(8, 512, 4096), on_cpu(1024, 8, 4096).transpose(0, 1)):
        operands = Operands(on_cpu(4096, 4096), b, ones(4096, 1), ones(*b.shape[:2], 1), ROW, ROW)
        kernel.grouped_mm(operands, torch.zeros(8).int(), HALF, True)
    assert compiled.fit()
    assert all("cp.async.bulk.tensor" in each.asm["ptx"] for each in compiled)


@pytest.mark.parametrize("fast", [False, True], ids=["promoted", "fast"])
@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E5M2, E4M3)], ids=str)
def test_the_copy_engine_loads_and_stores_the_tiles_of_dw(fast, formats, monkeypatch):
    kernel, compiled = compiled_for(90, "grouped_gemm", monkeypatch)
    monkeypatch.setattr(kernel, "has_copy_engine", lambda dw: True)
    a, b = on_cpu(1536, 1024, dtype=formats[0]), on_cpu(2048, 1024, dtype=formats[1])
    scale = ones(8, 1536, 1)
    for dtype in (HALF, torch.float32):
        kernel.grouped_mm_dw(Operands(a, b, scale, scale, ROW, ROW), torch.zeros(8).int(), dtype, fast)
    assert compiled.fit()
    for each in compiled:
        text = each.asm["ptx"]
        assert "cp.async.bulk.tensor.2d.shared" in text
        assert "cp.async.bulk.tensor.3d.global" in text
        assert ("add.f32" in text) is not fast  # of products to promoted sums


def test_pytorch_finds_that_the_matrices_of_a_stack_are_only_read(monkeypatch):
    """Compiled code would copy what a kernel may write to."""
    kernel, _ = compiled_for(90, "quantization", monkeypatch)
    names = ("identify_accessed_tensors", "identify_mutated_tensors")  # torch 2.13, torch 2.11
    find = next(getattr(triton_kernel_wrap, name) for name in names if hasattr(triton_kernel_wrap, name))
    found = {}

    def launcher(launched, grid):
        def analyse(*args, **constants) -> None:
            given = dict(zip(launched.arg_names, args, strict=False)) | constants
            accesses = find(launched, {name: given[name] for name in launched.arg_names}, {})
            written = accesses if isinstance(accesses, list) else accesses.read_writes.writes
            found[launched.fn.__name__] = {getattr(each, "name", each) for each in written}

        return analyse

    monkeypatch.setattr(kernel, "launcher", launcher)
    kernel.quantize_stack([rows(64)] * 3, Cast(relative_floor=0.5), True)
    kernel.requantize([rows(64)] * 3, ones(3 * M, 1), Cast().fmt, ROW, True)
    written = {name: {"data_ptr", "scale_ptr"} for name in ("_row_kernel", "_floor_kernel")}
    assert found == written | {"_requantize_kernel": {"result_ptr"}}
