"""The scaled GEMM by tensor or row scales on Hopper, called at cuBLASLt itself: for eager code.

`torch._scaled_mm` makes descriptors and asks cuBLASLt for an algorithm at each call, which takes 85 µs of the host's
time. Here the first call of a shape does so, as PyTorch does (aten/src/ATen/cuda/CUDABlas.cpp, `scaled_gemm`), and
later ones only pass addresses. The key of a plan has all facts by which cuBLASLt chooses, so that the algorithm is
PyTorch's, and the bits are the same. The numbers are those of cublasLt.h.
"""

import ctypes
import os
import threading
from collections.abc import Callable
from ctypes import byref, c_float, c_int, c_int8, c_int64, c_size_t, c_uint64, c_void_p, sizeof
from functools import cache
from typing import Any

import torch
from torch import Tensor

from octavo.ops.dispatch import architecture_key
from octavo.ops.launching import allocate, find_architecture

Plan = tuple[Callable[..., int], int]  # launches the GEMM and returns a status; the bytes of its workspace
MOST = 10_000  # plans of a thread at a time; a shape has the number of tokens
_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
_COMPUTE_FLOAT32, _ADD_BIAS, _SCALE_OF_TENSOR, _SCALES_OF_ROWS = 68, 4, 0, 3
_TRANSPOSE_A, _EPILOGUE, _BIAS, _SCALE_A, _SCALE_B = 3, 7, 8, 17, 18  # attributes of a product
_FAST, _BIAS_TYPE, _MODE_A, _MODE_B = 25, 26, 31, 32
_MOST_BYTES = 1  # of a preference
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_carveout: Any = getattr(torch._C, "_get_sm_carveout_experimental", lambda: None)


_plans = threading.local()  # backward runs in another thread, and a plan holds the addresses of one call


def scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype, fast: bool
) -> Tensor | None:
    """y [M, N] = (a * scale_a) @ (b * scale_b)^T + bias on the current device, or None: then `torch._scaled_mm` runs.

    a [M, K] and b [N, K] are contiguous, N and K multiples of 16. A plan that failed once is not tried again.
    """
    device = a.get_device()
    libraries = _libraries(device) if type(a) is Tensor else None  # PyTorch traces tensors of other types
    if libraries is None or _carveout() is not None:  # with a carveout, GEMMs leave multiprocessors to other kernels
        return None
    given = [a, b, scale_a.contiguous(), scale_b.contiguous(), *(() if bias is None else (bias.contiguous(),))]
    addresses = [x.data_ptr() for x in given]
    facts = [(x.shape, x.dtype, x.get_device(), address % 256) for x, address in zip(given, addresses, strict=True)]
    plans: dict[Any, Plan | None] = vars(_plans)
    key = (out_dtype, fast, *facts)
    try:
        plan = plans[key]
    except KeyError:
        if len(plans) >= MOST:
            plans.clear()
        plan = plans[key] = _plan(*libraries, given, out_dtype, fast)
    if plan is None:
        return None
    run, size = plan
    y = allocate(a, (a.shape[0], b.shape[0]), out_dtype)
    workspace = allocate(a, (size,), torch.uint8) if size else None
    if run(y.data_ptr(), _current_stream(device), None if workspace is None else workspace.data_ptr(), *addresses):
        plans[key] = None
        return None
    return y


@cache
def _libraries(device: int) -> tuple[Any, Any] | None:
    """PyTorch's library, whose symbols include those of its cuBLASLt, and the function that launches a GEMM without
    Python's lock; None where PyTorch runs another GEMM."""
    if device < 0 or architecture_key(find_architecture(torch.device("cuda", device))) != "hopper":
        return None
    try:
        library = ctypes.PyDLL("libtorch_cuda.so", os.RTLD_NOLOAD)
        library._ZN2at4cuda26getCUDABlasLtWorkspaceSizeEv.restype = c_size_t
        return library, ctypes.CDLL("libtorch_cuda.so", os.RTLD_NOLOAD).cublasLtMatmul
    except (AttributeError, OSError):
        return None


def _plan(library: Any, matmul: Any, given: list[Tensor], out_dtype: torch.dtype, fast: bool) -> Plan | None:
    """The plan of a GEMM, None where cuBLASLt refuses it or PyTorch would. Matrices that cuBLASLt reads by columns have
    their axes swapped, so its operands are b^T [N, K] and a [K, M], and its result is y [N, M]."""
    a, b, scale_a, scale_b, *bias = given
    (m, k), n, scales = a.shape, b.shape[0], (scale_a.numel(), scale_b.numel())
    known = {a.dtype, b.dtype, out_dtype} <= _TYPES.keys() and scale_a.dtype == scale_b.dtype == torch.float32
    fits = scales in ((1, 1), (m, n)) and m * n * k and all(x.dtype == out_dtype and x.shape == (n,) for x in bias)
    if not known or not fits or b.shape[1] != k or len({x.get_device() for x in given}) > 1:
        return None
    boxes = [c_void_p() for _ in range(3)] + [c_void_p(x.data_ptr()) for x in given]
    y, stream, workspace, to_a, to_b, to_scale_a, to_scale_b, *to_bias = boxes
    mode = c_int(_SCALE_OF_TENSOR if scales == (1, 1) else _SCALES_OF_ROWS)
    values: list[tuple[int, Any]] = [(_TRANSPOSE_A, c_int(1)), (_FAST, c_int8(fast)), (_MODE_A, mode), (_MODE_B, mode)]
    values += [(_EPILOGUE, c_int(_ADD_BIAS)), (_BIAS_TYPE, c_int(_TYPES[out_dtype]))] if bias else []
    pointers = [(_SCALE_A, to_scale_b), (_SCALE_B, to_scale_a), *((_BIAS, box) for box in to_bias)]
    product, preference, left, right, result = ((c_uint64 * words)() for words in (32, 8, 8, 8, 8))
    set_attribute, set_preference = library.cublasLtMatmulDescSetAttribute, library.cublasLtMatmulPreferenceSetAttribute
    most = c_size_t(library._ZN2at4cuda26getCUDABlasLtWorkspaceSizeEv())
    statuses = [
        library.cublasLtMatmulDescInit_internal(*_sized(product), _COMPUTE_FLOAT32, _TYPES[torch.float32]),
        *(set_attribute(product, name, *_sized(value)) for name, value in (*values, *pointers)),
        library.cublasLtMatmulPreferenceInit_internal(*_sized(preference)),
        set_preference(preference, _MOST_BYTES, *_sized(most)),
    ]
    for layout, dtype, rows, columns in (left, b.dtype, k, n), (right, a.dtype, k, m), (result, out_dtype, n, m):
        sizes = c_uint64(rows), c_uint64(columns), c_int64(rows)
        statuses.append(library.cublasLtMatrixLayoutInit_internal(*_sized(layout), _TYPES[dtype], *sizes))
    handle, found, count = c_void_p(torch._C._cuda_getCurrentBlasHandle()), (c_uint64 * 12)(), c_int()
    query = handle, product, left, right, result, result, preference, 1, found, byref(count)
    if any(statuses) or library.cublasLtMatmulAlgoGetHeuristic(*query) or count.value == 0:
        return None
    one, zero, size = byref(c_float(1)), byref(c_float(0)), c_size_t(found[8])  # the algorithm stands in eight words
    matrices = one, to_b, left, to_a, right, zero, y, result, y, result
    updates = [(product, name, *_sized(box)) for name, box in pointers]

    def run(*addresses: int | None) -> int:
        for box, address in zip(boxes, addresses, strict=True):
            box.value = address
        for update in updates:
            set_attribute(*update)
        return int(matmul(handle, product, *matrices, found, workspace, size, stream))

    return run, size.value


def _sized(value: Any) -> tuple[Any, c_size_t]:
    return byref(value), c_size_t(sizeof(value))
