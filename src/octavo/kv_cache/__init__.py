"""A KV cache in BF16, FP8 or INT8: of one attention layer, and of a whole model for transformers.

`LayerKVCache` is one layer's cache. `octavo.kv_cache.transformers_cache.QuantizedKVCache` is the cache of a model; its
module imports transformers, so it is not imported here. The full-precision cache of our own models is
`octavo.models.KVCache`.
"""

from octavo.kv_cache.layer import LayerKVCache

__all__ = ["LayerKVCache"]
