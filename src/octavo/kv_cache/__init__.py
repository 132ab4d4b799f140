"""A cache of keys and values in FP8, for models of transformers."""

from octavo.kv_cache.layer import LayerKVCache

__all__ = ["LayerKVCache"]
