"""Training on many devices with PyTorch's own engine: sharded weights (FSDP2) and tensor parallelism."""
