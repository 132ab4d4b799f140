"""A KV cache in BF16, FP8 or INT8: of one attention layer, of a model, and of a model for transformers.

`LayerKVCache` is one layer's cache, and `ModelKVCache` that of all layers of a model.
`octavo.kv_cache.transformers_cache.QuantizedKVCache` is the same for `past_key_values`; its module imports
transformers, so it is not imported here.
"""

from octavo.kv_cache.layer import LayerKVCache
from octavo.kv_cache.model import ModelKVCache

__all__ = ["LayerKVCache", "ModelKVCache"]
