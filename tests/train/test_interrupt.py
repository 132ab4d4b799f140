"""Signals ask a run to stop after its step, wherever in the step they come; a second one stops it at once."""

import os
import signal

import pytest

from octavo.train.processes import delay_interrupts
from octavo.train.saving import CheckpointWriter

pytestmark = pytest.mark.usefixtures("default_signals")
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


def signal_twice():
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    pytest.fail("the second signal was noted too")


@pytest.mark.parametrize(("block", "error"), [(signal_twice, KeyboardInterrupt), (lambda: 1 / 0, ZeroDivisionError)])
def test_a_second_signal_acts_at_once_and_handlers_come_back_after_an_error(block, error):
    before = [signal.getsignal(each) for each in SIGNALS]
    with pytest.raises(error), delay_interrupts():
        block()
    assert [signal.getsignal(each) for each in SIGNALS] == before


def test_a_signal_that_is_ignored_stays_ignored():
    """`nohup octavo train` goes on when its terminal closes."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with delay_interrupts() as noted:
            os.kill(os.getpid(), signal.SIGHUP)
            assert noted == []
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("where", "step", "saved"),
    [("step", 3, 3), ("_log", 3, 4), ("evaluate", 4, 5), ("save", 4, 5), ("step", 4, 4), ("_log", 1, 2),
     ("evaluate", 8, 8)],
)  # fmt: skip
def test_the_step_it_stops_at_is_saved(begin, go_on, monkeypatch, records, where, step, saved):
    """A signal in the last step finds the run done."""
    trainer = begin(recipe="bf16")
    owner = CheckpointWriter if where == "save" else trainer
    original = getattr(owner, where)

    def signalled(*args, **kwargs):
        result = original(*args, **kwargs)
        if trainer.state.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    monkeypatch.setattr(owner, where, signalled)
    result = trainer.run()
    assert (result.step, result.interrupted) == (saved, "SIGTERM" if step < 8 else None)
    assert trainer.run_folder.newest() == trainer.run_folder.checkpoint(saved)
    assert list(records(trainer.run_folder.path)) == list(range(1, saved + 1))
    monkeypatch.undo()
    assert go_on(trainer.run_folder.path).state.step == saved
