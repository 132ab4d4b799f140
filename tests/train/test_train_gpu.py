"""`octavo train` on a GPU: it learns what the CPU learns, and a resumed run is the run bit for bit."""

import math
import os
import shutil
import subprocess
import sys

import pytest
from gpus import ONLY_HOPPER, no_waits
from patience import HANG
from saved_checkpoints import contents

from octavo.checkpoint.folder import RunFolder

pytestmark = [pytest.mark.gpu, ONLY_HOPPER]

SIX_STEPS = {"recipe": "rowwise", "steps": 6, "save_every": 3, "evaluate_every": 3, "keep": 2}


@pytest.fixture(autouse=True)
def reproducible(monkeypatch):
    """What cuBLAS asks of those who want the same result twice."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_six_steps_and_their_second_half_again(spawn, begin, records, tmp_path, precision):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    settings = SIX_STEPS | {"precision": precision, "deterministic": True}
    process = spawn(**settings, device="cuda", out=str(whole))
    out, err = process.communicate(timeout=HANG)
    assert process.returncode == 0, err
    assert "device  cuda" in out
    assert "y, dx, dw cublaslt:" in out

    shutil.copytree(whole, parts)
    shutil.rmtree(RunFolder(parts).checkpoint(6))
    words = [sys.executable, "-m", "octavo", "train", "--resume", str(parts)]
    resumed = subprocess.run(words, env=dict(os.environ), capture_output=True, text=True, timeout=HANG, check=False)
    assert resumed.returncode == 0, resumed.stderr
    assert str(RunFolder(parts).checkpoint(3)) in resumed.stdout
    for key in ("loss", "evaluation_loss", "gradient_norm", "learning_rate", "largest_weight"):
        assert records(parts, key) == records(whole, key)
    assert contents(RunFolder(parts).checkpoint(6)) == contents(RunFolder(whole).checkpoint(6))

    losses = records(whole)
    assert list(losses) == [1, 2, 3, 4, 5, 6]
    assert all(math.isfinite(loss) for loss in losses.values())
    assert losses[6] < losses[1]
    begin(**SIX_STEPS, precision=precision, out=str(tmp_path / "cpu")).run()
    for step, loss in records(tmp_path / "cpu").items():
        assert losses[step] == pytest.approx(loss, rel=2e-2)  # the same data, weights and casts


@pytest.mark.parametrize("recipe", ["bf16", "rowwise", "delayed"])
def test_a_step_does_not_wait_for_the_gpu(begin, tmp_path, recipe):
    trainer = begin(recipe=recipe, precision="bf16", device="cuda", out=str(tmp_path))
    for _ in range(2):
        trainer.step()
    with no_waits():
        trainer.step()
