"""The ranks that share layers, and their exchanges.

The collectives are PyTorch's functional ones, which torch.compile traces. `gather` and `scatter` only start the
exchange: the GPU computes on until `done` waits for the result.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Self

import torch
import torch.distributed._symmetric_memory  # registers the operations of torch.ops.symm_mem
from torch import Tensor
from torch.distributed import get_process_group_ranks, get_rank
from torch.distributed.device_mesh import DeviceMesh

from octavo.nn.linear_function import FusedCall, dx_operand
from octavo.nn.module_tools import exchanged
from octavo.numerics.qtensor import ROW, Cast, QTensor
from octavo.numerics.scaling import ceil_power_of_two
from octavo.ops import requantize, row_scales
from octavo.recipe import Gemm

collectives = torch.ops._c10d_functional

Sent = tuple[QTensor, tuple[Tensor, ...] | None]  # this rank's rows, and those of all ranks, on their way


def check_mesh(mesh: DeviceMesh, what: str) -> None:
    """Raise a TypeError or ValueError, which begins with `what`, unless `mesh` is a DeviceMesh of one dimension."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f'{what} takes a DeviceMesh, such as init_device_mesh("cuda", (2,)), got {mesh!r}')
    if mesh.ndim != 1:
        raise ValueError(
            f"{what} takes a mesh of one dimension, got {mesh}: pass one of its dimensions, for example "
            'mesh["tp"], and give the other to fully_shard'
        )


@dataclass(frozen=True)
class Ranks:
    """The ranks of a mesh of one dimension.

    With `sequence`, each rank has only its part of the sequence between the layers (sequence parallelism,
    arXiv:2205.05198). Otherwise each has all of it there, `gather` does nothing and `scatter` only sums.
    """

    name: str  # of their process group
    size: int
    rank: int  # the position of this one
    sequence: bool
    asynchronous: bool = False  # on GPUs, the rows of one rank are multiplied while others travel

    @classmethod
    def of(cls, mesh: DeviceMesh, *, sequence: bool, asynchronous: bool = False) -> Self:
        """The ranks of `mesh`. Raises a ValueError for `asynchronous` where it cannot run."""
        group = mesh.get_group()
        if asynchronous and (mesh.device_type != "cuda" or not sequence):
            raise ValueError(
                f"asynchronous tensor parallelism needs GPUs and sequence=True, got a mesh on {mesh.device_type} "
                f"and sequence={sequence}: leave asynchronous=False"
            )
        rank = get_process_group_ranks(group).index(get_rank())
        return cls(group.group_name, mesh.size(), rank, sequence, asynchronous)

    def gather(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The rows of all ranks, in their order, of tensors with this rank's rows [T / size, ...]; see `done`."""
        if not self.sequence:
            return tensors
        sent = [t.contiguous() for t in tensors]
        if len(sent) == 1:
            return (collectives.all_gather_into_tensor(sent[0], self.size, self.name),)
        return tuple(collectives.all_gather_into_tensor_coalesced(sent, self.size, self.name))

    def scatter(self, y: Tensor) -> Tensor:
        """This rank's rows [T / size, N] of the sum of the ranks' y [T, N]; see `done`."""
        y = y.contiguous()
        if self.sequence:
            return collectives.reduce_scatter_tensor(y, "sum", self.size, self.name)
        return collectives.all_reduce(y, "sum", self.name)

    def done(self, t: Tensor) -> Tensor:
        """The result of an exchange, once it has arrived."""
        return collectives.wait_tensor(t)

    def gathered(self, x: Tensor) -> Tensor:
        """The result of `gather` of x [T / size, K]."""
        return self.done(self.gather(x)[0]) if self.sequence else x.view_as(x)

    def summed(self, y: Tensor) -> Tensor:
        """The result of `scatter`."""
        return self.done(self.scatter(y))

    def largest(self, scales: Tensor) -> Tensor:
        """The largest of the ranks' scales, positive float32 or NaN, element by element; NaN is the largest."""
        # Positive floats have the order of their bits, with NaN above. The maximum of floats may skip a NaN.
        bits = collectives.all_reduce(scales.contiguous().view(torch.int32), "max", self.name)
        return self.done(bits).view(torch.float32)

    def own(self, t: Tensor) -> Tensor:
        """This rank's rows of a tensor with the rows of all."""
        return t.chunk(self.size)[self.rank] if self.sequence else t

    def by_sequence(self, y: Tensor, batch: torch.Size) -> Tensor:
        """[*batch, T, N] of y with the rows that `gather` gives: the parts of each sequence lie in different ranks."""
        if not self.sequence or prod(batch) == 1:
            return y.view(*batch, -1, y.shape[-1])
        parts = y.view(self.size, prod(batch), -1, y.shape[-1]).transpose(0, 1)
        return parts.reshape(*batch, -1, y.shape[-1])

    def check_length(self, tokens: int) -> None:
        """Raise a ValueError unless the ranks can divide a sequence of so many tokens."""
        if self.sequence and tokens % self.size:
            raise ValueError(
                f"each of {self.size} ranks has a part of the sequence: its length must be a multiple of {self.size}, "
                f"the degree of tensor parallelism, got {tokens}: pad it, or choose sequence=False"
            )

    def by_rank(self, x: Tensor) -> Tensor:
        """The rows of x [..., T, K] in the order in which `scatter` takes them: the inverse of `by_sequence`."""
        batch, (tokens, k) = x.shape[:-2], x.shape[-2:]
        self.check_length(tokens)
        if not self.sequence or prod(batch) == 1:
            return x.reshape(-1, k)
        return x.reshape(prod(batch), self.size, -1, k).transpose(0, 1).reshape(-1, k)

    # GEMMs with an exchange: an operand is gathered before, or the result is scattered after. With `asynchronous` both
    # are one operation of PyTorch on symmetric memory (asynchronous tensor parallelism): the rows of one rank are
    # multiplied while those of another travel. Inductor's pass for it (`_micro_pipeline_tp`) does not know our GEMM, so
    # the operations are called here.

    def send(self, a: QTensor) -> Sent:
        """This rank's rows `a` [M / R, K], which travel while the operand `b` of `gathered_mm` is made."""
        # gloo takes one dtype
        return a, None if self._runs(a) else self.gather(a.data.view(torch.uint8), a.scale.view(torch.uint8))

    def gathered_mm(
        self,
        sent: Sent,
        b: QTensor,
        gemm: Gemm,
        call: FusedCall,
        *,
        m: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> tuple[QTensor, Tensor]:
        """The rows [M, K] of all ranks, which were `sent`, and y [M, N] = rows @ b [N, K]^T + bias [N].

        The scales of the rows are divided by `m` [M, 1], of all ranks, for the GEMM.
        """
        a, arriving = sent
        if arriving is None:
            own = dx_operand(a, None if m is None else self.own(m))
            data, (y,) = torch.ops.symm_mem.fused_all_gather_scaled_matmul(
                own.data, [b.data.t()], own.scale.contiguous(), [b.scale.t()], 0, self.name, [None], [None],
                [call.dtype], [gemm.fast_accumulation],
            )  # fmt: skip
            rows = QTensor(data, self.done(self.gather(a.scale)[0]), a.format, ROW)
            return rows, y if bias is None else y + bias.to(y.dtype)
        data, scale = map(self.done, arriving)
        rows = QTensor(data.view(a.data.dtype), scale.view(torch.float32), a.format, ROW)
        return rows, call.mm(gemm, dx_operand(rows, m), b, call.dtype, bias)

    def scattered_mm(self, a: QTensor, b: QTensor, gemm: Gemm, call: FusedCall) -> Tensor:
        """This rank's rows [M / R, N] of the sum of the ranks' a [M, K / R] @ b [N, K / R]^T; see `done`."""
        if self._runs(a):
            shape = [a.shape[0], b.shape[0]]
            return torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter(
                a.data, b.data.t(), a.scale.contiguous(), b.scale.t(), "sum", 0, 0, self.name, shape, None, None,
                call.dtype, gemm.fast_accumulation,
            )  # fmt: skip
        return self.scatter(call.mm(gemm, a, b, call.dtype))

    def _runs(self, a: QTensor) -> bool:
        return self.asynchronous and a.data.is_cuda


# ---- Quantized weights of which each rank has a part, with the bytes and the scales of the whole weight.
#
# column-parallel     w [N, K] is cut along N: a row and its scale are one rank's. The relative floor of the scales
#                     depends on the largest scale of all ranks: one number a weight is exchanged.
# row-parallel        w [N, K] is cut along K: each rank has a part of every row. The largest of the ranks' scales is
#                     that of the row: N numbers are exchanged.


@dataclass(frozen=True, eq=False)
class Shards:
    """This rank's parts of weights that are stacked along N."""

    weights: Sequence[Tensor]  # [N_i / ranks, K] cut along N, or one weight [N, K / ranks] cut along K
    cast: Cast  # by row
    cut_rows: bool  # cut along K: each rank has a part of every row


def quantize_shards(shards: Sequence[Shards], ranks: Ranks) -> list[QTensor]:
    """Quantize each of `shards`, with one exchange between the ranks for all."""
    scales = [row_scales(part.weights, part.cast) for part in shards]
    sent = [s.view(-1) if part.cut_rows else _largest(part, s) for part, s in zip(shards, scales, strict=True)]
    shared = torch.split(ranks.largest(torch.cat(sent)), [t.numel() for t in sent])
    final = [_final(part, s, common) for part, s, common in zip(shards, scales, shared, strict=True)]
    return [requantize(part.weights, scale, part.cast) for part, scale in zip(shards, final, strict=True)]


def _largest(part: Shards, scale: Tensor) -> Tensor:
    """The largest finite scale [number of weights] of each weight."""
    return torch.stack([_finite(rows).amax() for rows in torch.split(scale, [len(w) for w in part.weights])])


def _finite(scale: Tensor) -> Tensor:
    return torch.where(scale.isfinite(), scale, 0)


def _final(part: Shards, scale: Tensor, shared: Tensor) -> Tensor:
    """The scales [sum of N_i, 1], with the floor relative to the largest of each weight, and rounded by the cast."""
    cast = part.cast
    if part.cut_rows:
        scale = shared.view(-1, 1)
        floor = _finite(scale).amax() * cast.relative_floor
    else:
        rows = [largest.expand(len(w)) for largest, w in zip(shared, part.weights, strict=True)]
        floor = torch.cat(rows).view(-1, 1) * cast.relative_floor
    floored = torch.maximum(scale, floor)
    return torch.where(scale.isnan(), scale, ceil_power_of_two(floored) if cast.power_of_two else floored)


# ---- Exchanges whose gradient takes the way back: those of experts, and of tensor parallelism in high precision, for
# layers whose recipe is not `rowwise`.


def gather_rows(x: Tensor, ranks: Ranks) -> Tensor:
    """[..., T, K] of this rank's rows x [..., T / R, K]. Without sequence parallelism, x itself."""
    return ranks.by_sequence(exchanged(x.reshape(-1, x.shape[-1]), ranks.gathered, ranks.summed), x.shape[:-2])


def scatter_rows(y: Tensor, ranks: Ranks) -> Tensor:
    """This rank's rows [T / R, N] of the sum of the ranks' y [T, N], rows in the order of the ranks."""
    return exchanged(y, ranks.summed, ranks.gathered)


def own_rows(x: Tensor, ranks: Ranks) -> Tensor:
    """This rank's rows [..., T / R, K] of x [..., T, K], which each rank has whole."""

    def own(x: Tensor) -> Tensor:
        return ranks.own(ranks.by_rank(x)).reshape(*x.shape[:-2], -1, x.shape[-1]).clone()

    return exchanged(x, own, partial(gather_rows, ranks=ranks))
