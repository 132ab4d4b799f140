"""The host's time of a step, and settings with which a GPU waits less for it."""

from dataclasses import replace

import pytest

from bench.gpu.plan import configured
from octavo.plan.cases import Case
from octavo.plan.hardware import find_gpu
from octavo.plan.models import find_architecture
from octavo.plan.setup import make_setup
from octavo.plan.step_time import StepTime
from octavo.plan.training import WORTHWHILE, TrainingPlan

FULL = ("--activation-checkpointing.mode", "full")


def plan(*settings: str, model: str = "llama-3.2-1b", gpus: int = 2) -> TrainingPlan:
    """Of 2,048 tokens a GPU, and so of little work for it."""
    return Case(model, ("--context", "2048", *settings), gpus=gpus).training()


def time(*settings: str, gpus: int = 2) -> StepTime:
    return plan(*settings, gpus=gpus).time


@pytest.mark.parametrize(("recipe", "checkpointing", "ms"), [("bf16", "none", 104), ("rowwise", "full", 153)])
def test_the_measured_steps_of_two_hosts(recipe: str, checkpointing: str, ms: float) -> None:
    """A Llama of 16 blocks on two H200s: the call of `Trainer.step`, nothing waited for, at 73f4b6cd. The code has
    become faster since."""
    config = configured("1b", 2, recipe, checkpointing)
    found = TrainingPlan(make_setup(find_architecture("", config), config, find_gpu("h200"), 2))
    assert 0.85 * ms < 1e3 * found.time.host < ms


@pytest.mark.parametrize(("mode", "ms"), [("bf16", 4.0), ("rowwise", 9.4)])
def test_the_measured_stack_of_four_blocks_on_one_gpu(mode: str, ms: float) -> None:
    """docs/log.md, on the host of an H100: without an optimizer. No constant was fitted to it, and hosts differ."""
    one, two = (time("--recipe", mode, "--accumulate", n, gpus=1).host for n in ("1", "2"))
    assert 1e3 * (two - one) / 16 == pytest.approx(ms / 4, rel=0.7)


def test_a_step_takes_as_long_as_the_gpu_or_the_host() -> None:
    small, large = time(*FULL), time(*FULL, "--batch", "64")
    assert small.host == large.host
    assert small.total == pytest.approx(small.host)
    assert small.host > small.total - small.waiting > 0
    assert large.total > large.host
    assert large.waiting == 0
    assert "host" not in small.parts


def test_the_update_of_the_weights_is_the_last_micro_batch_alone() -> None:
    one, two, three = (time("--accumulate", str(n)).host for n in (1, 2, 3))
    assert three - two == pytest.approx(two - one)
    assert 0 < one - (two - one) < two - one


def test_what_the_host_does_more_takes_longer() -> None:
    wide = "--no-parallel.fp8-all-gather"
    cases = [("--recipe", "bf16"), (wide,), (wide, "--activation-checkpointing.mode", "selective"), (wide, *FULL), FULL]
    seconds = [time(*settings).host for settings in cases]
    assert seconds == sorted(set(seconds))
    assert time(gpus=1).host < 0.5 * time().host


def test_recipes_in_order_of_what_the_host_launches() -> None:
    recipes = ("bf16", "rowwise", "tensorwise", "delayed", "blockwise")
    seconds = [time("--recipe", recipe, gpus=1).host for recipe in recipes]
    assert seconds == sorted(set(seconds))
    assert time("--recipe", "mxfp8", gpus=1).host == seconds[-1]


def test_eager_blocks_and_their_checkpointing() -> None:
    modes = ("none", "full", "selective")
    eager = [time("--no-compile.blocks", "--activation-checkpointing.mode", mode).host for mode in modes]
    assert eager == sorted(set(eager))
    assert eager[0] > time().host


def test_settings_with_which_the_gpu_waits_less() -> None:
    waiting = plan("--batch", "2", *FULL)
    found = waiting.faster_settings
    assert {"--batch 4", "--accumulate 4", "--activation-checkpointing.mode none", "--recipe bf16"} <= set(found)
    assert "--compile.blocks" not in found  # they are
    assert min(found.values()) >= WORTHWHILE
    for settings, option in {
        ("--batch", "4", *FULL): "--batch 4",
        ("--batch", "2", "--accumulate", "4", *FULL): "--accumulate 4",
        ("--batch", "2"): "--activation-checkpointing.mode none",
        ("--batch", "2", "--recipe", "bf16", *FULL): "--recipe bf16",
    }.items():
        assert plan(*settings).tokens_per_second / waiting.tokens_per_second == pytest.approx(found[option])


def test_a_setting_that_does_not_fit_is_not_named() -> None:
    """All of them take more memory here."""
    waiting = plan("--batch", "2", *FULL)
    small = replace(waiting.setup.gpu, memory=1.001 * waiting.memory.peak)
    full = replace(waiting, setup=replace(waiting.setup, gpu=small))
    assert full.fits
    assert full.time.waiting
    assert full.faster_settings == {}


def test_a_busy_gpu_needs_no_other_settings() -> None:
    assert plan("--batch", "64", *FULL).faster_settings == {}
