"""The losses and gradient norms of the last steps, read all at once, and the weights before the first bad gradient.

A GPU would wait if the host read the norm in every step. So the step whose gradient is not finite must not change the
weights before anybody knows: torch's fused AdamW takes a flag on the device, `found_inf`, which `GradScaler` uses too.
From the first such step on the flag stays set, and the weights and moments stay as they were before that step, until
the host has read the norms.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.train.checkpoint import TrainState
from octavo.train.processes import mean_of_ranks, whole


class StepNumbers(NamedTuple):
    """The loss, the mean over all ranks, and the norm of the gradient, of the step with this number."""

    step: int
    loss: float
    norm: float

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.norm)


class RecentSteps:
    """The steps since the last call of `read`."""

    def __init__(self) -> None:
        self._steps: list[tuple[int, Tensor, Tensor]] = []
        self._bad: Tensor | None = None

    def update(self, state: TrainState, norm: Tensor) -> Tensor:
        """Take the optimizer's step, unless a gradient since the last `read` was not finite. The norm, whole.

        With a loss scaler (FP16), that scaler decides instead, for each step by itself.
        """
        norm = whole(norm)
        if state.scaler.is_enabled():
            state.scaler.step(state.optimizer)
            return norm
        bad = ~norm.isfinite()
        self._bad = bad if self._bad is None else bad | self._bad
        if isinstance(state.optimizer, torch.optim.AdamW):  # fused
            state.optimizer.found_inf = self._bad.float()  # type: ignore[attr-defined]
            state.optimizer.step()
        elif not self._bad:  # an optimizer of torchao's takes no flag: read the norm
            state.optimizer.step()
        return norm

    @property
    def bad(self) -> bool:
        """Whether a gradient since the last `read` was not finite: waits for the device."""
        return self._bad is not None and bool(self._bad)

    def note(self, step: int, loss: Tensor, norm: Tensor) -> None:
        """Take the numbers of a step: `loss` 0-dim, of this rank; `norm` 0-dim, whole."""
        self._steps.append((step, loss, norm))

    def read(self) -> list[StepNumbers]:
        """The numbers of the steps since the last call, and forget them. Every rank must call this."""
        if not self._steps:
            return []
        steps, losses, norms = zip(*self._steps, strict=True)
        self._steps, self._bad = [], None
        return list(map(StepNumbers, steps, mean_of_ranks(torch.stack(losses)).tolist(), torch.stack(norms).tolist()))
