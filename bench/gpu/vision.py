"""Blocks of vision transformers, forward and backward, compiled: BF16, ours, and torchao's, in turn in one process.

Two shapes. ViT-H/14 has 128 images of 257 tokens; its blocks are timm's where timm is installed, and else those of
`octavo.models.vision`. A transformer of the size of SDXL's is 1280 wide and has 20 heads, 10 blocks, a GEGLU MLP, and
1,024 tokens that attend to themselves and to 77 of a text; its blocks are diffusers', and it is left out without them.

Each block is compiled by itself. First come the outputs and gradients against BF16's, then the modes take turns.
The peak memory is that of a step, weights, gradients and input included, by which each mode's model is alone on the
GPU.

"ours, only if faster" converts with a batch, so that each layer is judged by its own tokens. At the end the
profiler sums the kernels of BF16 and "ours" by kind.

    python -m bench.gpu.vision
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import octavo
from bench import record
from bench.gpu import harness
from bench.gpu.harness import DEVICE, Options, Results, benchmark, show, sized
from bench.gpu.modes import speedup
from bench.gpu.peers import use_torchao
from bench.gpu.stack import categories
from octavo.models.vision import Block

MODES = ("bf16", "ours", "ours, only if faster", "torchao tensorwise", "torchao rowwise")
PROFILED = ("bf16", "ours")


@dataclass(frozen=True)
class Shape:
    """`batch` sequences of `tokens`, through `layers` blocks of `width` and `heads`; `text` tokens to attend to."""

    layers: int
    batch: int
    tokens: int
    width: int
    heads: int
    text: int = 0


SHAPES = {
    "ViT-H/14": sized(Shape(6, 128, 257, 1280, 16), Shape(2, 4, 32, 128, 4)),
    "SDXL-size": sized(Shape(10, 16, 1024, 1280, 20, 77), Shape(2, 2, 64, 128, 4, 8)),
}


class Stack(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        kind = diffusion_block() if shape.text else vision_block()
        self.blocks = nn.ModuleList(kind(shape.width, shape.heads) for _ in range(shape.layers))

    def forward(self, x: Tensor, *text: Tensor) -> Tensor:
        attended = {"encoder_hidden_states": text[0]} if text else {}
        for block in self.blocks:
            x = block(x, **attended)
        return x


def diffusion_block() -> Callable[[int, int], nn.Module]:
    """diffusers' block."""
    block = library_block("diffusers.models.attention", "BasicTransformerBlock")
    return lambda width, heads: block(width, heads, width // heads, cross_attention_dim=width)


def vision_block() -> Callable[[int, int], nn.Module]:
    """timm's block, with biases as in ViT-H/14; ours without timm."""
    block = library_block("timm.models.vision_transformer", "Block")
    return Block if block is None else lambda width, heads: block(width, heads, qkv_bias=True)


def library_block(module: str, name: str) -> Any:
    """A library's class; None without the library, or where the installed PyTorch or torchvision does not fit it."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, RuntimeError):
        return None


def block_source() -> str:
    """The module of the blocks of ViT-H/14."""
    return "octavo.models.vision" if vision_block() is Block else "timm"


def inputs(shape: Shape) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    sizes = [shape.tokens, *([shape.text] if shape.text else [])]
    return tuple(torch.randn(shape.batch, t, shape.width, device=DEVICE, dtype=torch.bfloat16) for t in sizes)


def make(shape: Shape, mode: str) -> tuple[nn.Module, dict[str, Any]]:
    """The compiled stack, the same weights in every mode, and facts of its conversion."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = Stack(shape).to(torch.bfloat16)
    facts: dict[str, Any] = {}
    if mode.startswith("ours"):
        faster = mode.endswith("faster") and DEVICE == "cuda"
        report = octavo.convert(model, "rowwise", only_if_faster=faster, batch=inputs(shape))
        facts = {"fp8_flops": report.coverage.flops, "fused": len(report.fused), "left": report.skipped}
        facts["predicted"] = {row.name: row.speedup for row in report.rows if row.name.startswith("blocks.0.")}
    elif mode.startswith("torchao"):
        use_torchao(model, mode.split()[1])
    for block in model.blocks:
        block.compile()
    return model, facts


def step(model: nn.Module, shape: Shape) -> Callable[[], list[Tensor]]:
    """A forward and backward pass; returns y, dx and the gradient of the first weight matrix."""
    given = inputs(shape)
    weight = next(p for p in model.parameters() if p.ndim == 2)
    return harness.Passes(model, given, torch.randn_like(given[0]), [weight]).step


def measure(shape: Shape) -> dict[str, Any]:
    torch._dynamo.config.recompile_limit = 64  # the modes share the code of their blocks
    modes = [mode for mode in MODES if "torchao" not in mode or record.installed("torchao")]
    result: dict[str, Any] = {"shape": vars(shape), "conversion": {}, "peak_bytes": {}, "db": {}}
    reference: list[Tensor] = []
    for mode in modes:  # alone on the GPU first, for its memory
        torch._dynamo.reset()  # a compiled block refers to itself, and would hold an earlier mode's model
        before = harness.allocated()
        model, result["conversion"][mode] = make(shape, mode)
        run = step(model, shape)
        result["peak_bytes"][mode] = harness.peak_of(run, before)
        found = [t.clone() for t in run()]
        reference = reference or found
        result["db"][mode] = harness.each_decibels(reference, found) if mode != "bf16" else []
        del model, run, found
    torch._dynamo.reset()
    harness.allocated()
    steps = {mode: step(make(shape, mode)[0], shape) for mode in modes}
    result["rounds"] = harness.interleaved(steps, rounds=15, repeat=3)
    result["speedup"] = {mode: speedup(result, mode, "bf16") for mode in modes}
    result["profiles"] = {mode: categories(steps[mode]) for mode in PROFILED}
    show(result)
    return result


@benchmark()
def main(_: Options) -> Results:
    found: dict[str, Any] = {}
    for name, shape in SHAPES.items():
        if shape.text and library_block("diffusers.models.attention", "BasicTransformerBlock") is None:
            print(f"{name}: diffusers is not installed")
            continue
        found[name] = measure(shape)
        yield "gpu_vision", {"blocks": block_source(), "shapes": found}
