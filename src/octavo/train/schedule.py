"""The learning rate as a function of the step: linear warmup, then cosine or WSD.

With peak `a`, end `b`, warmup `W` and `S` = decay_steps, for step s = 0, 1, ..., S - 1:

    warmup  s < W    a * (s + 1) / W                                       the first step already learns
    cosine           b + (a - b) * (1 + cos(pi * (s - W) / (S - W))) / 2
    wsd              a while s < S - D, then a + (b - a) * (s - (S - D)) / D,  with D = decay * S

Both curves reach `b` at s = S and stay there. The cosine is that of SGDR without restarts (Loshchilov and
Hutter, arXiv:1608.03983, equation 5). Warmup-stable-decay is from MiniCPM (Hu et al., arXiv:2404.06395), which
leaves the shape of the decay open; a linear one is used here.
"""

import math

from octavo.train.config import Config


def learning_rate(step: int, config: Config) -> float:
    """The learning rate of `step`, counted from 0; `config.min_learning_rate` from `config.decay_steps` on.

    Raises:
        ValueError: `step` is negative.
    """
    if step < 0:
        raise ValueError(f"step must be 0 or more; got {step}")
    peak, end = config.learning_rate, config.min_learning_rate
    if step < config.warmup:
        return peak * (step + 1) / config.warmup
    if step >= config.decay_steps:
        return end
    if config.schedule == "cosine":
        progress = (step - config.warmup) / (config.decay_steps - config.warmup)
        return end + (peak - end) * (1 + math.cos(math.pi * progress)) / 2
    decaying = config.decay * config.decay_steps
    decayed = step - (config.decay_steps - decaying)
    return peak if decayed <= 0 else peak + (end - peak) * decayed / decaying
