"""LoRA on all linear layers of transformers' Llama: BF16, converted and packed, with PEFT's adapters, compiled.

Eight layers of Llama-3-8B's shape and a head of 128,256; 4 x 1,024 random tokens; r = 16, adapters in BF16. A step is
forward, loss, backward and AdamW of the adapters. "body" leaves out the head, the loss and AdamW: its gradient is
random. "fused loss" computes the loss as `octavo.convert(model, fuse_loss=True)` does, and "head rowwise" with its head
in FP8. Each decoder layer is compiled by itself. The modes take turns; a peak is that of a step, weights included.

First come the gradients of all A and B on a small model, in decibels against float64: of the weights themselves
("bf16"), and of the weights that eight bits hold (the others).

    python -m bench.gpu.lora
"""

import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import octavo
from bench.gpu import harness
from bench.gpu.harness import DEVICE, Options, Results, benchmark, sized
from bench.gpu.llama import LLAMA, SMALL
from bench.gpu.modes import speedup
from bench.gpu.serve_models import build_bf16, build_fp8, compile_layers
from octavo.checkpoint.scheme import CHANNEL
from octavo.integrations.peft import support
from octavo.models.llama import LlamaConfig
from octavo.nn.fused_loss import find_loss, join_loss
from octavo.ops import quantize

SHAPE = sized(replace(LLAMA, layers=8, context=4096), SMALL)
BATCH, TOKENS, RANK = 4, sized(1024, 32), 16
BASE, CONVERTED, PACKED = "bf16 + PEFT", "octavo converted + PEFT", "octavo packed + PEFT"
FUSED_LOSS, FP8_HEAD = ", fused loss", ", head rowwise"
MODES = (BASE, BASE + FUSED_LOSS, CONVERTED + FUSED_LOSS, PACKED + FUSED_LOSS, PACKED + FUSED_LOSS + FP8_HEAD)
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
NAME = ".lora_{}.default.weight"


def build(mode: str, shape: LlamaConfig, scope: ExitStack) -> Any:
    """The model of a mode in adapters; the same weights and adapters in each. `scope` ends what a mode opens."""
    torch.manual_seed(0)
    model, config = without_cache(shape), LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=TARGETS)
    if mode.startswith(CONVERTED):
        octavo.convert(model)
    if mode.startswith(PACKED):
        model = build_fp8(model, DEVICE)
    if FUSED_LOSS in mode:
        join_loss(*find_loss(model), "rowwise" if mode.endswith(FP8_HEAD) else "bf16")
    model = in_adapters(model, config if mode.startswith(BASE) else support(config))
    if mode.startswith(CONVERTED):
        scope.enter_context(octavo.scales.cast_once(model))
    return model


def without_cache(shape: LlamaConfig) -> Any:
    """The model in BF16. Compiled layers have one number, so with a cache they would read each other's keys."""
    model = build_bf16(shape, DEVICE)
    model.config.use_cache = False
    return model


def in_adapters(model: nn.Module, config: LoraConfig) -> Any:
    """The model in adapters that change its output: PEFT begins with B = 0."""
    adapted = get_peft_model(model, config, autocast_adapter_dtype=False).train()
    generator = torch.Generator(DEVICE).manual_seed(1)
    for name, p in adapted.named_parameters():
        if p.requires_grad:
            drawn = torch.randn(p.shape, device=DEVICE, generator=generator) * (0.02 if "lora_A" in name else 0.005)
            p.data.copy_(drawn)
    return adapted


class Runner:
    """A mode's model and its steps."""

    def __init__(self, mode: str, scope: ExitStack) -> None:
        self.model = build(mode, SHAPE, scope)
        compile_layers(self.model.base_model.model)
        self.ids = torch.randint(SHAPE.vocabulary, (BATCH, TOKENS), device=DEVICE)
        self.dy = torch.randn(BATCH, TOKENS, SHAPE.width, device=DEVICE, dtype=torch.bfloat16)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, 1e-5, fused=True)

    def step(self) -> Tensor:
        loss = self.model(input_ids=self.ids, labels=self.ids).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def body(self) -> None:
        self.model.base_model.model.model(input_ids=self.ids).last_hidden_state.backward(self.dy)
        self.optimizer.zero_grad()


# --- The gradients of adapters against float64 -----------------------------------------------------------------


def gradients(model: Any) -> dict[str, Tensor]:
    """The gradients of the adapters on random tokens."""
    ids = torch.randint(SMALL.vocabulary, (2, 64), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    model(input_ids=ids, labels=ids).loss.backward()
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def exact_gradients(mode: str) -> dict[str, Tensor]:
    """The same in float64, of the weights that the mode multiplies by."""
    torch.manual_seed(0)
    model = without_cache(SMALL)
    for name, module in model.named_modules():
        head = name == "lm_head" and mode.endswith(FP8_HEAD)
        if head or (not mode.startswith(BASE) and name.endswith(tuple(TARGETS))):
            module.weight.data = quantize(module.weight.data, CHANNEL.weight).dequantize()
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=TARGETS)
    return gradients(in_adapters(model, config).double())


def check() -> dict[str, dict[str, float]]:
    """The median and the least decibels of the gradients of all A and all B; wrong ones end the benchmark."""
    found: dict[str, dict[str, float]] = {}
    for mode in MODES:
        with ExitStack() as scope:
            actual, exact = gradients(build(mode, SMALL, scope)), exact_gradients(mode)
        assert actual.keys() == exact.keys()
        found[mode] = {}
        for matrix in "AB":
            names = [name for name in exact if name.endswith(NAME.format(matrix))]
            decibels = harness.each_decibels((exact[n] for n in names), (actual[n] for n in names))
            found[mode] |= {f"{matrix} median": statistics.median(decibels), f"{matrix} least": min(decibels)}
    return found


def measure(runners: dict[str, Any], step: Callable[[Any], object]) -> dict[str, Any]:
    """The milliseconds of a step of each mode, and their speeds over the first."""
    steps = {mode: partial(step, runner) for mode, runner in runners.items()}
    rounds = harness.interleaved(steps, rounds=5, repeat=4, warmup=1)
    ms = {mode: harness.summary(each) for mode, each in rounds.items()}
    return {"ms": ms, "speed": {mode: speedup({"rounds": rounds}, mode, BASE) for mode in runners}}


@benchmark()
def main(_: Options) -> Results:
    result: dict[str, Any] = {"decibels": check()}
    with ExitStack() as scope:
        runners, peaks = harness.built({mode: partial(Runner, mode, scope) for mode in MODES})
        result |= {"rank": RANK, "layers": SHAPE.layers, "batch": BATCH, "tokens": TOKENS}
        result["peak_gib"] = {mode: peak / 2**30 for mode, peak in peaks.items()}
        result["loss"] = {mode: float(runner.step()) for mode, runner in runners.items()}
        result |= {"step": measure(runners, Runner.step), "body": measure(runners, Runner.body)}
    yield "gpu_lora", result
