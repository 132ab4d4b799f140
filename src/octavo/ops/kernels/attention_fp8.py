"""FP8 attention in cuDNN, and the widening of its results as a Triton kernel."""

import threading
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.launching import HEAD_DIM, P_SCALE, Heads, allocate, cdiv
from octavo.ops.registration import launcher
from octavo.util import import_extra

BLOCK = 4096  # elements of a program that widens


def attend(
    heads: Heads, scales: Mapping[str, Tensor], scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Same as `attend_reference`, for q, k and v whose last dimension is contiguous."""
    q = heads.q
    batch, count, tokens, dim = q.shape
    o, stats = allocate(q, (batch, tokens, count, dim)), allocate(q, (batch, count, tokens), torch.float32)
    amax = allocate(q, (2,), torch.float32)
    descale_s, scale_s = _constants(q.device)
    tensors = heads._asdict() | {f"descale_{name}": scales[name] for name in ("q", "k", "v")}
    tensors |= {"descale_s": descale_s, "scale_s": scale_s, "scale_o": scales["v"].reciprocal()}
    tensors |= {"o": o.transpose(1, 2), "stats": stats.unsqueeze(3), "amax_s": amax[:1], "amax_o": amax[1:]}
    run("forward", scale, tensors)
    return widen(o, scales["v"], dtype), o, stats


def attend_backward(
    dy: Tensor, heads: Heads, o: Tensor, stats: Tensor, scales: Mapping[str, Tensor], scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Same as `attend_backward_reference`. cuDNN gets heads of `HEAD_DIM` elements: narrower ones end in zeros, which
    change no product."""
    given = heads._asdict() | {"o": o.transpose(1, 2), "dO": dy.transpose(1, 2)}
    tensors = {name: _by_token(x) for name, x in given.items()}
    gradients = [allocate(x, x.transpose(1, 2).shape) for x in (tensors["q"], tensors["k"], tensors["v"])]
    amax, amax_ds = (allocate(o, (size,), torch.float32) for size in (3, 1))
    descale_s, scale_s = _constants(o.device)
    tensors |= {"stats": stats.contiguous().unsqueeze(3), "descale_s": descale_s, "scale_s": scale_s}
    tensors |= {f"descale_{name}": scales[name] for name in ("q", "k", "v", "o", "dO", "dP")}
    tensors |= {f"scale_{name}": scales[name].reciprocal() for name in ("dP", "dQ", "dK", "dV")}
    names = "dQ", "dK", "dV"
    for i, name in enumerate(names):
        tensors |= {name: gradients[i].transpose(1, 2), f"amax_{name}": amax[i : i + 1]}
    run("backward", scale, {**tensors, "amax_dP": amax_ds})
    written = [g[..., : o.shape[3]].contiguous() for g in gradients]
    dq, dk, dv = (widen(g, scales[name], dtype) for g, name in zip(written, names, strict=True))
    return dq, dk, dv, amax


def _by_token(x: Tensor) -> Tensor:
    """x [B, H, T, D] over contiguous memory of [B, T, H, HEAD_DIM], with zeros after its elements."""
    by_token = x.transpose(1, 2).contiguous()
    if missing := HEAD_DIM - x.shape[3]:
        by_token = F.pad(by_token.view(torch.uint8), (0, missing)).view(x.dtype)  # PyTorch pads no E4M3
    return by_token.transpose(1, 2)


def _constants(device: torch.device) -> tuple[Tensor, Tensor]:
    """The scale of the probabilities and its inverse, float32 [1] each. Not kept: a CUDA graph may own their memory."""
    return torch.full((1,), P_SCALE, device=device), torch.full((1,), 1 / P_SCALE, device=device)


def widen(data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """data * scale of a contiguous tensor in E4M3, computed in float32 and rounded once to `dtype`."""
    result = allocate(data, tuple(data.shape), dtype)
    count = data.numel()
    launcher(_widen_kernel, (cdiv(count, BLOCK),))(data, scale, result, count, BLOCK=BLOCK, num_warps=8)
    return result


@triton.jit
def _widen_kernel(data_ptr, scale_ptr, result_ptr, count, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < count
    x = tl.load(data_ptr + offs, mask, other=0.0).to(tl.float32) * tl.load(scale_ptr)
    tl.store(result_ptr + offs, x.to(result_ptr.dtype.element_ty), mask)


# ---- FP8 attention as graphs of cuDNN: each is built at the first call with its layouts, and cached for the thread.
#
# A graph reads and writes at addresses, by the shapes and strides with which it was built. So its key has those of
# every tensor. It names a tensor by a number: its place among the tensors, from 1. A scale in the arguments is what
# stored numbers are multiplied by, which cuDNN calls `descale`; its `scale` is the inverse.
#
# Source: the operations `sdpa_fp8` and `sdpa_fp8_backward` of nvidia-cudnn-frontend.


MOST = 256  # graphs cached at a time; each length of a prompt has its own
OUTPUTS = {  # of each graph, in the order of cuDNN
    "forward": ("o", "stats", "amax_s", "amax_o"),
    "backward": ("dQ", "dK", "dV", "amax_dQ", "amax_dK", "amax_dV", "amax_dP"),
}
_SCALAR = ((1, 1, 1, 1), (1, 1, 1, 1))
_local = threading.local()  # cuDNN's handles and graphs are not shared between threads
Layout = tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides


def run(name: str, scale: float, tensors: Mapping[str, Tensor]) -> None:
    """Run the graph "forward" or "backward" on the current stream.

    `tensors` has each input and output by cuDNN's name: [B, H, T, D] of E4M3 with any strides, "stats" [B, H, T, 1],
    and scalars [1] of float32. `scale` multiplies q k^T.
    """
    device = tensors["q"].get_device()
    cudnn, handle = _handle(device)
    layouts = {tensor: layout_of(t) if t.ndim == 4 else _SCALAR for tensor, t in tensors.items()}
    graphs: dict[Any, tuple[Any, int]] = _local.graphs  # and the bytes of their workspaces
    key = name, device, scale, *layouts.items()
    found = graphs.get(key)
    if found is None:
        if len(graphs) >= MOST:
            graphs.clear()
        found = graphs[key] = _build(cudnn, handle, name, scale, layouts)
    graph, size = found
    workspace = torch.empty(max(size, 1), dtype=torch.uint8, device=tensors["q"].device)
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
    pointers = {number: t.data_ptr() for number, t in enumerate(tensors.values(), 1)}
    graph.execute(pointers, workspace.data_ptr(), handle=handle)


def layout_of(x: Tensor) -> Layout:
    """The shape and the strides of x. A dimension of one element, which may have any stride, gets the extent of those
    after it."""
    shape, strides = tuple(x.shape), list(x.stride())
    for i in reversed(range(x.ndim)):
        if shape[i] == 1:
            strides[i] = max((shape[j] * strides[j] for j in range(i + 1, x.ndim)), default=1)
    return shape, tuple(strides)


def _handle(device: int) -> tuple[Any, Any]:
    """The module cudnn, and this thread's handle for the current device."""
    if not hasattr(_local, "handles"):
        _local.handles, _local.graphs = {}, {}
    if device not in _local.handles:
        cudnn = import_extra("cudnn", "cudnn", "FP8 attention runs in cuDNN")
        _local.handles[device] = cudnn, cudnn.create_handle()
    return _local.handles[device]


def _build(cudnn: Any, handle: Any, name: str, scale: float, layouts: Mapping[str, Layout]) -> tuple[Any, int]:
    types = cudnn.data_type
    graph = cudnn.pygraph(
        io_data_type=types.FP8_E4M3, intermediate_data_type=types.FLOAT, compute_data_type=types.FLOAT, handle=handle
    )
    inputs, written = {}, {}
    for number, (tensor, (dim, stride)) in enumerate(layouts.items(), 1):
        dtype = types.FLOAT if tensor == "stats" or dim == _SCALAR[0] else types.FP8_E4M3
        if tensor in OUTPUTS[name]:
            written[tensor] = number, dim, stride, dtype
        else:
            inputs[tensor] = graph.tensor(dim=dim, stride=stride, data_type=dtype, name=tensor, uid=number)
    earlier = layouts["k"][0][2] - layouts["q"][0][2]  # query t sees the keys up to t + S - T
    causal = {"diagonal_alignment": cudnn.diagonal_alignment.TOP_LEFT, "right_bound": earlier}
    if name == "forward":
        results = graph.sdpa_fp8(**inputs, attn_scale=scale, generate_stats=True, **causal)
    else:
        results = graph.sdpa_fp8_backward(**inputs, attn_scale=scale, **causal)
    for tensor, result in zip(OUTPUTS[name], results, strict=True):
        number, dim, stride, dtype = written[tensor]
        result.set_output(True).set_dim(dim).set_stride(stride).set_uid(number)
        result.set_data_type(dtype)
    try:
        graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    except cudnn.cudnnGraphNotSupportedError as error:
        raise RuntimeError(
            f"cuDNN {cudnn.backend_version_string()} has no {name} pass of FP8 attention for {dict(layouts)}: take "
            f"attention in BF16 ({str(error).splitlines()[0]})"
        ) from error
    return graph, graph.get_workspace_size()
