"""Training on many devices with PyTorch's own engine: sharded weights (FSDP2) and tensor parallelism."""

from octavo.dist.tensor_parallelism.architectures import tensor_parallel
from octavo.dist.tensor_parallelism.styles import ColumnParallel, NormParallel, RowParallel

__all__ = ["ColumnParallel", "NormParallel", "RowParallel", "tensor_parallel"]
