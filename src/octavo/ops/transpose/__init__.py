"""Bytes transposed, with an optional exponent shift a row."""

from octavo.ops.transpose.door import transpose

__all__ = ["transpose"]
