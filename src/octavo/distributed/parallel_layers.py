"""The computation of layers of which each rank has a part, as the modules of `octavo.nn` call it.

With a recipe of row scales in all three GEMMs (`Recipe.fusable`: `rowwise`) activations travel between the ranks as
bytes and row scales. With another recipe, or before conversion, they travel in the dtype of the layer's output: BF16
under autocast. Each rank then quantizes its part of an operand by itself: a scale of a whole tensor is the largest of
the ranks' (`octavo.nn.linear_function`), and any other that of the part.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from octavo import ops
from octavo.distributed.ranks import Ranks, Sent, Shards, gather_rows, quantize_shards, scatter_rows
from octavo.nn.fused import ALONE, Exchange, Gradient, Norm, Stack, run_fused
from octavo.nn.fused_modules import FusableLayers, fused_call
from octavo.nn.linear import Linear, WeightCache, compute_dtype
from octavo.nn.linear_function import FusedCall, rescaled, scale_folded, shaped
from octavo.nn.observer import observer_of
from octavo.nn.parallel_weights import GatheredWeight
from octavo.numerics.qtensor import Cast, QTensor
from octavo.numerics.scaling import scale_mantissa
from octavo.recipe import FusableRecipe

# Tokens T, of which each of R ranks has T/R between the layers; the mathematics is that of `octavo.nn.linear_function`.
#
#     column      x_q[T/R,K] -> gathered x_q[T,K];  y[T,N/R] = x_q @ w_q^T
#                 g = dy * s_w * m -> g_q[T,N/R];   dx[T/R,K] = scattered sum of g_q @ w_q;  dw[N/R,K] = g_q^T @ x_q
#     row         s_x[T]: the largest of the ranks';  y[T/R,N] = scattered sum of x_q[T,K/R] @ w_q^T
#                 g_q[T/R,N] -> gathered g_q[T,N];    dx[T,K/R] = g_q @ w_q;  dw[N,K/R] = g_q^T @ x_q
#
# In a row-parallel layer s_w and the mantissa m of s_x are the same for all ranks, so that each can quantize g = dy *
# s_w * m for its own rows before they are gathered. The results that are scattered are sums, in high precision.
#
# A column-parallel layer saves the bytes of its own rows, and gathers them again in the backward pass. There, as in the
# forward pass, ranks exchange while they compute: x_q travels during the GEMM of dx, and dx during that of dw.


@dataclass(frozen=True)
class ParallelLayer(Exchange):
    """Base of `Column` and `Row`, whose `linear` gives the output of an `nn.Linear`, converted or not. Two are equal
    where layers are parallel in the same way over the same ranks."""

    ranks: Ranks
    cuts_rows: ClassVar[bool]  # whether each rank has a part of every row of w
    parts: ClassVar[tuple[str, ...]]  # of x, w and dy, those of which each rank has a part in a wide exchange

    @torch.no_grad()
    def quantize(self, stacks: Sequence[tuple[Sequence[Any], Cast]]) -> list[QTensor]:
        """This rank's parts of the weights of each stack of layers over the same ranks, by a cast of row scales."""
        shards = [
            Shards([_local(linear.weight) for linear in linears], cast, linears[0].parallel.cuts_rows)
            for linears, cast in stacks
        ]
        return quantize_shards(shards, self.ranks)

    def quantize_w(self, weights: Sequence[Tensor], cast: Cast) -> QTensor:
        return quantize_shards([Shards(weights, cast, self.cuts_rows)], self.ranks)[0]

    def bias(self, linear: Any) -> Any:
        return _local(linear.bias)

    def stack(self, linears: Sequence[Any], cast: Cast, cache: WeightCache) -> Stack:
        weights, biases = [_local(linear.weight) for linear in linears], [self.bias(linear) for linear in linears]
        if isinstance(weights[0], GatheredWeight):
            return Stack(weights, biases, cache.gathered)
        parameters = [linear.weight for linear in linears]
        if cache.q is not None and cache.is_stale(parameters):
            cache.store(self.quantize([(linears, cast)])[0], parameters)
        return Stack(weights, biases, cache.q)

    def fused(self, layer: Linear, recipe: FusableRecipe, x: Tensor) -> Tensor:
        """y of one layer by a recipe of row scales, with the rows that the exchange gives."""
        call = fused_call(FusableLayers([layer], recipe, []), x, self, observer_of(layer))
        return run_fused(x, None, None, self.stack([layer], recipe.w, layer.weight_cache), call, (self, ALONE))[0]


class Column(ParallelLayer):
    """Each rank has N / R of the N outputs, the rows of w [N, K]."""

    cuts_rows, parts = False, ("w", "dy")

    def linear(self, layer: Any, x: Tensor) -> Tensor:
        """y [..., T, N / R] of this rank's rows x [..., T / R, K]."""
        recipe = _fusable(layer)
        if recipe is None or x.numel() == 0:
            return self.run(layer, self.input(None, x))
        return self.output(self.fused(layer, recipe, x), x)

    def read_norm(self, norm: Norm) -> Norm:
        spec, gamma, beta = norm
        return spec, local_replicated(gamma, self.ranks), None if beta is None else local_replicated(beta, self.ranks)

    def output(self, y: Tensor, x: Tensor) -> Tensor:
        return self.ranks.by_sequence(y, x.shape[:-2])

    def input(self, norm: nn.Module | None, x: Tensor) -> Tensor:
        n = x if norm is None else call_norm(norm, x, self.ranks)
        return gather_rows(n.to(compute_dtype(n)), self.ranks)

    def run(self, linear: Any, x: Tensor) -> Tensor:
        return _compute(linear, x, _local(linear.bias))

    # Its exchanges: the rows of x are gathered, and those of dx scattered.

    resends_x = True

    def send_x(self, x_q: QTensor) -> Sent:
        return self.ranks.send(x_q)

    def y(self, x_q: Sent, w_q: QTensor, bias: Tensor | None, call: FusedCall) -> tuple[Tensor, Tensor]:
        rows, y = self.ranks.gathered_mm(x_q, w_q, call.recipe.y, call, bias=bias)  # [T,K] @ [N/R,K]^T
        return rows.scale, y

    def dx(self, g: QTensor, w_t: QTensor, s_x: Tensor, s_w: Tensor, call: FusedCall) -> Gradient:
        scales = ops.fold_scales(s_x, g.scale, s_w)
        dx = self.ranks.scattered_mm(rescaled(g, scales.dx), w_t, call.recipe.dx, call)  # [T,N/R] @ [K,N/R]^T
        return g, scales, dx

    def arrived(self, dx: Tensor) -> Tensor:
        return self.ranks.done(dx)

    def send_bytes(self, x_data: Tensor | None, g: QTensor) -> tuple[tuple[Tensor, ...], torch.dtype]:
        assert x_data is not None  # by `resends_x`
        # A number of the backward pass travels too. Compiled code would otherwise gather in the forward pass, and save
        # the rows of all ranks.
        return self.ranks.gather(x_data.view(torch.uint8), g.scale[:1].view(torch.uint8)), x_data.dtype

    def x_transposed(self, x_data: tuple[tuple[Tensor, ...], torch.dtype], g: QTensor) -> QTensor:
        # PyTorch keeps the memory of an exchange until its result is waited for: also that of the number.
        gathered, dtype = x_data
        data, _ = [self.ranks.done(t) for t in gathered]
        return scale_folded(ops.transpose(data.view(dtype)))


class Row(ParallelLayer):
    """Each rank has K / R of the K inputs, the columns of w [N, K]."""

    cuts_rows, parts = True, ("x", "w")

    def check(self, module: nn.Module) -> None:
        raise ValueError(
            f"the layers that read the input of {module} must have the style octavo.distributed.ColumnParallel, got "
            "RowParallel"
        )

    def bias(self, linear: Any) -> Tensor | None:
        return None if linear.bias is None else local_replicated(linear.bias, self.ranks)

    def linear(self, layer: Any, x: Tensor) -> Tensor:
        """y [..., T / R, N], this rank's rows, of its columns x [..., T, K / R]."""
        rows, recipe = self.ranks.by_rank(x), _fusable(layer)
        if recipe is None or x.numel() == 0:
            y, bias = scatter_rows(_compute(layer, rows, None), self.ranks), self.bias(layer)
            y = y if bias is None else y + bias.to(y.dtype)
        else:
            y = self.fused(layer, recipe, rows)
        batch = x.shape[:-2]
        return shaped(y, torch.Size((*batch, y.shape[0] // prod(batch), y.shape[1])))

    # Its exchanges: the rows of y are scattered, and those of g gathered.

    def quantize_x(self, x: Tensor, cast: Cast) -> QTensor:
        return ops.requantize([x], self.ranks.largest(ops.row_scales([x], cast)), cast)

    def quantize_activation(self, u: Tensor, kind: str, cast: Cast) -> QTensor:
        return ops.activation_quantize(u, kind, cast, self.ranks.largest(ops.activation_scales(u, kind, cast)))

    def y(self, x_q: QTensor, w_q: QTensor, bias: Tensor | None, call: FusedCall) -> tuple[Tensor, Tensor]:
        y = self.ranks.done(self.ranks.scattered_mm(x_q, w_q, call.recipe.y, call))  # [T,K/R] @ [N,K/R]^T
        return x_q.scale, y if bias is None else y + bias.to(y.dtype)

    def own(self, s_x: Tensor) -> Tensor:
        return self.ranks.own(s_x)

    def send_g(self, g: QTensor) -> Sent:
        return self.ranks.send(g)

    def dx(self, g: Sent, w_t: QTensor, s_x: Tensor, s_w: Tensor, call: FusedCall) -> Gradient:
        rows, dx = self.ranks.gathered_mm(g, w_t, call.recipe.dx, call, m=scale_mantissa(s_x))  # [T,N] @ [K/R,N]^T
        return rows, ops.fold_scales(s_x, rows.scale, s_w), dx

    def x_transposed(self, x_data: Tensor, g: QTensor) -> QTensor:
        return scale_folded(ops.transpose(x_data, None, g.data))


def call_norm(norm: nn.Module, x: Tensor, ranks: Ranks) -> Tensor:
    """`norm` of this rank's rows x [..., T / R, K], by its own forward: its parameters are DTensors."""
    parameter: Any = next(norm.parameters(), None)
    if parameter is None:
        return norm(x)
    local_replicated(parameter, ranks)  # raises where it is no DTensor
    placement = Shard(x.ndim - 2) if ranks.sequence else Replicate()
    return norm(DTensor.from_local(x, parameter.device_mesh, [placement], run_check=False)).to_local()


def local_replicated(parameter: Any, ranks: Ranks) -> Tensor:
    """A parameter that each rank has whole, and uses for its own rows: its gradient is a part of a sum."""
    if not isinstance(parameter, DTensor):
        raise ValueError(
            "a norm between parallel layers requires DTensors, got a tensor: give it octavo.distributed.NormParallel"
        )
    return parameter.to_local(grad_placements=[Partial()]) if ranks.sequence else parameter.to_local()


def _local(parameter: Any) -> Any:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _fusable(layer: Any) -> FusableRecipe | None:
    return layer.recipe.fusable if isinstance(layer, Linear) else None


def _compute(layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    w = _local(layer.weight)
    return layer.compute(x, w, bias, layer.quantized_weight(w)) if isinstance(layer, Linear) else F.linear(x, w, bias)
