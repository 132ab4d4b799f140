"""Reinforcement learning and online distillation: one FP8 from the optimizer's step to the sampled token."""

from octavo.rl.pushing import checksum, push, served_weights
from octavo.rl.rollout_parity import DriftError, parity

__all__ = ["DriftError", "checksum", "parity", "push", "served_weights"]
