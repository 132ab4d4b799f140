"""FP8 attention in cuDNN, and the widening of its results as a Triton kernel."""

import threading
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.launching import Heads, allocate, cdiv
from octavo.ops.registration import launcher
from octavo.util import import_extra

BLOCK = 4096  # elements of a program


def attend(
    heads: Heads, scales: Mapping[str, Tensor], p_scale: float, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Same as `attend_reference`, for q, k and v whose last dimension is contiguous."""
    q = heads.q
    batch, count, tokens, dim = q.shape
    o, stats = allocate(q, (batch, tokens, count, dim)), allocate(q, (batch, count, tokens), torch.float32)
    amax = allocate(q, (2,), torch.float32)
    descale_s, scale_s = _constants(q.device, p_scale)
    tensors = heads._asdict() | {f"descale_{name}": scales[name] for name in ("q", "k", "v")}
    tensors |= {"descale_s": descale_s, "scale_s": scale_s, "scale_o": scales["v"].reciprocal()}
    tensors |= {"o": o, "stats": stats, "amax_s": amax[:1], "amax_o": amax[1:]}
    run("forward", Shape.of(*heads, scale), tensors)
    return widen(o, scales["v"], dtype), o, stats


def attend_backward(
    dy: Tensor,
    heads: Heads,
    o: Tensor,
    stats: Tensor,
    scales: Mapping[str, Tensor],
    p_scale: float,
    scale: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Same as `attend_backward_reference`, for q, k and v whose last dimension is contiguous, and dy and o over
    memory of [B, T, H, D]."""
    q, by_token = heads.q, [(x.shape[0], x.shape[2], x.shape[1], x.shape[3]) for x in heads]
    gradients = [allocate(q, shape) for shape in by_token]
    amax, amax_ds = (allocate(q, (size,), torch.float32) for size in (3, 1))
    descale_s, scale_s = _constants(q.device, p_scale)
    tensors = heads._asdict() | {"o": o, "dO": dy, "stats": stats, "descale_s": descale_s, "scale_s": scale_s}
    tensors |= {f"descale_{name}": scales[name] for name in ("q", "k", "v", "o", "dO", "dP")}
    tensors |= {f"scale_{name}": scales[name].reciprocal() for name in ("dP", "dQ", "dK", "dV")}
    for i, name in enumerate(("dQ", "dK", "dV")):
        tensors |= {name: gradients[i], f"amax_{name}": amax[i : i + 1]}
    run("backward", Shape.of(*heads, scale), {**tensors, "amax_dP": amax_ds})
    dq, dk, dv = (widen(g, scales[name], dtype) for g, name in zip(gradients, ("dQ", "dK", "dV"), strict=True))
    return dq, dk, dv, amax


@cache
def _constants(device: torch.device, p_scale: float) -> tuple[Tensor, Tensor]:
    """The scale of the probabilities and its inverse, float32 [1] each."""
    with torch.inference_mode(False):
        return torch.full((1,), p_scale, device=device), torch.full((1,), 1 / p_scale, device=device)


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


# ---- FP8 attention as graphs of cuDNN: each is built at the first call with its shapes, and cached for the thread.
#
# A graph names its tensors by numbers, their places in `INPUTS` and `OUTPUTS`. A scale in the arguments is what stored
# numbers are multiplied by, which cuDNN calls `descale`; its `scale` is the inverse.
#
# Source: the operations `sdpa_fp8` and `sdpa_fp8_backward` of nvidia-cudnn-frontend.


MOST = 256  # graphs cached at a time; each length of a prompt has its own
_SCALAR = (1, 1, 1, 1)
_local = threading.local()  # cuDNN's handles and graphs are not shared between threads


class Shape(NamedTuple):
    """The shapes and strides of q [B, H, T, D], and of k and v [B, G, S, D]; and the factor of q k^T."""

    q: tuple[int, ...]
    k: tuple[int, ...]
    q_stride: tuple[int, ...]
    k_stride: tuple[int, ...]
    v_stride: tuple[int, ...]
    scale: float

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Self:
        return cls(tuple(q.shape), tuple(k.shape), q.stride(), k.stride(), v.stride(), scale)


class _Graph(NamedTuple):
    graph: Any
    workspace: int  # bytes
    numbers: dict[str, int]


def run(name: str, shape: Shape, tensors: Mapping[str, Tensor]) -> None:
    """Run the graph "forward" or "backward" of `shape` on the current stream. `tensors` has each input and output."""
    device = tensors["q"].get_device()
    cudnn, handle = _handle(device)
    graphs: dict[Any, _Graph] = _local.graphs
    key = name, device, shape
    found = graphs.get(key)
    if found is None:
        if len(graphs) >= MOST:
            graphs.clear()
        found = graphs[key] = _build(cudnn, handle, name, shape)
    workspace = torch.empty(max(found.workspace, 1), dtype=torch.uint8, device=tensors["q"].device)
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
    pointers = {found.numbers[tensor]: t.data_ptr() for tensor, t in tensors.items()}
    found.graph.execute(pointers, workspace.data_ptr(), handle=handle)


def _handle(device: int) -> tuple[Any, Any]:
    """The module cudnn, and this thread's handle for the current device."""
    if not hasattr(_local, "handles"):
        _local.handles, _local.graphs = {}, {}
    if device not in _local.handles:
        cudnn = import_extra("cudnn", "cudnn", "FP8 attention runs in cuDNN")
        _local.handles[device] = cudnn, cudnn.create_handle()
    found: tuple[Any, Any] = _local.handles[device]
    return found


def _build(cudnn: Any, handle: Any, name: str, shape: Shape) -> _Graph:
    graph = cudnn.pygraph(
        io_data_type=cudnn.data_type.FP8_E4M3,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=handle,
    )
    numbers = {"forward": _forward, "backward": _backward}[name](cudnn, graph, shape)
    try:
        graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    except cudnn.cudnnGraphNotSupportedError as error:
        raise RuntimeError(
            f"cuDNN {cudnn.backend_version_string()} has no {name} pass of FP8 attention for {shape}: take attention "
            f"in BF16 ({str(error).splitlines()[0]})"
        ) from error
    return _Graph(graph, graph.get_workspace_size(), numbers)


class _Tensors:
    """Makes the tensors of a graph by their names, and numbers them. Those without a layout are scalars in float32."""

    def __init__(self, cudnn: Any, graph: Any, shape: Shape) -> None:
        _, heads, tokens, _ = shape.q
        self.types, self.graph, self.numbers = cudnn.data_type, graph, dict[str, int]()
        self.layouts = {"q": (shape.q, shape.q_stride), "k": (shape.k, shape.k_stride), "v": (shape.k, shape.v_stride)}
        self.layouts |= dict.fromkeys(("o", "dO", "dQ"), (shape.q, _by_token(shape.q)))
        self.layouts |= dict.fromkeys(("dK", "dV"), (shape.k, _by_token(shape.k)))
        self.layouts["stats"] = (*shape.q[:3], 1), (heads * tokens, tokens, 1, 1)

    def inputs(self, *names: str) -> dict[str, Any]:
        made = {}
        for name in names:
            dim, stride, dtype, number = self._facts(name)
            made[name] = self.graph.tensor(dim=dim, stride=stride, data_type=dtype, name=name, uid=number)
        return made

    def outputs(self, **tensors: Any) -> None:
        for name, tensor in tensors.items():
            dim, stride, dtype, number = self._facts(name)
            tensor.set_output(True).set_dim(dim).set_stride(stride).set_uid(number)
            tensor.set_data_type(dtype)

    def _facts(self, name: str) -> tuple[Any, Any, Any, int]:
        dim, stride = self.layouts.get(name, (_SCALAR, _SCALAR))
        in_float32 = name == "stats" or name not in self.layouts
        number = self.numbers.setdefault(name, len(self.numbers) + 1)
        return dim, stride, self.types.FLOAT if in_float32 else self.types.FP8_E4M3, number


def _forward(cudnn: Any, graph: Any, shape: Shape) -> dict[str, int]:
    """o [B, H, T, D] over memory of [B, T, H, D], and stats [B, H, T, 1]."""
    tensors = _Tensors(cudnn, graph, shape)
    scales = "descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o"
    o, stats, amax_s, amax_o = graph.sdpa_fp8(
        **tensors.inputs("q", "k", "v", *scales), generate_stats=True, attn_scale=shape.scale, **_causal(cudnn, shape)
    )
    tensors.outputs(o=o, stats=stats, amax_s=amax_s, amax_o=amax_o)
    return tensors.numbers


def _backward(cudnn: Any, graph: Any, shape: Shape) -> dict[str, int]:
    """dq, dk and dv, over memory of [B, T, H, D]. dO and o lie so too."""
    tensors = _Tensors(cudnn, graph, shape)
    scales = [f"descale_{name}" for name in ("q", "k", "v", "o", "dO", "s", "dP")]
    scales += ["scale_s", "scale_dQ", "scale_dK", "scale_dV", "scale_dP"]
    inputs = tensors.inputs("q", "k", "v", "o", "dO", "stats", *scales)
    dq, dk, dv, *amax = graph.sdpa_fp8_backward(**inputs, attn_scale=shape.scale, **_causal(cudnn, shape))
    tensors.outputs(dQ=dq, dK=dk, dV=dv)
    tensors.outputs(**dict(zip(("amax_dQ", "amax_dK", "amax_dV", "amax_dP"), amax, strict=True)))
    return tensors.numbers


def _causal(cudnn: Any, shape: Shape) -> dict[str, Any]:
    """The mask: query t sees the keys up to t + S - T."""
    return {"diagonal_alignment": cudnn.diagonal_alignment.TOP_LEFT, "right_bound": shape.k[2] - shape.q[2]}


def _by_token(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of [B, H, T, D] over memory of [B, T, H, D]."""
    _, heads, tokens, dim = shape
    return tokens * heads * dim, dim, heads * dim, 1
