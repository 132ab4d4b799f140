"""The Trainer of Hugging Face transformers, and Accelerate, on converted models."""

import pytest
import torch
from bits import bits
from linear_examples import converted_model
from operation_counts import operations
from tiny_models import IDS
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import octavo
from octavo.integrations.transformers import FILE_NAME, ScaleUpdates

STEPS, MICRO_BATCHES = 2, 2
GEMMS = 3 * 2 * 4  # y, dx and dw of q+k+v, o, gate+up and down in two blocks
ROWS = [{"input_ids": row, "labels": row} for row in IDS.repeat(8, 1)]


def converted(folder, recipe):
    return converted_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), recipe)


def make_trainer(model, out, **settings):
    """Two micro-batches of two rows make a step."""
    settings = {"max_steps": STEPS, "save_strategy": "no"} | settings
    args = TrainingArguments(
        str(out), per_device_train_batch_size=2, gradient_accumulation_steps=MICRO_BATCHES, bf16=True, use_cpu=True,
        learning_rate=1e-2, lr_scheduler_type="constant", logging_steps=1, report_to=[], disable_tqdm=True, **settings,
    )  # fmt: skip
    return Trainer(model, args, train_dataset=ROWS, callbacks=[ScaleUpdates()])


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_the_trainer_runs_in_fp8_and_saves_the_plain_model(made, tmp_path):
    model = converted(made("llama"), "rowwise")
    trainer = make_trainer(model, tmp_path)
    with octavo.scales.cast_once(model):
        counts = operations(trainer.train)
    assert counts["octavo::scaled_mm"] == GEMMS * STEPS * MICRO_BATCHES
    assert losses(trainer)[1] < losses(trainer)[0] - 0.3
    trainer.save_model(str(tmp_path / "saved"))
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert type(opened.model.layers[0].mlp.up_proj) is torch.nn.Linear
    for name, p in model.named_parameters():
        assert torch.equal(bits(p.detach()), bits(opened.get_parameter(name).detach())), name


@pytest.mark.slow
def test_scales_are_updated_after_each_step_and_resume(made, tmp_path):
    saving = {"save_steps": 2, "save_strategy": "steps"}
    whole = make_trainer(converted(made("llama"), "delayed"), tmp_path / "whole", max_steps=3, **saving)
    whole.train()
    scales = octavo.scales.scale_state(whole.model)
    assert {int(t) for name, t in scales.items() if name.endswith(".steps")} == {3}
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    assert (checkpoint / FILE_NAME).is_file()

    resumed = make_trainer(converted(made("llama"), "delayed"), tmp_path / "whole", max_steps=3)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert all(torch.equal(t, scales[name]) for name, t in octavo.scales.scale_state(resumed.model).items())
    assert losses(resumed)[-1] == losses(whole)[-1]

    (checkpoint / FILE_NAME).unlink()
    without = make_trainer(converted(made("llama"), "delayed"), tmp_path / "whole", max_steps=3)
    with pytest.warns(UserWarning, match="begin anew"):
        without.train(resume_from_checkpoint=str(checkpoint))
