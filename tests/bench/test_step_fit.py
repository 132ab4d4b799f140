"""The fit of the model of a step to a measured time."""

from dataclasses import replace

import pytest

from bench.report.step_fit import fit
from octavo.plan.communication import Links, Training

TRAINING = Training(
    layers=4, block=0.3, rest=0.05, optimizer=0.08, gathered=8e9, reduced=16e9, root_gathered=2e9, root_reduced=4e9
)  # fmt: skip


@pytest.mark.parametrize("world", [1, 2, 8])
def test_the_fit_gives_the_measured_time_back(world: int) -> None:
    links = Links(100e9)
    found = fit(TRAINING.step(links, world), replace(TRAINING, block=0.0), links, world)
    assert found.block == pytest.approx(TRAINING.block, rel=1e-6)
