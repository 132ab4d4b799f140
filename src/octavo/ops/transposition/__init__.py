"""The byte transpose, with an optional exponent shift for each row."""

from octavo.ops.transposition.op import transpose

__all__ = ["transpose"]
