"""Every benchmark of bench/gpu and bench/cpu is rehearsed on this CPU at a tiny size, or is at least imported.

A rehearsal computes what the GPU computes, by emulation. The others need kernels that a CPU lacks.
"""

import importlib
import json
import queue
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import attention_fp8_oracle
import pytest
import torch

from bench import record
from bench.cpu import vision as digits
from bench.cpu import watch as watch_on_cpu
from bench.gpu import (
    attention,
    generate,
    harness,
    kernels,
    layer,
    llama,
    moe,
    packed_experts,
    plan,
    stack,
    start,
    vision,
    watch,
)
from bench.gpu import serve_models as models
from bench.gpu.harness import decibels
from bench.gpu.modes import BASE, FP8_CACHE, FUSED, FUSED_EAGER, HOOKED
from bench.gpu.peers import RECIPES
from bench.gpu.programs import EAGER, OCTAVO, STATIC
from bench.report.plots import OWNERS, owner
from octavo.inference.kv_cache import DTYPES
from octavo.inference.packed_linear import fuse
from octavo.models.llama import LlamaConfig, rope_tables
from octavo.rates.measured import find_gpu

ROOT = Path(__file__).parents[2]
MAINS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "bench").rglob("*.py")
    if '__name__ == "__main__"' in path.read_text() and path.name != "__main__.py"
)
BLOCKS = LlamaConfig(vocabulary=8, layers=2, width=256, heads=2, kv_heads=1, mlp_width=384, context=16)
MODEL = LlamaConfig(vocabulary=512, layers=1, width=64, heads=2, kv_heads=1, mlp_width=128, context=64, tied=False)
TINY_MOE = moe.Shape(4, 64, 48, 2, 8)


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that stands for bench/results."""
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", MAINS)
def test_every_main_is_imported_and_says_how_it_is_called(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        pytest.skip("it imports Triton's kernels, which this torch comes without")
    assert callable(module.main)
    assert len(module.__doc__ or "") > 40


@pytest.mark.slow
@pytest.mark.parametrize("name", ["moe", "packed_experts", "vision"])
def test_mains_that_know_tiny_sizes_run(name: str, monkeypatch: pytest.MonkeyPatch, results: Path) -> None:
    for module, field, value in (
        (packed_experts, "TOKENS", {"decode": (2,), "prefill": (8,)}),
        (moe, "TINY", {"tiny": TINY_MOE}), (packed_experts, "TINY", {"tiny": TINY_MOE}),
        (vision, "MODES", ("bf16", "ours", "ours, only if faster")), (torch, "compile", lambda model: model),
        (torch.nn.Module, "compile", lambda self: None), (sys, "argv", [name, "--quick"]),
    ):  # fmt: skip
        monkeypatch.setattr(module, field, value)
    importlib.import_module(f"bench.gpu.{name}").main()
    assert list(results.iterdir()) == []  # only a GPU's results are written


# --- What benchmarks compare with ------------------------------------------------------------------------------


def test_the_oracle_of_attention_is_autograd_in_float64() -> None:
    torch.manual_seed(0)
    q, k, v, dy = (x.double() for x in attention_fp8_oracle.given(1, 3, 1, 40, 40))
    expected = attention_fp8_oracle.exact(q, k, v, dy)
    actual = attention.attention64(q[0], k[0, 0], v[0, 0], dy[0])
    for one, other in zip(expected, actual, strict=True):
        torch.testing.assert_close(one[0].view_as(other), other)


def test_the_frechet_distance_of_known_gaussians() -> None:
    torch.manual_seed(0)
    x = torch.randn(4000, 3).double()
    assert digits.frechet(x, x) == pytest.approx(0, abs=1e-9)
    assert digits.frechet(x, x + torch.tensor([3.0, 4.0, 0.0])) == pytest.approx(25)  # the square of the distance
    # A second Gaussian with twice the standard deviation: tr(A + 4 A - 2 * 2 A) = tr(A), and the means
    means = x.mean(0).square().sum()
    assert digits.frechet(x, 2 * x) == pytest.approx(float(x.T.cov().trace() + means))


@pytest.mark.parametrize("k", [4096, 14336])
def test_each_operation_gives_what_its_reference_gives(monkeypatch: pytest.MonkeyPatch, k: int) -> None:
    monkeypatch.setattr(kernels, "T", 32)
    monkeypatch.setattr(kernels, "DEVICE", "cpu")
    found = list(kernels.kernels(k))
    for kernel in found:
        kernels.check(kernel)
        assert kernel.elements == 32 * k
    assert len({kernel.name for kernel in found}) == len(found)
    right = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(AssertionError, match="some: 3 of 3 bytes"):
        kernels.check(kernels.Kernel("some", lambda: right, lambda: right + 1, 3, 2))


def test_a_mode_that_does_not_run_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert harness.made("a mode", lambda: 1 // 0) is None
    assert "a mode: ZeroDivisionError" in capsys.readouterr().out
    assert harness.made("a mode", lambda: 7) == 7
    steps = {"base": lambda: torch.ones(4), "other": lambda: -torch.ones(4)}
    with pytest.raises(AssertionError):
        harness.against("base", steps)


# --- The layer, the stack, and its watch -----------------------------------------------------------------------


def test_batches_hold_each_cell_once_and_fit_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "SIZES", (1024, 2048, 4096, 8192, 16384, 32768))
    cells, memory = layer.order(), 100 << 30
    batches = list(layer.batches(cells, 12, memory, 2))
    assert [cell for batch in batches for cell in batch] == cells
    assert len(set(cells)) == 216
    assert max(map(len, batches)) == 12
    assert all(sum(map(layer.bytes_of, batch[gpu::2])) <= memory for batch in batches for gpu in range(2))


def test_a_cell_is_measured_once_all_are_compiled_and_one_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda model: model)
    monkeypatch.setattr(layer, "time_candidates_alone", lambda lock: None)
    found: queue.Queue[Any] = queue.Queue()
    for cell in ((16, 16, 16), (16, 16, -1)):
        layer.work(cell, 0, threading.RLock(), threading.Barrier(1), found)
    (_, rounds), (_, failure) = found.get(), found.get()
    assert rounds.keys() >= {"bf16", "ours", "ours, only if faster"}
    assert isinstance(failure, str)


def test_cells_of_another_commit_are_measured_again(results: Path) -> None:
    assert layer.measured_before() == []
    path = record.write("gpu_layer", {"cells": [{"m": 16}]})
    for change, expected in (({}, [{"m": 16}]), ({"measured": "2020-01-01"}, [{"m": 16}]), ({"commit": "other"}, [])):
        found = json.loads(path.read_text())
        path.write_text(json.dumps(found | {"machine": found["machine"] | change}))
        assert layer.measured_before() == expected


def test_plain_and_fused_blocks_compute_the_same() -> None:
    plain, fused = llama.Plain(BLOCKS), llama.Fused(BLOCKS)
    matrices = [[p for p in model.parameters() if p.ndim == 2] for model in (plain, fused)]
    for p, q in zip(*matrices, strict=True):
        q.data.copy_(p.data)
    x, tables = torch.randn(1, 16, BLOCKS.width), rope_tables(BLOCKS, torch.arange(16))
    torch.testing.assert_close(fused(x, *tables), plain(x, *tables))


def test_a_mode_in_fp8_is_near_bf16_and_its_step_leaves_no_gradient() -> None:
    modes = {BASE: "bf16, eager", FUSED: FUSED_EAGER, "plain": "ours plain: rowwise, eager"}
    runners = {name: stack.Runner(mode, BLOCKS, 16, "cpu") for name, mode in modes.items()}
    found = stack.check(runners)
    assert all(40 < db < 50 for each in found.values() for db in each)
    for runner in runners.values():
        runner.step()
        assert runner.x.grad is None
        assert all(p.grad is None for p in runner.model.parameters())
    assert {owner(mode) for mode in stack.MODES} == set(OWNERS)
    assert sum(mode.startswith("Transformer Engine") for mode in stack.MODES) == len(RECIPES)


def test_the_watch_of_a_stack_and_of_a_run_costs_time_and_changes_no_bit(tmp_path: Path) -> None:
    options: dict[str, Any] = {"config": BLOCKS, "tokens": 16, "device": "cpu"}
    found = watch.measure(FUSED_EAGER, rounds=2, repeat=1, many=3, **options)
    assert found["equal"] == {"outputs": True}
    assert found["sample_ms"][watch.FULL] > 0
    assert watch.small_equality(FUSED_EAGER, **options) == {"repeated": True, "watched": True}
    text = tmp_path / "text.txt"
    text.write_text("a quire of sheets folded three times makes eight leaves\n" * 200)
    sizes = ["--data", str(text), "--layers", "1", "--width", "32", "--heads", "2", "--context", "16", "--batch", "2"]
    found = watch_on_cpu.measure(8, *sizes)
    step, extra = found["step_ms"], found["extra_ms"]
    expected = (extra["not sampled"] * 90 + extra["brief"] * 9 + extra["both"]) / 100 / step
    assert found["overhead"] == pytest.approx(expected)


# --- Whole models ----------------------------------------------------------------------------------------------


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """bench/gpu/generate.py with these words, of a small model; returns what it wrote."""
    original = generate.Bench
    monkeypatch.setattr(generate, "Bench", lambda shape, folder, _: original(shape, folder, "cpu"))
    monkeypatch.setattr(llama, "CONFIG", MODEL)
    for name, value in {"PROMPTS": (8, 16), "PROMPT": 16, "TOKENS": 4}.items():
        monkeypatch.setattr(generate, name, value)

    def run(*words: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["generate", "--layers", "1", "--folder", str(tmp_path / "models"), *words])
        generate.main()
        found: dict[str, Any] = json.loads((tmp_path / f"{generate.NAME}.json").read_text())
        return found

    return run


@pytest.mark.slow
def test_generation_and_its_start_are_measured(
    call: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sections are added to those of before, and the folders that are there are used again."""
    found = call("--only", "prompt", "--batches", "1,2")
    assert [row["way"] for row in found["prompt"]] == [OCTAVO, FP8_CACHE, EAGER] * 2
    assert found[f"check of {OCTAVO}"]["equal"] == [4, 4]
    again = call("--only", "decode 2", "--batches", "1,2")
    assert again["prompt"] == found["prompt"]
    assert [row["way"] for row in again["decode 2"]] == [OCTAVO, HOOKED, FP8_CACHE, EAGER, STATIC]
    with pytest.raises(SystemExit, match="--only takes prompt, decode 1, graphs 1, got 'decode 7'"):
        call("--only", "decode 7", "--batches", "1")
    folders = [str(tmp_path / "models" / "packed"), "--against", str(tmp_path / "models" / "bf16")]
    monkeypatch.setattr(sys, "argv", ["start", *folders, "--prompt", "8", "--device", "cpu"])
    seconds = start.run(OCTAVO, start.parse(), tmp_path)
    assert all(seconds[key] > 0 for key in start.FIGURES)


@pytest.mark.slow
def test_one_configuration_of_a_plan_is_trained(tmp_path: Path) -> None:
    small = plan.MODELS["8b"].change(
        layers=2, width=64, heads=4, kv_heads=2, mlp_width=96, context=32, device="cpu", recipe="rowwise",
        out=str(tmp_path / "run"), **{"compile.blocks": False},
    )  # fmt: skip
    task, result = tmp_path / "task.json", tmp_path / "result.json"
    task.write_text(json.dumps({"config": small.to_dict(), "out": str(result)}))
    plan.work(task)
    row = plan.compared(small, 1, find_gpu("h200"), json.loads(result.read_text()))
    assert min(row["seconds"], row["host_seconds"]) > 0
    assert set(row["errors"]) == {"time"}  # the CPU has no peak of a GPU
    assert "rowwise  none      1 GPU" in plan.line(row)
    for name in plan.MODELS:
        for each in plan.CONFIGURATIONS:
            unmeasured = plan.compared(plan.configured(name, *each), each[0], find_gpu("h200"), {"error": "not run"})
            assert unmeasured["planned"]["peak_bytes"] < find_gpu("h200").memory


@pytest.fixture
def wide() -> Any:
    return models.build_bf16(replace(MODEL, layers=3, width=256, heads=4, kv_heads=2, mlp_width=512), "cpu")


def ids(length: int) -> torch.Tensor:
    return torch.randint(0, 512, (2, length))


@pytest.mark.slow
def test_the_served_model_computes_what_transformers_computes(wide: Any) -> None:
    text, kept = (
        ids(16),
        [models.PlainCache(each) for each in models.random_stores(wide.config, 2, 16, "cpu", "bf16")["bf16"]],
    )
    assert torch.equal(models.forward(wide, text), wide(text, use_cache=False, logits_to_keep=1).logits[:, 0])
    expected = models.forward(wide, text)
    for number, each in enumerate(wide.model.layers):
        each.self_attn.layer_idx = number  # for the cache of transformers
    filled = wide(text[:, :15], use_cache=True).past_key_values
    for ours, theirs in zip(kept, filled.layers, strict=True):
        ours.keys[:, :, :15], ours.values[:, :, :15] = theirs.keys, theirs.values
    assert decibels(expected, models.forward(wide, text[:, 15:], 15, kept)) > 30


@pytest.mark.slow
def test_packed_it_is_near_and_half_as_large(wide: Any) -> None:
    packed, text = models.build_fp8(wide, "cpu"), ids(32)
    exact, apart = models.forward(wide, text), models.forward(packed, text)
    fuse(packed)
    assert min(decibels(exact, models.forward(packed, text)), decibels(exact, apart)) > 15
    linears = 3 * (256 * (256 + 2 * 128) + 256 * 256 + 3 * 256 * 512)
    assert models.held(wide, linears=True) == 2 * linears
    assert linears < models.held(packed, linears=True) < 1.02 * linears


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "least", "most"), [("bf16", 35, float("inf")), ("fp8", 20, 35)])
def test_keys_and_values_in_octavos_caches_are_those_of_the_plain_ones(
    wide: Any, dtype: str, least: float, most: float
) -> None:
    text, kept = ids(1), models.random_stores(wide.config, 2, 16, "cpu", "bf16", dtype)
    exact = models.forward(wide, text, 15, [models.PlainCache(store) for store in kept["bf16"]])
    caches = models.octavo_caches(wide, kept[dtype])
    again = partial(models.forward_again, wide, text, 15, caches)
    assert least < decibels(exact, again()) <= most
    assert {each.store.keys.dtype for each in caches} == {DTYPES[dtype]}
    assert {int(each.store.length) for each in caches} == {15}
