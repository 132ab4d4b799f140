"""Packing a trained model, and running it from the packed bytes."""

from octavo.serve.load import Loaded, end_tokens, load
from octavo.serve.pack import PackReport, pack
from octavo.serve.packed_linear import PackedLinear

__all__ = ["Loaded", "PackReport", "PackedLinear", "end_tokens", "load", "pack"]
