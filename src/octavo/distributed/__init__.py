"""Training on many devices with PyTorch's own engine: sharded weights (FSDP2), tensor and expert parallelism."""

from octavo.distributed.expert_parallelism import expert_parallel
from octavo.distributed.fsdp import fp8_all_gather
from octavo.distributed.fsdp_units import GatherReport, send_bf16_gradients
from octavo.distributed.tensor_parallelism import ColumnParallel, NormParallel, RowParallel, tensor_parallel

__all__ = [
    "ColumnParallel",
    "GatherReport",
    "NormParallel",
    "RowParallel",
    "expert_parallel",
    "fp8_all_gather",
    "send_bf16_gradients",
    "tensor_parallel",
]
