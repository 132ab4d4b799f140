"""Attention over a cache of stored keys and values, and the functions that store them."""

from octavo.ops.attention.op import MAX_ROWS, append_kv, cached_attention
from octavo.ops.attention.stored import LARGEST, from_stored, to_stored, widened

__all__ = ["LARGEST", "MAX_ROWS", "append_kv", "cached_attention", "from_stored", "to_stored", "widened"]
