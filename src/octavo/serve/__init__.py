"""Packing a model, repacking it, and running it from the packed bytes."""

from octavo.serve.load import Loaded, end_tokens, load
from octavo.serve.pack import PackReport, pack
from octavo.serve.packed_linear import PackedLinear
from octavo.serve.repack import Repacked, convert_layout, unpack

__all__ = [
    "Loaded",
    "PackReport",
    "PackedLinear",
    "Repacked",
    "convert_layout",
    "end_tokens",
    "load",
    "pack",
    "unpack",
]
