"""Whole training steps of transformers' Llama with AdamW: the blocks, the head, the loss and the optimizer.

    1b, compile          Llama-3.2-1B's shape, 8 sequences of 1,024 tokens, layers compiled one by one
    1b, eager            the same without torch.compile
    8b, compile          4 layers of Llama-3-8B's shape, a head of 32,000, 8,192 tokens

The modes of a cell have the same parameters and the same states of AdamW, in BF16, and take turns in one process. So a
peak is that of a step of the mode alone. Liger's loss needs Liger Kernel.

First come the losses alone. Their values and gradients are compared with float64: an error of ours above 1.25 times
that of BF16's own plain loss ends the benchmark. Then follow the times of the losses, forward and backward.

    python -m bench.gpu.whole_step [--only 1b]
"""

import copy
import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import octavo
from bench.gpu import harness
from bench.gpu.harness import DEVICE, Options, Results, benchmark, made, sized
from bench.gpu.llama import LLAMA, SMALL
from bench.gpu.variants import use_liger_loss, use_torchao
from octavo.nn.fused_loss import CHUNK, linear_cross_entropy

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
Prepare = Callable[[nn.Module], Any]

TOKENS, WIDTH, VOCABULARY = sized((8192, 2048, 128_256), (64, 64, 512))  # of the losses alone
CHECKED = sized(1024, 64)  # tokens of the comparison with float64
SHAPES = {
    "1b": sized(replace(LLAMA, layers=16, width=2048, mlp_width=8192, context=1024, tied=True), SMALL),
    "8b": sized(replace(LLAMA, layers=4, vocabulary=32_000), SMALL),
}
BATCHES = {"1b": sized(8, 2), "8b": sized(1, 2)}  # sequences of a step
BASE, LIGER = "bf16", " + Liger's loss"
MODES: dict[str, Prepare] = {  # what prepares the model; Liger's loss comes after it
    BASE: lambda model: None,
    BASE + LIGER: lambda model: None,
    "bf16 + fuse_loss": lambda model: octavo.convert(model, "bf16", fuse_loss=True),
    "torchao tensorwise": lambda model: use_torchao(model, "tensorwise"),
    "torchao tensorwise" + LIGER: lambda model: use_torchao(model, "tensorwise"),
    "octavo": octavo.convert,
    "octavo" + LIGER: octavo.convert,
    "octavo + fuse_loss": partial(octavo.convert, fuse_loss=True),
    "octavo + fuse_loss, recompute": partial(octavo.convert, fuse_loss=True, recompute=True),
    "octavo + fuse_loss, head rowwise": partial(octavo.convert, fuse_loss=True, head="rowwise"),
    "octavo + fuse_loss, head rowwise, recompute": partial(
        octavo.convert, fuse_loss=True, head="rowwise", recompute=True
    ),
}
CELLS = {"1b, compile": ("1b", True), "1b, eager": ("1b", False), "8b, compile": ("8b", True)}
NEEDS = {"Liger": "liger-kernel", "torchao": "torchao"}  # packages of the modes with such a word


# --- Whole steps -----------------------------------------------------------------------------------------------


class Training:
    """Parameters of a shape and their optimizer, which the models of all modes share."""

    def __init__(self, shape: str) -> None:
        transformers: Any = importlib.import_module("transformers")
        config, options = SHAPES[shape], {"attn_implementation": "sdpa", "use_cache": False}
        torch.manual_seed(0)
        with torch.device(DEVICE):
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config.to_hf(), **options))
        self.model: Any = model.to(torch.bfloat16).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-7, fused=DEVICE == "cuda")
        self.ids = torch.randint(config.vocabulary, (BATCHES[shape], config.context), device=DEVICE)


class Step:
    """A training step of a mode's model."""

    def __init__(self, training: Training, mode: str, compiled: bool) -> None:
        self.training = training
        self.model = model = copy.deepcopy(training.model, {id(p): p for p in training.model.parameters()})
        MODES[mode](model)
        if mode.endswith(LIGER):
            use_liger_loss(model)
        for layer in model.model.layers if compiled else ():
            layer.compile()

    def backward(self) -> Tensor:
        loss: Tensor = self.model(self.training.ids, labels=self.training.ids).loss
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def gradients(self) -> list[Tensor]:
        """Those of the first q projection, the last down projection and the head, for the check."""
        self.backward()
        layers = self.model.model.layers
        layers_of = (layers[0].self_attn.q_proj, layers[-1].mlp.down_proj, self.model.lm_head)
        found = [layer.weight.grad.clone() for layer in layers_of]
        self.training.optimizer.zero_grad()
        return found

    def __call__(self) -> Tensor:
        loss = self.backward()
        self.training.optimizer.step()
        self.training.optimizer.zero_grad()
        return loss


def cell(shape: str, compiled: bool, rounds: int) -> dict[str, Any]:
    """The SQNR of each mode's gradients against BF16's, its milliseconds and its peak."""
    training = Training(shape)
    modes = [mode for mode in MODES if all(harness.installed(p) for word, p in NEEDS.items() if word in mode)]
    steps = {mode: Step(training, mode, compiled) for mode in modes}
    gradients = {mode: made(mode, step.gradients) for mode, step in steps.items()}
    steps = {mode: step for mode, step in steps.items() if gradients[mode] is not None}
    exact = gradients[BASE] or []
    sqnr = {mode: harness.each_decibels(exact, found) for mode, found in gradients.items() if found and mode != BASE}
    del gradients, exact
    peaks = {mode: harness.peak_of(step, 0) for mode, step in steps.items()}
    times = harness.interleaved(steps, rounds=rounds, repeat=4, warmup=1)
    rows = harness.rows_of(times, BASE, "speed")
    for mode, row in rows.items():
        row |= {"peak_gib": peaks[mode] / 2**30, "sqnr": sqnr.get(mode)}
    return {"machine": harness.facts(), "modes": rows, "rounds": times}


# --- The losses alone ------------------------------------------------------------------------------------------


def plain(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    """As transformers computes it."""
    z = F.linear(x, w)
    return F.cross_entropy(z if z.dtype == torch.float64 else z.float(), labels)


def losses() -> dict[str, Loss]:
    """The losses that are installed, by name."""
    found: dict[str, Loss] = {"bf16": plain}
    found[f"ours, {CHUNK}"] = ours = partial(linear_cross_entropy, chunk=min(CHUNK, TOKENS))
    found[f"ours, rowwise, {CHUNK}"] = partial(ours, recipe="rowwise")
    if harness.installed("liger-kernel"):
        liger: Any = importlib.import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss()
        found["Liger"] = lambda x, w, labels: liger(w, x, labels)
    return found


def given(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, w and labels: logits with a standard deviation of 2, and a label that is likely for half of the tokens."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    x = torch.randn(tokens, WIDTH, device=DEVICE, generator=generator).bfloat16()
    w = (2 * torch.randn(VOCABULARY, WIDTH, device=DEVICE, generator=generator) / WIDTH**0.5).bfloat16()
    labels = torch.randint(VOCABULARY, (tokens,), device=DEVICE, generator=generator)
    labels[::2] = (x[::2] @ w.t()).argmax(1)
    return x.requires_grad_(), w.requires_grad_(), labels


def gradients_of(loss: Loss, x: Tensor, w: Tensor, labels: Tensor) -> list[Tensor]:
    """The loss, dx and dw."""
    value = loss(x, w, labels)
    return [t.double() for t in (value.detach(), *torch.autograd.grad(value, (x, w)))]


def errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    """The relative errors of the loss, dx and dw; of a gradient that of its norm."""
    return [float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]


def losses_alone() -> dict[str, Any]:
    found = losses()
    x, w, labels = given(CHECKED)
    wide_x, wide_w = (t.detach().double().requires_grad_() for t in (x, w))
    exact = gradients_of(plain, wide_x, wide_w, labels)
    checked = {name: errors(gradients_of(loss, x, w, labels), exact) for name, loss in found.items()}
    for chunks in (2, 4):
        ours = partial(linear_cross_entropy, chunk=CHECKED // chunks)
        checked[f"ours, in {chunks} chunks"] = errors(gradients_of(ours, x, w, labels), exact)
    for name, each in checked.items():
        if name.startswith("ours") and "rowwise" not in name:
            limits = [1.25 * limit + floor for limit, floor in zip(checked["bf16"], (1e-5, 0, 0), strict=True)]
            assert all(a <= b for a, b in zip(each, limits, strict=True)), (name, each, limits)
    del exact, wide_x, wide_w
    x, w, labels = given(TOKENS)
    steps = {name: partial(backward, loss, x, w, labels) for name, loss in found.items()}
    peaks = {name: harness.peak_of(step, harness.allocated()) / 2**30 for name, step in steps.items()}
    times = harness.medians(harness.interleaved(steps, rounds=5, repeat=2, warmup=1))
    return {"errors": checked, "ms": times, "peak_gib": peaks}


def backward(loss: Loss, x: Tensor, w: Tensor, labels: Tensor) -> None:
    loss(x, w, labels).backward()  # type: ignore[no-untyped-call]
    x.grad = w.grad = None


@benchmark(only="", rounds=4)
def main(options: Options) -> Results:
    for package in NEEDS.values():
        if not harness.installed(package):
            print(f"{package} is not installed: its modes are left out", flush=True)
    result: dict[str, Any] = {}
    if options.only in ("", "loss"):
        result["losses"] = losses_alone()
    for name, (shape, compiled) in CELLS.items():
        if options.only in name:
            result[name] = cell(shape, compiled, options.rounds)
            torch._dynamo.reset()
    if not options.only:
        yield "gpu_whole_step", result
    else:
        harness.show(result)
