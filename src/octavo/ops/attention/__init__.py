"""Attention of the newest queries over stored keys and values, and the cast that stores them."""

from octavo.ops.attention.op import append_kv, cached_attention

__all__ = ["append_kv", "cached_attention"]
