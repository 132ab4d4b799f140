"""Bytes transposed, with an optional exponent shift a row."""

from octavo.ops.transposition.op import transpose

__all__ = ["transpose"]
