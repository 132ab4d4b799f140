"""Quantization of many matrices by row, in two launches for all of them (`octavo.ops.row_batch.op`)."""

from octavo.ops.row_batch.batch import RowBatch
from octavo.ops.row_batch.op import cast_rows, row_amaxes

__all__ = ["RowBatch", "cast_rows", "row_amaxes"]
