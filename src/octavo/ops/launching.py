"""Launches of Triton kernels: when they can run, on which GPU, in which tiles, and compiled ahead."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from importlib.util import find_spec
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from octavo.numerics.qtensor import TENSOR, Cast, Granularity, QTensor

# ---- Launches of Triton kernels, and the memory of their results, in eager code.
#
# `kernel[grid](...)` works out at each call which compiled kernel its arguments need, which takes most of the host's
# time for a launch. Here the compiled kernel that the first such call returns is cached, under everything that decided
# its choice: dtype and alignment of the pointers, properties of the integers, the constants, the grid and the device. A
# later call with the same key calls its launcher as Triton and Inductor do, with addresses in place of tensors: for a
# tensor, the launcher asks Python and the driver for the address. Where the launcher takes other arguments,
# `kernel[grid](...)` runs as before. Triton's hooks of launches, which its profiler Proton sets, see the first launch
# of each key only.


TENSORS = frozenset((Tensor, Parameter))  # those that hold numbers; subclasses may not
MOST = 10_000  # launches cached at a time; a grid depends on the number of tokens
_cached: dict[tuple[Any, ...], tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...], Any]] = {}
_empty_cuda = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)  # of Inductor: a third of the time
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def allocate(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
    """A contiguous tensor on the device of `like`, the current one, not initialized; in its dtype by default."""
    dtype = like.dtype if dtype is None else dtype
    if _empty_cuda is None or type(like) not in TENSORS or not like.is_cuda:
        return like.new_empty(shape, dtype=dtype)
    shape = tuple(shape)  # not a torch.Size, which the function refuses
    return _empty_cuda(shape, _strides(shape), dtype)


@lru_cache(maxsize=4096)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(max(size, 1) for size in shape[i + 1 :]) for i in range(len(shape)))


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Launch `kernel`, a function of `triton.jit`, on `grid`, with tensors, integers and None for its first parameters.

    The first is a tensor on the current device, or descriptors of tensors stand before all others. `constants` are its
    last parameters, and options of the compiler.
    """
    descriptors = () if isinstance(args[0], Tensor) else [arg for arg in args if hasattr(arg, "block_shape")]
    tensors = (*(each.base for each in descriptors), *args[len(descriptors) :]) if descriptors else args
    device = tensors[0].get_device()
    kinds, values = _read(tensors, device)
    for i, each in enumerate(descriptors):  # Triton encodes them at each launch
        kinds[i], values[i] = (kinds[i], *each.block_shape), each
    key = (id(kernel), device, grid, *kinds, *constants.values())
    found = _cached.get(key)
    if found is not None:
        run, handles, rest, _ = found
        try:
            run(_current_stream(device), *handles, None, None, None, *values, *rest)
        except (AttributeError, TypeError):  # a Triton whose launcher takes other arguments
            kernel[grid](*args, **constants)
        return
    if (compilation := running.get()) is not None:
        compilation.add(kernel, device, (id(kernel), *kinds, *constants.values()), grid, args, constants)
        return
    compiled = kernel[grid](*args, **constants)
    if type(compiled).__name__ == "CompiledKernel":  # Triton's interpreter returns None
        if len(_cached) >= MOST:
            _cached.clear()
        rest = tuple(constants[name] for name in kernel.arg_names[len(args) :])
        handles = compiled.function, compiled.packed_metadata
        # With the kernel, so that no other one gets its id. Triton's own hash of a kernel takes longer.
        _cached[key] = partial(compiled.run, *(*grid, 1, 1)[:3]), handles, rest, kernel


def _read(args: tuple[Any, ...], device: int) -> tuple[list[Any], list[Any]]:
    """The properties of each argument that decide Triton's choice of a compiled kernel, and the arguments for its
    launcher, tensors as addresses."""
    kinds: list[Any] = []
    values: list[Any] = []
    for arg in args:
        if arg is None:
            kinds.append(None)
            values.append(None)
        elif type(arg) is int:
            kinds.append(_kind_of(arg))
            values.append(arg)
        else:
            address = arg.data_ptr()
            kinds.append((arg.dtype,) if address % 16 else arg.dtype)
            values.append(address)
            if arg.get_device() != device:
                raise ValueError(
                    f"the tensors of an operation must be on one device, got cuda:{device} and {arg.device}"
                )
    return kinds, values


@lru_cache(maxsize=4096)
def _kind_of(number: int) -> Any:
    """The properties of an integer that decide Triton's choice."""
    return number if number == 1 else (number % 16 == 0, -(2**31) <= number < 2**31, number < 2**63)


# ---- Compiling Triton kernels in several threads, before they are first launched.
#
#     with compile_only():
#         model(tokens)       no kernel of ours runs: each is compiled for its arguments, and results hold any numbers
#
# A kernel is compiled at its first launch otherwise, one after the other, at 0.5 to 1 s each. Most of that time passes
# in LLVM and in ptxas, without Python's lock. Triton saves compiled kernels on disk, for later processes.


LOG = logging.getLogger(__name__)
MOST_THREADS = 16


class Compilation:
    """Kernels that threads compile, each once."""

    def __init__(self, threads: Executor) -> None:
        self.threads = threads
        self.known: set[tuple[Any, ...]] = set()

    def add(self, kernel: Any, device: int, signature: tuple[Any, ...], grid: Any, args: Any, constants: Any) -> None:
        """Compile `kernel` for these arguments. An error is not reported: it comes again at the first launch."""
        if signature not in self.known:
            self.known.add(signature)
            if (caches := getattr(kernel, "device_caches", None)) is not None:
                _ = caches[device]  # made here: of threads that make it at once, one would keep its own
            self.threads.submit(_compile, kernel, device, grid, args, constants)


running: ContextVar[Compilation | None] = ContextVar("running", default=None)  # in this thread


@contextmanager
def compile_only() -> Iterator[None]:
    """In this thread, compile kernels instead of launching them. At the end, wait until all are compiled."""
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as threads:
        token = running.set(Compilation(threads))
        try:
            yield
        finally:
            running.reset(token)


def _compile(kernel: Any, device: int, grid: tuple[int, ...], args: Any, constants: dict[str, Any]) -> None:
    try:
        with torch.cuda.device(device):
            compiled = kernel.warmup(*args, grid=grid, **constants)
            _ = compiled.run  # loads the kernel on the GPU, and makes its launcher, which the host's compiler compiles
    except Exception:
        LOG.debug("%s was not compiled", kernel, exc_info=True)


# ---- When the Triton kernels can run, and the sizes of their tiles.
#
# Triton comes with the CUDA builds of PyTorch. Only the modules whose names end in `kernel` import it. The operations
# import these inside functions, when the first CUDA tensor comes.


FORMATS = frozenset(("e4m3", "e5m2"))  # those that Triton's conversions round and saturate as PyTorch's do
LONGEST_ROW = 32768  # elements that one program can hold in registers
HAS_TRITON = find_spec("triton") is not None  # found at import: torch.compile cannot trace the search


@cache
def has_kernels(device: Place, lowest: tuple[int, int] = (8, 9)) -> bool:
    """True if Triton kernels run on `device`: NVIDIA GPUs from the compute capability `lowest`. Most kernels need Ada
    (8.9), the first that converts to eight bits."""
    if isinstance(device, GpuArchitecture):
        return device in NVIDIA and device.lowest >= lowest
    if device.type != "cuda" or torch.version.hip is not None or not HAS_TRITON:
        return False
    return torch.cuda.get_device_capability(device) >= lowest


@cache
def is_hopper(device: torch.device) -> bool:
    """True for a Hopper, the only GPU on whose copy engine (TMA) tiles are loaded by descriptors."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


@cache
def some_gpu_rounds_twice() -> bool:
    """True if a GPU here is an Ada (8.9), for which Triton 3.6 converts float32 to FP8 through float16."""
    return any(torch.cuda.get_device_capability(i) == (8, 9) for i in range(torch.cuda.device_count()))


@cache
def multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors of a GPU. The cache saves the search for its properties, at every launch."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def shared_memory(device: torch.device) -> int:
    """The bytes of shared memory that one program may have on a GPU."""
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. (`triton.cdiv` takes microseconds, since it serves kernels too.)"""
    return -(-a // b)


def power_of_two_above(n: int) -> int:
    """The smallest power of two that is at least `n`: Triton's tiles have such sizes."""
    return 1 << max(n - 1, 0).bit_length()


@lru_cache(maxsize=4096)
def row_tile(k: int) -> tuple[int, int, int]:
    """(BLOCK_K, BLOCK_M, warps) of a program over rows of `k` elements: the fastest on an H100."""
    block = max(power_of_two_above(k), 16)
    rows = max(1, 4096 // block)
    return block, rows, 8 if block <= 8192 else block // 1024


def converts(x: Tensor, *formats: str) -> bool:
    """True if the kernels run on `x`'s device and convert to these formats, and `x` is not empty."""
    return x.numel() > 0 and FORMATS.issuperset(formats) and has_kernels(x.device)


def runs_fused(x: Tensor, columns: int, *formats: str) -> bool:
    """True if the fused kernels run on `x`'s device, over rows of `columns` elements, to these formats."""
    return columns <= LONGEST_ROW and converts(x, *formats)


def quantizes_rows(x: Tensor, columns: int, fmt: str) -> bool:
    """True if the kernels that quantize rows of `columns` elements to the format `fmt` run on `x`'s device. int8 needs
    no conversion to FP8, so an Ampere runs it too."""
    if fmt == "int8":
        return x.numel() > 0 and columns <= LONGEST_ROW and has_kernels(x.device, (8, 0))
    return runs_fused(x, columns, fmt)


def fits(cast: Cast, columns: int) -> bool:
    """True if the registers of a program hold the rows (of `columns` elements) or the blocks of this cast."""
    if cast.by_row:
        return columns <= LONGEST_ROW and not (cast.relative_floor and cast.scale == "e8m0")
    if cast.granularity == TENSOR:
        return not cast.relative_floor
    rows, cols = cast.granularity.rows or 1, cast.granularity.cols or 1
    return not cast.relative_floor and power_of_two_above(rows) * power_of_two_above(cols) <= LONGEST_ROW


# ---- The architectures of GPUs, by which PyTorch chooses its FP8 GEMMs.
#
# AMD's compute capability is the number of the instruction set, gfx942 being (9, 4).


@dataclass(frozen=True)
class GpuArchitecture:
    """A family of GPUs that run the same GEMMs."""

    key: str  # the name in tables and options
    name: str  # for people, with an example
    lowest: tuple[int, int]  # compute capability that belongs to it
    measured: bool = False  # whether Octavo's speed and results were measured on such a GPU


# A GPU belongs to the last architecture whose lowest compute capability it reaches.
NVIDIA = (
    GpuArchitecture("older", "NVIDIA before Ampere", (0, 0)),
    GpuArchitecture("ampere", "Ampere (A100, RTX 30)", (8, 0)),
    GpuArchitecture("ada", "Ada (L40S, RTX 40)", (8, 9)),
    GpuArchitecture("hopper", "Hopper (H100, H200)", (9, 0), measured=True),
    GpuArchitecture("blackwell", "Blackwell (B200)", (10, 0)),
    GpuArchitecture("rtx_blackwell", "RTX Blackwell (RTX 50)", (12, 0)),
    GpuArchitecture("unknown", "an NVIDIA GPU newer than Blackwell", (13, 0)),
)
AMD = (
    GpuArchitecture("amd_older", "AMD before MI300", (0, 0)),
    GpuArchitecture("mi300", "AMD MI300 (gfx942)", (9, 4)),
    GpuArchitecture("mi350", "AMD MI350 (gfx950)", (9, 5)),
    GpuArchitecture("amd_other", "another AMD GPU", (9, 6)),
    GpuArchitecture("rdna4", "AMD RDNA 4 (gfx120x)", (12, 0)),
    GpuArchitecture("amd_newer", "an AMD GPU newer than RDNA 4", (12, 1)),
)
Place = torch.device | GpuArchitecture  # a GPU that is here, or one that need not be
ARCHITECTURES = {each.key: each for each in NVIDIA + AMD}


def find_architecture(place: Place) -> GpuArchitecture:
    """The architecture of a GPU that is here, or the one given."""
    if isinstance(place, GpuArchitecture):
        return place
    return architecture_of(torch.cuda.get_device_capability(place), amd=torch.version.hip is not None)


def architecture_of(capability: tuple[int, int], *, amd: bool = False) -> GpuArchitecture:
    """The architecture of this compute capability."""
    known = AMD if amd else NVIDIA
    return [known[0], *(each for each in known if each.lowest <= capability)][-1]


# ---- Tensors that operations take together.


class Operands(NamedTuple):
    """Both operands of a scaled GEMM, a [M, K] and b [N, K] or [E, N, K], contracted over their last axis."""

    a: Tensor
    b: Tensor
    scale_a: Tensor
    scale_b: Tensor
    by_a: Granularity
    by_b: Granularity

    @classmethod
    def of(cls, a: QTensor, b: QTensor) -> Operands:
        return cls(a.data, b.data, a.scale, b.scale, a.granularity, b.granularity)


class Cache(NamedTuple):
    """Keys and values [B, G, S, D] with their scales [G], and the tokens that are there (`ops.cached_attention`)."""

    keys: Tensor
    values: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    length: Tensor


HEAD_DIM = 128  # of FP8 attention: the only one whose gradient cuDNN 9.19 has
P_SCALE = 2.0**-8  # of its probabilities, which are at most 1; a power of two, so that it rounds nothing


class Heads(NamedTuple):
    """Queries [B, H, T, D], and keys and values [B, G, S, D], of which H / G heads of queries share one."""

    q: Tensor
    k: Tensor
    v: Tensor


class Turn(NamedTuple):
    """Rotary embedding of heads: cos and sin [B or 1, T, D], and a norm by weights [D] that comes first."""

    cos: Tensor
    sin: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float


class Factors(NamedTuple):
    """What rows are multiplied by: the lines `group` [M] of column_scale [E, K], then the mantissas of mantissa_of
    [M, 1], or these times the weights [T, top_k] of the rows' slots. Each is None for ones."""

    column_scale: Tensor | None
    group: Tensor | None
    mantissa_of: Tensor | None
    weight: Tensor | None


class RowBatch:
    """Matrices [M_i, K] of one dtype and device, contiguous, one at least; M_i may be 0. Row r of matrix i is row
    `starts[i]` + r of the batch."""

    def __init__(self, matrices: Sequence[Tensor], starts: Sequence[int]) -> None:
        self.matrices, self.starts = list(matrices), list(starts)
        self.addresses = [m.data_ptr() for m in matrices]
        self.aligned = all(address % 16 == 0 for address in self.addresses)
        self.longest = max(m.shape[0] for m in matrices)
        self.table: Tensor | None = None  # on a GPU, [matrices, 3] int64: address, M_i and start of each
        if matrices[0].is_cuda:
            rows = [[m.data_ptr(), m.shape[0], start] for m, start in zip(matrices, starts, strict=True)]
            self.table = torch.tensor(rows, dtype=torch.int64, device=matrices[0].device)
