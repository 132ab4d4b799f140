"""Running a packed folder: models whose linear layers compute with the packed weights."""

from octavo.runtime.build import Loaded, end_tokens, load_packed
from octavo.runtime.packed_linear import PackedLinear

__all__ = ["Loaded", "PackedLinear", "end_tokens", "load_packed"]
