"""Rotary embedding of queries and keys, stored in a cache in the same pass."""

from octavo.ops.rotary.op import rotate_append

__all__ = ["rotate_append"]
