"""The transposed bytes of what was quantized before, made again from what it was quantized from."""

from octavo.ops.requantization.op import recast_norm, recast_transposed

__all__ = ["recast_norm", "recast_transposed"]
