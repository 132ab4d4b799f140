"""octavo/plan/communication.py against steps that are simple enough to write down."""

import math
from dataclasses import replace

import pytest

from octavo.plan.communication import HOP, NETWORK_HOP, Links, Training

TRAINING = Training(
    layers=4, block=0.3, rest=0.05, optimizer=0.08, gathered=8e9, reduced=16e9, root_gathered=2e9, root_reduced=4e9
)  # fmt: skip


def test_a_ring_moves_all_but_the_own_shard() -> None:
    links = Links(node=100e9, network=50e9)
    assert links.gather(8e9, 1) == 0
    assert links.gather(8e9, 2) == pytest.approx(0.04 + HOP)
    assert links.gather(8e9, 8) == pytest.approx(0.07 + 7 * HOP)
    assert links.gather(8e9, 16) == pytest.approx(8e9 * 15 / 16 / 50e9 + NETWORK_HOP + 14 * HOP)
    assert replace(links, network=math.inf).gather(8e9, 16) < links.gather(8e9, 16)
    assert links.reduce(1e9, 4) == pytest.approx(2 * 1e9 * 0.75 / (50e9 / 8) + 4 * NETWORK_HOP)


def test_one_gpu_communicates_nothing() -> None:
    assert TRAINING.step(Links(1.0), 1) == pytest.approx(4 * 0.3 + 0.05 + 0.08)


def test_hidden_communication_costs_its_ends_only() -> None:
    links = Links(100e9)  # a block is gathered in 0.04 s and reduced in 0.08 s: less than 0.1 and 0.2
    ends = 0.04 + 0.04 + 0.08 + 0.01 + 0.02
    assert TRAINING.step(links, 2) == pytest.approx(4 * 0.3 + 0.05 + 0.04 + ends, rel=1e-3)


def test_a_slow_network_sets_the_time_of_a_block() -> None:
    links = Links(10e9)  # gathered in 0.4 s and reduced in 0.8 s
    expected = 0.4 + 3 * 0.4 + 0.1 + 0.4 + 3 * 1.2 + 0.2 + 0.8 + 0.1 + 0.2 + 0.05 + 0.04
    assert TRAINING.step(links, 2) == pytest.approx(expected, rel=1e-3)
    half = replace(TRAINING, gathered=4e9)
    assert TRAINING.step(links, 2) - half.step(links, 2) == pytest.approx(0.2 + 3 * 0.2 + 0.2 + 3 * 0.2, rel=1e-3)


def test_groups_that_hold_all_weights_sum_their_gradients_too() -> None:
    links = Links(100e9, network=50e9)
    alone, grouped = TRAINING.step(links, 8), TRAINING.step(links, 32, shards=8)
    across = [links.reduce(size / 8, 4) for size in (TRAINING.reduced, TRAINING.root_reduced)]
    g, s = links.gather(8e9, 8), links.gather(16e9, 8) + across[0]
    blocks = 3 * (max(0.2, g + s) - max(0.2, g + s - across[0]))
    assert grouped - alone == pytest.approx(blocks + sum(across))
