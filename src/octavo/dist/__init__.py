"""Training on many devices with PyTorch's own engine: sharded weights (FSDP2), tensor and expert parallelism."""

from octavo.dist.expert_parallelism import expert_parallel
from octavo.dist.fsdp_gather import fp8_all_gather
from octavo.dist.gather_report import GatherReport, GatherRow
from octavo.dist.gradient_exchange import send_bf16_gradients
from octavo.dist.tensor_parallelism.architectures import tensor_parallel
from octavo.dist.tensor_parallelism.styles import ColumnParallel, NormParallel, RowParallel

__all__ = [
    "ColumnParallel",
    "GatherReport",
    "GatherRow",
    "NormParallel",
    "RowParallel",
    "expert_parallel",
    "fp8_all_gather",
    "send_bf16_gradients",
    "tensor_parallel",
]
