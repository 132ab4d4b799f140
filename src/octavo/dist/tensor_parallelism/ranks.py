"""The ranks that share layers, and their exchanges.

The collectives are PyTorch's functional ones, which torch.compile traces. `gather` and `scatter` only start the
exchange: the GPU computes on until `done` waits for the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.distributed import get_process_group_ranks, get_rank
from torch.distributed.device_mesh import DeviceMesh

from octavo.numerics.granularity import ROW
from octavo.numerics.qtensor import QTensor

collectives = torch.ops._c10d_functional


@dataclass(frozen=True)
class Ranks:
    """The ranks of a mesh of one dimension.

    Args:
        name: of their process group.
        size: how many there are.
        rank: the position of this one.
        sequence: whether each rank has only its part of the sequence between the layers (sequence parallelism,
            arXiv:2205.05198). Otherwise each has all of it there, `gather` does nothing and `scatter` only sums.
        asynchronous: whether the rows of one rank are multiplied while those of another travel, on GPUs.
    """

    name: str
    size: int
    rank: int
    sequence: bool
    asynchronous: bool = False

    @classmethod
    def of(cls, mesh: DeviceMesh, *, sequence: bool, asynchronous: bool = False) -> Ranks:
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

    def gather_data(self, data: Tensor, after: Tensor) -> tuple[Tensor, ...]:
        """`gather` of the data of a quantized tensor, in the backward pass; see `data`.

        A number of `after`, a tensor of that pass, travels too. Compiled code would otherwise gather in the forward
        pass, and save the rows of all ranks.
        """
        return self.gather(data.view(torch.uint8), after[:1].view(torch.uint8))

    def data(self, gathered: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """The data that `gather_data` gathers, in `dtype`, once it has arrived."""
        # PyTorch keeps the memory of an exchange until its result is waited for: also that of the number.
        data, _ = [self.done(t) for t in gathered]
        return data.view(dtype)

    def gather_quantized(self, q: QTensor) -> tuple[Tensor, Tensor]:
        """`gather` of the data and the row scales of a quantized tensor."""
        data, scale = self.gather(q.data.view(torch.uint8), q.scale.view(torch.uint8))  # gloo takes one dtype
        return data, scale

    def scatter(self, y: Tensor) -> Tensor:
        """This rank's rows [T / size, N] of the sum of the ranks' y [T, N]; see `done`."""
        y = y.contiguous()
        own: Tensor = (
            collectives.reduce_scatter_tensor(y, "sum", self.size, self.name)
            if self.sequence
            else collectives.all_reduce(y, "sum", self.name)
        )
        return own

    def done(self, t: Tensor) -> Tensor:
        """The result of an exchange, once it has arrived."""
        arrived: Tensor = collectives.wait_tensor(t)
        return arrived

    def quantized(self, gathered: tuple[Tensor, Tensor], like: QTensor) -> QTensor:
        """The tensor that `gather_quantized` gathers, once it has arrived; `like` is this rank's part."""
        data, scale = map(self.done, gathered)
        return QTensor(data.view(like.data.dtype), scale.view(torch.float32), like.format, ROW)

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

    def by_rank(self, x: Tensor) -> Tensor:
        """The rows of x [..., T, K] in the order in which `scatter` takes them: the inverse of `by_sequence`."""
        batch, (tokens, k) = x.shape[:-2], x.shape[-2:]
        if not self.sequence:
            return x.reshape(-1, k)
        if tokens % self.size:
            raise ValueError(
                f"each of {self.size} ranks has a part of the sequence: its length must be a multiple of {self.size}, "
                f"got {tokens}: pad it, or choose sequence=False"
            )
        if prod(batch) == 1:
            return x.reshape(-1, k)
        return x.reshape(prod(batch), self.size, -1, k).transpose(0, 1).reshape(-1, k)
