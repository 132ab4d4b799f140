"""The sum or the mean of a few long rows (`octavo.ops.row_addition.op`)."""

from octavo.ops.row_addition.op import add_rows

__all__ = ["add_rows"]
