"""`update_scales` on a GPU: the numbers of the CPU, and no wait for the device."""

from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
from gpu_memory import no_waits
from test_scales import mixed

import octavo
from octavo.nn.delayed import histories

pytestmark = pytest.mark.gpu


def test_the_scales_are_those_of_the_cpu_and_the_host_does_not_wait() -> None:
    torch.manual_seed(0)
    here = mixed()
    there = deepcopy(here).cuda()
    for step in range(6):
        for (_, a), (_, b) in zip(histories(here), histories(there), strict=True):
            a.pending.uniform_(1, 8)
            b.pending.copy_(a.pending)
        octavo.scales.update_scales(here)
        with no_waits() if step else nullcontext():  # the first step reads which have a scale
            octavo.scales.update_scales(there)
    for (_, a), (_, b) in zip(histories(here), histories(there), strict=True):
        assert torch.equal(a.recent, b.recent.cpu())
        assert int(a.steps) == int(b.steps) == 6
        torch.testing.assert_close(a.scale, b.scale.cpu(), rtol=1e-6, atol=0.0)
