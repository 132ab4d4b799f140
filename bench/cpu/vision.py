"""A vision transformer and a diffusion transformer on scikit-learn's digits, trained in BF16 and in FP8, by seed.

The digits are 1,797 images of 8 x 8 pixels that scikit-learn ships, 10 classes. For each seed all recipes start from
the same weights and see the same batches, noise and times. The classifier is judged by its accuracy and loss on
held-out images. The diffusion transformer makes images of all classes, which are judged by a Fréchet distance: that of
the Gaussians of the features of a small classifier, which was trained in FP32, on the images made and on all digits.
The features are those of this classifier and no standard ones: distances compare the recipes here and nothing else.

    python -m bench.cpu.vision
"""

import importlib
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import octavo
from bench.gpu.harness import Options, Results, benchmark, sized
from octavo.models.vision import DiffusionTransformer, ImageConfig, VisionTransformer, flow_loss, sample
from octavo.recipe import get_recipe

SEEDS = {"classifier": range(sized(24, 1)), "diffusion": range(sized(6, 1))}
RECIPES = ("bf16", "rowwise", "mxfp8")
CONFIG = ImageConfig(image=8, patch=2, channels=1, classes=10, layers=2, width=64, heads=4)
HELD_OUT, BATCH = 360, 64
STEPS = {"classifier": 250, "diffusion": 450}
MADE, EULER_STEPS = 900, 12  # images, and the steps that make them
PROCESSES = 2


def digits() -> tuple[Tensor, Tensor]:
    """Images [1797, 1, 8, 8] from -1 to 1 and their classes, in a fixed random order."""
    found = importlib.import_module("sklearn.datasets").load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    images = torch.tensor(found.images[order], dtype=torch.float32).unsqueeze(1) / 8 - 1
    return images, torch.tensor(found.target[order])


def batches(images: Tensor, classes: Tensor, steps: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    drawn = torch.Generator().manual_seed(seed)
    indices = (torch.randint(len(images), (BATCH,), generator=drawn) for _ in range(steps))
    return [(images[index], classes[index]) for index in indices]


def train(
    model: nn.Module,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    data: Sequence[tuple[Tensor, Tensor]],
    precision: torch.dtype = torch.bfloat16,
) -> None:
    """AdamW with a learning rate that falls linearly to 0. The forward pass runs under autocast for BF16."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 1e-3, len(data))
    for images, classes in data:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
            loss = loss_of(images, classes)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def convert(model: nn.Module, recipe: str, batch: Any) -> None:
    if recipe != "bf16":
        octavo.convert(model, get_recipe(recipe), batch=batch)


def classify(recipe: str, seed: int, steps: int) -> dict[str, Any]:
    """Accuracy and loss on held-out images."""
    images, classes = digits()
    torch.manual_seed(seed)
    model = VisionTransformer(CONFIG)
    convert(model, recipe, images[:BATCH])
    data = batches(images[HELD_OUT:], classes[HELD_OUT:], steps, seed)
    train(model, lambda x, y: F.cross_entropy(model(x).float(), y), data)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits = model.eval()(images[:HELD_OUT]).float()
    accuracy = (logits.argmax(-1) == classes[:HELD_OUT]).float().mean()
    return {"accuracy": float(accuracy), "loss": float(F.cross_entropy(logits, classes[:HELD_OUT]))}


def diffuse(recipe: str, seed: int, steps: int, known: VisionTransformer) -> dict[str, Any]:
    """The Fréchet distance of images made to all digits, and the loss on all digits at fixed noise and times."""
    images, classes = digits()
    torch.manual_seed(seed)
    model = DiffusionTransformer(CONFIG)
    convert(model, recipe, (images[:BATCH], torch.rand(BATCH), classes[:BATCH]))
    torch.manual_seed(seed)
    train(model, lambda x, y: flow_loss(model, x, y), batches(images, classes, steps, seed))
    model.eval()
    torch.manual_seed(1000)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        loss = flow_loss(model, images, classes)
        made = sample(model, torch.arange(MADE) % CONFIG.classes, EULER_STEPS)
    with torch.no_grad():
        distance = frechet(known.features(made), known.features(images))
        accuracy = (known(made).argmax(-1) == torch.arange(MADE) % CONFIG.classes).float().mean()
    return {"frechet": distance, "loss": float(loss), "recognized": float(accuracy)}


def frechet(a: Tensor, b: Tensor) -> float:
    """|mean_a - mean_b|^2 + tr(A + B - 2 (A B)^(1/2)) of the Gaussians of features [N, K] (Dowson and Landau 1982)."""
    means, covariances = zip(*((t.double().mean(0), t.double().T.cov()) for t in (a, b)), strict=True)
    roots = torch.linalg.eigvals(covariances[0] @ covariances[1]).real.clamp(min=0).sqrt()
    traces = covariances[0].trace() + covariances[1].trace() - 2 * roots.sum()
    return float((means[0] - means[1]).square().sum() + traces)


@cache
def judge(steps: int) -> VisionTransformer:
    """The classifier whose features the distance compares: trained in FP32 on all digits."""
    images, classes = digits()
    torch.manual_seed(99)
    model = VisionTransformer(CONFIG)
    data = batches(images, classes, steps, 99)
    train(model, lambda x, y: F.cross_entropy(model(x), y), data, precision=torch.float32)
    return model.eval()


def run(task: str, recipe: str, seed: int, steps: dict[str, int]) -> dict[str, Any]:
    torch.set_num_threads(1)
    if task == "classifier":
        found = classify(recipe, seed, steps[task])
    else:
        found = diffuse(recipe, seed, steps[task], judge(steps["classifier"]))
    print(task, recipe, seed, found, flush=True)
    return {"recipe": recipe, "seed": seed, **found}


@benchmark()
def main(_: Options) -> Results:
    steps = {name: sized(count, 3) for name, count in STEPS.items()}
    jobs = [(task, recipe, seed) for task in STEPS for seed in SEEDS[task] for recipe in RECIPES]
    with ProcessPoolExecutor(PROCESSES, get_context("spawn")) as pool:
        runs = [(job[0], pool.submit(run, *job, steps)) for job in jobs]
        found = {task: [job.result() for name, job in runs if name == task] for task in STEPS}
    images, known = digits()[0], judge(steps["classifier"])
    with torch.no_grad():
        halves = [known.features(part) for part in (images[::2], images[1::2])]
    settings = {**vars(CONFIG), "batch": BATCH, "steps": steps, "made": MADE, "euler_steps": EULER_STEPS}
    yield "vision", {"settings": settings, "held_out": HELD_OUT, "frechet_of_halves": frechet(*halves), **found}
