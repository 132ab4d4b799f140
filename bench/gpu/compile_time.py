"""Seconds until a converted vision transformer is compiled, forward and backward: BF16, and ours, by depth.

The blocks have ViT-H/14's shape (128 images of 257 tokens, 1,280 wide, 16 heads). Each way to compile runs in a process
of its own, without any of PyTorch's or Triton's saved code:

    whole    torch.compile(model): one graph, whose size grows with the depth
    block    block.compile() for each block: compiled once, for all of them

The clock runs over the first step. PyTorch is imported and an eager step has run before. A later step is subtracted.

The result is written after each way, beside the earlier one of the other way.

    python -m bench.gpu.compile_time [--depth 32]
"""

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

import octavo
from bench import record
from bench.gpu import vision
from bench.gpu.harness import DEVICE, Options, Results, benchmark, in_new_process, show, sized
from octavo.speed import timed

MODES = ("bf16", "ours")
SCOPES = ("whole", "block")
NAME = "gpu_compile_time"  # of the results


def new_process(mode: str, scope: str, depth: int) -> dict[str, float]:
    """The result of `first_step` in a process of its own, with empty caches."""
    with tempfile.TemporaryDirectory() as empty:
        caches = {name: str(Path(empty) / name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
        return in_new_process(partial(first_step, mode, scope, depth), **caches)


def first_step(mode: str, scope: str, depth: int) -> dict[str, float]:
    """Seconds that the first compiled step takes beyond a later one, and milliseconds of the later one."""
    shape = replace(vision.SHAPES["ViT-H/14"], layers=depth)
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = vision.Stack(shape).to(torch.bfloat16)
    if mode == "ours":
        octavo.convert(model, "rowwise", skip=[])
    run = vision.step(model, shape)
    run()  # initializes the libraries
    if scope == "whole":
        model.compile()
    else:
        torch._dynamo.config.recompile_limit = 64
        for block in model.blocks:
            block.compile()
    first, *later = (timed(run, torch.device(DEVICE))[0] for _ in range(4))
    return {"seconds": first - min(later), "later_ms": min(later) * 1e3}


@benchmark(depth=sized(32, 2))
def main(options: Options) -> Results:
    cells = record.rows_before(NAME, "cells")
    for scope in SCOPES:
        found = [{"mode": mode, "scope": scope, **new_process(mode, scope, options.depth)} for mode in MODES]
        show(found)
        cells = [cell for cell in cells if cell["scope"] != scope] + found
        yield NAME, {"depth": options.depth, "cells": cells}
