"""What a run says before its first step, and models that are too large for the device."""

import io

import pytest
import torch
from rich.console import Console

from octavo.train.config import Config, ConfigError
from octavo.train.model import check_memory
from octavo.train.start import start_run


def test_the_header_says_what_is_trained_on_what(settings, text):
    out = io.StringIO()
    start_run(settings(steps=1, warmup=0, min_learning_rate=None), Console(file=out, width=30))
    lines = {line.split()[0]: line for line in out.getvalue().splitlines() if line}
    assert "llama, 26,784 parameters, trained from random weights" in lines["model"]
    assert str(text) in lines["data"]
    assert "held out" in lines["data"]
    assert "1 step of 64 tokens" in lines["steps"]
    assert "0.01 to 0.001 (cosine), after 0 steps of warmup" in lines["rate"]
    assert lines["rowwise:"] == "rowwise: 14 linear layers converted, 1 skipped"


@pytest.mark.parametrize(
    "absurd",
    [{"width": 100_000_000}, {"width": 4 * 10**15}, {"layers": 10**9}, {"mlp_width": 10**14}, {"width": 10**30}],
    ids=str,
)
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_a_model_beyond_the_memory_is_refused_in_plain_words(model, absurd):
    if model == "gpt2" and "mlp_width" in absurd:
        pytest.skip("gpt2 has no mlp_width")
    with pytest.raises(ConfigError, match="16 bytes for each.*cpu has .* GB. Lower width, mlp_width or layers"):
        check_memory(Config(model=model, **absurd), 256, torch.device("cpu"))


def test_the_default_model_fits():
    check_memory(Config(), 4096, torch.device("cpu"))
