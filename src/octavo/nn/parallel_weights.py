"""Weights of which each rank has a part: gathered in eight bits by FSDP2, or divided by tensor parallelism."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from octavo.nn.module_tools import PrecomputedProjections
from octavo.numerics.formats import format_of
from octavo.numerics.qtensor import QTensor, parse_granularity
from octavo.numerics.scaling import hadamard


def local_part(t: Any) -> Tensor:
    """The part of a DTensor that this rank holds, in the same memory; any other tensor as it is."""
    return getattr(t, "_local_tensor", t)


def first_indices(tensor: Any) -> list[int]:
    """Where the part of a DTensor that this rank holds begins, in each dimension; zeros for any other tensor."""
    if not hasattr(tensor, "__create_chunk_list__"):
        return [0] * tensor.ndim
    [chunk] = tensor.__create_chunk_list__()  # two dimensions of a mesh may divide one of the tensor
    return list(chunk.offsets)


def device_of(p: Any) -> torch.device:
    """The device that computes with a parameter. FSDP2, or a run with masters on the host, may keep it elsewhere."""
    if hasattr(p, "device_mesh"):
        kind = p.device_mesh.device_type
        return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    return getattr(p, "computing_device", p.device)


def groups_of(tensors: Iterable[Any]) -> list[Any]:
    """The process groups over which tensors are sharded (DTensor): one for each dimension of each mesh."""
    meshes = dict.fromkeys(t.device_mesh for t in tensors if hasattr(t, "device_mesh"))
    return [group for mesh in meshes for group in mesh.get_all_groups()]


def largest_magnitudes(tensors: Sequence[Any]) -> Tensor:
    """The largest magnitude of each whole tensor: float32 [tensors], NaN for NaN. Every rank must call this."""
    # a parameter may have fewer rows than there are ranks
    parts = [part if part.numel() else part.new_zeros(1) for part in map(local_part, tensors)]
    largest = torch.stack([norm.to(parts[0].device).float() for norm in torch._foreach_norm(parts, math.inf)]).abs()
    for group in groups_of(tensors):  # by their bits, whose order has NaN above: a maximum of floats may skip it
        dist.all_reduce(largest.view(torch.int32), dist.ReduceOp.MAX, group)
    return largest


# ---- The unsharded weight of a layer, as `octavo.distributed.fp8_all_gather` makes FSDP2 gather it: quantized.
#
# FSDP2 registers it as the layer's parameter while the layer runs. To autograd it is a tensor [N, K] of the parameter's
# dtype, so the gradient of the weight has that dtype. It has no numbers of that dtype: only the bytes and scales exist,
# in memory that FSDP2 frees and fills again.


aten = torch.ops.aten
_ALIASES = {aten.detach.default, aten.alias.default}
_RESHAPES = {aten.as_strided.default, aten.view.default}
_FACTORIES = {aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.new_zeros.default}


class GatheredWeight(Tensor):
    """A quantized weight [N, K] that looks to autograd like a tensor of the parameter's `dtype`.

    Where dx reads other bytes than y, `for_dx` are these, [N, K], and their scale, transposed. They exist in the
    backward pass only. The bytes for y may be those of the `rotated` weight.
    """

    data_bytes: Tensor  # contiguous
    scale: Tensor
    granularity: str  # of the scale, by its name
    rotated: bool

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor, dtype: torch.dtype, *_: Any) -> Any:
        make: Any = torch.Tensor._make_wrapper_subclass
        return make(cls, data.shape, strides=data.stride(), dtype=dtype, device=data.device)

    def __init__(
        self, data: Tensor, scale: Tensor, dtype: torch.dtype, granularity: str, rotated: bool = False, *for_dx: Tensor
    ) -> None:
        self.data_bytes, self.scale, self.granularity, self.rotated = data, scale, granularity, rotated
        if for_dx:
            self.dx_bytes, self.dx_scale = for_dx

    @property
    def for_dx(self) -> tuple[Tensor, ...]:
        """The bytes and the scale for dx; empty where dx reads those of y."""
        return (self.dx_bytes, self.dx_scale) if hasattr(self, "dx_bytes") else ()

    def dequantize(self) -> Tensor:
        """The weight [N, K] as numbers of its dtype, differentiable: the gradient of the result is the weight's."""
        return _Dequantize.apply(self)  # type: ignore[no-untyped-call]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        # AOTAutograd prints weights that have no bytes now.
        return f"GatheredWeight({list(self.shape)}, {self.dtype}, by {self.granularity})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[torch.dtype, str, bool]]:
        names = ["data_bytes", "scale", "dx_bytes", "dx_scale"]
        return names if self.for_dx else names[:2], (self.dtype, self.granularity, self.rotated)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: tuple[torch.dtype, str, bool], size: Any, stride: Any
    ) -> GatheredWeight:
        data, scale, *for_dx = inner.values()
        return GatheredWeight(data, scale, *context, *for_dx)

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        w = args[0]
        if func in _ALIASES or (func in _RESHAPES and tuple(args[1]) == tuple(w.shape)):
            return GatheredWeight(w.data_bytes, w.scale, w.dtype, w.granularity, w.rotated, *w.for_dx)
        if func in _FACTORIES:
            like = torch.empty(w.shape, dtype=w.dtype, device=w.device)
            return func(like, *args[1:], **(kwargs or {}))
        raise NotImplementedError(
            f"{func} of a weight that was gathered in eight bits: it has no numbers of {w.dtype}. Take "
            "weight.dequantize(), or the sharded parameter outside of the forward and backward pass"
        )


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: GatheredWeight) -> Tensor:
        q = QTensor(w.data_bytes, w.scale, format_of(w.data_bytes.dtype), parse_granularity(w.granularity))
        return hadamard(q.dequantize(torch.float32)).to(w.dtype) if w.rotated else q.dequantize(w.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


# ---- Linear layers of which each rank of a mesh has a part: tensor parallelism.
#
# `octavo.distributed.ColumnParallel` and `RowParallel` give such a layer the attribute `parallel`, which computes it
# together with the other ranks, before and after `octavo.convert`. This module is all that layers know of other ranks.


class ParallelLinear(nn.Linear):
    """An `nn.Linear` of which each rank has a part, not converted."""

    parallel: Any  # an `octavo.distributed.parallel_layers.ParallelLayer`

    def forward(self, input: Tensor | PrecomputedProjections) -> Tensor:
        return input.output_of(self) if isinstance(input, PrecomputedProjections) else self.parallel.linear(self, input)


def parallel_of(layers: Sequence[nn.Module]) -> Any:
    """The `ParallelLayer` of layers that share an input; None for layers that each rank has whole."""
    ways = {layer.__dict__.get("parallel") for layer in layers}
    if len(ways) > 1:
        raise ValueError(
            "layers that share an input must be parallelized together: give the style "
            f"octavo.distributed.ColumnParallel to each of {', '.join(map(str, layers))}"
        )
    return ways.pop()
