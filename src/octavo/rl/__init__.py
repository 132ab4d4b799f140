"""Reinforcement learning and online distillation: one FP8 from the optimizer's step to the sampled token."""

from octavo.rl.pushing import checksum, push
from octavo.rl.same_forward import log_probabilities, same_bits

__all__ = ["checksum", "log_probabilities", "push", "same_bits"]
