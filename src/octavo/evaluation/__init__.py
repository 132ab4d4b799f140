"""Measuring a model on text: prompts, the distance of two models' logits, and limits on it."""

from octavo.evaluation.limits import Budget

__all__ = ["Budget"]
