"""examples/grpo.py: its sums are right, and its three arms learn and measure."""

import pytest
import torch

from examples import grpo


def test_an_answer_is_the_sum():
    prompts, answers = grpo.sums(50, torch.Generator().manual_seed(0))
    for (a, b, plus, c, d, equals), digits in zip(prompts.tolist(), answers.tolist(), strict=True):
        assert (plus, equals) == (grpo.PLUS, grpo.EQUALS)
        assert f"{10 * a + b + 10 * c + d:03}"[::-1] == "".join(map(str, digits))


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["bf16", "fp8", "mismatch"])
def test_an_arm_samples_from_the_weights_that_it_trains(monkeypatch, arm, tmp_path):
    monkeypatch.setattr(grpo, "ENOUGH", 0.2)
    measured = grpo.run(arm, 0, 3, tmp_path)
    assert all(0 < reward < 1 for reward in measured.reward)
    assert len(measured.push_seconds) == (0 if arm == "bf16" else 3)
    assert max(measured.kl) < {"bf16": 1e-6, "fp8": 3e-3, "mismatch": 1e-2}[arm]
