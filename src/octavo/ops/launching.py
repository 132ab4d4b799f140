"""Launches of Triton kernels: repeated with other tensors, when they can run, in which tiles, and compiled ahead."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from octavo.numerics.qtensor import TENSOR, Cast, Granularity, QTensor

# ---- Launches of Triton kernels, and the memory of their results, in eager code.


recording_stream = cache(torch.cuda.Stream)  # of a GPU; PyTorch's own is of the GPU that recorded the first graph
TENSORS = frozenset((Tensor, Parameter))  # those that hold numbers; subclasses may not


def allocate(like: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None, *, zero: bool = False) -> Tensor:
    """A contiguous tensor on the device of `like`, zeros or not initialized, in its dtype by default. A call in which
    PyTorch writes to it, and not a kernel, is not repeated."""
    make = like.new_zeros if zero else like.new_empty
    made: Tensor = make(tuple(shape), dtype=like.dtype if dtype is None else dtype)
    if (call := recording.get()) is not None:
        call.note_memory(made, zero)
    return made


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Launch `kernel`, a function of `triton.jit`, on `grid`. Its first parameters get tensors on the current device,
    descriptors of such, integers and None. `constants` are its last parameters, and options of the compiler."""
    devices = {arg.device for arg in args if isinstance(arg, Tensor)}
    if len(devices) > 1:
        raise ValueError(f"the tensors of an operation must be on one device, got {' and '.join(map(str, devices))}")
    if starts_early() and "wait_for_inputs" in kernel.fn.__code__.co_names:
        constants["launch_pdl"] = True
    if (compilation := running.get()) is not None:
        compilation.add(kernel, grid, args, constants)
        return
    compiled, call = kernel[grid](*args, **constants), recording.get()
    if call is not None and type(compiled).__name__ == "CompiledKernel":  # Triton's interpreter returns None
        rest = [constants[name] for name in kernel.arg_names[len(args) :]]
        handles = compiled.function, compiled.packed_metadata, None, None, None  # the last are hooks
        call.note_launch(partial(compiled.run, *(*grid, 1, 1)[:3]), [*handles, *args, *rest])


# ---- Calls of an operation, repeated with other tensors.
#
# `kernel[grid](...)` works out at each launch which compiled kernel its arguments need, which takes most of the host's
# time. But what a call of an operation allocates and launches follows from the kind of its arguments: dtypes, sizes,
# strides and alignment of tensors, and all that is no tensor. So one call of each kind is recorded. The next ones
# allocate the same, and call the launchers of the same compiled kernels, as Triton and Inductor do, with addresses in
# place of tensors. They need no checks, no choice of tiles and no arithmetic of sizes.
#
# A call that did anything else is not repeated: no kernel ran, one got a tensor that is neither an argument nor from
# `allocate`, PyTorch wrote to one from `allocate`, or a result is a tensor that no kernel got. Triton's hooks of
# launches, which its profiler Proton sets, see the first call of each kind only.


MOST = 10_000  # calls recorded at a time; their sizes depend on the number of tokens
_recorded: dict[tuple[Any, ...], Recording | None] = {}  # None for calls that are not repeated
recording: ContextVar[Recording | None] = ContextVar("recording", default=None)  # of the call that this thread computes
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def repeat(name: str, values: Sequence[Any], compute: Callable[..., Any], *args: Any) -> Any:
    """compute(*args), the results of an operation for `values`, which begin with a tensor on the current device."""
    if recording.get() is not None:  # a part of another call
        return compute(*args)
    kinds: list[Any] = [name]
    tensors: list[Any] = []
    addresses: list[int] = []
    for value in values:
        if type(value) not in TENSORS:
            kinds.append(value)
            continue
        tensors.append(value)
        addresses.append(address := value.data_ptr())
        kinds += value.dtype, value.shape, value.stride(), value.get_device(), address % 16
    if len(set(addresses)) < len(addresses):
        kinds += map(addresses.index, addresses)  # which of them are the same
    key = tuple(kinds)
    if (known := _recorded.get(key)) is not None:
        try:
            return known.repeat(tensors, addresses)
        except (AttributeError, TypeError):  # a Triton whose launcher takes other arguments
            _recorded[key] = None
    if key in _recorded:
        return compute(*args)
    token = recording.set(call := Recording(tensors))
    try:
        results = compute(*args)
    finally:
        recording.reset(token)
    if running.get() is None:
        if len(_recorded) >= MOST:
            _recorded.clear()
        _recorded[key] = call if call.ends(results) else None
    return results


class Recording:
    """What a call of an operation with these tensors allocates, launches and returns."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.known = list(tensors)  # the arguments, then what is allocated; none when the call has ended
        self.memory: list[Callable[[], Tensor]] = []
        self.launches: list[tuple[Callable[..., Any], list[Any], list[tuple[int, int]]]] = []
        self.results: list[tuple[int, torch.dtype | None]] = []  # places of tensors, and dtypes of views

    def note_memory(self, made: Tensor, zero: bool) -> None:
        self.known.append(made)
        guards: Any = torch._C._dynamo.guards  # its function of Inductor takes a third of the time of `torch.empty`
        empty = partial(guards._empty_strided_cuda, tuple(made.shape), made.stride(), made.dtype)
        zeros = partial(torch.zeros, made.shape, dtype=made.dtype, device=made.device)
        self.memory.append(zeros if zero else empty)

    def note_launch(self, run: Callable[..., Any], values: list[Any]) -> None:
        pointers = []
        for at, arg in enumerate(values):
            base = arg if isinstance(arg, Tensor) else getattr(arg, "base", None)
            if base is not None:  # a tensor, or a descriptor of one, which Triton encodes at each launch
                pointers.append((at, self.place(base)))
                values[at] = None if base is arg else partial(SimpleNamespace, **vars(arg) | {"base": None})
        self.launches.append((run, values, pointers))

    def place(self, t: Tensor) -> int:
        """The number of the known tensor with the address of `t`; -1 for none."""
        return next((i for i, known in enumerate(self.known) if known.data_ptr() == t.data_ptr()), -1)

    def ends(self, results: Any) -> bool:
        """True if the call, which gave these results, can be repeated."""
        got = {place for _, _, pointers in self.launches for _, place in pointers}
        memory = self.known[len(self.known) - len(self.memory) :]
        written = any(made._version for made in memory if not made.is_inference())  # by PyTorch: kernels count nothing
        fits = len(self.launches) > 0 and -1 not in got and not written
        for result in results if isinstance(results, tuple) else (results,):
            place, dtype = -1, None
            if result is not None:
                place = self.place(result)
                made = self.known[place]
                dtype = None if made.dtype == result.dtype else result.dtype
                fits &= (place in got or made.numel() == 0) and made.shape == result.shape
            self.results.append((place, dtype))
        self.known = []
        return fits

    def repeat(self, tensors: list[Any], addresses: list[int]) -> Any:
        """The results for other tensors of the same kind."""
        made = [make() for make in self.memory]
        tensors += made
        addresses += [each.data_ptr() for each in made]
        stream = _current_stream(tensors[0].get_device())
        for run, template, pointers in self.launches:
            values = template.copy()
            for at, place in pointers:
                describe = template[at]
                values[at] = addresses[place] if describe is None else describe(base=tensors[place])
            run(stream, *values)
        tensors.append(None)  # the place -1
        found = [tensors[place] if dtype is None else tensors[place].view(dtype) for place, dtype in self.results]
        return found[0] if len(found) == 1 else tuple(found)


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

    def add(self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        """Compile `kernel` for these arguments. An error is not reported: it comes again at the first launch."""
        device = next(getattr(arg, "base", arg) for arg in args if arg is not None).get_device()
        signature = id(kernel), *map(_kind_of, args), *constants.values()
        if signature not in self.known:
            if HAS_TRITON and not self.known:
                from triton.runtime.cache import triton_key

                triton_key()  # hashes Triton's 400 MB once a process; threads that begin at once would each do it
            self.known.add(signature)
            if (caches := getattr(kernel, "device_caches", None)) is not None:
                _ = caches[device]  # made here: of threads that make it at once, one would keep its own
            self.threads.submit(_compile, kernel, device, grid, args, constants)


def _kind_of(arg: Any) -> Any:
    """The properties of an argument that decide Triton's choice of a compiled kernel."""
    if isinstance(arg, int):
        return arg if arg == 1 else (arg % 16 == 0, -(2**31) <= arg < 2**31, arg < 2**63)
    if isinstance(arg, Tensor):
        return arg.dtype, arg.data_ptr() % 16 == 0
    return arg if arg is None else (_kind_of(arg.base), *arg.block_shape)


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


def is_hopper(device: torch.device) -> bool:
    """True for a Hopper, the only GPU on whose copy engine (TMA) tiles are loaded by descriptors."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


@cache
def starts_early() -> bool:
    """True if each GPU here has programmatic dependent launch, from Hopper on: see `wait_for_inputs` of the kernels."""
    return torch.version.hip is None and min(_capabilities(), default=(0, 0)) >= (9, 0)


@cache
def some_gpu_rounds_twice() -> bool:
    """True if a GPU here is an Ada (8.9), for which Triton 3.6 converts float32 to FP8 through float16."""
    return (8, 9) in _capabilities()


def _capabilities() -> list[tuple[int, int]]:
    """The compute capability of each GPU here."""
    return [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]


def multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


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


def row_tile(k: int) -> tuple[int, int, int]:
    """(BLOCK_K, BLOCK_M, warps) of a program over rows of `k` elements: the fastest on an H100."""
    block = max(power_of_two_above(k), 16)
    rows = max(1, 4096 // block)
    return block, rows, 8 if block <= 8192 else block // 1024


def converts(x: Tensor, *formats: str) -> bool:
    """True if the kernels run on `x`'s device and convert to these formats, and `x` is not empty."""
    return x.numel() > 0 and FORMATS.issuperset(formats) and has_kernels(x.device)


def runs_fused(x: Tensor, columns: int, *formats: str) -> bool:
    """True if the kernels over rows of `columns` elements run on `x`'s device, to these formats. int8 needs no
    conversion to FP8, so an Ampere runs it too."""
    if formats == ("int8",):
        return x.numel() > 0 and columns <= LONGEST_ROW and has_kernels(x.device, (8, 0))
    return columns <= LONGEST_ROW and converts(x, *formats)


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
    """What rows are multiplied by: the lines `group` of column_scale, then the mantissas of mantissa_of, or these times
    the weights of the rows' slots. Each is None for ones. Rows of experts have slots (`ops.permutation`)."""

    column_scale: Tensor | None = None  # float32 [E, K]
    group: Tensor | None = None  # int32 [M], from 0 to E - 1
    mantissa_of: Tensor | None = None  # float32 [M, 1]
    weight: Tensor | None = None  # float32 [T, top_k]
    slot: Tensor | None = None  # int32 [M], of each row
    row: Tensor | None = None  # int32 [T, top_k], of each slot, or -1


class Around(NamedTuple):
    """What is computed around the product of one row: a root-mean-square norm by a weight [K] before it, and SwiGLU
    after it, where the rows of w are those of gate, then of up."""

    norm: Tensor | None = None
    eps: float = 0.0
    gated: bool = False


ALONE = Around()
LEAST_WEIGHT = 2.0**-24  # in place of a smaller weight of a slot in a backward pass, which divides by it


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
