"""Rewriting a checkpoint so that its outliers shrink and its function stays the same: smoothing and rotation."""

from octavo.folding.pipeline import FoldReport, fold

__all__ = ["FoldReport", "fold"]
