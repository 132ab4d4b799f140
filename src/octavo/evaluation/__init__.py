"""Measuring a model on text: prompts, the difference between two models' outputs, and budgets for it."""
