"""FSDP2's reduction of gradients: BF16 on the network, FP32 sums.

With `reduce_dtype=torch.float32` FSDP2 casts the gradients of a unit to FP32 and reduce-scatters them: four bytes an
element are copied and sent. Gradients of a unit that computes in BF16 are BF16 before that cast. So each rank can send
the other ranks their parts in BF16, by one all-to-all, and sum what it receives in FP32. These are the same sums of the
same numbers, in the order of the ranks, with half the bytes.

FSDP2 asks for the buffer of a reduction before it says which gradients it will hold. They are FP32 where micro-batches
were accumulated without a reduction. Therefore it gets a tensor without memory, `_Gradients`, which takes the dtype of
the gradients that FSDP2 copies into it. FP32 gradients are reduced as before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from octavo.dist.fsdp_units import check_sharded, reducing_units
from octavo.nn.layer_limits import check_module
from octavo.ops.row_addition import add_rows


def send_bf16_gradients(model: nn.Module) -> int:
    """Make FSDP2 send BF16 gradients as they are and sum them in FP32, in place of sending them in FP32.

    Call it after the last `fully_shard`. The sums have the precision of `reduce_dtype=torch.float32`, which the units
    must have; two ranks get the same bits. A rank sends half the bytes, and holds no more memory. Gradients that are
    FP32 are reduced in FP32: those of units without `param_dtype=torch.bfloat16`, and those of micro-batches that
    `set_requires_gradient_sync(False)` accumulated. So are gradients with `set_gradient_divide_factor`.

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.layers:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        send_bf16_gradients(model)

    Args:
        model: on which `fully_shard` was called, and on all units below it.

    Returns:
        The number of units whose BF16 gradients travel in BF16. Units of one rank send nothing, and units with another
        `reduce_dtype`, or with parameters on several meshes, stay as they are.

    Raises:
        TypeError: `model` is no module.
        ValueError: `fully_shard` was not called.
    """
    check_module(model, "send_bf16_gradients")
    check_sharded(model)
    units = reducing_units(model)
    for unit in units:
        unit.set_custom_reduce_scatter(BF16Exchange())
    return len(units)


class BF16Exchange(ReduceScatter):
    """The reduce-scatter of one unit of FSDP2: an all-to-all of BF16 gradients, and sums in FP32."""

    def __init__(self) -> None:
        self._filled: _Gradients | None = None  # until FSDP2 asks for the output of their reduction

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The input of a reduction, and, in the next call, its output."""
        if self._filled is not None and self._filled.memory is not None:
            self._filled = None
            return torch.empty(*size, dtype=dtype, device=device)
        empty = torch.empty(0, dtype=dtype, device=device)
        self._filled = torch.Tensor._make_subclass(_Gradients, empty)
        self._filled.size_to_fill = int(size[0])
        return self._filled

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Reduce the gradients of `input_tensor`, one row a rank, into this rank's `output_tensor`."""
        assert isinstance(input_tensor, _Gradients)
        assert input_tensor.memory is not None
        sent, average = input_tensor.memory, op == dist.ReduceOp.AVG
        if sent.dtype != torch.bfloat16 or not (average or op == dist.ReduceOp.SUM):
            wide = sent.to(output_tensor.dtype).view(-1)
            return DefaultReduceScatter()(output_tensor, wide, group, op, async_op)
        received = torch.empty_like(sent)
        # bytes, because not every backend knows BF16
        dist.all_to_all_single(received.view(torch.uint8), sent.view(torch.uint8), group=group)
        add_rows(received, output_tensor, mean=average)
        return None


class _Gradients(Tensor):
    """What FSDP2 holds as the input of a reduction. `memory` has a row for each rank, once FSDP2 has filled it."""

    memory: Tensor | None = None
    size_to_fill = 0  # elements of all rows

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.view:
            return args[0]
        if func is torch.ops.fsdp.chunk_cat:
            return _fill(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def _fill(tensors: Sequence[Tensor], dim: int, num_chunks: int, out: _Gradients) -> None:
    """Copy the parts of `tensors`, padded, to a row for each rank, in their own dtype."""
    grad = tensors[0]
    out.memory = torch.empty(num_chunks, out.size_to_fill // num_chunks, dtype=grad.dtype, device=grad.device)
    torch.ops.fsdp.chunk_cat(tensors, dim, num_chunks, out=out.memory)
