"""Fine-tuning with the recipe delayed, whose first scales come from a calibration."""

import pytest
from calibration_examples import write_model

from octavo.artifact.files import ArtifactError
from octavo.calibration import calibrate
from octavo.evaluation import PromptOptions
from octavo.nn.delayed import histories
from octavo.train.config import ConfigError


@pytest.fixture
def calibrated(tmp_path, text):
    """(model, calibration): the folders of a tiny Llama and of its calibration."""
    model = write_model(tmp_path / "model", "llama")
    calibrate(model, [str(text)], tmp_path / "calibrated", prompts=PromptOptions(samples=8, context=32, batch=4))
    return model, tmp_path / "calibrated"


def test_the_first_step_has_the_scales_of_the_calibration(begin, go_on, calibrated, tmp_path):
    model, calibration = calibrated
    trainer = begin(model=str(model), recipe="delayed", calibration=str(calibration), steps=3)
    found = dict(histories(trainer.model))
    inputs = {name: history for name, history in found.items() if name.endswith(".x")}
    assert len(inputs) == 21
    for name, history in inputs.items():
        assert history.ready
        assert history.steps == 2, "one entry for each batch of the calibration"
        weight = found[name.replace(".x", ".w")]
        assert (weight.ready, weight.steps) == (True, 1)
        assert not found[name.replace(".x", ".dy")].ready
    trainer.run()
    resumed = go_on(tmp_path / "run", "--steps", "4")
    assert all(history.steps == 5 for name, history in histories(resumed.model) if name.endswith(".x"))


def test_the_calibration_must_fit(settings, begin, calibrated, tmp_path):
    model, calibration = calibrated
    with pytest.raises(ConfigError, match="to fine-tune the calibrated model; got recipe rowwise"):
        settings(model=str(model), calibration=str(calibration))
    with pytest.raises(ConfigError, match="to fine-tune the calibrated model; got recipe delayed and model llama"):
        settings(recipe="delayed", calibration=str(calibration))
    with pytest.raises(FileNotFoundError, match="calibration.json"):
        begin(model=str(model), recipe="delayed", calibration=str(tmp_path / "absent"))
    other = write_model(tmp_path / "other", "qwen2")
    with pytest.raises(ArtifactError, match="is a calibration of another model than"):
        begin(model=str(other), recipe="delayed", calibration=str(calibration))
