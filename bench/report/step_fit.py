"""The model of a step (octavo/plan/communication.py) that takes as long as a measured one."""

from collections.abc import Callable
from dataclasses import replace

from octavo.plan.communication import Links, Training


def fit(seconds: float, training: Training, links: Links, world: int) -> Training:
    """`training` with the block's time that makes a step on `world` GPUs take `seconds`."""
    return replace(training, block=solve(lambda block: replace(training, block=block).step(links, world), seconds))


def solve(function: Callable[[float], float], target: float) -> float:
    """The largest argument from 0 to `target` at which the rising `function` is at most `target`."""
    low, high = 0.0, target
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) <= target else (low, middle)
    return low
