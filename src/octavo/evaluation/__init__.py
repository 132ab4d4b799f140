"""Measuring a model on text: prompts, the difference between two models' outputs, and budgets for it."""

from octavo.evaluation.metrics import Budget
from octavo.evaluation.prompts import PromptOptions

__all__ = ["Budget", "PromptOptions"]
