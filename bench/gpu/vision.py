"""Blocks of vision transformers, forward and backward, compiled: BF16, ours, and torchao's, in turn in one process.

Two shapes. ViT-H/14 has 128 images of 257 tokens; its blocks are timm's where timm is installed, and else those of
`octavo.models.vision`. A transformer of the size of SDXL's is 1280 wide and has 20 heads, 10 blocks, a GEGLU MLP, and
1,024 tokens that attend to themselves and to 77 of a text; its blocks are diffusers' where diffusers is installed, and
else those below.

Each block is compiled by itself. First come the outputs and gradients against BF16's, then the modes take turns.
The peak memory is that of a step, weights, gradients and input included, by which each mode's model is alone on the
GPU.

"ours, only if faster" converts with a batch, so that each layer is judged by its own tokens. `only_if_faster_to_best`
is its speed as a multiple of the faster one of BF16 and "ours": below 0.97 it chose wrongly. At the end the profiler
sums the kernels of BF16 and "ours" by kind.

    python -m bench.gpu.vision [--quick]
"""

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import octavo
from bench import record
from bench.gpu.harness import DEVICE, decibels, interleaved, peak_of
from bench.gpu.modes import speedup
from bench.gpu.peers import use_torchao
from bench.gpu.stack import categories
from octavo.models.vision import Block
from octavo.nn import GEGLU, NormLinear
from octavo.speed import release

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


SHAPES = {"ViT-H/14": Shape(6, 128, 257, 1280, 16), "SDXL-size": Shape(10, 16, 1024, 1280, 20, 77)}
TINY = {"ViT-H/14": Shape(2, 2, 9, 64, 4), "SDXL-size": Shape(2, 2, 16, 64, 4, 5)}  # for a rehearsal on a CPU


class Attention(nn.Module):
    layer_after = "to_out"  # whose input is the result of PyTorch's attention (`octavo.nn.attention_layers`)

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(width, width, bias=i == 3) for i in range(4))

    def forward(self, *projected: Any) -> Tensor:
        """[B, T, width] from q [B, T, width], k and v [B, S, width]."""
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in projected)
        return self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class DiffusionBlock(nn.Module):
    """A transformer block of SDXL's U-Net, as `BasicTransformerBlock` of diffusers. Once it is converted, norms and the
    activation quantize in the pass that computes them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.attn1, self.attn2 = Attention(width, heads), Attention(width, heads)
        self.proj, self.out = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)
        self.qkv = NormLinear(self, "norm1", "attn1.to_q", "attn1.to_k", "attn1.to_v")
        self.q, self.mlp = NormLinear(self, "norm2", "attn2.to_q"), GEGLU(self, "proj", "out")

    def forward(self, x: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        projected, _ = self.qkv(x)
        (q,), x = self.q(x, self.attn1(*projected))
        k, v = self.attn2.to_k(encoder_hidden_states), self.attn2.to_v(encoder_hidden_states)
        return self.mlp.forward_residual(x, self.norm3, self.attn2(q, k, v))


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
    """diffusers' block; ours without diffusers."""
    block = library_block("diffusers.models.attention", "BasicTransformerBlock")
    if block is None:
        return DiffusionBlock
    return lambda width, heads: block(width, heads, width // heads, cross_attention_dim=width)


def vision_block() -> Callable[[int, int], nn.Module]:
    """timm's block, with biases as in ViT-H/14; ours without timm."""
    block = timm_block()
    return Block if block is None else lambda width, heads: block(width, heads, qkv_bias=True)


def timm_block() -> Any:
    return library_block("timm.models.vision_transformer", "Block")


def library_block(module: str, name: str) -> Any:
    """A library's class; None without the library, or where the installed PyTorch or torchvision does not fit it."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, RuntimeError):
        return None


def block_source() -> str:
    """The module of the blocks of ViT-H/14, for a table's heading."""
    return "octavo.models.vision" if timm_block() is None else "timm"


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
    x, *text = inputs(shape)
    x.requires_grad_()
    dy = torch.randn_like(x)
    weight = next(p for p in model.parameters() if p.ndim == 2)

    def run() -> list[Tensor]:
        model.zero_grad()
        x.grad = None
        y = model(x, *text)
        y.backward(dy)
        assert x.grad is not None
        assert weight.grad is not None
        return [y.detach(), x.grad, weight.grad]

    return run


def free_models() -> None:
    """Free the models of earlier modes, with their gradients.

    A compiled block refers to itself. By itself Python frees it later, and a mode measured before that seems to take
    more memory.
    """
    torch._dynamo.reset()
    release(torch.device(DEVICE))


def measure(shape: Shape, rounds: int) -> dict[str, Any]:
    torch._dynamo.config.recompile_limit = 64  # the modes share the code of their blocks
    modes = [mode for mode in MODES if "torchao" not in mode or record.installed("torchao")]
    result: dict[str, Any] = {"shape": vars(shape), "conversion": {}, "peak_bytes": {}, "db": {}}
    reference: list[Tensor] = []
    steps: dict[str, Callable[[], Any]] = {}
    for mode in modes:  # alone on the GPU first, for its memory
        free_models()
        model, result["conversion"][mode] = make(shape, mode)
        run = step(model, shape)
        known = sum(t.numel() * t.element_size() for t in reference)
        result["peak_bytes"][mode] = peak_of(run, known)
        found = [t.clone() for t in run()]
        reference = reference or found
        result["db"][mode] = [decibels(b, a) for a, b in zip(found, reference, strict=True)] if mode != "bf16" else []
        print(mode, f"{result['peak_bytes'][mode] / 2**30:.2f} GiB", result["db"][mode], flush=True)
        del model, run, found
    free_models()
    for mode in modes:
        steps[mode] = step(make(shape, mode)[0], shape)
    result["rounds"] = interleaved(steps, rounds=rounds, repeat=3 if DEVICE == "cuda" else 1)
    result["speedup"] = {mode: speedup(result, mode, "bf16") for mode in modes}
    best = max(1.0, result["speedup"]["ours"])
    result["only_if_faster_to_best"] = result["speedup"]["ours, only if faster"] / best
    if DEVICE == "cuda":
        result["profiles"] = {mode: categories(steps[mode]) for mode in PROFILED}
        for mode, sums in result["profiles"].items():
            print(mode, {kind: round(sums[kind], 2) for kind in ("gemm", "attention", "rest")}, flush=True)
    print(result["speedup"], result["only_if_faster_to_best"], flush=True)
    return result


def main() -> None:
    quick = "--quick" in sys.argv
    shapes = SHAPES if DEVICE == "cuda" else TINY
    found: dict[str, Any] = {}
    for name, shape in shapes.items():
        found[name] = measure(shape, 5 if quick else 15)
        if DEVICE == "cuda":
            print(record.write("gpu_vision", {"blocks": block_source(), "shapes": found}))


if __name__ == "__main__":
    main()
