"""When Python collects garbage in a run, and that it frees what steps leave."""

import gc
import weakref

import pytest

from octavo.train.garbage import EVERY, collect_between_steps, collect_young


class Node:
    """An object in a cycle of references."""

    def __init__(self):
        self.own = self


@pytest.mark.parametrize("enabled", [True, False])
def test_collection_is_as_before_after_the_block_and_after_an_error(enabled):
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with collect_between_steps():
            assert not gc.isenabled()
        assert gc.isenabled() == enabled
        with pytest.raises(KeyError), collect_between_steps():
            raise KeyError
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_cycles_are_freed_at_every_fiftieth_step_and_no_sooner():
    with collect_between_steps():
        node = weakref.ref(Node())
        for step in range(1, EVERY):
            collect_young(step)
        [Node() for _ in range(10_000)]  # enough for a collection by itself
        assert node() is not None
        collect_young(EVERY)
        assert node() is None


def test_a_run_collects_between_its_steps(begin, monkeypatch):
    collected, enabled = [], []
    trainer = begin(steps=3)
    monkeypatch.setattr("octavo.train.loop.collect_young", collected.append)
    step = trainer.step
    monkeypatch.setattr(trainer, "step", lambda: (enabled.append(gc.isenabled()), step())[1])
    before = gc.isenabled()
    trainer.run()
    assert collected == [1, 2, 3]
    assert enabled == [False] * 3
    assert gc.isenabled() == before
