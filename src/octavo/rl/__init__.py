"""Reinforcement learning and online distillation: one FP8 from the optimizer's step to the sampled token."""

from octavo.rl.same_forward import log_probabilities, same_bits

__all__ = ["log_probabilities", "same_bits"]
