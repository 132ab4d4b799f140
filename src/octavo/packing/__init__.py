"""Writing FP8-quantized checkpoints, and converting them to other layouts or back to BF16."""

from octavo.packing.budget import pack_within
from octavo.packing.options import PackOptions
from octavo.packing.packer import pack
from octavo.packing.repacking import convert_layout, freeze_folder, pack_frozen, unpack

__all__ = ["PackOptions", "convert_layout", "freeze_folder", "pack", "pack_frozen", "pack_within", "unpack"]
