"""Writing FP8-quantized checkpoints: `pack`, within a budget or without, and conversions of packed folders."""

from octavo.packing.budget import Kept, pack_within
from octavo.packing.options import PackOptions
from octavo.packing.pipeline import pack
from octavo.packing.repacking import Repacked, convert_layout, unpack
from octavo.packing.report import PackReport

__all__ = ["Kept", "PackOptions", "PackReport", "Repacked", "convert_layout", "pack", "pack_within", "unpack"]
