"""Running a packed folder: models whose linear layers compute with the packed weights."""

from octavo.runtime.build import Loaded, end_tokens, load_packed
from octavo.runtime.packed_linear import PackedLinear
from octavo.runtime.transformers_model import load_transformers, warm_up

__all__ = ["Loaded", "PackedLinear", "end_tokens", "load_packed", "load_transformers", "warm_up"]
