"""GEMMs with an exchange between ranks: of an operand, gathered before, or of the result, scattered after.

With `Ranks.asynchronous` both are one operation of PyTorch on symmetric memory (asynchronous tensor parallelism): the
rows of one rank are multiplied while those of another travel. Inductor's pass for it (`_micro_pipeline_tp`) does not
know our GEMM, so the operations are called here.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed._symmetric_memory  # registers the operations of torch.ops.symm_mem
from torch import Tensor

from octavo.dist.tensor_parallelism.ranks import Ranks
from octavo.nn.linear_call import FusedCall
from octavo.nn.scale_folding import dx_operand
from octavo.numerics.granularity import ROW
from octavo.numerics.qtensor import QTensor
from octavo.recipe import Gemm


def gathered_mm(
    a: QTensor,
    make_b: Callable[[], QTensor],
    gemm: Gemm,
    call: FusedCall,
    ranks: Ranks,
    *,
    m: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[QTensor, QTensor, Tensor]:
    """The rows [M, K] of all ranks, b [N, K], and y [M, N] = rows @ b^T + bias [N].

    Args:
        a: [M / R, K], this rank's rows.
        make_b: gives b. It is called while the rows travel.
        m: [M, 1] of all ranks, by which the scales of the rows are divided for the GEMM.
    """
    if _runs(a, ranks):
        b = make_b()
        own = dx_operand(a, None if m is None else ranks.own(m))
        symmetric: Any = torch.ops.symm_mem.fused_all_gather_scaled_matmul
        data, (y,) = symmetric(
            own.data, [b.data.t()], own.scale.contiguous(), [b.scale.t()], 0, ranks.name, [None], [None], [call.dtype],
            [gemm.fast_accumulation],
        )  # fmt: skip
        rows = QTensor(data, ranks.done(ranks.gather(a.scale)[0]), a.format, ROW)
        return rows, b, y if bias is None else y + bias.to(y.dtype)
    arriving = ranks.gather_quantized(a)
    b = make_b()
    rows = ranks.quantized(arriving, a)
    return rows, b, call.mm(gemm, dx_operand(rows, m), b, call.dtype, bias)


def scattered_mm(a: QTensor, b: QTensor, gemm: Gemm, call: FusedCall, ranks: Ranks) -> Tensor:
    """This rank's rows [M / R, N] of the sum of the ranks' a [M, K / R] @ b [N, K / R]^T; see `Ranks.done`."""
    if _runs(a, ranks):
        symmetric: Any = torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter
        shape = [a.shape[0], b.shape[0]]
        own: Tensor = symmetric(
            a.data, b.data.t(), a.scale.contiguous(), b.scale.t(), "sum", 0, 0, ranks.name, shape, None, None,
            call.dtype, gemm.fast_accumulation,
        )  # fmt: skip
        return own
    return ranks.scatter(call.mm(gemm, a, b, call.dtype))


def _runs(a: QTensor, ranks: Ranks) -> bool:
    """True where the operation on symmetric memory runs: on GPUs."""
    return ranks.asynchronous and a.data.is_cuda
