"""Training on many devices with PyTorch's own engine: sharded weights (FSDP2) and tensor parallelism."""

from octavo.dist.fsdp_gather import fp8_all_gather
from octavo.dist.gather_report import GatherReport, GatherRow

__all__ = ["GatherReport", "GatherRow", "fp8_all_gather"]
