"""Comparisons of speed: what is called, what is reported, and what does not stop them."""

import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from speed_examples import counting, program, too_large, unopened
from tiny_models import Folders
from torch import Tensor

from octavo.speed import Grid, compare_speed, measure_programs
from octavo.speed.grid import ModelSizes
from octavo.train.config import Config
from octavo.train.start import start_run

CPU = torch.device("cpu")
GRID = Grid([1, 4], [8, 16], tokens=4, rounds=2)


@pytest.fixture
def folder(made: Folders) -> Path:
    return made("llama")


def recording(calls: list[tuple[str, Tensor, int]], name: str) -> Callable[[Tensor, int], Tensor]:
    def generate(ids: Tensor, tokens: int) -> Tensor:
        calls.append((name, ids, tokens))
        return counting(ids, tokens)

    return generate


def test_every_way_gets_the_same_prompts_and_takes_its_turn(folder: Path) -> None:
    calls: list[tuple[str, Tensor, int]] = []
    programs = [program(folder, name, recording(calls, name)) for name in ("a", "b")]
    report = measure_programs(programs, Grid([2], [8], tokens=4, rounds=6), CPU)
    first = [(name, len(ids), tokens) for name, ids, tokens in calls[:6]]
    assert first == [("a", 1, 1), ("b", 1, 1), ("a", 2, 4), ("a", 2, 1), ("b", 2, 4), ("b", 2, 1)]
    timed = calls[6:]
    assert len(timed) == 2 * 2 * 6
    assert all(torch.equal(ids, timed[0][1]) for _, ids, _ in timed)
    assert timed[0][1].shape == (2, 8)
    turns = ["".join(name for name, _, tokens in timed[at : at + 4] if tokens == 1) for at in range(0, 24, 4)]
    assert set(turns) == {"ab", "ba"}
    assert [len(row.prompt_seconds) for row in report.rows] == [6, 6]
    assert report.interleaved
    assert report.process_peak_bytes is not None
    assert report.process_peak_bytes > 1e7


def test_one_token_is_the_time_to_the_first_alone(folder: Path) -> None:
    row = measure_programs([program(folder, "a")], Grid([2], [8], tokens=1), CPU).rows[0]
    assert (len(row.prompt_seconds), row.whole_seconds, row.tokens_per_second) == (5, [], None)


def test_rows_stand_in_the_order_of_batch_and_prompt(folder: Path) -> None:
    report = measure_programs([program(folder, "a"), program(folder, "b", baseline=True)], GRID, CPU)
    cells = [(1, 8), (1, 16), (4, 8), (4, 16)]
    assert [(row.batch, row.prompt, row.way, row.baseline) for row in report.rows] == [
        (*cell, way, way == "b") for cell in cells for way in "ab"
    ]


def test_a_size_that_does_not_fit_leaves_the_others(folder: Path) -> None:
    report = measure_programs([program(folder, "a", too_large(1)), program(folder, "b")], GRID, CPU)
    problems = {(row.way, row.batch): row.problem for row in report.rows}
    assert problems["a", 4] == "does not fit: CUDA out of memory. Tried to allocate 3 GiB"
    assert {problems[key] for key in (("a", 1), ("b", 1), ("b", 4))} == {""}
    assert all(bool(row.prompt_seconds) != bool(row.problem) for row in report.rows)


def test_a_model_that_does_not_fit_leaves_the_others(folder: Path) -> None:
    report = measure_programs([program(folder, "a"), unopened(folder, "b", MemoryError("no room"))], GRID, CPU)
    assert [start.problem for start in report.starts] == ["", "does not fit: no room"]
    assert {row.problem for row in report.rows if row.way == "b"} == {"does not fit: no room"}
    assert sum(row.way == "b" for row in report.rows) == 4
    assert all(row.prompt_seconds for row in report.rows if row.way == "a")


def dies_of(error: Exception) -> Callable[[Tensor, int], Tensor]:
    """Generates the first token, and no more."""

    def generate(ids: Tensor, tokens: int) -> Tensor:
        if tokens > 1:
            raise error
        return counting(ids, tokens)

    return generate


def test_only_a_program_that_runs_apart_may_fail(folder: Path) -> None:
    broken = RuntimeError("engine died\nstack")
    report = measure_programs([program(folder, "a"), unopened(folder, "vLLM", broken, apart=True)], GRID, CPU)
    assert report.starts[1].problem == "failed: RuntimeError: engine died"
    late = program(folder, "vLLM", dies_of(broken), apart=True)
    assert {row.problem for row in measure_programs([late], GRID, CPU).rows} == {"failed: RuntimeError: engine died"}
    with pytest.raises(RuntimeError, match="engine died"):
        measure_programs([unopened(folder, "a", broken)], GRID, CPU)


def test_tokens_are_compared_before_anything_is_timed(folder: Path) -> None:
    def differs(ids: Tensor, tokens: int) -> Tensor:
        made = counting(ids, tokens).clone()
        made[1, 2] = 9  # the second prompt, third token; the last token is equal again
        return made

    order: list[tuple[str, Tensor, int]] = []
    fast = program(folder, "octavo", recording(order, "fast"), reference=differs)
    check = measure_programs([fast, program(folder, "b")], GRID, CPU).check
    assert check is not None
    assert (check.way, check.tokens, check.equal) == ("octavo", 4, [4, 2])
    assert [(len(ids), tokens) for _, ids, tokens in order[:3]] == [(1, 1), (2, 4), (1, 4)]


def test_a_way_that_stops_early_is_an_error(folder: Path) -> None:
    with pytest.raises(RuntimeError, match=r"a was to generate 1 x 4 tokens, got \[1, 3\]"):
        measure_programs([program(folder, "a", lambda ids, n: counting(ids, max(n - 1, 1)))], GRID, CPU)


def test_progress_counts_every_piece_of_work(folder: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    measure_programs([program(folder, "a")], GRID, CPU, lambda *step: seen.append(step))
    assert [done for done, _, _ in seen] == list(range(13))
    assert {total for _, total, _ in seen} == {1 + 4 * 3}
    assert seen[0][2] == "loading: a"
    assert seen[-1][2] == "a: batch 4, prompt 16, round 2 of 2"


def test_sizes_of_a_model(folder: Path) -> None:
    sizes = ModelSizes.read(folder)
    assert sizes[:2] == (256, 64)
    assert sizes.weight_bytes == (folder / "model.safetensors").stat().st_size
    assert sizes.cache_bytes == 2 * (2 * 4 * 32) * 2  # layers, keys and values of 4 heads of 32, BF16


def test_models_that_do_not_fit_together_are_measured_one_after_the_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from octavo.speed import comparison

    sizes = ModelSizes.read(folder)
    programs = [program(folder, "a"), program(folder, "b"), program(folder, "vLLM", apart=True)]
    needed = 2 * (sizes.weight_bytes + 4 * 20 * sizes.cache_bytes)
    place = SimpleNamespace(type="cuda")
    for free, fits in ((needed / 0.79, True), (needed / 0.81, False)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, 1e12))
        prompts = SimpleNamespace(device=place, grid=GRID)
        assert comparison._fit_together(programs, [sizes] * 3, prompts) == fits  # type: ignore[arg-type]
    monkeypatch.setattr(comparison, "_fit_together", lambda *_: False)
    seen: list[str] = []
    report = measure_programs(programs, GRID, CPU, lambda _done, _total, doing: seen.append(doing.split(":")[0]))
    assert list(dict.fromkeys(seen)) == ["loading", "a", "b", "vLLM"]
    assert not report.interleaved


def test_octavo_and_transformers_take_part(made: Folders) -> None:
    report = compare_speed(made("llama", scheme="channel"), made("llama"), Grid([2], [8], 6, 1), "cpu")
    assert [start.program for start in report.starts] == ["octavo", "transformers, BF16"]
    assert [(row.way, row.baseline) for row in report.rows] == [
        ("octavo", False), ("BF16, eager", True), ("BF16, static", True),
    ]  # fmt: skip
    assert report.check is not None
    assert report.check.equal == [6, 6]
    assert report.remarks == ["vLLM is not installed, so it was not measured"]


def test_the_packed_folder_alone(made: Folders) -> None:
    report = compare_speed(made("llama", scheme="channel"), None, Grid([1], [8], 4, 1), "cpu")
    assert [row.way for row in report.rows] == ["octavo"]
    assert report.speedups(report.rows[0]) == (None, None)


def test_a_model_that_is_not_packed_runs_on_the_engine(made: Folders) -> None:
    report = compare_speed(made("llama"), made("llama"), Grid([2], [8], 6, 1), "cpu")
    assert [row.way for row in report.rows] == ["octavo", "BF16, eager", "BF16, static"]
    assert report.check is not None
    assert (report.check.reference, report.check.equal) == ("the model without a cache", [6, 6])


@pytest.mark.parametrize("recipe", ["bf16", "rowwise"])
def test_a_run_of_octavo_train(tmp_path: Path, recipe: str) -> None:
    (tmp_path / "text.txt").write_text("folio quarto octavo duodecimo " * 60)
    sizes = {"layers": 1, "width": 32, "heads": 2, "context": 16, "batch": 2, "steps": 2, "warmup": 1, "device": "cpu"}
    config = Config(**sizes, data=(str(tmp_path / "text.txt"),), recipe=recipe, out=str(tmp_path / "run"))
    start_run(config, Console(quiet=True)).run()
    report = compare_speed(tmp_path / "run", None, Grid([1, 2], [4], 6, 1), "cpu")
    assert [(row.way, row.batch, row.problem) for row in report.rows] == [("octavo", 1, ""), ("octavo", 2, "")]
    assert report.check is not None
    assert report.check.ok
    with pytest.raises(ValueError, match=r"16 tokens and 1 new ones are 17 tokens, and the model of .* sees 16"):
        compare_speed(tmp_path / "run", None, Grid([1], [16], 1, 1), "cpu")


VLLM = """
class SamplingParams:
    def __init__(self, **settings):
        self.settings = settings

class LLM:
    def __init__(self, **settings):
        self.settings = settings

    def generate(self, prompts, sampling, use_tqdm):
        class Result: pass
        results = []
        for prompt in prompts:
            count = sampling.settings["max_tokens"]
            assert sampling.settings["min_tokens"] == count and sampling.settings["ignore_eos"]
            assert len(prompt["prompt_token_ids"]) + count <= self.settings["max_model_len"]
            assert not self.settings["enable_prefix_caching"]
            result, output = Result(), Result()
            output.token_ids, result.outputs = tuple(range(count)), [output]
            results.append(result)
        return results
"""


def test_vllm_runs_both_folders_where_it_is_installed(
    made: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm.py").write_text(VLLM)
    spec = spec_from_file_location("vllm", tmp_path / "vllm.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")  # the program sets it: restored after the test
    report = compare_speed(made("llama", scheme="channel"), made("llama"), Grid([2], [8], 4, 1), "cpu")
    assert [start.program for start in report.starts] == ["octavo", "transformers, BF16", "vLLM, packed", "vLLM, BF16"]
    assert [(row.way, row.baseline) for row in report.rows][3:] == [("vLLM, packed", False), ("vLLM, BF16", True)]
    assert report.remarks == []
