"""docs/vision.md from results that are made up, and the Fréchet distance of bench.cpu.vision."""

from typing import Any

import pytest
import torch

from bench.cpu.vision import frechet
from bench.report import pages, vision
from bench.report.tables import load


def runs(task: str, bf16: list[float], rowwise: list[float]) -> list[dict[str, Any]]:
    keys = [key for key, _, _ in vision.FIGURES[task]]
    return [
        {"recipe": recipe, "seed": seed, **dict.fromkeys(keys, value), "fp8_flops": 0.96}
        for recipe, values in (("bf16", bf16), ("rowwise", rowwise))
        for seed, value in enumerate(values)
    ]


@pytest.fixture
def results() -> dict[str, Any]:
    settings = {
        "image": 8, "patch": 2, "layers": 2, "width": 64, "batch": 64, "made": 900, "euler_steps": 12,
        "steps": {"classifier": 250, "diffusion": 450},
    }  # fmt: skip
    tasks = {
        "classifier": runs("classifier", [0.90, 0.92, 0.91], [0.91, 0.93, 0.92]),
        "diffusion": runs("diffusion", [0.5, 0.6, 0.7], [0.8, 0.8, 1.1]),
    }
    result = {"machine": {"processor": "a CPU"}, "settings": settings, "held_out": 360, "frechet_of_halves": 0.01}
    cell = {
        "shape": {"layers": 6, "width": 1280, "batch": 128, "tokens": 257},
        "rounds": {"bf16": [10.0, 12.0, 11.0], "ours": [8.0]},
        "speedup": {"bf16": 1.0, "ours": 1.25},
        "peak_bytes": {"bf16": 8 << 30, "ours": 7 << 30},
        "db": {"bf16": [], "ours": [28.0, 27.0, 26.04]},
        "conversion": {"ours": {"predicted": {"blocks.0.fc1": 1.3, "blocks.0.fc2": None}, "left": {}}},
    }
    gpu = {"machine": {"gpu": "NVIDIA H200"}, "shapes": {"ViT-H/14": cell}}
    return {"vision": result | tasks, "gpu_vision": gpu}


def test_the_page_holds_every_figure(results: dict[str, Any]) -> None:
    text = pages.page("vision", load() | results)
    assert "{" not in text
    assert "| accuracy | 91.0% | rowwise | +1.0% | +1.0% to +1.0% | 2.0% | yes |" in text
    # differences of 0.3, 0.2 and 0.4: the half is 4.3027 * 0.1 / sqrt(3)
    assert "| Fréchet distance | 0.6000 | rowwise | +0.3000 | +0.0516 to +0.5484 | 0.2000 | no |" in text
    assert "| rowwise | 2 | 1.1000 | 1.1000 | 110.0% | 96.0% |" in text
    blocks = "ViT-H/14: 6 of width 1,280, 128 x 257"
    assert f"| {blocks} | ours | 8.00 | 1.250x | 7.00 | 28.0, 27.0, 26.0 |" in text
    assert "| ViT-H/14 | ours | blocks.0.fc1 | 1.30x | no |" in text
    assert "fc2" not in text


def test_the_page_says_what_was_not_measured(results: dict[str, Any]) -> None:
    del results["gpu_vision"]
    others = {name: result for name, result in load().items() if not name.endswith("vision")}
    assert "Not measured." in pages.page("vision", others | results)
    assert "vision" not in pages.pages(others)


def test_the_frechet_distance_of_known_gaussians() -> None:
    torch.manual_seed(0)
    x = torch.randn(4000, 3).double()
    assert frechet(x, x) == pytest.approx(0, abs=1e-9)
    assert frechet(x, x + torch.tensor([3.0, 4.0, 0.0])) == pytest.approx(25)  # the square of the means' distance
    # A second Gaussian with twice the standard deviation: tr(A + 4 A - 2 * 2 A) = tr(A), and the means
    means = x.mean(0).square().sum()
    assert frechet(x, 2 * x) == pytest.approx(float(x.T.cov().trace() + means))
