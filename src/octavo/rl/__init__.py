"""Reinforcement learning and online distillation: one FP8 from the optimizer's step to the sampled token."""

from octavo.rl.pushing import checksum, push

__all__ = ["checksum", "push"]
