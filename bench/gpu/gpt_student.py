"""The 124M GPT of `gpt_parity` in one mode: BF16, ours, or torchao's row scaling."""

from __future__ import annotations

import dataclasses
import importlib
import math
import time
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import octavo
from bench.gpu import gpt_corpus
from octavo.models import GPT2Config, build
from octavo.train.config import Config
from octavo.train.optimizer import make_optimizer
from octavo.train.schedule import learning_rate

CONFIG = Config(
    model="gpt2",
    layers=12,
    width=768,
    heads=12,
    context=1024,
    vocabulary=50_257,
    batch=64,
    steps=800,
    learning_rate=6e-4,
    min_learning_rate=6e-5,
    warmup=40,
    evaluate_every=100,
    evaluate_batches=8,
    compile=True,
)
RANDOM_BATCHES = 3
# Relative errors of weight gradients: BF16 and another compilation of it lie below the first, FP8 (about 0.09) between.
GRADIENT_ERRORS = 0.02, 0.5

# How octavo.convert makes each of our modes; beside them there are "bf16" and "torchao".
OURS: dict[str, dict[str, Any]] = {
    "rowwise": {},
    "rowwise_if_faster": {"only_if_faster": True, "tokens": CONFIG.batch * CONFIG.context},
}
MODES = ("bf16", *OURS, "torchao")


class Student:
    """A model in one mode, compiled once and used for every seed."""

    def __init__(self, mode: str, config: Config, device: torch.device) -> None:
        vocabulary = -(-config.vocabulary // 128) * 128
        shape = GPT2Config(vocabulary, config.layers, config.width, config.heads, config.context, config.tied)
        self.mode, self.config, self.device = mode, config, device
        self.model: nn.Module = build(shape).to(device)
        self.converted = convert(self.model, mode, device)
        self.loss = torch.compile(self._loss, dynamic=False)
        self.restart(0)

    def compile(self) -> float:
        """Have forward and backward compiled; the seconds it took."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # another student's memory may not fit this one's shapes
        began = time.perf_counter()
        self.loss(*random_batches(self.config, self.device).at(0)).backward()  # type: ignore[no-untyped-call]
        synchronize(self.device)
        seconds = time.perf_counter() - began
        print(f"{self.mode}: {len(self.converted)} layers in FP8, compiled in {seconds:.0f} s", flush=True)
        return seconds

    def restart(self, seed: int) -> None:
        """Weights drawn anew, in place, since the compiled code knows these tensors; a new optimizer."""
        torch.manual_seed(seed)
        model: Any = self.model
        model.init_weights()
        self.model.zero_grad()
        self.optimizer = make_optimizer(self.model, self.config)

    def step(self, index: int, inputs: Tensor, targets: Tensor) -> Tensor:
        """One optimizer step on a batch; its loss stays on the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(index, self.config)
        loss: Tensor = self.loss(inputs, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def weights_mark(self) -> float:
        """A number by which two sets of weights are told apart."""
        with torch.no_grad():
            return float(torch.stack([p.double().square().sum() for p in self.model.parameters()]).sum())

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16):
            logits = self.model(inputs)  # bf16 [B, T, V]
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def convert(model: nn.Module, mode: str, device: torch.device) -> list[str]:
    """Make `model` run in `mode`; the names of the layers that are in FP8. The head stays in BF16 in every mode."""
    if mode == "bf16":
        return []
    if mode in OURS:
        report = octavo.convert(model, "rowwise", **OURS[mode])
        print(f"{mode}: {report.summary()}", flush=True)
        return report.converted
    if mode != "torchao":
        raise ValueError(f"unknown mode {mode!r}: choose of {', '.join(MODES)}")
    return convert_torchao(model, device)


def convert_torchao(model: nn.Module, device: torch.device) -> list[str]:
    """As `convert`, by torchao."""
    float8 = importlib.import_module("torchao.float8")
    settings = float8.Float8LinearConfig.from_recipe_name("rowwise")
    if device.type == "cpu":
        settings = dataclasses.replace(settings, emulate=True)
    names = {name for name, m in model.named_modules() if isinstance(m, nn.Linear) and name != "lm_head"}
    float8.convert_to_float8_training(model, config=settings, module_filter_fn=lambda _, name: name in names)
    return [name for name in names if type(model.get_submodule(name)) is not nn.Linear]


def check(students: dict[str, Student]) -> dict[str, float]:
    """Each mode's weight gradients against the first's, same weights and batch: the relative error of the worst layer.

    A benchmark of wrong numbers is worth nothing: raises RuntimeError for an error outside GRADIENT_ERRORS, that of a
    wrong gradient or of a mode that does not run in FP8 though it says so.
    """
    first, *others = students
    expected = gradients(students[first])
    errors = {}
    for mode in others:
        found = gradients(students[mode])
        gaps = {name: float((found[name] - g).norm() / g.norm()) for name, g in expected.items()}
        worst = max(gaps, key=lambda name: gaps[name] if math.isfinite(gaps[name]) else math.inf)
        errors[mode] = gaps[worst]
        print(f"{mode}: weight gradients within {gaps[worst]:.3f} of {first}, the worst is {worst}", flush=True)
        least, most = GRADIENT_ERRORS if students[mode].converted else (0.0, GRADIENT_ERRORS[0])
        if not least <= gaps[worst] <= most:
            raise RuntimeError(f"{mode}: {worst} must be off by {least} to {most}, and is by {gaps[worst]:.3f}")
    return errors


def gradients(student: Student) -> dict[str, Tensor]:
    """Of the blocks' weight matrices, on the weights of seed 0 and one batch of random tokens."""
    student.restart(0)
    student.loss(*random_batches(student.config, student.device).at(0)).backward()  # type: ignore[no-untyped-call]
    blocks = {name: p.grad for name, p in student.model.named_parameters() if ".h." in name and p.ndim == 2}
    student.model.zero_grad()
    return {name: grad for name, grad in blocks.items() if grad is not None}


def random_batches(config: Config, device: torch.device) -> gpt_corpus.Batches:
    """A few batches of random tokens."""
    size = RANDOM_BATCHES * config.batch * config.context + 1
    tokens = np.random.default_rng(0).integers(0, config.vocabulary, size, dtype=np.uint16)
    return gpt_corpus.Batches(tokens, config, device, RANDOM_BATCHES, None)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
