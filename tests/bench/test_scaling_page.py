"""docs/scaling.md from results that are made up: steps of the model itself, and steps that differ from it."""

import copy
from dataclasses import replace
from typing import Any

import pytest

from bench.gpu.modes import BASE
from bench.gpu.sharded import OURS, TORCHAO, WIDE
from bench.report import pages, scaling
from bench.report.tables import load
from octavo.plan.communication import Links

WIDTH, LAYERS, VOCABULARY = 4096, 16, 128_256
SETTING = {
    "layers": LAYERS, "width": WIDTH, "heads": 32, "kv_heads": 8, "mlp_width": 14336, "vocabulary": VOCABULARY,
    "tokens": 8192,
}  # fmt: skip
BLOCK, ROWS = WIDTH * (2 * WIDTH + 2 * 1024) + 3 * WIDTH * 14336, 2 * WIDTH + 2 * 1024 + 2 * 14336
ROOT = 2 * VOCABULARY * WIDTH + WIDTH
RATE = 300e9
MACHINE = {"measured": "2030-01-02", "gpu": "NVIDIA H200"}
BYTES = {BASE: 2 * BLOCK, WIDE: 2 * BLOCK, OURS: BLOCK + 4 * ROWS + 0, TORCHAO: BLOCK}  # of a block's matrices


def row(mode: str, milliseconds: float, world: int) -> dict[str, Any]:
    gathered = (LAYERS * 2 * (BYTES[mode] + 2 * 2 * WIDTH) + 2 * ROOT) / world
    return {
        "mode": mode, "median": milliseconds, "ratio": 400 / milliseconds, "tokens_per_second": 8192e3 / milliseconds,
        "peak_bytes": 40 << 30, "gathered_bytes": gathered, "kernels": {"exposed": 1.5}, "optimizer_ms": 30 / world,
        "reduced_bytes": (LAYERS * 4 * (BLOCK + 2 * WIDTH) + 4 * ROOT) / world,
    }  # fmt: skip


@pytest.fixture
def results() -> dict[str, Any]:
    """Runs on one and two GPUs, the second as the model says; a slow link; and tensor parallelism."""
    modes = {BASE: 400.0, WIDE: 300.0, OURS: 298.0, TORCHAO: 345.0}
    one = {"machine": MACHINE, "setting": {**SETTING, "world": 1}, "modes": [row(m, t, 1) for m, t in modes.items()]}
    found = {"gpu_fsdp_16_layers_1_gpus": one}
    two = {"machine": MACHINE, "setting": {**SETTING, "world": 2}, "bytes_per_second": RATE}
    slow = Links(10e9)
    trainings = {name: training for name, (_, training) in scaling.trainings(found).items()}
    two["modes"] = [row(name, 1e3 * training.step(Links(RATE), 2), 2) for name, training in trainings.items()]
    two["modes"].append({"mode": "broken", "error": "ValueError: no"})
    rounds = {name: [2e3 * training.step(slow, 2)] * 3 for name, training in trainings.items()}
    link = {"channels": 1, "bytes_per_second": 10e9, "rounds": rounds}
    setting = {"layers": LAYERS, "tokens": 8192, "world": 2, "transport": "socket"}
    found |= {"gpu_fsdp_16_layers_2_gpus": two}
    found["gpu_network_socket"] = {"machine": MACHINE, "setting": setting, "links": [link]}
    rows = [
        {"mode": mode, "median": ms, "low": ms, "high": ms, "ratio": 10 / ms, "kernels": {}}
        for mode, ms in (("bf16", 10.0), ("octavo: rowwise", 7.0), ("torchao: rowwise", 9.0))
    ]
    found["gpu_tensor_parallel_2_gpus"] = {"machine": MACHINE, "setting": {"layers": 2, "world": 2}, "modes": rows}
    return found


def test_there_is_no_page_without_results(results: dict[str, Any]) -> None:
    others = {name: result for name, result in load().items() if not name.startswith("gpu_fsdp_")}
    without = set(pages.pages(others))
    assert "scaling" not in without
    assert set(pages.pages(others | results)) == {*without, "scaling"}


def test_the_page_holds_every_figure(results: dict[str, Any]) -> None:
    text = pages.page("scaling", load() | results)
    assert "{" not in text
    assert "nan" not in text
    assert "| 1 | 16 | bf16, compile | 400.0 | 20,480 | 1.000x | 0.862x | 40.0 |" in text
    assert "- 2 GPUs, 16 layers, broken: ValueError: no" in text
    assert "NVIDIA H200, 2030-01-02." in text
    assert "| 25 Gb/s | 4,096 |" in text


def test_a_page_with_one_run_says_what_is_not_measured(results: dict[str, Any]) -> None:
    text = pages.page("scaling", {"gpu_fsdp_16_layers_1_gpus": results["gpu_fsdp_16_layers_1_gpus"], **without(load())})
    assert "Not measured." in text
    assert "nan" not in text


def without(results: dict[str, Any]) -> dict[str, Any]:
    """The results of the other pages."""
    return {name: result for name, result in results.items() if not name.startswith(("gpu_fsdp", "gpu_net", "gpu_ten"))}


def test_the_error_of_the_model_is_that_of_steps_it_was_not_fitted_to(results: dict[str, Any]) -> None:
    rows = list(scaling.model_errors(results))
    assert len(rows) == 2 * 4
    assert {row["error"] for row in rows if "at 10.0 GB/s" in row["measured"]} == {"-50.0%"}
    exact = {row["error"].replace("-", "+") for row in rows if row["measured"] == "2 GPUs, 16 layers"}
    assert exact == {"+0.0%"}


def test_the_fit_splits_a_step_into_its_parts(results: dict[str, Any]) -> None:
    world, training = scaling.trainings(results)[OURS]
    assert world == 1
    assert training.gathered == pytest.approx(BLOCK + 4 * ROWS + 4 * WIDTH)
    assert training.reduced == pytest.approx(4 * (BLOCK + 2 * WIDTH))
    assert training.optimizer == pytest.approx(0.030)
    attention, head = 8192 * WIDTH, VOCABULARY * WIDTH
    assert training.rest == pytest.approx(0.370 * head / (LAYERS * (BLOCK + attention) + head))
    assert training.step(Links(1.0), 1) == pytest.approx(0.298)


def test_two_depths_give_the_times_of_a_block_and_of_the_rest(results: dict[str, Any]) -> None:
    deep = results["gpu_fsdp_16_layers_1_gpus"]
    shallow = copy.deepcopy(deep)
    shallow["setting"]["layers"] = 8
    _, before = scaling.trainings(results)[OURS]
    for each in shallow["modes"]:
        each["median"] -= 100.0
    _, training = scaling.trainings(results | {"gpu_fsdp_8_layers_1_gpus": shallow})[OURS]
    assert training.block == pytest.approx(0.1 / 8)
    assert training.rest == pytest.approx(0.298 - 0.2 - training.optimizer)
    assert before.block != pytest.approx(training.block)


def test_a_gather_and_a_reduction_on_few_channels_run_side_by_side(results: dict[str, Any]) -> None:
    network = results["gpu_network_socket"]
    network["setting"]["transport"] = "direct"
    errors = [row["error"] for row in scaling.model_errors(results) if "at 10.0 GB/s" in row["measured"]]
    assert all(float(error.removesuffix("%")) < -55 for error in errors)


def test_the_share_of_bytes_leaves_out_what_is_not_converted(results: dict[str, Any]) -> None:
    run = results["gpu_fsdp_16_layers_2_gpus"]
    assert scaling.gathered_share(run, TORCHAO) == pytest.approx(0.5)
    assert scaling.gathered_share(run, OURS) == pytest.approx(0.5 * (1 + 4 * ROWS / BLOCK))
    assert scaling.gathered_share(run, "nothing") is None


def test_aims_are_judged_for_each_run_on_several_gpus(results: dict[str, Any]) -> None:
    run = results["gpu_fsdp_16_layers_2_gpus"]
    for each in run["modes"][:-1]:
        each["ratio"] = {BASE: 1.0, WIDE: 1.40, OURS: 1.35, TORCHAO: 1.16}[each["mode"]]
    found = {row["aim"]: row["verdict"] for row in scaling.scaling_aims(results)}
    verdicts = [verdict for claim, verdict in found.items() if claim.startswith("2 GPUs, 16 layers")]
    assert verdicts == ["met", "met", "**missed**", "**missed**", "met"]
    assert [verdict for claim, verdict in found.items() if claim.startswith("tensor")] == ["met", "met"]


def test_a_slow_network_gains_by_eight_bits_and_a_fast_one_does_not(results: dict[str, Any]) -> None:
    rows = list(scaling.projection(results))
    gains = {(row["network a GPU"], row["GPUs"]): row["FP8 gather vs BF16 gather"] for row in rows}
    assert float(gains["25 Gb/s", "64"].removesuffix("x")) > 1.15
    assert float(gains["400 Gb/s", "64"].removesuffix("x")) < 1.02
    fewer = copy.deepcopy(results)
    for result in fewer.values():
        result["modes"] = [row for row in result.get("modes", []) if row["mode"] != OURS]
    assert list(scaling.projection(fewer)) == []
    _, training = scaling.trainings(results)[BASE]
    links = Links(RATE, 8 * 25 / 8 * 1e9 * RATE / 450e9)
    assert rows[8][f"{BASE}, tokens/s a GPU"] == f"{8192 / replace(training, layers=32).step(links, 64, 64):,.0f}"
