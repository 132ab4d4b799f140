"""Seconds until a converted vision transformer is compiled, forward and backward: BF16, and ours, by depth.

The blocks have ViT-H/14's shape (128 images of 257 tokens, 1,280 wide, 16 heads). Each way to compile runs in a process
of its own, without any of PyTorch's or Triton's saved code:

    whole    torch.compile(model): one graph, whose size grows with the depth
    block    block.compile() for each block: compiled once, for all of them

The clock runs over the first step. PyTorch is imported and an eager step has run before. A later step is subtracted.

The result is written after each way, beside the earlier one of the other way.

    python -m bench.gpu.compile_time [--depth 32] [--cpu]      --cpu: narrow blocks on a CPU; writes nothing
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import octavo
from bench import record
from bench.gpu import vision
from bench.gpu.harness import DEVICE

MODES = ("bf16", "ours")
SCOPES = ("whole", "block")
NAME = "gpu_compile_time"  # of the results


def main() -> None:
    options = parse()
    if options.mode is not None:
        print(json.dumps(first_step(options)), flush=True)
        return
    cells: list[dict[str, Any]] = [] if options.cpu else record.rows_before(NAME, "cells")
    for scope in SCOPES:
        found: list[dict[str, Any]] = [
            {"mode": mode, "scope": scope, **in_new_process(mode, scope, options)} for mode in MODES
        ]
        bf16, ours = (cell["seconds"] for cell in found)
        print(f"{scope}: bf16 {bf16:.1f} s, ours {ours:.1f} s, {ours / bf16:.2f} times BF16's", flush=True)
        cells = [cell for cell in cells if cell["scope"] != scope] + found
        if not options.cpu:
            blocks = vision.block_source()
            print(record.write(NAME, {"depth": options.depth, "blocks": blocks, "cells": cells}), flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--depth", type=int, default=32)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--mode", choices=MODES, help="only this mode, in this process")
    parser.add_argument("--scope", choices=SCOPES)
    return parser.parse_args()


def in_new_process(mode: str, scope: str, options: argparse.Namespace) -> dict[str, float]:
    """The result of `first_step` with empty caches."""
    words = [sys.executable, "-m", "bench.gpu.compile_time", "--mode", mode, "--scope", scope]
    words += ["--depth", str(options.depth), *(["--cpu"] if options.cpu else [])]
    with tempfile.TemporaryDirectory() as empty:
        caches = {name: str(Path(empty) / name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if options.cpu else {}
        done = subprocess.run(words, env=os.environ | caches | hidden, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def first_step(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds that the first compiled step takes beyond a later one, and milliseconds of the later one."""
    known = vision.TINY if options.cpu else vision.SHAPES
    shape = replace(known["ViT-H/14"], layers=options.depth)
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = vision.Stack(shape).to(torch.bfloat16)
    if options.mode == "ours":
        octavo.convert(model, "rowwise", skip=[])
    run = vision.step(model, shape)
    timed(run)  # initializes the libraries
    if options.scope == "whole":
        model.compile()
    else:
        torch._dynamo.config.recompile_limit = 64
        for block in model.blocks:
            block.compile()
    first = timed(run)
    later = min(timed(run) for _ in range(3))
    return {"seconds": first - later, "later_ms": later * 1e3}


def timed(run: Any) -> float:
    began = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
