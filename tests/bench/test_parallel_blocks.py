"""bench/gpu/tensor_parallel.py: tiny blocks on two processes without a GPU."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn

from bench.gpu.parallel_blocks import SplitStack
from octavo.models.llama import LlamaConfig, rope_tables

pytestmark = pytest.mark.slow

TINY = LlamaConfig(vocabulary=64, layers=2, width=64, heads=4, kv_heads=2, mlp_width=96, context=16, tied=False)


def measure(rank: int, folder: str) -> list[Any]:
    from torch.distributed.device_mesh import init_device_mesh

    from bench import record
    from bench.gpu import ranks, tensor_parallel

    record.RESULTS, ranks.GATHERED = Path(folder), 1 << 16
    mesh = init_device_mesh("cpu", (2,))
    tensor_parallel.MODES["broken"] = replace(tensor_parallel.MODES["bf16"], split=fail)
    names = ["bf16", "bf16, async", "broken", "octavo: rowwise"]
    deadline = ranks.Deadline(math.inf)
    tensor_parallel.Bench(TINY, 16, mesh, 2, deadline, compiled=False).run(names)
    runner = tensor_parallel.Runner(tensor_parallel.MODES["bf16"], TINY, 16, mesh, compiled=False)
    return [t.tolist() for t in runner.step()]


def fail(model: nn.Module, mesh: Any) -> None:
    raise ValueError("no such plan")


def test_modes_are_measured_and_bf16_equals_one_process(tmp_path: Path) -> None:
    results = run_ranks(2, measure, str(tmp_path))
    rows = json.loads((tmp_path / "gpu_tensor_parallel_2_gpus.json").read_text())["modes"]
    assert [row["mode"] for row in rows] == ["broken", "bf16", "octavo: rowwise", "bf16, async"]
    assert rows[0] == {"mode": "broken", "error": "ValueError: no such plan"}
    assert rows[1]["ratio"] == 1.0
    assert len(rows[2]["rounds"]) == 2

    model = SplitStack(TINY).to(torch.bfloat16)
    torch.manual_seed(0)
    for p in model.parameters():
        if p.ndim > 1:
            nn.init.normal_(p, std=0.02)
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(1, 16, 64, generator=generator).to(torch.bfloat16) for _ in range(2))
    y = model(x.requires_grad_(), *rope_tables(TINY, torch.arange(16)))
    y.backward(dy)
    assert x.grad is not None
    for part, whole in enumerate((y, x.grad)):
        found = torch.cat([torch.tensor(grads[part]) for grads in results], dim=1)
        torch.testing.assert_close(found, whole.float(), rtol=0.02, atol=0.02)
