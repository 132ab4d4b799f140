"""Every benchmark is imported; those that a CPU can run are run at their smallest, with what they compare against.

`make bench-smoke` runs all of them on a GPU.
"""

import importlib
import json
import re
import runpy
import shlex
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import attention_fp8_oracle
import numpy as np
import pytest
import torch
from torch import Tensor

from bench import smoke
from bench.cpu import embeddings
from bench.cpu import vision as digits
from bench.gpu import attention, generate, harness, kernels, layer, llama, plan, stack
from bench.gpu import serve_models as models
from bench.gpu.harness import decibels
from bench.gpu.llama import SMALL
from bench.gpu.modes import BASE, FP8_CACHE, FUSED, FUSED_EAGER, HOOKED, OCTAVO, PLAIN
from octavo.inference.kv_cache import DTYPES
from octavo.inference.packed_linear import fuse
from octavo.inference.transformers_cache import CACHE
from octavo.models.llama import rope_tables
from octavo.rates.measured import find_gpu
from octavo.speed import Cell, Grid

ROOT = Path(__file__).parents[2]
MAINS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "bench").rglob("*.py")
    if re.search(r"^@benchmark\(|^if __name__", path.read_text(), re.MULTILINE) and path.name != "__main__.py"
)
FIGURES = ("cosine", "least", "spearman", "nearest")  # of embeddings
BLOCKS = replace(SMALL, vocabulary=8, context=16)


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
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
    if name.startswith("bench.gpu."):
        assert any(name in command for command in (*smoke.COMMANDS, *smoke.COMMANDS_OF_A_GPU))


STARTS_PROCESSES = ("torch.distributed.run", "--only start", "--hosted", "vision --only compile")


@pytest.mark.slow
@pytest.mark.parametrize("command", [each for each in smoke.COMMANDS if not any(x in each for x in STARTS_PROCESSES)])
def test_it_runs_at_its_smallest_and_writes_nothing(command, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **_: None)
    for name in [name for name in sys.modules if name.partition(".")[0] == "bench"]:
        monkeypatch.delitem(sys.modules, name)  # sizes are chosen at import
    _, name, *words = shlex.split(command.replace("{out}", str(tmp_path)))
    if name == "bench.gpu.lora":  # its compiled layers have one number: with a cache, they would read each other's keys
        monkeypatch.setattr("transformers.DynamicCache.update", None)
    monkeypatch.setattr(sys, "argv", [name, *words, "--quick"])
    before = {path: path.stat().st_mtime_ns for path in (ROOT / "bench" / "results").iterdir()}
    runpy.run_module(name, run_name="__main__")
    assert {path: path.stat().st_mtime_ns for path in (ROOT / "bench" / "results").iterdir()} == before


# --- What benchmarks compare with ------------------------------------------------------------------------------


def test_the_oracle_of_attention_is_autograd_in_float64() -> None:
    q, k, v, dy = (x.double() for x in attention_fp8_oracle.given(1, 3, 1, 40, 40))
    expected = attention_fp8_oracle.exact(q, k, v, dy)
    actual = attention.attention64(q[0], k[0, 0], v[0, 0], dy[0])
    for one, other in zip(expected, actual, strict=True):
        torch.testing.assert_close(one[0].view_as(other), other)


def test_the_frechet_distance_of_known_gaussians() -> None:
    x = torch.randn(4000, 3).double()
    assert digits.frechet(x, x) == pytest.approx(0, abs=1e-9)
    assert digits.frechet(x, x + torch.tensor([3.0, 4.0, 0.0])) == pytest.approx(25)  # the square of the distance
    # A second Gaussian with twice the standard deviation: tr(A + 4 A - 2 * 2 A) = tr(A), and the means
    means = x.mean(0).square().sum()
    assert digits.frechet(x, 2 * x) == pytest.approx(float(x.T.cov().trace() + means))


def test_wrong_results_end_a_benchmark(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "T", 32)
    rotate = next(kernel for kernel in kernels.kernels(4096) if kernel.name == "rotate")
    kernels.check(rotate)
    monkeypatch.setattr(kernels.Kernel, "run", lambda self: self.arguments[0])
    with pytest.raises(AssertionError, match="rotate: .* bytes are not the reference's"):
        kernels.check(rotate)
    with pytest.raises(AssertionError):
        harness.turns("base", {"base": lambda: torch.ones(4), "other": lambda: -torch.ones(4)}, rounds=1, repeat=1)
    assert harness.made("a mode", lambda: 1 // 0) is None  # a mode that does not run is left out
    assert "a mode: ZeroDivisionError" in capsys.readouterr().out


# --- The layer and the stack -----------------------------------------------------------------------------------


def test_cells_of_another_commit_are_measured_again(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert layer.measured_before() == []
    assert len(set(layer.order())) == 216
    path = harness.write_result("gpu_layer", {"cells": [{"m": 16}]})
    for change, expected in (({}, [{"m": 16}]), ({"measured": "2020-01-01"}, [{"m": 16}]), ({"commit": "other"}, [])):
        found = json.loads(path.read_text())
        path.write_text(json.dumps(found | {"machine": found["machine"] | change}))
        assert layer.measured_before() == expected
    monkeypatch.setenv("OCTAVO_COMMIT", "0123abcd")
    assert harness.facts()["commit"] == "0123abcd"


def test_plain_and_fused_blocks_compute_the_same() -> None:
    plain, fused = llama.Plain(BLOCKS), llama.Fused(BLOCKS)
    matrices = [[p for p in model.parameters() if p.ndim == 2] for model in (plain, fused)]
    for p, q in zip(*matrices, strict=True):
        q.data.copy_(p.data)
    x, tables = torch.randn(1, 16, BLOCKS.width), rope_tables(BLOCKS, torch.arange(16))
    torch.testing.assert_close(fused(x, *tables), plain(x, *tables))


def test_a_mode_in_fp8_is_near_bf16_and_its_step_leaves_no_gradient() -> None:
    modes = {BASE: "bf16, eager", FUSED: FUSED_EAGER, "plain": "ours plain: rowwise, eager"}
    runners = {name: stack.Runner(stack.MODES[mode], BLOCKS, 16) for name, mode in modes.items()}
    assert all(40 < db < 50 for each in harness.checked(BASE, runners).values() for db in each)
    for runner in runners.values():
        runner.step()
        assert runner.x.grad is None
        assert all(p.grad is None for p in runner.model.parameters())
    assert {BASE, FUSED, FUSED_EAGER, PLAIN} <= stack.MODES.keys()  # which the pages name


# --- Generating ------------------------------------------------------------------------------------------------


def test_ways_take_turns() -> None:
    order: list[tuple[str, int]] = []

    def way(name: str, baseline: bool) -> generate.Way:
        def call(ids: Tensor, tokens: int) -> Tensor:
            order.append((name, tokens))
            return torch.arange(tokens).expand(len(ids), -1)

        return generate.Way(name, call, baseline=baseline)

    rows = generate.measure_cell([way("a", False), way("b", True)], Cell(2, 8), Grid([2], [8], 4, 3), 256)
    assert [row["way"] for row in rows] == ["a", "b"]
    assert order[:4] == [("a", 4), ("a", 1), ("b", 4), ("b", 1)]  # the first calls
    for turn in range(4, 16, 4):
        assert sorted(order[turn : turn + 4]) == [("a", 1), ("a", 4), ("b", 1), ("b", 4)]


def test_the_memory_of_others_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = {"now": 500, "most": 500}  # of which 100 are this way's weights
    monkeypatch.setattr(generate, "DEVICE", "cuda")
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: counted["now"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: counted["most"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: counted.update(most=counted["now"]))

    def allocate(count: int) -> None:
        counted["now"] += count
        counted["most"] = max(counted.values())

    way = generate.Way("a", lambda ids, tokens: ids, weights=100)
    way.begin()
    with way.metered():
        allocate(70)
        allocate(-50)  # 20 stay
    assert way.peak == 170
    allocate(200)  # another way's
    with way.metered():
        allocate(60)
        allocate(-60)
    assert way.peak == 100 + 20 + 60
    way.begin()
    with way.metered():
        allocate(5)
    assert way.peak == 105


@pytest.mark.slow
def test_generation_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sections are added to those of before, and the folders that are there are used again."""
    monkeypatch.setattr(llama, "CONFIG", SMALL)
    for name, value in {"PROMPTS": (8, 16), "PROMPT": 16, "TOKENS": 4}.items():
        monkeypatch.setattr(generate, name, value)
    words = ["--layers", "1", "--folder", str(tmp_path / "models"), "--batches", "1,2", "--rounds", "1"]
    found: list[dict[str, Any]] = []
    for section in ("prompt", "decode 2,rows"):
        generate.main([*words, "--only", section])
        found.append(json.loads((tmp_path / f"{generate.NAME}.json").read_text()))
    assert [row["way"] for row in found[0]["prompt"]] == [OCTAVO, FP8_CACHE, "BF16, eager"] * 2
    assert found[0][f"check of {OCTAVO}"]["equal"] == [4, 4]
    assert found[1]["prompt"] == found[0]["prompt"]
    assert [row["way"] for row in found[1]["decode 2"]] == [OCTAVO, HOOKED, FP8_CACHE, "BF16, eager", "BF16, static"]
    assert "torch" in found[1]["rows"]["machine"]  # which the page names
    with pytest.raises(SystemExit, match="--only takes prompt, decode 1, .* got 'decode 7'"):
        generate.main([*words, "--only", "decode 7"])


# --- Embeddings


def test_embeddings_are_compared_by_direction_and_by_rank() -> None:
    exact = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert embeddings.compare(3 * exact, exact) == pytest.approx(dict.fromkeys(FIGURES, 1.0))
    turned = exact.clone()
    turned[2] = -turned[2]
    found = embeddings.compare(turned, exact)
    assert found["least"] == pytest.approx(-1)
    assert found["cosine"] == pytest.approx(4 / 6)
    pairs = [(i, j) for i in range(6) for j in range(i)]
    units = (each / np.linalg.norm(each, axis=1, keepdims=True) for each in (turned.numpy(), exact.numpy()))
    ours, theirs = ([float(unit[i] @ unit[j]) for i, j in pairs] for unit in units)
    ranks = [np.argsort(np.argsort(each)) for each in (ours, theirs)]
    assert found["spearman"] == pytest.approx(np.corrcoef(ranks)[0, 1])


@pytest.mark.slow
def test_a_packed_encoder_is_measured(results: Path) -> None:
    embeddings.main(["--sentences", "6", "--schemes", "channel"])
    found = json.loads((results / "embeddings.json").read_text())["schemes"]
    assert found["bf16"]["least"] > 0.999 > found["channel"]["least"] > 0.99
    assert 0.5 < found["channel"]["bytes_to_bf16"] < 0.51


# --- Plans and served models -----------------------------------------------------------------------------------


def test_every_configuration_of_a_plan_fits_its_gpu() -> None:
    for name in plan.MODELS:
        for each in plan.CONFIGURATIONS:
            wanted = dict(zip(("gpus", "recipe", "checkpointing"), each, strict=True))
            unmeasured = plan.with_plan({"model": name, **wanted, "gpu": "h200", "error": "not run"})
            assert unmeasured["planned"]["peak_bytes"] < find_gpu("h200").memory


@pytest.fixture
def wide() -> Any:
    return models.build_bf16(replace(SMALL, layers=3, heads=4, kv_heads=2, mlp_width=512), "cpu")


def ids(length: int) -> Tensor:
    return torch.randint(0, 512, (2, length))


@pytest.mark.slow
def test_the_served_model_computes_what_transformers_computes(wide: Any) -> None:
    text, stores = ids(16), models.random_stores(wide.config, 2, 16, "cpu", "bf16")["bf16"]
    kept = list(map(models.PlainCache, stores))
    assert torch.equal(models.forward(wide, text), wide(text, use_cache=False, logits_to_keep=1).logits[:, 0])
    expected = models.forward(wide, text)
    filled = wide(text[:, :15], use_cache=True)[CACHE]
    for ours, theirs in zip(kept, filled.layers, strict=True):
        ours.keys[:, :, :15], ours.values[:, :, :15] = theirs.keys, theirs.values
    assert decibels(expected, models.forward(wide, text[:, 15:], kept)) > 30


@pytest.mark.slow
def test_packed_it_is_near_and_half_as_large(wide: Any) -> None:
    packed, text = models.build_fp8(wide, "cpu", fused=False), ids(32)
    exact, apart = models.forward(wide, text), models.forward(packed, text)
    fuse(packed)
    assert min(decibels(exact, models.forward(packed, text)), decibels(exact, apart)) > 15
    linears = 3 * (256 * (256 + 2 * 128) + 256 * 256 + 3 * 256 * 512)
    assert models.held(wide, linears=True) == 2 * linears
    assert linears < models.held(packed, linears=True) < 1.02 * linears


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "least", "most"), [("bf16", 35, float("inf")), ("fp8", 20, 35)])
def test_keys_and_values_in_octavos_caches_are_those_of_the_plain_ones(wide, dtype, least, most):
    text, kept = ids(1), models.random_stores(wide.config, 2, 16, "cpu", "bf16", dtype)
    exact = models.forward(wide, text, list(map(models.PlainCache, kept["bf16"])))
    caches = models.octavo_caches(wide, kept[dtype])
    assert least < decibels(exact, partial(models.forward, wide, text, caches)()) <= most
    assert {each.store.keys.dtype for each in caches} == {DTYPES[dtype]}
    assert {int(each.store.length) for each in caches} == {15}
