"""Reinforcement learning and online distillation: one FP8 from the optimizer's step to the sampled token."""

from octavo.rl.pushing import checksum, push, served_weights
from octavo.rl.rollout_parity import DriftError, parity
from octavo.rl.same_forward import log_probabilities, same_bits

__all__ = ["DriftError", "checksum", "log_probabilities", "parity", "push", "same_bits", "served_weights"]
