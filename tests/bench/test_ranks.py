"""The benchmarks of several GPUs: tiny models on two processes without a GPU."""

import json
import statistics
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks

from bench.gpu import fsdp, harness, ranks
from bench.gpu.fsdp import MODES
from bench.gpu.harness import draw_matrices, write
from bench.gpu.llama import Plain
from bench.gpu.modes import BASE, OURS, WIDE
from bench.gpu.ranks import covered, kind_of, split, without_first
from octavo.models.llama import LlamaConfig, rope_tables

TINY = LlamaConfig(vocabulary=64, layers=2, width=64, heads=2, kv_heads=1, mlp_width=96, context=16, tied=False)
BLOCK = 64 * (2 * 64 + 2 * 32) + 3 * 64 * 96 + 2 * 64  # parameters
EAGER = "bf16, eager"


def measure(rank: int, folder: str) -> list[dict[str, Any]]:
    """The rows of a run with modes that fail, then times over two links."""
    warnings.simplefilter("ignore")  # of torch, that a unit of FSDP2 returns a view
    harness.RESULTS, ranks.GATHERED = Path(folder), 1 << 16
    MODES.update({name: replace(mode, compiled=False) for name, mode in MODES.items()})
    MODES["broken"] = replace(MODES[EAGER], convert=fail)
    MODES["not in FP8"] = replace(MODES[EAGER], convert=lambda model: None)
    write(results := list(fsdp.measure([BASE, EAGER, "broken", "not in FP8", WIDE, OURS], TINY, 3)))
    write(fsdp.over_links([BASE, WIDE], TINY, [1, 2], 2))
    return results[-1][1]["modes"]


def fail(*_: Any) -> None:
    raise ValueError("no such mode")


@pytest.mark.slow
def test_modes_are_measured_and_written(tmp_path: Path) -> None:
    earlier = {"machine": {"commit": "abc"}, "modes": [{"mode": BASE, "median": 1.0}, {"mode": "other", "median": 2.0}]}
    (tmp_path / "gpu_fsdp_2_layers_2_gpus.json").write_text(json.dumps(earlier))
    rows, others = run_ranks(2, measure, str(tmp_path))
    assert [row["mode"] for row in rows] == [BASE, EAGER, "broken", "not in FP8", WIDE, OURS, "other"]
    base, eager, broken, exact, wide, ours, kept = rows
    assert broken["error"] == "ValueError: no such mode"
    assert "the gradients must be off by 0.03 to 0.5, and are by 0.0" in exact["error"]
    assert eager["gradient_error"] == 0  # compiled neither
    assert 0.02 < wide["gradient_error"] < 0.5
    assert 0.02 < ours["gradient_error"] < 0.5
    for row, other in zip(rows, others, strict=True):
        assert row.get("rounds") == other.get("rounds")  # of the slowest rank
    # forward and backward gather half of the blocks in BF16; the root stays gathered; gradients are reduced in FP32
    root = 2 * 64 * 64 + 64
    assert base["gathered_bytes"] == (2 * 2 * BLOCK + root) // 2 * 2
    assert wide["gathered_bytes"] == base["gathered_bytes"]
    rows_of_weights = 2 * 64 + 2 * 32 + 2 * 96 + 64  # a float each beside the bytes; the norms in BF16
    assert ours["gathered_bytes"] == (2 * 2 * (BLOCK - 128 + 4 * rows_of_weights + 2 * 128) + 2 * root) // 2
    assert base["reduced_bytes"] == (2 * BLOCK + root) // 2 * 4
    assert ours["reduced_bytes"] == wide["reduced_bytes"] == base["reduced_bytes"] // 2  # Octavo sends BF16 gradients
    assert eager["tokens_per_second"] == pytest.approx(TINY.context * 1e3 / statistics.median(eager["rounds"][EAGER]))
    turns = [b / a for a, b in zip(eager["rounds"][EAGER], eager["rounds"][BASE], strict=True)]
    assert eager["ratio"] == statistics.median(turns)

    written = json.loads((tmp_path / "gpu_fsdp_2_layers_2_gpus.json").read_text())
    assert base["ratio"] == 1.0
    assert kept == earlier["modes"][1] | {"machine": {"commit": "abc"}}
    assert written["modes"] == rows
    assert written["setting"]["world"] == 2
    assert written["bytes_per_second"] > 0
    network = json.loads((tmp_path / "gpu_network_direct.json").read_text())
    assert [link["channels"] for link in network["links"]] == [2, 1]
    assert all(len(times) == 2 for link in network["links"] for times in link["rounds"].values())


def test_kernels_are_split_and_exposed_communication_is_what_nothing_hides() -> None:
    kernels = [
        ("nvjet_gemm", 0.0, 4.0),
        ("ncclDevKernel_AllGather_RING_LL", 2.0, 6.0),  # 4 to 6 alone
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", 5.0, 7.0),  # 6 to 7 alone
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 6.0, 7.0),
        ("flash_fwd", 9.0, 10.0),  # after 2 of nothing
        ("triton_red_fused", 10.0, 10.5),
    ]
    expected = {"all-gather": 4.0, "reduce-scatter": 2.0, "all-to-all": 1.0, "gemm": 4.0, "attention": 1.0, "rest": 0.5}
    assert split(kernels) == {**expected, "other communication": 0.0, "exposed": 3.0, "idle": 2.0}
    assert split([])["idle"] == 0
    assert covered([("", *each) for each in ((2.0, 3.0), (0.0, 1.0), (0.5, 2.0), (5.0, 9.0), (6.0, 7.0))]) == 3 + 4
    assert kind_of("nccldevkernel_allreduce_sum_f32") == "other communication"


def test_the_first_profiled_step_is_left_out() -> None:
    launched = [("gather", 0.0, 90.0), ("gemm", 91.0, 92.0), ("gemm", 101.0, 102.0), ("gather", 100.0, 101.0)]
    assert without_first(launched, 2) == [("gather", 100.0, 101.0), ("gemm", 101.0, 102.0)]


# --- Tensor parallelism ----------------------------------------------------------------------------------------

BLOCKS = replace(TINY, heads=4, kv_heads=2)


def measure_blocks(rank: int, folder: str) -> list[Any]:
    from torch.distributed.device_mesh import init_device_mesh

    from bench.gpu import tensor_parallel

    harness.RESULTS, ranks.GATHERED = Path(folder), 1 << 16
    mesh = init_device_mesh("cpu", (2,))
    tensor_parallel.MODES["broken"] = replace(tensor_parallel.MODES["bf16"], split=fail)
    names = ["bf16", "bf16, async", "broken", "octavo: rowwise"]
    write(tensor_parallel.measure(names, BLOCKS, mesh, 2, compiled=False))
    runner = tensor_parallel.Runner(tensor_parallel.MODES["bf16"], BLOCKS, mesh, compiled=False)
    return [t.tolist() for t in runner.step()]


@pytest.mark.slow
def test_blocks_in_bf16_equal_one_process(tmp_path: Path) -> None:
    results = run_ranks(2, measure_blocks, str(tmp_path))
    rows = json.loads((tmp_path / "gpu_tensor_parallel_2_gpus.json").read_text())["modes"]
    assert [row["mode"] for row in rows] == ["bf16", "bf16, async", "broken", "octavo: rowwise"]
    assert rows[0]["ratio"] == 1.0
    assert rows[2] == {"mode": "broken", "error": "ValueError: no such mode"}
    assert [len(times) for times in rows[3]["rounds"].values()] == [2, 2]

    model = Plain(BLOCKS).to(torch.bfloat16)
    draw_matrices(model)
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(1, 16, 64, generator=generator).to(torch.bfloat16) for _ in range(2))
    y = model(x.requires_grad_(), *rope_tables(BLOCKS, torch.arange(16)))
    y.backward(dy)
    for part, whole in enumerate((y, x.grad)):
        found = torch.cat([torch.tensor(grads[part]) for grads in results], dim=1)
        torch.testing.assert_close(found, whole.float(), rtol=0.02, atol=0.02)
