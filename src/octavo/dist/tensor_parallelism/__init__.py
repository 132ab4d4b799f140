"""Tensor parallelism: each rank has a part of every layer, and activations travel as bytes and row scales."""
