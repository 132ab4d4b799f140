"""FP16 with dynamic loss scaling: the scale finds its level, and a step that overflows changes no weight."""

import math

import pytest
import torch
from saved_checkpoints import save_checkpoint

from octavo.artifact.files import model_tensors
from octavo.train.early_warning import TrainingError
from octavo.train.optimizer import optimizer_state


def copied(trainer):
    state = model_tensors(trainer.model) | optimizer_state(trainer.model, trainer.state.optimizer)
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def changed(trainer, before):
    return {name for name, tensor in copied(trainer).items() if not torch.equal(tensor, before[name])}


def overflow_at(trainer, *steps):
    """Make one weight's gradient infinite in these steps."""
    weight = trainer.model.model.layers[0].mlp.up_proj.weight
    weight.register_hook(lambda gradient: gradient * math.inf if trainer.state.step in steps else gradient)


@pytest.mark.parametrize("recipe", ["bf16", "rowwise", "delayed"])
def test_scale_doubles_after_so_many_good_steps(begin, recipe):
    trainer = begin(recipe=recipe, precision="fp16")
    trainer.state.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    scales = []
    for _ in range(7):
        loss, _ = trainer.step()
        scales.append(trainer.state.scaler.get_scale())
    assert scales == [2.0**10] * 2 + [2.0**11] * 3 + [2.0**12] * 2
    assert math.isfinite(loss)
    assert trainer.state.skipped_steps == 0


def test_overflow_halves_the_scale_and_skips_the_step(begin):
    trainer = begin(precision="fp16")
    overflow_at(trainer, 0, 3)
    start, scale = copied(trainer), trainer.state.scaler.get_scale()
    trainer.step()
    assert changed(trainer, start) == set()
    assert (trainer.state.scaler.get_scale(), trainer.state.skipped_steps, trainer.state.step) == (scale / 2, 1, 1)
    for _ in range(2):
        trainer.step()
    before = copied(trainer)
    assert changed(trainer, start) == set(start)
    trainer.step()
    assert changed(trainer, before) == set()  # neither the weights nor the moments, nor the optimizer's count of steps
    assert (trainer.state.scaler.get_scale(), trainer.state.skipped_steps, trainer.state.step) == (scale / 4, 2, 4)
    assert float(optimizer_state(trainer.model, trainer.state.optimizer)["model.norm.weight.step"]) == 2
    trainer.step()
    assert changed(trainer, before) == set(before)


def test_overflow_of_the_scaled_gradients_themselves_finds_a_scale(begin):
    """From a scale far too large, without anybody's help."""
    trainer = begin(recipe="bf16", precision="fp16")
    trainer.state.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    for _ in range(40):
        trainer.step()
    assert 10 < trainer.state.skipped_steps < 38
    assert trainer.state.scaler.get_scale() == 2.0 ** (40 - trainer.state.skipped_steps)


def test_norm_and_clipping_are_of_unscaled_gradients(begin, tmp_path):
    norms = {}
    for precision in ("fp16", "fp32"):
        trainer = begin(recipe="bf16", precision=precision, clip=0.25, out=str(tmp_path / precision))
        gradients = []

        def note(optimizer, args, kwargs, gradients=gradients, model=trainer.model):
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]).norm())

        trainer.state.optimizer.register_step_pre_hook(note)
        norms[precision] = [trainer.step()[1] for _ in range(2)]
        torch.testing.assert_close(torch.stack(gradients), torch.full((2,), 0.25), rtol=1e-4, atol=0)
    torch.testing.assert_close(norms["fp16"], norms["fp32"], rtol=1e-2, atol=0)


def test_skipped_steps_are_logged_and_the_run_goes_on(begin, records):
    trainer = begin(precision="fp16", steps=5)
    overflow_at(trainer, 1, 2)
    trainer.run()
    run = trainer.run_folder.path
    assert list(records(run, "skipped_steps").values()) == [0, 1, 2, 2, 2]
    assert list(records(run, "loss_scale").values()) == [2.0**16, 2.0**15, 2.0**14, 2.0**14, 2.0**14]
    assert [step for step, norm in records(run, "gradient_norm").items() if norm is None] == [2, 3]
    assert all(math.isfinite(loss) for loss in records(run).values())


def test_resumed_scaler_is_the_same(begin, go_on, tmp_path):
    """Scale, count towards the next growth, skipped steps: saved right after an overflow in the very first step too."""
    trainer = begin(recipe="delayed", precision="fp16")
    overflow_at(trainer, 0, 2)
    trainer.lock.close()
    for _ in range(4):
        trainer.step()
        save_checkpoint(trainer.run_folder, trainer.state, keep=1)
        resumed = go_on(trainer.run_folder.path)
        resumed.lock.close()
        assert resumed.state.scaler.state_dict() == trainer.state.scaler.state_dict()
        assert (resumed.state.step, resumed.state.skipped_steps) == (trainer.state.step, trainer.state.skipped_steps)
        assert changed(resumed, copied(trainer)) == set()
    for _ in range(2):
        assert torch.equal(resumed.step()[0], trainer.step()[0])
    assert changed(resumed, copied(trainer)) == set()


def test_loss_that_is_no_number_ends_the_run_though_gradients_may_overflow(begin):
    trainer = begin(precision="fp16")
    trainer.model.model.norm.weight.data.fill_(math.inf)
    with pytest.raises(TrainingError, match="step 1: the loss is nan"):
        trainer.run()
