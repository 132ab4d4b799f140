"""Calibrating a model, packing it, repacking it, verifying it, and running it from the packed bytes."""

from octavo.serve.calibrate import calibrate
from octavo.serve.calibration import Calibration
from octavo.serve.load import Loaded, end_tokens, load
from octavo.serve.pack import PackReport, pack
from octavo.serve.packed_linear import PackedLinear
from octavo.serve.repack import Repacked, convert_layout, unpack
from octavo.serve.verify import verify

__all__ = [
    "Calibration",
    "Loaded",
    "PackReport",
    "PackedLinear",
    "Repacked",
    "calibrate",
    "convert_layout",
    "end_tokens",
    "load",
    "pack",
    "unpack",
    "verify",
]
