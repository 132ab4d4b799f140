"""Calibrating a model, folding it, packing it, repacking it, verifying it, and running it from the packed bytes."""

from octavo.serve.budget import Kept, pack_within
from octavo.serve.calibrate import calibrate
from octavo.serve.calibration import Calibration
from octavo.serve.fold import FoldReport, fold
from octavo.serve.gguf import GgufReport, export_gguf
from octavo.serve.limits import Budget
from octavo.serve.load import Loaded, end_tokens, load
from octavo.serve.pack import pack
from octavo.serve.pack_report import PackReport
from octavo.serve.packed_linear import PackedLinear
from octavo.serve.repack import Repacked, convert_layout, unpack
from octavo.serve.runtime import warm_up
from octavo.serve.verify import verify

__all__ = [
    "Budget",
    "Calibration",
    "FoldReport",
    "GgufReport",
    "Kept",
    "Loaded",
    "PackReport",
    "PackedLinear",
    "Repacked",
    "calibrate",
    "convert_layout",
    "end_tokens",
    "export_gguf",
    "fold",
    "load",
    "pack",
    "pack_within",
    "unpack",
    "verify",
    "warm_up",
]
