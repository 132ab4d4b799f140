"""Blocks of vision transformers, forward and backward, compiled: BF16, ours, and torchao's, in turn in one process.

Two shapes. ViT-H/14 has 128 images of 257 tokens; its blocks are timm's where timm is installed, and else those of
`octavo.models.vision`. A transformer of the size of SDXL's is 1280 wide and has 20 heads, 10 blocks, a GEGLU MLP, and
1,024 tokens that attend to themselves and to 77 of a text; its blocks are diffusers', and it is left out without them.

Each block is compiled by itself. First come the outputs and gradients against BF16's, then the modes take turns.
The peak memory is that of a step, weights, gradients and input included, without the models of other modes.

"ours, only if faster" converts with a batch, so that each layer is judged by its own tokens.

The part `whole` takes steps of whole models with AdamW: timm's ViT-H/14, and a U-Net of SDXL's shape of diffusers.
Their blocks are compiled one by one. The modes in BF16 share their parameters.

The part `compile` has the seconds until a stack of ViT-H/14's shape is compiled, in BF16 and converted. Each way to
compile runs in a process of its own, without any of PyTorch's or Triton's saved code:

    whole    torch.compile(model): one graph, whose size grows with the depth
    block    block.compile() for each block: compiled once, for all of them

The clock runs over the first step. PyTorch is imported and an eager step has run before. A later step is subtracted.
The result is written after each way, beside the earlier one of the other way.

    python -m bench.gpu.vision [--only blocks] [--model ViT-H/14] [--depth 32]
"""

import copy
import importlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import octavo
from bench.gpu import harness
from bench.gpu.harness import DEVICE, Options, Results, benchmark, made, sized
from bench.gpu.modes import speedup
from bench.gpu.variants import use_torchao
from octavo.models.vision import Block
from octavo.speed import timed

MODES = ("bf16", "ours", "ours, only if faster", "torchao tensorwise", "torchao rowwise")


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
        sizes = shape.width, shape.heads
        if shape.text:
            block = library_block("diffusers.models.attention", "BasicTransformerBlock")
            make = partial(block, *sizes, shape.width // shape.heads, cross_attention_dim=shape.width)
        else:  # timm's block, with biases as in ViT-H/14; ours without timm
            block = library_block("timm.models.vision_transformer", "Block")
            make = partial(Block, *sizes) if block is None else partial(block, *sizes, qkv_bias=True)
        self.blocks = nn.ModuleList(make() for _ in range(shape.layers))

    def forward(self, x: Tensor, *text: Tensor) -> Tensor:
        attended = {"encoder_hidden_states": text[0]} if text else {}
        for block in self.blocks:
            x = block(x, **attended)
        return x


def library_block(module: str, name: str) -> Any:
    """A library's class; None without the library, or where the installed PyTorch or torchvision does not fit it."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, RuntimeError):
        return None


def inputs(shape: Shape) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    sizes = [shape.tokens, *([shape.text] if shape.text else [])]
    return tuple(torch.randn(shape.batch, t, shape.width, device=DEVICE, dtype=torch.bfloat16) for t in sizes)


class Runner(harness.Passes):
    """A mode's stack, the same weights in every mode; a step returns y, dx and the gradient of the first matrix."""

    def __init__(self, mode: str, shape: Shape, *, compiled: bool = True) -> None:
        torch.manual_seed(0)
        with torch.device(DEVICE):
            stack = Stack(shape).to(torch.bfloat16)
        self.facts: dict[str, Any] = {}  # of the conversion
        if mode.startswith("ours"):
            faster = mode.endswith("faster") and DEVICE == "cuda"
            report = octavo.convert(stack, "rowwise", only_if_faster=faster, batch=inputs(shape))
            self.facts = {"fp8_flops": report.coverage.flops, "fused": len(report.fused), "left": report.skipped}
            self.facts["predicted"] = {row.name: row.speedup for row in report.rows if row.name.startswith("blocks.0.")}
        elif mode.startswith("torchao"):
            use_torchao(stack, mode.split()[1])
        given = inputs(shape)
        super().__init__(stack, given, torch.randn_like(given[0]), [next(p for p in stack.parameters() if p.ndim == 2)])
        if compiled:
            self.compile_blocks()

    def compile_blocks(self) -> None:
        for block in self.model.blocks:  # type: ignore[union-attr]
            block.compile()


def measure(shape: Shape) -> dict[str, Any]:
    modes = [mode for mode in MODES if "torchao" not in mode or harness.installed("torchao")]
    runners, peaks = harness.built({mode: partial(Runner, mode, shape) for mode in modes})
    result = {"shape": vars(shape), "conversion": {mode: runner.facts for mode, runner in runners.items()}}
    result |= {"peak_bytes": peaks, "db": {"bf16": []} | harness.checked("bf16", runners)}
    steps = {mode: runner.step for mode, runner in runners.items()}
    result["rounds"] = harness.interleaved(steps, rounds=15, repeat=3)
    return result | {"speedup": {mode: speedup(result, mode, "bf16") for mode in steps}}


# --- Whole models ----------------------------------------------------------------------------------------------

FP32 = "fp32 (TF32)"
WHOLE: dict[str, Callable[[nn.Module], Any]] = {  # what prepares a model
    FP32: lambda model: None,
    "bf16": lambda model: None,
    "ours": octavo.convert,
    "torchao tensorwise": lambda model: use_torchao(model, "tensorwise"),
}


class VisionTransformer:
    """timm's ViT-H/14 and its images."""

    library, block, batches = "timm", "Block", sized((64, 128), (16, 32))  # torchao needs rows in multiples of 16

    @staticmethod
    def make() -> nn.Module:
        timm: Any = importlib.import_module("timm")
        small = sized({}, {"img_size": 28, "embed_dim": 128, "depth": 2, "num_heads": 4})
        return timm.create_model("vit_huge_patch14_224", **small)

    @staticmethod
    def inputs(model: Any, batch: int, **options: Any) -> dict[str, Any]:
        return {"x": torch.randn(batch, 3, *model.patch_embed.img_size, **options)}


class UNet:
    """diffusers' U-Net of SDXL's shape (Podell et al. 2023, arXiv:2307.01952), and latents of 1,024 x 1,024 pixels."""

    library, block, batches = "diffusers", "BasicTransformerBlock", sized((4, 8), (16, 32))

    @staticmethod
    def make() -> nn.Module:
        diffusers: Any = importlib.import_module("diffusers")
        attends = "CrossAttnDownBlock2D", "CrossAttnUpBlock2D"
        return diffusers.UNet2DConditionModel(
            down_block_types=("DownBlock2D", attends[0], attends[0]),
            up_block_types=(attends[1], attends[1], "UpBlock2D"),
            block_out_channels=sized((320, 640, 1280), (32, 64, 64)),
            transformer_layers_per_block=sized((1, 2, 10), (1, 1, 2)),
            attention_head_dim=sized((5, 10, 20), (1, 2, 2)),
            cross_attention_dim=sized(2048, 64),
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=256,
            projection_class_embeddings_input_dim=2816,
        )

    @staticmethod
    def inputs(model: Any, batch: int, **options: Any) -> dict[str, Any]:
        side = sized(128, 16)
        return {
            "sample": torch.randn(batch, 4, side, side, **options),
            "timestep": torch.randint(1000, (batch,), device=options["device"]),
            "encoder_hidden_states": torch.randn(batch, 77, model.config.cross_attention_dim, **options),
            "added_cond_kwargs": {
                "text_embeds": torch.randn(batch, 1280, **options),
                "time_ids": torch.zeros(batch, 6, **options),
            },
        }


MODELS: dict[str, type[VisionTransformer | UNet]] = {"ViT-H/14": VisionTransformer, "SDXL's U-Net": UNet}


class Training:
    """The steps of a mode with AdamW. The loss is the mean square of the outputs."""

    def __init__(self, kind: Any, mode: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.kind, self.optimizer = kind, optimizer
        self.model = copy.deepcopy(model, {id(p): p for p in model.parameters()})
        self.dtype = next(model.parameters()).dtype
        WHOLE[mode](self.model)
        for module in [m for m in self.model.modules() if any(c.__name__ == kind.block for c in type(m).__mro__)]:
            module.compile()

    def __call__(self, batch: int = 0) -> None:
        inputs = self.kind.inputs(self.model, batch or self.kind.batches[0], device=DEVICE, dtype=self.dtype)
        y: Any = self.model(**inputs)
        getattr(y, "sample", y).float().square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def memory(self) -> dict[str, Any]:
        """The peaks of two batches, in bytes, and the largest batch that runs, as if no other model were there."""
        batches, own = self.kind.batches, 3 * sum(p.nbytes for p in self.model.parameters())  # with AdamW's moments
        return harness.largest_batch(self, batches, max(harness.allocated() - own, 0), self.optimizer)


def measure_whole(kind: Any) -> Iterator[dict[str, Any]]:
    """Milliseconds of each mode, and then its peaks and its largest batch, mode by mode."""
    torch.set_float32_matmul_precision("high")
    steps: dict[str, Training] = {}
    for modes, dtype in (((FP32,), torch.float32), (tuple(WHOLE)[1:], torch.bfloat16)):
        torch.manual_seed(0)
        with torch.device(DEVICE):
            model = kind.make().to(dtype).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-7, fused=DEVICE == "cuda")
        for mode in modes:
            step = Training(kind, mode, model, optimizer)
            if made(mode, partial(harness.once, step, 1)):  # torchao takes no layer of 308 rows, as of four texts
                steps[mode] = step
    times = harness.interleaved(steps, rounds=5, repeat=2)
    result = {"parameters": sum(p.numel() for p in model.parameters()), "batch": kind.batches[0], "rounds": times}
    result["modes"] = harness.rows_of(times, "bf16", "speed")
    yield result
    for mode, step in steps.items():
        result["modes"][mode] |= step.memory()
        yield result


# --- Time to compile -------------------------------------------------------------------------------------------


def first_step(mode: str, scope: str, depth: int) -> dict[str, float]:
    """Seconds that the first compiled step takes beyond a later one, and milliseconds of the later one."""
    runner = Runner(mode, replace(SHAPES["ViT-H/14"], layers=depth), compiled=False)
    runner.step()  # initializes the libraries
    if scope == "whole":
        runner.model.compile()
    else:
        torch._dynamo.config.recompile_limit = 64
        runner.compile_blocks()
    first, *later = (timed(runner.step, torch.device(DEVICE))[0] for _ in range(4))
    return {"seconds": first - min(later), "later_ms": min(later) * 1e3}


def compile_times(depth: int) -> Results:
    name = "gpu_compile_time"
    cells = harness.rows_before(name, "cells")
    for scope in ("whole", "block"):
        found = []
        for mode in ("bf16", "ours"):
            with tempfile.TemporaryDirectory() as empty:
                caches = {cache: str(Path(empty) / cache) for cache in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
                seconds = harness.in_new_process(partial(first_step, mode, scope, depth), **caches)
            found.append({"mode": mode, "scope": scope, **seconds})
        cells = [cell for cell in cells if cell["scope"] != scope] + found
        yield name, {"depth": depth, "cells": cells}


@benchmark(only=("blocks", "whole", "compile"), model=tuple(MODELS), depth=sized(32, 2))
def main(options: Options) -> Results:
    earlier = harness.result_before("gpu_vision")
    if options.only in (None, "whole"):
        whole = dict(earlier.get("whole", {}))
        for name in [options.model] if options.model else MODELS:
            if library_block(MODELS[name].library, "__version__") is None:
                print(f"{name}: {MODELS[name].library} is not installed")
                continue
            for measured in measure_whole(MODELS[name]):
                whole[name] = {"machine": harness.facts(), **measured}
                earlier = {"shapes": {}, **earlier, "whole": whole}
                yield "gpu_vision", earlier
    found: dict[str, Any] = {}
    for name, shape in SHAPES.items() if options.only in (None, "blocks") else ():
        if shape.text and library_block("diffusers.models.attention", "BasicTransformerBlock") is None:
            print(f"{name}: diffusers is not installed")
            continue
        found[name] = measure(shape)
        yield "gpu_vision", {"shapes": found, "whole": earlier.get("whole", {})}
    if options.only in (None, "compile"):  # the last, because it changes where this process finds compiled code
        yield from compile_times(options.depth)
